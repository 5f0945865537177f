// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, WithDType};
use sparseattn::{
    Axes, Context, Device, Dtype, Gradients, Memory, MemoryMut, Pattern, Plan, Problem, Saved, View, ViewMut,
};
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;

/// Attention under a pattern. It keeps plans for the shapes that it has seen.
#[derive(Clone)]
pub struct Attention {
    context: Context,
    pattern: Pattern,
    axes: Axes,
    scale: Option<f64>,
    softcap: f64,
}

impl Attention {
    /// On the CPU; axes as candle's models have them, [`Axes::Bhsd`].
    pub fn new(pattern: Pattern) -> Result<Self> {
        pattern.check().map_err(wrap)?;
        let context = Context::cpu().map_err(wrap)?;
        Ok(Attention { context, pattern, axes: Axes::Bhsd, scale: None, softcap: 0.0 })
    }
    /// The order of the axes of all operands; `Axes::Thd` has no batch.
    pub fn axes(mut self, axes: Axes) -> Self {
        self.axes = axes;
        self
    }
    /// The factor on scores; 1 / sqrt(head_dim) if not given.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }
    /// Scores become softcap * tanh(score / softcap); 0 is none.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = softcap;
        self
    }

    /// `q` is `[batch, heads_q, seq_q, head_dim]`, `k` and `v` are `[batch, heads_kv, seq_k, head_dim]` (of `v`,
    /// `head_dim` may differ), with any strides, of f32, f64, f16 or bf16. The result is as `q`, with the `head_dim` of
    /// `v`; gradients reach all three.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let [(batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _), (_, _, _, head_dim_v)] =
            [self.sizes(q)?, self.sizes(k)?, self.sizes(v)?];
        let mut problem = Problem::new(batch, heads_q, seq_q, head_dim)
            .heads_kv(heads_kv)
            .seq_k(seq_k)
            .head_dim_v(head_dim_v)
            .dtype(dtype_of(q)?)
            .axes(self.axes)
            .softcap(self.softcap)
            .backward([q, k, v].iter().any(|operand| operand.track_op()));
        if let Some(scale) = self.scale {
            problem = problem.scale(scale);
        }
        let plan = self.context.plan(&self.pattern, &problem).map_err(wrap)?;
        let lse_shape = if self.axes == Axes::Thd { vec![heads_q, seq_q] } else { vec![batch, heads_q, seq_q] };
        q.apply_op3(k, v, Pass { plan, head_dim_v, lse_shape, lse: OnceLock::new() })
    }

    /// Batch, heads, tokens, head_dim.
    fn sizes(&self, operand: &Tensor) -> Result<(usize, usize, usize, usize)> {
        match self.axes {
            Axes::Bhsd => operand.dims4(),
            Axes::Bshd => operand.dims4().map(|(batch, seq, heads, dim)| (batch, heads, seq, dim)),
            Axes::Thd => operand.dims3().map(|(seq, heads, dim)| (1, heads, seq, dim)),
        }
    }
}

fn wrap(error: sparseattn::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

fn dtype_of(tensor: &Tensor) -> Result<Dtype> {
    use candle_core::DType;
    match tensor.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::F64 => Ok(Dtype::F64),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        other => candle_core::bail!("sparseattn: q is of {other:?}; accepted: F32, F64, F16, BF16"),
    }
}

/// A number that tensors of operands may have.
trait Number: WithDType {
    const CALLED: Dtype;
}
impl Number for f32 {
    const CALLED: Dtype = Dtype::F32;
}
impl Number for f64 {
    const CALLED: Dtype = Dtype::F64;
}
impl Number for half::f16 {
    const CALLED: Dtype = Dtype::F16;
}
impl Number for half::bf16 {
    const CALLED: Dtype = Dtype::BF16;
}

/// Numbers of a tensor, from its first one on, or those of a result.
struct Numbers<C>(C);

// SAFETY: slices and vectors are what the trait describes.
unsafe impl<T: Number, C: Deref<Target = [T]>> Memory for Numbers<C> {
    fn as_ptr(&self) -> *const c_void {
        self.0.deref().as_ptr().cast()
    }
    fn elements(&self) -> usize {
        self.0.len()
    }
    fn dtype(&self) -> Dtype {
        T::CALLED
    }
    fn device(&self) -> Device {
        Device::Cpu
    }
}
// SAFETY: as above.
unsafe impl<T: Number, C: DerefMut<Target = [T]>> MemoryMut for Numbers<C> {
    fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.deref_mut().as_mut_ptr().cast()
    }
}

impl<'a, T: Number> Numbers<&'a [T]> {
    fn of((storage, layout): Operand<'a>) -> Result<Self> {
        let all = storage.as_slice::<T>()?;
        Ok(Numbers(all.get(layout.start_offset()..).unwrap_or_default()))
    }
    fn view(&self, layout: &Layout) -> Result<View<'_>> {
        View::of_strided(self, layout.dims(), layout.stride()).map_err(wrap)
    }
}

impl<T: Number> Numbers<Vec<T>> {
    fn zeros(shape: &Shape) -> Self {
        Numbers(vec![T::zero(); shape.elem_count()])
    }
    fn view_mut(&mut self, shape: &Shape) -> Result<ViewMut<'_>> {
        ViewMut::of(self, shape.dims()).map_err(wrap)
    }
    fn tensor(self, shape: &Shape) -> Result<Tensor> {
        Tensor::from_vec(self.0, shape, &candle_core::Device::Cpu)
    }
}

/// One call, as candle keeps it for the gradient.
struct Pass {
    plan: Plan,
    head_dim_v: usize,
    lse_shape: Vec<usize>,
    lse: OnceLock<Vec<f32>>,
}

type Operand<'a> = (&'a CpuStorage, &'a Layout);

impl Pass {
    fn forward<T: Number>(&self, [q, k, v]: [Operand; 3]) -> Result<(CpuStorage, Shape)> {
        let mut shape = q.1.dims().to_vec();
        *shape.last_mut().expect("sizes has seen axes") = self.head_dim_v;
        let shape = Shape::from(shape);
        let mut out = Numbers::<Vec<T>>::zeros(&shape);
        let mut lse = vec![0f32; self.lse_shape.iter().product()];
        let numbers = [Numbers::<&[T]>::of(q)?, Numbers::of(k)?, Numbers::of(v)?];
        let (q, k, v) = (numbers[0].view(q.1)?, numbers[1].view(k.1)?, numbers[2].view(v.1)?);
        let lse_view = ViewMut::new(&mut lse, &self.lse_shape).map_err(wrap)?;
        self.plan.forward(q, k, v, out.view_mut(&shape)?).lse(lse_view).run().map_err(wrap)?;
        let _ = self.lse.set(lse); // a second run of the same call would write the same
        Ok((T::to_cpu_storage_owned(out.0), shape))
    }

    fn backward<T: Number>(&self, [q, k, v, out, dout]: [Operand; 5]) -> Result<[Tensor; 3]> {
        let lse = self.lse.get().ok_or_else(|| candle_core::Error::msg("sparseattn: backward without forward"))?;
        let shapes = [q, k, v].map(|(_, layout)| layout.shape());
        let [mut dq, mut dk, mut dv] = shapes.map(Numbers::<Vec<T>>::zeros);
        let of = Numbers::<&[T]>::of;
        let numbers = [of(q)?, of(k)?, of(v)?, of(out)?, of(dout)?];
        let saved = Saved {
            q: numbers[0].view(q.1)?,
            k: numbers[1].view(k.1)?,
            v: Some(numbers[2].view(v.1)?),
            out: numbers[3].view(out.1)?,
            lse: View::new(lse, &self.lse_shape).map_err(wrap)?,
        };
        let gradients =
            Gradients { dq: dq.view_mut(shapes[0])?, dk: dk.view_mut(shapes[1])?, dv: Some(dv.view_mut(shapes[2])?) };
        self.plan.backward(saved, numbers[4].view(dout.1)?, gradients).run().map_err(wrap)?;
        Ok([dq.tensor(shapes[0])?, dk.tensor(shapes[1])?, dv.tensor(shapes[2])?])
    }
}

impl CustomOp3 for Pass {
    fn name(&self) -> &'static str {
        "sparseattn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
        match q {
            CpuStorage::F32(_) => self.forward::<f32>(operands),
            CpuStorage::F64(_) => self.forward::<f64>(operands),
            CpuStorage::F16(_) => self.forward::<half::f16>(operands),
            _ => self.forward::<half::bf16>(operands), // dtype_of has refused the others
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let locked = [q, k, v, out, dout].map(Tensor::storage_and_layout);
        let mut operands = Vec::with_capacity(5);
        for (storage, layout) in &locked {
            match &**storage {
                Storage::Cpu(storage) => operands.push((storage, *layout)),
                _ => candle_core::bail!("sparseattn: an operand of backward is not on the CPU"),
            }
        }
        let operands: [Operand; 5] = operands.try_into().expect("five were locked");
        let [dq, dk, dv] = match operands[0].0 {
            CpuStorage::F32(_) => self.backward::<f32>(operands),
            CpuStorage::F64(_) => self.backward::<f64>(operands),
            CpuStorage::F16(_) => self.backward::<half::f16>(operands),
            _ => self.backward::<half::bf16>(operands),
        }?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, DType, DeviceLocation, Layout, Result, Shape, StorageRef, Tensor};
use sparseattn::{
    Axes, Context, ContextOptions, Device, Dtype, Error, ErrorKind, Memory, MemoryMut, Pattern, Plan, Problem, View,
    ViewMut,
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

/// Attention under a pattern. It keeps plans for the shapes that it has seen.
#[derive(Clone)]
pub struct Attention {
    contexts: Arc<Mutex<Vec<(Device, Context)>>>, // of the devices that it has met
    pattern: Pattern,
    axes: Axes,
    scale: Option<f64>,
    softcap: f64,
}

impl Attention {
    /// Axes as candle's models have them, [`Axes::Bhsd`].
    pub fn new(pattern: Pattern) -> Result<Self> {
        pattern.check().map_err(wrap)?;
        Ok(Attention { contexts: Arc::default(), pattern, axes: Axes::Bhsd, scale: None, softcap: 0.0 })
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
    /// `head_dim` may differ), with any strides, of f32, f64, f16 or bf16, on one device. The result is as `q`, with the
    /// `head_dim` of `v`; gradients reach all three. On a GPU it is enqueued on candle's stream.
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
        let plan = self.plan(q.device(), &problem).map_err(wrap)?;
        let lse_shape = if self.axes == Axes::Thd { vec![heads_q, seq_q] } else { vec![batch, heads_q, seq_q] };
        q.apply_op3(k, v, Pass { plan, head_dim_v, lse_shape: lse_shape.into(), lse: OnceLock::new() })
    }

    fn plan(&self, device: &candle_core::Device, problem: &Problem) -> sparseattn::Result<Plan> {
        let context = self.context(device_of(device)?)?;
        match device {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(device) => context.plan_on(&self.pattern, problem, &gpu::stream_of(device)?),
            _ => context.plan(&self.pattern, problem),
        }
    }

    fn context(&self, device: Device) -> sparseattn::Result<Context> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, context)) = contexts.iter().find(|(of, _)| *of == device) {
            return Ok(context.clone());
        }
        let context = Context::with(ContextOptions::new().device(device))?;
        contexts.push((device, context.clone()));
        Ok(context)
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

fn device_of(device: &candle_core::Device) -> sparseattn::Result<Device> {
    let refused = |text| Err(Error::new(ErrorKind::Device, "q", format!("lies on a {text}")));
    match device.location() {
        DeviceLocation::Cpu => Ok(Device::Cpu),
        #[cfg(feature = "cuda")]
        DeviceLocation::Cuda { gpu_id } => Ok(Device::Cuda(gpu_id as i32)),
        #[cfg(not(feature = "cuda"))]
        DeviceLocation::Cuda { .. } => refused("GPU; accepted: the CPU, and GPUs where the feature `cuda` is on"),
        DeviceLocation::Metal { .. } => refused("Metal device; accepted: the CPU, and NVIDIA GPUs"),
    }
}

fn dtype_of(tensor: &Tensor) -> Result<Dtype> {
    match tensor.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::F64 => Ok(Dtype::F64),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        other => candle_core::bail!("sparseattn: q is of {other:?}; accepted: F32, F64, F16, BF16"),
    }
}

/// One call, as candle keeps it for the gradient.
struct Pass {
    plan: Plan,
    head_dim_v: usize,
    lse_shape: Shape,
    lse: OnceLock<Tensor>,
}

impl Pass {
    /// The shape of out.
    fn shape(&self, q: &Layout) -> Shape {
        let mut dims = q.dims().to_vec();
        *dims.last_mut().expect("sizes has seen axes") = self.head_dim_v;
        dims.into()
    }
    fn keep(&self, lse: Tensor) {
        let _ = self.lse.set(lse); // a second run of the same call would write the same
    }
}

fn view<'a>(memory: &'a impl Memory, layout: &Layout) -> Result<View<'a>> {
    View::of_strided(memory, layout.dims(), layout.stride()).map_err(wrap)
}

fn view_mut<'a>(memory: &'a mut impl MemoryMut, shape: &Shape) -> Result<ViewMut<'a>> {
    let layout = Layout::contiguous(shape);
    ViewMut::of_strided(memory, layout.dims(), layout.stride()).map_err(wrap)
}

/// A tensor that candle lends.
type Lent<'a> = (StorageRef<'a>, &'a Layout);

/// Those of one pass, as a module takes them, if `of` says that they are on its device.
fn all_on<'a, S, const N: usize>(
    lent: &'a [Lent; N],
    of: impl Fn(&'a candle_core::Storage) -> Option<&'a S>,
) -> Result<[(&'a S, &'a Layout); N]> {
    let found: Option<Vec<_>> = lent.iter().map(|(storage, layout)| Some((of(storage)?, *layout))).collect();
    match found.map(TryInto::try_into) {
        Some(Ok(found)) => Ok(found),
        _ => candle_core::bail!("sparseattn: operands of backward are not on one device"),
    }
}

/// A module's function for elements that `dtype_of` has accepted.
macro_rules! for_dtype {
    ($dtype:expr, $module:ident::$function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $module::$function::<f32>($($argument),*),
            DType::F64 => $module::$function::<f64>($($argument),*),
            DType::F16 => $module::$function::<half::f16>($($argument),*),
            _ => $module::$function::<half::bf16>($($argument),*),
        }
    };
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
        for_dtype!(q.dtype(), cpu::forward(self, [(q, q_layout), (k, k_layout), (v, v_layout)]))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        for_dtype!(q.dtype(), gpu::forward(self, [(q, q_layout), (k, k_layout), (v, v_layout)]))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let lse = self.lse.get().ok_or_else(|| candle_core::Error::msg("sparseattn: backward without forward"))?;
        let lent = [q, k, v, out, dout, lse].map(Tensor::storage_and_layout);
        let [dq, dk, dv] = match q.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => for_dtype!(q.dtype(), gpu::backward(self, &lent)),
            _ => for_dtype!(q.dtype(), cpu::backward(self, &lent)),
        }?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

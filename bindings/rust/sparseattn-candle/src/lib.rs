// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs, missing_debug_implementations)]

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{
    CpuStorage, CustomOp3, DType, DeviceLocation, InplaceOp3, Layout, Result, Shape, StorageRef, Tensor,
};
use sparseattn::{
    Axes, Context, ContextOptions, Device, Dtype, Error, ErrorKind, Forward, Memory, MemoryMut, Pattern, Plan, Problem,
    View, ViewMut,
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

/// Attention under a pattern. It keeps plans for the shapes that it has seen.
#[derive(Clone, Debug)]
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
        let place = Vec::new();
        q.apply_op3(k, v, Pass { plan, head_dim_v, lse_shape: lse_shape.into(), lse: OnceLock::new(), place })
    }

    /// New tokens on a cache, forward alone: row `i` of `q`, `[batch, heads_q, new, head_dim]`, is token `starts[b] + i`
    /// of its sequence, and sees of that and the tokens before what the pattern keeps. `k` and `v` have room for all
    /// tokens of a sequence, `[batch, heads_kv, capacity, head_dim]`; with a `page_table`, `[batch, capacity /
    /// page_size]`, they are pages, `[pages, heads_kv, page_size, head_dim]`. `starts` is `[batch]`, both of i32 or i64.
    /// One plan serves all calls of so many new tokens. Not with [`Axes::Thd`].
    pub fn decode(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        starts: &Tensor,
        page_table: Option<&Tensor>,
    ) -> Result<Tensor> {
        let problem = self.cache_problem(q, k, page_table)?;
        let ((batch, heads_q, new, _), (.., head_dim_v)) = (self.sizes(q)?, self.sizes(v)?);
        let mut problem = problem.head_dim_v(head_dim_v).softcap(self.softcap);
        if let Some(scale) = self.scale {
            problem = problem.scale(scale);
        }
        let plan = self.plan(q.device(), &problem).map_err(wrap)?;
        let place = [Some(starts), page_table].into_iter().flatten().cloned().collect();
        let lse_shape = (batch, heads_q, new).into();
        q.apply_op3(k, v, Pass { plan, head_dim_v, lse_shape, lse: OnceLock::new(), place })
    }

    /// Writes keys or values of new tokens, `[batch, heads_kv, new, head_dim]`, to a cache of [`Attention::decode`], in
    /// place: row `i` becomes token `starts[b] + i`.
    pub fn append(&self, new: &Tensor, cache: &Tensor, starts: &Tensor, page_table: Option<&Tensor>) -> Result<()> {
        let problem = self.cache_problem(new, cache, page_table)?.value_in_key(true); // one tensor is written
        let context = self.context(device_of(new.device()).map_err(wrap)?).map_err(wrap)?;
        cache.inplace_op3(
            new,
            starts,
            &Appending { context, problem, page_table: page_table.into_iter().cloned().collect() },
        )
    }

    fn cache_problem(&self, rows: &Tensor, cache: &Tensor, page_table: Option<&Tensor>) -> Result<Problem> {
        if self.axes == Axes::Thd {
            candle_core::bail!("sparseattn: axes are Thd; accepted with a cache: Bhsd, Bshd");
        }
        let ((batch, heads, new, head_dim), (_, heads_kv, tokens, _)) = (self.sizes(rows)?, self.sizes(cache)?);
        let problem = Problem::new(batch, heads, new, head_dim).heads_kv(heads_kv).dtype(dtype_of(rows)?);
        let problem = problem.axes(self.axes).starts(true);
        Ok(match page_table {
            Some(table) => problem.seq_k(table.dims2()?.1 * tokens).page_size(tokens),
            None => problem.seq_k(tokens),
        })
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

fn lend(tensors: &[Tensor]) -> Vec<Lent<'_>> {
    tensors.iter().map(Tensor::storage_and_layout).collect()
}

/// Brings a call to where its cache is.
fn on_cache<'a>(mut call: Forward<'a>, place: &[View<'a>]) -> Forward<'a> {
    if let Some(starts) = place.first() {
        call = call.starts(*starts);
    }
    if let Some(page_table) = place.get(1) {
        call = call.page_table(*page_table);
    }
    call
}

/// One call, as candle keeps it for the gradient.
struct Pass {
    plan: Plan,
    head_dim_v: usize,
    lse_shape: Shape,
    lse: OnceLock<Tensor>,
    place: Vec<Tensor>, // of a call on a cache, which has no gradient: starts, and a page table where there is one
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

fn view<'a>(memory: &'a (impl Memory + ?Sized), layout: &Layout) -> Result<View<'a>> {
    View::of_strided(memory, layout.dims(), layout.stride()).map_err(wrap)
}

fn view_mut<'a>(memory: &'a mut impl MemoryMut, layout: &Layout) -> Result<ViewMut<'a>> {
    ViewMut::of_strided(memory, layout.dims(), layout.stride()).map_err(wrap)
}

/// Of a result: all of its memory, row-major.
fn whole<'a>(memory: &'a mut impl MemoryMut, shape: &Shape) -> Result<ViewMut<'a>> {
    view_mut(memory, &Layout::contiguous(shape))
}

fn elsewhere() -> candle_core::Error {
    candle_core::Error::msg("sparseattn: an operand lies on another device than q")
}

fn another_dtype(of_cache: DType) -> candle_core::Error {
    candle_core::Error::msg(format!("sparseattn: the cache is of {of_cache:?}; accepted: the dtype of new rows"))
}

fn no_integers(dtype: DType) -> candle_core::Error {
    candle_core::Error::msg(format!("sparseattn: starts or page_table are of {dtype:?}; accepted: I32, I64"))
}

/// A tensor that candle lends.
type Lent<'a> = (StorageRef<'a>, &'a Layout);

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
        if !self.place.is_empty() {
            return Err(candle_core::Error::BackwardNotSupported { op: "sparseattn's decode" });
        }
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

/// Rows that a call writes to a cache.
struct Appending {
    context: Context,
    problem: Problem,
    page_table: Vec<Tensor>, // one or none
}

impl InplaceOp3 for Appending {
    fn name(&self) -> &'static str {
        "sparseattn's append"
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        cache_layout: &Layout,
        new: &CpuStorage,
        new_layout: &Layout,
        starts: &CpuStorage,
        starts_layout: &Layout,
    ) -> Result<()> {
        let (cache, rows) = ((cache, cache_layout), [(new, new_layout), (starts, starts_layout)]);
        for_dtype!(new.dtype(), cpu::append(self, cache, rows))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        cache: &mut CudaStorage,
        cache_layout: &Layout,
        new: &CudaStorage,
        new_layout: &Layout,
        starts: &CudaStorage,
        starts_layout: &Layout,
    ) -> Result<()> {
        let (cache, rows) = ((cache, cache_layout), [(new, new_layout), (starts, starts_layout)]);
        for_dtype!(new.dtype(), gpu::append(self, cache, rows))
    }
}

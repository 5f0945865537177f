// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs, missing_debug_implementations)]

use candle_core::backend::{BackendDevice, BackendStorage};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, DType, DeviceLocation, InplaceOp3, Layout, Result, Shape, StorageRef, Tensor,
};
use sparseattn::{
    Append, Axes, Backward, Context, ContextOptions, Device, Dtype, Error, ErrorKind, Forward, Memory, MemoryMut,
    Pattern, Plan, Problem, View, ViewMut,
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
    q_offset: Option<i64>,
    deterministic: bool,
    tf32: bool,
    beside: Vec<(Role, Tensor)>,
}

/// What an operand of a call beside q, k and v is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Starts,
    PageTable,
    QueryOffsets,
    Parents,
    Indices,
    IndexCounts,
    SinkLogits,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Starts => "starts",
            Role::PageTable => "page_table",
            Role::QueryOffsets => "query_offsets",
            Role::Parents => "parents",
            Role::Indices => "indices",
            Role::IndexCounts => "index_counts",
            Role::SinkLogits => "sink_logits",
        }
    }
}

impl Attention {
    /// Axes as candle's models have them, [`Axes::Bhsd`].
    pub fn new(pattern: Pattern) -> Result<Self> {
        pattern.check().map_err(wrap)?;
        Ok(Attention {
            contexts: Arc::default(),
            pattern,
            axes: Axes::Bhsd,
            scale: None,
            softcap: 0.0,
            q_offset: None,
            deterministic: false,
            tf32: false,
            beside: Vec::new(),
        })
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
    /// The position of the first query in [`Attention::forward`]; `seq_k - seq_q` if not given.
    pub fn q_offset(mut self, q_offset: i64) -> Self {
        self.q_offset = Some(q_offset);
        self
    }
    /// Whether results are to be the same bits in every call; on the CPU they always are.
    pub fn deterministic(mut self, on: bool) -> Self {
        self.deterministic = on;
        self
    }
    /// Whether f32 products may round their operands to TF32, 11 significant bits, on GPUs whose tensor cores take them.
    pub fn tf32(mut self, on: bool) -> Self {
        self.tf32 = on;
        self
    }
    /// A learned sink: one score without a value for each query head, `[heads_q]`, in the softmax of each of its rows.
    /// Of any float, taken as f32; the gradient of [`Attention::forward`] reaches it.
    pub fn sink_logits(self, logits: &Tensor) -> Self {
        self.with(Role::SinkLogits, Some(logits))
    }
    /// The keys of a pattern with `runtime_tokens` or `runtime_blocks` for the calls that follow: a clone of this with
    /// lists of its own costs little. `indices` is `[batch, rows, heads_kv, max]`, where rows are queries or their
    /// blocks, and `counts`, `[batch, rows, heads_kv]`, says how many entries of each list count, if not all; without
    /// batch in [`Axes::Thd`]. Of i32, i64, or u32, as candle's `arg_sort` has them.
    pub fn lists(self, indices: &Tensor, counts: Option<&Tensor>) -> Self {
        self.with(Role::Indices, Some(indices)).with(Role::IndexCounts, counts)
    }
    /// Which rows are whose in the calls on a cache that follow, in [`Axes::Thd`]: those of entry `b` are rows
    /// `offsets[b] .. offsets[b + 1]`, any number of them. `[batch + 1]`, of i32 or i64.
    pub fn query_offsets(self, offsets: &Tensor) -> Self {
        self.with(Role::QueryOffsets, Some(offsets))
    }
    /// The queries of an entry, in the calls of [`Attention::decode`] that follow, are drafts of several continuations,
    /// nodes of trees, as speculative decoding verifies them: each number is that of a query's parent among those of its
    /// entry, below its own, or -1 for a root. A query then sees no other drafts than its ancestors and itself.
    /// `[batch, new]`, or `[new]` in [`Axes::Thd`], of i32 or i64.
    pub fn parents(self, parents: &Tensor) -> Self {
        self.with(Role::Parents, Some(parents))
    }

    fn with(mut self, role: Role, operand: Option<&Tensor>) -> Self {
        self.beside.retain(|(other, _)| *other != role);
        self.beside.extend(operand.map(|operand| (role, operand.clone())));
        self
    }

    /// `q` is `[batch, heads_q, seq_q, head_dim]`, `k` and `v` are `[batch, heads_kv, seq_k, head_dim]` (of `v`,
    /// `head_dim` may differ), with any strides, of f32, f64, f16 or bf16, on one device. The result is as `q`, with the
    /// `head_dim` of `v`; gradients reach all three. On a GPU it is enqueued on candle's stream.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let [(batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _), _] =
            [sizes(self.axes, "q", q)?, sizes(self.axes, "k", k)?, sizes(self.axes, "v", v)?];
        let beside = self.beside_with(&[])?;
        let sinks = beside.iter().find(|(role, logits)| *role == Role::SinkLogits && logits.track_op());
        let problem = Problem::new(batch, heads_q, seq_q, head_dim)
            .heads_kv(heads_kv)
            .seq_k(seq_k)
            .dtype(dtype_of(q)?)
            .axes(self.axes)
            .backward(sinks.is_some() || [q, k, v].iter().any(|operand| operand.track_op()));
        let problem = self.q_offset.map_or(problem, |q_offset| problem.q_offset(q_offset));
        let dsinks = DSinks::default();
        let carrier = sinks.map(|(_, logits)| q.apply_op2(logits, Carrier(dsinks.clone()))).transpose()?;
        let pass = self.pass([q, k, v], problem, beside, dsinks)?;
        carrier.as_ref().unwrap_or(q).apply_op3(k, v, pass)
    }

    /// New tokens on a cache, forward alone: row `i` of `q`, `[batch, heads_q, new, head_dim]`, is token `starts[b] + i`
    /// of its sequence, and sees of that and the tokens before what the pattern keeps. `k` and `v` have room for all
    /// tokens of a sequence, `[batch, heads_kv, capacity, head_dim]`; with a `page_table`, `[batch, capacity /
    /// page_size]`, they are pages, `[pages, heads_kv, page_size, head_dim]`. `starts` is `[batch]`, both of i32 or i64.
    /// One plan serves all calls of so many new tokens. With [`Axes::Thd`] `q` is `[new, heads_q, head_dim]`, rows are
    /// told apart by [`Attention::query_offsets`], and the cache has pages, `[pages, page_size, heads_kv, head_dim]`.
    pub fn decode(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        starts: &Tensor,
        page_table: Option<&Tensor>,
    ) -> Result<Tensor> {
        let problem = self.cache_problem(("q", q), ("k", k), starts, page_table)?;
        sizes(self.cache_axes(), "v", v)?;
        let beside = self.beside_with(&[(Role::Starts, Some(starts)), (Role::PageTable, page_table)])?;
        let problem = problem.parents(beside.iter().any(|(role, _)| *role == Role::Parents));
        let pass = self.pass([q, k, v], problem, beside, DSinks::default())?;
        q.apply_op3(k, v, pass)
    }

    /// Writes keys or values of new tokens, `[batch, heads_kv, new, head_dim]`, to a cache of [`Attention::decode`], in
    /// place: row `i` becomes token `starts[b] + i`. With [`Axes::Thd`] they are `[new, heads_kv, head_dim]`.
    pub fn append(&self, new: &Tensor, cache: &Tensor, starts: &Tensor, page_table: Option<&Tensor>) -> Result<()> {
        let problem = self.cache_problem(("new", new), ("cache", cache), starts, page_table)?;
        let problem = problem.value_in_key(true); // one tensor is written
        let context = self.context(device_of(new.device()).map_err(wrap)?).map_err(wrap)?;
        let mut beside = self.beside_with(&[(Role::PageTable, page_table)])?;
        beside.retain(|(role, _)| matches!(role, Role::PageTable | Role::QueryOffsets));
        cache.inplace_op3(new, starts, &Appending { context, problem, beside })
    }

    fn cache_problem(
        &self,
        (rows_name, rows): (&str, &Tensor),
        (cache_name, cache): (&str, &Tensor),
        starts: &Tensor,
        page_table: Option<&Tensor>,
    ) -> Result<Problem> {
        let (batch, heads, new, head_dim) = sizes(self.axes, rows_name, rows)?;
        let (_, heads_kv, tokens, _) = sizes(self.cache_axes(), cache_name, cache)?;
        let batch = if self.axes == Axes::Thd { starts.elem_count() } else { batch }; // packed rows are of any entries
        let problem = Problem::new(batch, heads, new, head_dim).heads_kv(heads_kv).dtype(dtype_of(rows)?);
        let problem = problem.axes(self.axes).starts(true);
        Ok(match page_table {
            Some(table) => problem.seq_k(table.dims2()?.1 * tokens).page_size(tokens),
            None => problem.seq_k(tokens),
        })
    }

    /// Packed rows lie in no cache: its pages have the tokens of an entry.
    fn cache_axes(&self) -> Axes {
        if self.axes == Axes::Thd {
            Axes::Bshd
        } else {
            self.axes
        }
    }

    /// The operands that all calls have beside q, k and v, and those that are a call's own, as the library takes them.
    fn beside_with(&self, own: &[(Role, Option<&Tensor>)]) -> Result<Vec<(Role, Tensor)>> {
        let own = own.iter().filter_map(|(role, operand)| Some((role, (*operand)?)));
        let all = self.beside.iter().map(|(role, operand)| (role, operand)).chain(own);
        all.map(|(role, operand)| match (role, operand.dtype()) {
            (Role::SinkLogits, _) => Ok((*role, operand.to_dtype(DType::F32)?)),
            (Role::Indices | Role::IndexCounts, DType::U32) => Ok((*role, operand.to_dtype(DType::I64)?)),
            _ => Ok((*role, operand.clone())),
        })
        .collect()
    }

    fn pass(
        &self,
        [q, k, v]: [&Tensor; 3],
        problem: Problem,
        beside: Vec<(Role, Tensor)>,
        dsinks: DSinks,
    ) -> Result<Pass> {
        for (name, operand) in [("k", k), ("v", v)] {
            if operand.dtype() != q.dtype() {
                let (given, accepted) = (operand.dtype(), q.dtype());
                candle_core::bail!("sparseattn: {name} is of dtype {given:?}; accepted: that of q, {accepted:?}");
            }
        }
        let (batch, heads_q, seq_q, _) = sizes(self.axes, "q", q)?;
        let head_dim_v = v.dims()[v.rank() - 1];
        let mut problem = problem
            .head_dim_v(head_dim_v)
            .softcap(self.softcap)
            .deterministic(self.deterministic)
            .tf32(self.tf32)
            .sink_logits(beside.iter().any(|(role, _)| *role == Role::SinkLogits));
        if let Some(scale) = self.scale {
            problem = problem.scale(scale);
        }
        let plan = self.plan(q.device(), &problem).map_err(wrap)?;
        let lse_shape = if self.axes == Axes::Thd { vec![heads_q, seq_q] } else { vec![batch, heads_q, seq_q] };
        let beside = beside.into_iter().map(|(role, operand)| (role, operand.detach())).collect();
        Ok(Pass { plan, head_dim_v, lse_shape: lse_shape.into(), lse: OnceLock::new(), beside, dsinks })
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
}

/// Batch, heads, tokens, head_dim.
fn sizes(axes: Axes, name: &str, operand: &Tensor) -> Result<(usize, usize, usize, usize)> {
    match (axes, operand.dims()) {
        (Axes::Bhsd, &[batch, heads, seq, dim]) | (Axes::Bshd, &[batch, seq, heads, dim]) => {
            Ok((batch, heads, seq, dim))
        }
        (Axes::Thd, &[seq, heads, dim]) => Ok((1, heads, seq, dim)),
        (_, dims) => {
            let accepted = match axes {
                Axes::Bhsd => "[batch, heads, seq, head_dim]",
                Axes::Bshd => "[batch, seq, heads, head_dim]",
                Axes::Thd => "[seq, heads, head_dim]",
            };
            candle_core::bail!("sparseattn: {name} has shape {dims:?}; accepted: {accepted}, as axes are {axes:?}")
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

fn lend(beside: &[(Role, Tensor)]) -> Vec<(Role, Lent<'_>)> {
    beside.iter().map(|(role, operand)| (*role, operand.storage_and_layout())).collect()
}

/// The views of operands that lie in such memory.
fn views<'a>(memory: &'a [Box<dyn Memory + 'a>], lent: &[(Role, Lent)]) -> Result<Vec<(Role, View<'a>)>> {
    memory.iter().zip(lent).map(|(memory, (role, (_, layout)))| Ok((*role, view(&**memory, layout)?))).collect()
}

fn forward_with<'a>(call: Forward<'a>, beside: &[(Role, View<'a>)]) -> Forward<'a> {
    beside.iter().fold(call, |call, (role, view)| match role {
        Role::Starts => call.starts(*view),
        Role::PageTable => call.page_table(*view),
        Role::QueryOffsets => call.query_offsets(*view),
        Role::Parents => call.parents(*view),
        Role::Indices => call.indices(*view),
        Role::IndexCounts => call.index_counts(*view),
        Role::SinkLogits => call.sink_logits(*view),
    })
}

/// A cache has no gradient, so that what says where queries are in it is not among these operands.
fn backward_with<'a>(call: Backward<'a>, beside: &[(Role, View<'a>)]) -> Backward<'a> {
    beside.iter().fold(call, |call, (role, view)| match role {
        Role::Indices => call.indices(*view),
        Role::IndexCounts => call.index_counts(*view),
        Role::SinkLogits => call.sink_logits(*view),
        Role::Starts | Role::PageTable | Role::QueryOffsets | Role::Parents => call,
    })
}

fn append_with<'a>(call: Append<'a>, beside: &[(Role, View<'a>)]) -> Append<'a> {
    beside.iter().fold(call, |call, (role, view)| match role {
        Role::PageTable => call.page_table(*view),
        Role::QueryOffsets => call.query_offsets(*view),
        Role::Starts | Role::Parents | Role::Indices | Role::IndexCounts | Role::SinkLogits => call,
    })
}

/// One call, as candle keeps it for the gradient.
struct Pass {
    plan: Plan,
    head_dim_v: usize,
    lse_shape: Shape,
    lse: OnceLock<Tensor>,
    beside: Vec<(Role, Tensor)>,
    dsinks: DSinks,
}

/// The gradient of sink logits, from the call's backward pass on until its [`Carrier`] takes it.
type DSinks = Arc<Mutex<Option<Tensor>>>;

/// Hands q on to a call, and the gradient that the call has found of its sink logits back to these: an operation of
/// candle's has three operands at most, and the call's are q, k and v. Gradients come from the call to this one.
struct Carrier(DSinks);

fn copy<S>(storage: &S, layout: &Layout) -> Result<(S, Shape)>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    let mut copied = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copied, 0, layout)?;
    Ok((copied, layout.shape().clone()))
}

impl CustomOp2 for Carrier {
    fn name(&self) -> &'static str {
        "sparseattn's sink_logits"
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        copy(q, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        copy(q, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, dq: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dsinks = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok((Some(dq.clone()), dsinks))
    }
}

impl Pass {
    /// The shape of out.
    fn shape(&self, q: &Layout) -> Shape {
        let mut dims = q.dims().to_vec();
        *dims.last_mut().expect("sizes has seen axes") = self.head_dim_v;
        dims.into()
    }
    /// The shape of sink logits.
    fn sinks(&self) -> Option<&Shape> {
        self.beside.iter().find(|(role, _)| *role == Role::SinkLogits).map(|(_, logits)| logits.shape())
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

fn no_integers(role: Role, dtype: DType) -> candle_core::Error {
    candle_core::Error::msg(format!("sparseattn: {} is of {dtype:?}; accepted: I32, I64", role.name()))
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
        if self.beside.iter().any(|(role, _)| *role == Role::Starts) {
            return Err(candle_core::Error::BackwardNotSupported { op: "sparseattn's decode" });
        }
        let lse = self.lse.get().ok_or_else(|| candle_core::Error::msg("sparseattn: backward without forward"))?;
        let lent = [q, k, v, out, dout, lse].map(Tensor::storage_and_layout);
        let ([dq, dk, dv], dsinks) = match q.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => for_dtype!(q.dtype(), gpu::backward(self, &lent)),
            _ => for_dtype!(q.dtype(), cpu::backward(self, &lent)),
        }?;
        *self.dsinks.lock().unwrap_or_else(PoisonError::into_inner) = dsinks;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

/// Rows that a call writes to a cache.
struct Appending {
    context: Context,
    problem: Problem,
    beside: Vec<(Role, Tensor)>,
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

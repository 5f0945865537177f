// SPDX-License-Identifier: MIT
//! Passes of a plan. Operands have the names and shapes of `spattn_forward_args` and `spattn_backward_args`.
use crate::error::{check, sized, Error, ErrorKind, Result};
use crate::{sys, Append, Context, Device, Dtype, Exchange, Pass, Plan, Problem, Sharding, View, ViewMut};
use std::alloc::Layout;
use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};

/// A CUDA stream that somebody owns.
///
/// # Safety
/// `raw` is a live `cudaStream_t`, or NULL for the default stream, as long as `self` lives. When `wait` returns, with
/// or without an error, nothing that was enqueued on it before runs any more. It does not panic: a scope would end, and
/// free what a device still uses. Where `raw` is NULL and there are several GPUs, [`device`](Self::device) says whose.
pub unsafe trait Stream {
    /// The `cudaStream_t`.
    fn raw(&self) -> *mut c_void;
    /// Waits for all that is enqueued; an error says in words why that failed.
    fn wait(&self) -> std::result::Result<(), String>;
    /// The GPU whose stream it is. A scope then refuses operands of other GPUs: each has a default stream of its own, for
    /// which `wait` would not wait. `None` where no other GPU can be meant.
    fn device(&self) -> Option<Device> {
        None
    }
}

/// Scratch in host memory. One serves any number of calls after each other.
pub struct Workspace {
    memory: *mut u8,
    layout: Layout,
}

// SAFETY: it owns plain memory.
unsafe impl Send for Workspace {}
// SAFETY: a shared one gives nothing away.
unsafe impl Sync for Workspace {}

impl Workspace {
    /// Enough for one call of a pass.
    pub fn new(plan: &Plan, pass: Pass) -> Result<Self> {
        let (bytes, align) = plan.workspace(pass)?;
        Self::allocate("workspace", bytes, align)
    }

    pub(crate) fn allocate(argument: &str, bytes: usize, align: usize) -> Result<Self> {
        let refuse = || Error::new(ErrorKind::HostMemory, argument, format!("no memory for {bytes} bytes"));
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| refuse())?;
        // SAFETY: the size is not 0. Zeros, because a view may be read as numbers.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        if memory.is_null() {
            return Err(refuse());
        }
        Ok(Workspace { memory, layout })
    }

    /// The memory, for [`Forward::workspace`] and [`Backward::workspace`].
    pub fn view(&mut self) -> ViewMut<'_> {
        let shape = [self.layout.size()];
        // SAFETY: the memory is ours, and borrowed as long as the view.
        unsafe { ViewMut::from_raw(self.memory.cast(), Dtype::U8, Device::Cpu, &shape, None) }
            .expect("one axis is legal")
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: so much memory is ours, and was written when it was allocated.
        unsafe { std::slice::from_raw_parts(self.memory, self.layout.size()) }
    }
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in bytes; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.layout.size()) }
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace of {} bytes", self.layout.size())
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { std::alloc::dealloc(self.memory, self.layout) };
    }
}

thread_local! {
    /// The scratch of this thread's last call without one of its own, for the next.
    static SCRATCH: Cell<Option<Workspace>> = const { Cell::new(None) };
}

/// An operand with its name, where it is given.
pub(crate) type Operand<'v> = (&'static str, Option<&'v View<'v>>);

/// How a call is started.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    /// It returns when all is done: host memory only.
    Now,
    /// It enqueues on this stream, of this GPU where that is known; a scope waits.
    On(*mut c_void, Option<Device>),
}

impl Start {
    /// Refuses an operand in device memory where nobody would wait for the device, and one that others may still write
    /// as far as this stream knows.
    pub(crate) fn check(self, argument: &str, view: &View) -> Result<()> {
        let refuse = |message| Err(Error::new(ErrorKind::State, argument, format!("{argument} {message}")));
        if let Start::On(_, Some(device)) = self {
            if view.device() != Device::Cpu && view.device() != device {
                let message = format!(
                    "{argument} lies on {:?}; accepted: where the scope's stream is, {device:?}",
                    view.device()
                );
                return Err(Error::new(ErrorKind::Device, argument, message));
            }
        }
        if view.device() != Device::Cpu && matches!(self, Start::Now) {
            return refuse("lies in device memory; accepted here: host memory. Use Plan::scope, or enqueue");
        }
        if view.stream().is_some_and(|stream| stream != self.stream()) {
            return refuse("is for passes on another stream; accepted: operands for that of the call");
        }
        Ok(())
    }

    /// The same of several operands, some of which may be left out.
    pub(crate) fn check_all<'v>(self, operands: impl IntoIterator<Item = Operand<'v>>) -> Result<()> {
        let mut given = operands.into_iter().filter_map(|(argument, view)| Some((argument, view?)));
        given.try_for_each(|(argument, view)| self.check(argument, view))
    }

    pub(crate) fn stream(self) -> *mut c_void {
        match self {
            Start::Now => std::ptr::null_mut(),
            Start::On(stream, _) => stream,
        }
    }
}

/// Refuses memory of bytes that lies where no tensor of its call does. The library is told an address alone; of tensors
/// it refuses those that do not lie on its device, so that what lies beside one that it accepts lies there, too.
pub(crate) fn check_beside(argument: &str, any_beside: bool) -> Result<()> {
    if any_beside {
        return Ok(());
    }
    let message = format!("{argument} lies on another device than tensors; accepted: where they lie");
    Err(Error::new(ErrorKind::Device, argument, message))
}

/// What forward and backward have in common.
#[derive(Debug)]
struct Call<'a> {
    plan: &'a Plan,
    pass: Pass,
    start: Start,
    workspace: Option<ViewMut<'a>>,
}

impl Call<'_> {
    /// Refuses device memory where nobody would wait for the device. Says whether there is host memory among the
    /// operands: scratch is then brought, so that the library names the operand that lies elsewhere.
    fn check_devices<'v>(&self, operands: impl IntoIterator<Item = Operand<'v>>) -> Result<bool> {
        let scratch = self.workspace.as_ref().map(|memory| memory.view());
        let (mut any_host, mut any_beside) = (false, scratch.is_none());
        for (argument, view) in operands {
            let Some(view) = view else { continue };
            self.start.check(argument, view)?;
            any_host |= view.device() == Device::Cpu;
            any_beside |= scratch.is_some_and(|memory| memory.device() == view.device());
        }
        scratch.map_or(Ok(()), |memory| self.start.check("workspace", memory))?;
        check_beside("workspace", any_beside)?;
        Ok(any_host)
    }

    /// Brings scratch, calls the library, and keeps scratch of its own for the next call.
    fn run(
        &mut self,
        any_host: bool,
        call: impl FnOnce(*const sys::spattn_plan, *mut c_void, usize) -> i32,
    ) -> Result<()> {
        if let Some(memory) = &self.workspace {
            let (memory, bytes) = memory.view().bytes("workspace")?;
            return check(call(self.plan.handle(), memory, bytes));
        }
        if !any_host {
            return check(call(self.plan.handle(), std::ptr::null_mut(), 0));
        }
        let (bytes, align) = self.plan.workspace(self.pass)?;
        let kept = SCRATCH.try_with(Cell::take).ok().flatten(); // gone in destructors at the thread's end
        let scratch = match kept.filter(|kept| kept.layout.size() >= bytes && kept.layout.align() >= align) {
            Some(kept) => kept,
            None => Workspace::allocate("workspace", bytes, align)?,
        };
        let done = check(call(self.plan.handle(), scratch.memory.cast(), scratch.layout.size()));
        let _ = SCRATCH.try_with(|kept| kept.set(Some(scratch)));
        done
    }
}

pub(crate) fn optional(tensor: &Option<sys::spattn_tensor>) -> *const sys::spattn_tensor {
    tensor.as_ref().map_or(std::ptr::null(), |tensor| tensor)
}

/// Methods for operands that may be left out.
macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $view:ident,)*) => { $(
        $(#[$doc])*
        pub fn $name(mut self, $name: $view<'a>) -> Self {
            self.$name = Some($name);
            self
        }
    )* };
}
pub(crate) use options;

/// A forward pass that is being described: `run` does it.
#[derive(Debug)]
#[must_use = "a pass does nothing before `run`"]
pub struct Forward<'a> {
    call: Call<'a>,
    q: View<'a>,
    k: View<'a>,
    v: Option<View<'a>>,
    out: ViewMut<'a>,
    lse: Option<ViewMut<'a>>,
    max_logits: Option<ViewMut<'a>>,
    indices: Option<View<'a>>,
    index_counts: Option<View<'a>>,
    sink_logits: Option<View<'a>>,
    starts: Option<View<'a>>,
    page_table: Option<View<'a>>,
    query_offsets: Option<View<'a>>,
    parents: Option<View<'a>>,
    q_scales: Option<View<'a>>,
    k_scales: Option<View<'a>>,
    v_scales: Option<View<'a>>,
    same_step: bool,
}

impl<'a> Forward<'a> {
    fn new(plan: &'a Plan, start: Start, q: View<'a>, k: View<'a>, v: Option<View<'a>>, out: ViewMut<'a>) -> Self {
        let call = Call { plan, pass: Pass::Forward, start, workspace: None };
        let (lse, max_logits, indices, index_counts) = (None, None, None, None);
        let (sink_logits, starts, page_table, query_offsets) = (None, None, None, None);
        let (parents, q_scales, k_scales, v_scales) = (None, None, None, None);
        Forward {
            call,
            q,
            k,
            v,
            out,
            lse,
            max_logits,
            indices,
            index_counts,
            sink_logits,
            starts,
            page_table,
            query_offsets,
            parents,
            q_scales,
            k_scales,
            v_scales,
            same_step: false,
        }
    }

    options! {
        /// Written: log(sum(exp(s))) of each query, f32; backward needs it.
        lse: ViewMut,
        /// Written: the largest score of each query, f32.
        max_logits: ViewMut,
        /// The keys of `runtime_tokens` and `runtime_blocks`; on a cache tokens of each query's own sequence.
        indices: View,
        /// How many entries of each list count.
        index_counts: View,
        /// One score without a value for each query head, f32, in a plan that has them.
        sink_logits: View,
        /// Where queries begin in a cache: `[batch]`, i32 or i64. Query `i` of entry `b` is token `starts[b] + i`, and
        /// sees no key after it. Every number is legal: a query outside of the cache sees nothing. Where a plan with
        /// [`Problem::starts`](crate::Problem::starts) does not get it, that is [`ErrorKind::Null`]; where another plan
        /// does, [`ErrorKind::State`].
        starts: View,
        /// Which pages a cache lies in: `[batch, seq_k / page_size]`, i32 or i64. Token `t` of entry `b` is token
        /// `t % page_size` of page `page_table[b][t / page_size]`; `k` and `v` are then
        /// `[pages, page_size, heads_kv, head_dim]`, or `[pages, heads_kv, page_size, head_dim]` of
        /// [`Axes::Bhsd`](crate::Axes::Bhsd), of any number of pages, which entries may share. What no query needs,
        /// in the table or in pages, may be anything; a page that one needs and that does not exist is not read, and
        /// what comes of it means nothing. Where a plan with a [`Problem::page_size`](crate::Problem::page_size) does
        /// not get it, that is [`ErrorKind::Null`]; where another plan does, [`ErrorKind::State`].
        ///
        /// ```
        /// use sparseattn::{causal, Context, Problem, View, ViewMut};
        /// let plan = Context::cpu()?.plan(&causal(), &Problem::new(2, 1, 1, 4).seq_k(6).starts(true).page_size(2))?;
        /// let pages: Vec<f32> = [0.0, 9.0, 1.0, 2.0].into_iter().flat_map(|x| [x; 8]).collect(); // two tokens each
        /// let table = [3, 2, -1, 3, 0, -1]; // two texts that begin alike
        /// let (starts, q, mut out) = ([3, 2], [0f32; 8], [0f32; 8]); // 4 tokens are there, and 3
        /// let kv = View::new(&pages, &[4, 2, 1, 4])?;
        /// plan.forward(View::new(&q, &[2, 1, 1, 4])?, kv, kv, ViewMut::new(&mut out, &[2, 1, 1, 4])?)
        ///     .starts(View::new(&starts, &[2])?)
        ///     .page_table(View::new(&table, &[2, 3])?)
        ///     .run()?;
        /// assert!((out[0] - (2.0 + 2.0 + 1.0 + 1.0) / 4.0).abs() < 1e-6); // equal scores: averages of what is seen
        /// assert!((out[4] - (2.0 + 2.0 + 0.0) / 3.0).abs() < 1e-6);
        /// # Ok::<(), sparseattn::Error>(())
        /// ```
        page_table: View,
        /// Which queries are whose: `[batch + 1]`, i32 or i64, in a plan of [`Axes::Thd`](crate::Axes::Thd) with
        /// [`Problem::starts`](crate::Problem::starts), as servers batch prompts beside tokens that are decoded. Those
        /// of entry `b` are rows `query_offsets[b] .. query_offsets[b + 1]` of `q`, any number of them. Rows before all
        /// offsets or after them see nothing. Offsets do not fall, and lie in `0 ..= seq_q`; else results mean nothing,
        /// though nothing outside of the views is touched. Where such a plan does not get it, that is
        /// [`ErrorKind::Null`]; where another plan does, [`ErrorKind::State`].
        ///
        /// ```
        /// use sparseattn::{causal, Axes, Context, Problem, View, ViewMut};
        /// let problem = Problem::new(2, 1, 4, 4).axes(Axes::Thd).seq_k(6).starts(true).page_size(2);
        /// let plan = Context::cpu()?.plan(&causal(), &problem)?; // four queries, whoever asks
        /// let pages: Vec<f32> = [0.0, 9.0, 1.0, 2.0].into_iter().flat_map(|x| [x; 8]).collect(); // two tokens each
        /// let table = [3, 2, -1, 1, 0, -1];
        /// let (starts, offsets) = ([3, 0], [0, 1, 4]); // one decodes its fourth token; a prompt brings three
        /// let (q, mut out, kv) = ([0f32; 16], [0f32; 16], View::new(&pages, &[4, 2, 1, 4])?);
        /// plan.forward(View::new(&q, &[4, 1, 4])?, kv, kv, ViewMut::new(&mut out, &[4, 1, 4])?)
        ///     .starts(View::new(&starts, &[2])?)
        ///     .page_table(View::new(&table, &[2, 3])?)
        ///     .query_offsets(View::new(&offsets, &[3])?)
        ///     .run()?;
        /// let averages = [(2.0 + 2.0 + 1.0 + 1.0) / 4.0, 9.0, (9.0 + 9.0) / 2.0, (9.0 + 9.0 + 0.0) / 3.0];
        /// assert!(out.iter().step_by(4).zip(averages).all(|(x, average)| (x - average).abs() < 1e-6));
        /// # Ok::<(), sparseattn::Error>(())
        /// ```
        query_offsets: View,
        /// Whose children the queries are, where they are nodes of trees: `[batch, seq_q]`, or `[seq_q]` of
        /// [`Axes::Thd`](crate::Axes::Thd), i32 or i64. Each is the number of a query's parent among the queries of its
        /// entry, from 0, and below its own; -1 is a root, which follows token `starts[b] - 1`. Every number is legal:
        /// one that is negative, or not below the query's own, counts as -1. Where a plan with
        /// [`Problem::parents`](crate::Problem::parents), which has an example, does not get it, that is
        /// [`ErrorKind::Null`]; where another plan does, [`ErrorKind::State`].
        parents: View,
        /// What rows of queries are multiplied by, f32, where the plan's operands are float8
        /// ([`Problem::dtype`](crate::Problem::dtype), which has an example): for each token and head, shaped as `q`
        /// without its last axis. Strides may be 0, as where heads have one scale each. Without it all are 1. In
        /// another plan it is [`ErrorKind::State`].
        q_scales: View,
        /// The same of keys, where operands are float8 or a cache is
        /// ([`Problem::cache_dtype`](crate::Problem::cache_dtype)): shaped as `k` without its last axis; from page to
        /// page are as many rows as in `k`.
        k_scales: View,
        /// The same of values; not where they lie in keys.
        v_scales: View,
    }

    /// Scratch, as many bytes as [`Plan::workspace`] says, one after the other, on the plan's device. Without it, each
    /// thread keeps some in host memory.
    pub fn workspace(mut self, workspace: ViewMut<'a>) -> Self {
        self.call.workspace = Some(workspace);
        self
    }

    /// Whether the layout of an earlier call is still in the [`workspace`](Self::workspace). A call on a cache makes
    /// one of the numbers in `starts`, `page_table`, `query_offsets` and `parents`; the layers of a model bring the
    /// same numbers, each with keys and values of its own, so that those behind the first need not make it again.
    /// Without a workspace it changes nothing: other calls write to the one that the thread keeps, so that each makes
    /// its layout anew. With one, in a plan without [`Problem::starts`](crate::Problem::starts), it is
    /// [`ErrorKind::State`].
    ///
    /// # Safety
    /// Where this is on and the call has a workspace, the last that wrote to that memory was a forward pass of this
    /// plan. It did not fail, and is done or comes before this one on the stream. It had the same numbers in `starts`,
    /// `page_table`, `query_offsets` and `parents`, and `k` and `v` of the same shapes and strides. The layout is not
    /// checked: one of other numbers may lead out of the views.
    ///
    /// ```
    /// use sparseattn::{causal, Context, Pass, Problem, View, ViewMut, Workspace};
    /// let plan = Context::cpu()?.plan(&causal(), &Problem::new(1, 1, 1, 4).seq_k(8).starts(true))?;
    /// let mut workspace = Workspace::new(&plan, Pass::Forward)?; // of all layers
    /// let (starts, q, shape) = ([5], [0f32; 4], [1, 1, 1, 4]);
    /// for layer in 0..3 {
    ///     let (cache, mut out) = ([layer as f32; 32], [0f32; 4]); // of this one
    ///     let kv = View::new(&cache, &[1, 8, 1, 4])?;
    ///     let pass = plan
    ///         .forward(View::new(&q, &shape)?, kv, kv, ViewMut::new(&mut out, &shape)?)
    ///         .starts(View::new(&starts, &[1])?)
    ///         .workspace(workspace.view());
    ///     // SAFETY: only these calls write to the workspace, and all have the same starts and shapes.
    ///     unsafe { pass.same_step(layer > 0) }.run()?;
    ///     assert!((out[0] - layer as f32).abs() < 1e-6);
    /// }
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub unsafe fn same_step(mut self, on: bool) -> Self {
        self.same_step = on;
        self
    }

    /// Does the pass: at once in host memory; in a scope, it may be enqueued.
    pub fn run(mut self) -> Result<()> {
        // Outputs first: the library wants them to overlap nothing, and borrows see to that for host memory.
        let outputs = [Some(&self.out), self.lse.as_ref(), self.max_logits.as_ref()];
        let inputs = [Some(&self.q), Some(&self.k), self.v.as_ref(), self.indices.as_ref(), self.index_counts.as_ref()];
        let of_cache =
            [self.starts.as_ref(), self.page_table.as_ref(), self.query_offsets.as_ref(), self.parents.as_ref()];
        let scales = [self.q_scales.as_ref(), self.k_scales.as_ref(), self.v_scales.as_ref()];
        let outputs = outputs.map(|view| view.map(ViewMut::view));
        let any_host = self.call.check_devices(
            (["out", "lse", "max_logits"].into_iter().zip(outputs))
                .chain(["q", "k", "v", "indices", "index_counts"].into_iter().zip(inputs))
                .chain(["starts", "page_table", "query_offsets", "parents"].into_iter().zip(of_cache))
                .chain(["q_scales", "k_scales", "v_scales"].into_iter().zip(scales))
                .chain([("sink_logits", self.sink_logits.as_ref())]),
        )?;

        let mut args = sized!(sys::spattn_forward_args);
        let has_layout = self.same_step && self.call.workspace.is_some();
        args.flags = if has_layout { sys::SPATTN_FORWARD_SAME_STEP } else { 0 };
        args.stream = self.call.start.stream();
        let (q, k, v, out) = (self.q.c(), self.k.c(), self.v.as_ref().map(View::c), self.out.view().c());
        let lse = self.lse.as_ref().map(|view| view.view().c());
        let max_logits = self.max_logits.as_ref().map(|view| view.view().c());
        let (indices, index_counts) = (self.indices.as_ref().map(View::c), self.index_counts.as_ref().map(View::c));
        let sink_logits = self.sink_logits.as_ref().map(View::c);
        let [starts, page_table, query_offsets, parents] = of_cache.map(|view| view.map(View::c));
        let [q_scales, k_scales, v_scales] = scales.map(|view| view.map(View::c));
        (args.q, args.k, args.v, args.out) = (&q, &k, optional(&v), &out);
        (args.lse, args.max_logits) = (optional(&lse), optional(&max_logits));
        (args.indices, args.index_counts) = (optional(&indices), optional(&index_counts));
        args.sink_logits = optional(&sink_logits);
        (args.starts, args.page_table) = (optional(&starts), optional(&page_table));
        (args.query_offsets, args.parents) = (optional(&query_offsets), optional(&parents));
        args.q_scales = optional(&q_scales);
        (args.k_scales, args.v_scales) = (optional(&k_scales), optional(&v_scales));
        self.call.run(any_host, |plan, memory, bytes| {
            (args.workspace, args.workspace_bytes) = (memory, bytes);
            // SAFETY: views are valid for their shapes; device memory only where somebody waits. A layout is said to be
            // in the workspace only where that was promised to same_step.
            unsafe { sys::spattn_forward(plan, &args) }
        })
    }

    /// Only enqueues the pass on a `cudaStream_t`.
    ///
    /// # Safety
    /// The stream is live, and until it has done the pass the memory of all views stays valid, outputs untouched.
    pub unsafe fn enqueue(mut self, stream: *mut c_void) -> Result<()> {
        self.call.start = Start::On(stream, None);
        self.run()
    }
}

/// What backward needs of a forward pass.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Saved<'a> {
    pub q: View<'a>,
    pub k: View<'a>,
    pub v: Option<View<'a>>,
    /// As forward wrote it.
    pub out: View<'a>,
    /// As forward wrote it.
    pub lse: View<'a>,
}

/// Where backward writes.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Gradients<'a> {
    pub dq: ViewMut<'a>,
    pub dk: ViewMut<'a>,
    pub dv: Option<ViewMut<'a>>,
}

/// A backward pass that is being described: `run` does it.
#[derive(Debug)]
#[must_use = "a pass does nothing before `run`"]
pub struct Backward<'a> {
    call: Call<'a>,
    saved: Saved<'a>,
    dout: View<'a>,
    gradients: Gradients<'a>,
    dlse: Option<View<'a>>,
    indices: Option<View<'a>>,
    index_counts: Option<View<'a>>,
    sink_logits: Option<View<'a>>,
    dsink_logits: Option<ViewMut<'a>>,
    q_scales: Option<View<'a>>,
    k_scales: Option<View<'a>>,
    v_scales: Option<View<'a>>,
}

impl<'a> Backward<'a> {
    fn new(plan: &'a Plan, start: Start, saved: Saved<'a>, dout: View<'a>, gradients: Gradients<'a>) -> Self {
        let call = Call { plan, pass: Pass::Backward, start, workspace: None };
        let (dlse, indices, index_counts, sink_logits, dsink_logits) = (None, None, None, None, None);
        let (q_scales, k_scales, v_scales) = (None, None, None);
        Backward {
            call,
            saved,
            dout,
            gradients,
            dlse,
            indices,
            index_counts,
            sink_logits,
            dsink_logits,
            q_scales,
            k_scales,
            v_scales,
        }
    }

    options! {
        /// The gradient that arrives at lse, f32.
        dlse: View,
        /// The lists that forward had.
        indices: View,
        /// The counts that forward had.
        index_counts: View,
        /// The sink logits that forward had.
        sink_logits: View,
        /// Written: the gradient of the sink logits, f32.
        dsink_logits: ViewMut,
        /// The scales of queries that forward had. Gradients are of what rows stand for
        /// ([`Problem::dtype`](crate::Problem::dtype)). In a plan whose operands are not float8 it is
        /// [`ErrorKind::State`].
        q_scales: View,
        /// The scales of keys that forward had.
        k_scales: View,
        /// The scales of values that forward had; not where they lie in keys.
        v_scales: View,
    }

    /// As [`Forward::workspace`].
    pub fn workspace(mut self, workspace: ViewMut<'a>) -> Self {
        self.call.workspace = Some(workspace);
        self
    }

    /// As [`Forward::run`].
    pub fn run(mut self) -> Result<()> {
        let (saved, gradients) = (&self.saved, &self.gradients);
        let outputs = [Some(&gradients.dq), Some(&gradients.dk), gradients.dv.as_ref(), self.dsink_logits.as_ref()];
        let inputs = [Some(&saved.q), Some(&saved.k), saved.v.as_ref(), Some(&saved.out), Some(&saved.lse)];
        let more = [self.dlse.as_ref(), self.indices.as_ref(), self.index_counts.as_ref(), self.sink_logits.as_ref()];
        let scales = [self.q_scales.as_ref(), self.k_scales.as_ref(), self.v_scales.as_ref()];
        let outputs = outputs.map(|view| view.map(ViewMut::view));
        let any_host = self.call.check_devices(
            (["dq", "dk", "dv", "dsink_logits"].into_iter().zip(outputs))
                .chain(["q", "k", "v", "out", "lse"].into_iter().zip(inputs))
                .chain(["dlse", "indices", "index_counts", "sink_logits"].into_iter().zip(more))
                .chain(["q_scales", "k_scales", "v_scales"].into_iter().zip(scales))
                .chain([("dout", Some(&self.dout))]),
        )?;

        let mut args = sized!(sys::spattn_backward_args);
        args.stream = self.call.start.stream();
        let (q, k, v, out) = (saved.q.c(), saved.k.c(), saved.v.as_ref().map(View::c), saved.out.c());
        let (lse, dout, dlse) = (saved.lse.c(), self.dout.c(), self.dlse.as_ref().map(View::c));
        let (dq, dk) = (gradients.dq.view().c(), gradients.dk.view().c());
        let dv = gradients.dv.as_ref().map(|view| view.view().c());
        let (indices, index_counts) = (self.indices.as_ref().map(View::c), self.index_counts.as_ref().map(View::c));
        let sink_logits = self.sink_logits.as_ref().map(View::c);
        let dsink_logits = self.dsink_logits.as_ref().map(|view| view.view().c());
        let [q_scales, k_scales, v_scales] = scales.map(|view| view.map(View::c));
        (args.q, args.k, args.v, args.out, args.lse) = (&q, &k, optional(&v), &out, &lse);
        (args.dout, args.dlse) = (&dout, optional(&dlse));
        (args.dq, args.dk, args.dv) = (&dq, &dk, optional(&dv));
        (args.indices, args.index_counts) = (optional(&indices), optional(&index_counts));
        (args.sink_logits, args.dsink_logits) = (optional(&sink_logits), optional(&dsink_logits));
        args.q_scales = optional(&q_scales);
        (args.k_scales, args.v_scales) = (optional(&k_scales), optional(&v_scales));
        self.call.run(any_host, |plan, memory, bytes| {
            (args.workspace, args.workspace_bytes) = (memory, bytes);
            // SAFETY: as in Forward::run.
            unsafe { sys::spattn_backward(plan, &args) }
        })
    }

    /// As [`Forward::enqueue`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn enqueue(mut self, stream: *mut c_void) -> Result<()> {
        self.call.start = Start::On(stream, None);
        self.run()
    }
}

impl Plan {
    /// A forward pass. `v` is a view, or `None` in a plan whose values lie in its keys.
    pub fn forward<'a>(
        &'a self,
        q: View<'a>,
        k: View<'a>,
        v: impl Into<Option<View<'a>>>,
        out: ViewMut<'a>,
    ) -> Forward<'a> {
        Forward::new(self, Start::Now, q, k, v.into(), out)
    }

    /// A backward pass; gradients are overwritten.
    pub fn backward<'a>(&'a self, saved: Saved<'a>, dout: View<'a>, gradients: Gradients<'a>) -> Backward<'a> {
        Backward::new(self, Start::Now, saved, dout, gradients)
    }

    /// Runs passes on a stream and waits for it at the end, whatever happens, so that no memory is freed or written
    /// while a device uses it: what passes of the scope borrow is borrowed for longer than the scope.
    ///
    /// ```compile_fail
    /// # use sparseattn::*;
    /// # fn wrong(plan: &Plan, stream: &impl Stream, q: View) -> Result<()> {
    /// plan.scope(stream, |scope| {
    ///     let mut out = vec![0f32; 64]; // would be freed while the device writes it
    ///     scope.forward(q, q, q, ViewMut::new(&mut out, &[1, 4, 4, 4])?).run()
    /// })
    /// # }
    /// ```
    pub fn scope<'env, S: Stream, T>(
        &'env self,
        stream: &'env S,
        body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    ) -> Result<T> {
        let start = Start::On(stream.raw(), stream.device());
        let scope = Scope { plan: self, start, scope: PhantomData, env: PhantomData };
        let done = catch_unwind(AssertUnwindSafe(|| body(&scope)));
        let waited = stream.wait();
        let done = done.unwrap_or_else(|panic| resume_unwind(panic))?;
        waited.map_err(|text| Error::new(ErrorKind::Cuda, "stream", text))?;
        Ok(done)
    }
}

/// Passes that are waited for: see [`Plan::scope`].
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    plan: &'env Plan,
    start: Start,
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

/// A pass that can only be run in its scope.
#[derive(Debug)]
#[must_use = "a pass does nothing before `run`"]
pub struct Scoped<'scope, P> {
    pass: P,
    scope: PhantomData<&'scope ()>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// As [`Plan::forward`].
    pub fn forward(
        &'scope self,
        q: View<'env>,
        k: View<'env>,
        v: impl Into<Option<View<'env>>>,
        out: ViewMut<'env>,
    ) -> Scoped<'scope, Forward<'env>> {
        Scoped { pass: Forward::new(self.plan, self.start, q, k, v.into(), out), scope: PhantomData }
    }

    /// As [`Context::append`]. What it writes is free to be read when the scope has ended.
    pub fn append(
        &'scope self,
        context: &'env Context,
        problem: &Problem,
        rows: (View<'env>, impl Into<Option<View<'env>>>),
        cache: (ViewMut<'env>, impl Into<Option<ViewMut<'env>>>),
        starts: View<'env>,
    ) -> Scoped<'scope, Append<'env>> {
        let rows = (rows.0, rows.1.into());
        let cache = (cache.0, cache.1.into());
        Scoped { pass: Append::new(context, self.start, problem, rows, cache, starts), scope: PhantomData }
    }

    /// As [`Sharding::pack`]. What an exchange writes is free to be read when the scope has ended.
    pub fn pack(
        &'scope self,
        sharding: &'env Sharding,
        held: (View<'env>, impl Into<Option<View<'env>>>),
        sent: impl Into<ViewMut<'env>>,
    ) -> Scoped<'scope, Exchange<'env>> {
        self.exchange(sharding.pack(held, sent))
    }

    /// As [`Sharding::unpack`].
    pub fn unpack(
        &'scope self,
        sharding: &'env Sharding,
        held: (View<'env>, impl Into<Option<View<'env>>>),
        received: impl Into<View<'env>>,
        seen: (ViewMut<'env>, impl Into<Option<ViewMut<'env>>>),
    ) -> Scoped<'scope, Exchange<'env>> {
        self.exchange(sharding.unpack(held, received, seen))
    }

    /// As [`Sharding::unpack_received`].
    pub fn unpack_received(
        &'scope self,
        sharding: &'env Sharding,
        received: impl Into<View<'env>>,
        seen: (ViewMut<'env>, impl Into<Option<ViewMut<'env>>>),
    ) -> Scoped<'scope, Exchange<'env>> {
        self.exchange(sharding.unpack_received(received, seen))
    }

    /// As [`Sharding::pack_gradients`].
    pub fn pack_gradients(
        &'scope self,
        sharding: &'env Sharding,
        seen: (View<'env>, impl Into<Option<View<'env>>>),
        received: impl Into<ViewMut<'env>>,
    ) -> Scoped<'scope, Exchange<'env>> {
        self.exchange(sharding.pack_gradients(seen, received))
    }

    /// As [`Sharding::add_gradients`].
    pub fn add_gradients(
        &'scope self,
        sharding: &'env Sharding,
        seen: (View<'env>, impl Into<Option<View<'env>>>),
        sent: impl Into<View<'env>>,
        held: (ViewMut<'env>, impl Into<Option<ViewMut<'env>>>),
    ) -> Scoped<'scope, Exchange<'env>> {
        self.exchange(sharding.add_gradients(seen, sent, held))
    }

    /// As [`Sharding::add_gradients_in_place`].
    pub fn add_gradients_in_place(
        &'scope self,
        sharding: &'env Sharding,
        seen: (ViewMut<'env>, impl Into<Option<ViewMut<'env>>>),
        sent: impl Into<View<'env>>,
    ) -> Scoped<'scope, Exchange<'env>> {
        self.exchange(sharding.add_gradients_in_place(seen, sent))
    }

    fn exchange(&'scope self, exchange: Exchange<'env>) -> Scoped<'scope, Exchange<'env>> {
        Scoped { pass: exchange.starting(self.start), scope: PhantomData }
    }

    /// As [`Plan::backward`].
    pub fn backward(
        &'scope self,
        saved: Saved<'env>,
        dout: View<'env>,
        gradients: Gradients<'env>,
    ) -> Scoped<'scope, Backward<'env>> {
        Scoped { pass: Backward::new(self.plan, self.start, saved, dout, gradients), scope: PhantomData }
    }
}

/// Forwards the methods of a pass to what lies in its scope.
macro_rules! scoped {
    ($pass:ident: $($name:ident($view:ident),)*) => {
        #[allow(missing_docs)] // those of the pass
        impl<'scope, 'env: 'scope> Scoped<'scope, $pass<'env>> {
            $(pub fn $name(mut self, $name: $view<'env>) -> Self {
                self.pass = self.pass.$name($name);
                self
            })*
            pub fn run(self) -> Result<()> {
                self.pass.run()
            }
        }
    };
}
scoped! { Forward: lse(ViewMut), max_logits(ViewMut), indices(View), index_counts(View), sink_logits(View),
starts(View), page_table(View), query_offsets(View), parents(View), q_scales(View), k_scales(View),
v_scales(View), workspace(ViewMut), }
scoped! { Backward: dlse(View), indices(View), index_counts(View), sink_logits(View), dsink_logits(ViewMut),
q_scales(View), k_scales(View), v_scales(View), workspace(ViewMut), }
scoped! { Append: counts(View), page_table(View), query_offsets(View), k_scales(View), v_scales(View), }
scoped! { Exchange: }

impl<'scope, 'env: 'scope> Scoped<'scope, Forward<'env>> {
    /// As [`Forward::same_step`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn same_step(mut self, on: bool) -> Self {
        self.pass = self.pass.same_step(on);
        self
    }
}

impl<'scope, 'env: 'scope> Scoped<'scope, Exchange<'env>> {
    /// As [`Exchange::scales`].
    pub fn scales(mut self, held: (View<'env>, impl Into<Option<View<'env>>>)) -> Self {
        self.pass = self.pass.scales(held);
        self
    }
    /// As [`Exchange::seen_scales`].
    pub fn seen_scales(mut self, seen: (ViewMut<'env>, impl Into<Option<ViewMut<'env>>>)) -> Self {
        self.pass = self.pass.seen_scales(seen);
        self
    }
}

impl<'scope, 'env: 'scope> Scoped<'scope, Append<'env>> {
    /// As [`Append::choose_scales`].
    pub fn choose_scales(mut self, k_scales: ViewMut<'env>, v_scales: impl Into<Option<ViewMut<'env>>>) -> Self {
        self.pass = self.pass.choose_scales(k_scales, v_scales);
        self
    }
}

// Nothing here calls the library, so that Miri can run it.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;
    use std::mem::ManuallyDrop;

    #[test]
    fn scratch_is_as_large_and_aligned_as_asked() {
        let mut scratch = Workspace::allocate("workspace", 100, 64).unwrap();
        let c = scratch.view().view().c();
        assert_eq!(c.data as usize % 64, 0);
        // SAFETY: the memory lives, and nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(c.data.cast::<u8>(), 100).fill(1) };
        let refused = |bytes, align| Workspace::allocate("workspace", bytes, align).err().unwrap().kind();
        assert_eq!(refused(usize::MAX, 64), ErrorKind::HostMemory);
        assert_eq!(refused(8, 3), ErrorKind::HostMemory);
    }

    /// Writes when it is waited for, as a device does that is late.
    struct Late(Cell<*mut f32>);

    // SAFETY: it is no CUDA stream, and no pass reaches the library.
    unsafe impl Stream for Late {
        fn raw(&self) -> *mut c_void {
            std::ptr::null_mut()
        }
        fn wait(&self) -> std::result::Result<(), String> {
            // SAFETY: what a scope borrows outlives it.
            unsafe { self.0.get().write(3.0) };
            Ok(())
        }
    }

    struct OnStream(Vec<f32>, *mut c_void);

    // SAFETY: the vector is valid for its elements, and written by nobody.
    unsafe impl Memory for OnStream {
        fn as_ptr(&self) -> *const c_void {
            self.0.as_ptr().cast()
        }
        fn elements(&self) -> usize {
            self.0.len()
        }
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn device(&self) -> Device {
            Device::Cuda(0)
        }
        fn stream(&self) -> Option<*mut c_void> {
            Some(self.1)
        }
    }

    #[test]
    fn memory_for_one_stream_is_refused_on_another() {
        let (one, other) = (std::ptr::null_mut::<u8>().wrapping_add(8).cast(), std::ptr::null_mut());
        let memory = OnStream(vec![0.0; 4], one);
        for view in [View::of(&memory, &[4]).unwrap(), View::of_strided(&memory, &[2], &[2]).unwrap()] {
            assert!(Start::On(one, None).check("q", &view).is_ok());
            let refused = Start::On(other, None).check("q", &view).unwrap_err();
            assert_eq!((refused.kind(), refused.argument()), (ErrorKind::State, "q"));
            // The default streams of all GPUs are NULL, so that a stream does not tell them apart.
            assert!(Start::On(one, Some(Device::Cuda(0))).check("q", &view).is_ok());
            let refused = Start::On(one, Some(Device::Cuda(1))).check("q", &view).unwrap_err();
            assert_eq!((refused.kind(), refused.argument()), (ErrorKind::Device, "q"));
            let refused = Start::Now.check("q", &view).unwrap_err();
            assert_eq!((refused.kind(), refused.argument()), (ErrorKind::State, "q"));
        }
    }

    #[test]
    fn what_a_scope_borrows_lives_until_the_device_is_done() {
        let plan = ManuallyDrop::new(Plan::own(std::ptr::null_mut())); // released, it would call the library
        let stream = Late(Cell::new(std::ptr::null_mut()));
        let mut out = vec![0f32; 4];
        let q = vec![1f32; 4];
        let q = View::new(&q, &[1, 4, 1, 1]).unwrap();
        let out_view = ViewMut::new(&mut out, &[1, 4, 1, 1]).unwrap();
        let done = plan.scope(&stream, |scope| {
            let pass = scope.forward(q, q, q, out_view);
            stream.0.set(pass.pass.out.view().c().data.cast());
            Ok(7)
        });
        assert_eq!((done.unwrap(), out[0]), (7, 3.0));
    }
}

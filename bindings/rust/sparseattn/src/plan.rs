// SPDX-License-Identifier: MIT
//! A pattern compiled for shapes.
use crate::error::{check, fill_text, size, sized, text, Result};
use crate::{sys, Dtype, Pattern, Stats};
use std::fmt;

/// The order of a tensor's axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Axes {
    /// `[batch, seq, heads, head_dim]`; lse is `[batch, heads_q, seq_q]`.
    #[default]
    Bshd = sys::SPATTN_BSHD as isize,
    /// `[batch, heads, seq, head_dim]`; lse as before.
    Bhsd = sys::SPATTN_BHSD as isize,
    /// `[tokens, heads, head_dim]`: sequences one after the other; lse is `[heads_q, tokens]`.
    Thd = sys::SPATTN_THD as isize,
}

/// A pass of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Pass {
    Forward = sys::SPATTN_OP_FORWARD as isize,
    Backward = sys::SPATTN_OP_BACKWARD as isize,
}

/// The shapes that a plan is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    batch: usize,
    heads: (usize, usize),
    seq: (usize, usize),
    head_dim: (usize, usize),
    dtype: Dtype,
    axes: Axes,
    scale: Option<f64>,
    q_offset: Option<i64>,
    softcap: f64,
    page_size: usize,
    cache_dtype: Option<Dtype>,
    flags: u32,
}

impl Problem {
    /// As many heads and tokens of keys as of queries; f32; [`Axes::Bshd`]; forward only.
    pub fn new(batch: usize, heads: usize, seq: usize, head_dim: usize) -> Self {
        Problem {
            batch,
            heads: (heads, heads),
            seq: (seq, seq),
            head_dim: (head_dim, 0),
            dtype: Dtype::F32,
            axes: Axes::Bshd,
            scale: None,
            q_offset: None,
            softcap: 0.0,
            page_size: 0,
            cache_dtype: None,
            flags: 0,
        }
    }
    /// Heads of keys and values, a divisor of those of queries.
    pub fn heads_kv(mut self, heads: usize) -> Self {
        self.heads.1 = heads;
        self
    }
    /// Tokens of keys and values.
    pub fn seq_k(mut self, seq: usize) -> Self {
        self.seq.1 = seq;
        self
    }
    /// Elements of a value.
    pub fn head_dim_v(mut self, head_dim: usize) -> Self {
        self.head_dim.1 = head_dim;
        self
    }
    /// The type of operands and gradients; lse and sinks are always f32. Where it is [`Dtype::F8_E4M3FN`], that is the
    /// type of `q`, `k` and `v`; `out` and gradients are [`Dtype::BF16`]. Each row of a token and head stands for its
    /// elements times a scale, 1 unless [`Forward::q_scales`](crate::Forward::q_scales), `k_scales` or `v_scales` says
    /// which, and those of [`Backward`](crate::Backward) say it again; kernels may round that product to bf16, once.
    /// Gradients are of what rows stand for, so that who has rounded to float8 may hand them on as they are
    /// ([a straight-through estimator](https://arxiv.org/abs/1308.3432)). Such a problem with [`starts`](Self::starts),
    /// whose caches have a [`cache_dtype`](Self::cache_dtype), is
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported).
    ///
    /// ```
    /// use sparseattn::{full, Context, Dtype, Problem, View, ViewMut};
    /// let plan = Context::cpu()?.plan(&full(), &Problem::new(1, 1, 2, 4).dtype(Dtype::F8_E4M3FN))?;
    /// let (ones, scales, shape) = ([0x38u8; 8], [1f32, 3.0], [1, 2, 1, 4]); // bits of 1; a scale for each token
    /// let (x, scales, mut out) = (View::f8_e4m3fn(&ones, &shape)?, View::new(&scales, &shape[..3])?, [0u16; 8]);
    /// plan.forward(x, x, x, ViewMut::bf16(&mut out, &shape)?).q_scales(scales).v_scales(scales).run()?;
    /// assert!(out.iter().all(|bits| *bits == 0x4000)); // 2: keys are equal, and (1 + 3) / 2 is the average of values
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }
    /// The order of the axes.
    pub fn axes(mut self, axes: Axes) -> Self {
        self.axes = axes;
        self
    }
    /// The factor on scores; 1 / sqrt(head_dim) if not given.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }
    /// The position of the first query; `seq_k - seq_q` if not given.
    pub fn q_offset(mut self, q_offset: i64) -> Self {
        self.q_offset = Some(q_offset);
        self
    }
    /// Scores become softcap * tanh(score / softcap); 0 is none.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = softcap;
        self
    }
    /// Whether `Plan::backward` will be called.
    pub fn backward(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_BACKWARD, on)
    }
    /// Whether results are to be the same bits in every call; on the CPU they always are.
    pub fn deterministic(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_DETERMINISTIC, on)
    }
    /// Whether to take the plain double-precision kernels: slow, the truth.
    pub fn reference(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_REFERENCE, on)
    }
    /// Whether values are the first elements of keys; `v` and `dv` are then `None`.
    pub fn value_in_key(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_VALUE_IN_KEY, on)
    }
    /// Whether each call brings sink logits.
    pub fn sink_logits(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_SINK_LOGITS, on)
    }
    /// Whether float32 products may round their operands to TF32, 11 significant bits, on GPUs whose tensor cores take
    /// them. Where no such kernel serves it changes nothing.
    pub fn tf32(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_TF32, on)
    }
    /// Whether keys lie in a cache that is filled from call to call, to decode or to take a prompt in chunks: `seq_k`
    /// is how many tokens of an entry it has room for, what [`new`](Self::new) was given how many queries of an entry
    /// a call has, which begin where [`Forward::starts`](crate::Forward::starts) says. The pattern is that of the
    /// whole sequence, and is cut to what is causal. With [`Axes::Thd`] entries have any numbers of queries, which
    /// [`Forward::query_offsets`](crate::Forward::query_offsets) tells apart: [`new`](Self::new) was given how many all
    /// have together. A plan with `backward`, `q_offset` or lists under more than causal beside it is
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported).
    ///
    /// ```
    /// use sparseattn::{full, Context, Problem, View, ViewMut};
    /// let (room, heads, dim) = (64, 2, 8);
    /// let plan = Context::cpu()?.plan(&full(), &Problem::new(1, heads, 1, dim).seq_k(room).starts(true))?;
    /// let mut cache = vec![f32::NAN; room * heads * dim]; // what was not written yet may hold anything
    /// let (q, mut out) = (vec![1f32; heads * dim], vec![0f32; heads * dim]);
    /// for token in 0..room {
    ///     cache[token * heads * dim..][..heads * dim].fill(token as f32);
    ///     let (starts, kv) = ([token as i64], View::new(&cache, &[1, room, heads, dim])?);
    ///     plan.forward(View::new(&q, &[1, 1, heads, dim])?, kv, kv, ViewMut::new(&mut out, &[1, 1, heads, dim])?)
    ///         .starts(View::new(&starts, &[1])?)
    ///         .run()?;
    ///     assert!(out.iter().all(|x| *x > token as f32 - 0.1 && *x <= token as f32)); // the largest score is the last
    /// }
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn starts(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_STARTS, on)
    }
    /// Whether the queries of an entry of such a cache are drafts of several continuations, nodes of trees, as
    /// speculative decoding verifies them ([SpecInfer](https://arxiv.org/abs/2305.09781)):
    /// [`Forward::parents`](crate::Forward::parents) says whose children they are. Of the drafts' keys a query then
    /// sees no others than its own and its ancestors'. It is the same row of the pattern as without trees, however deep
    /// it stands. A plan with parents but without [`starts`](Self::starts), or with lists that come with a call, which
    /// can leave out what a query is not to see, is [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported).
    ///
    /// ```
    /// use sparseattn::{full, Context, Problem, View, ViewMut};
    /// let problem = Problem::new(1, 1, 4, 4).seq_k(8).starts(true).parents(true);
    /// let plan = Context::cpu()?.plan(&full(), &problem)?;
    /// let tokens = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, f32::NAN, f32::NAN]; // two of the text, and four drafts
    /// let cache: Vec<f32> = tokens.into_iter().flat_map(|x| [x; 4]).collect();
    /// let (starts, parents) = ([2], [-1, 0, 0, -1]); // two ways on from the first draft, and one beside it
    /// let (q, mut out, kv) = ([0f32; 16], [0f32; 16], View::new(&cache, &[1, 8, 1, 4])?);
    /// plan.forward(View::new(&q, &[1, 4, 1, 4])?, kv, kv, ViewMut::new(&mut out, &[1, 4, 1, 4])?)
    ///     .starts(View::new(&starts, &[1])?)
    ///     .parents(View::new(&parents, &[1, 4])?)
    ///     .run()?;
    /// let text = 1.0 + 3.0; // equal scores: averages of what is seen
    /// let averages = [(text + 5.0) / 3.0, (text + 5.0 + 7.0) / 4.0, (text + 5.0 + 9.0) / 4.0, (text + 11.0) / 3.0];
    /// assert!(out.iter().step_by(4).zip(averages).all(|(x, average)| (x - average).abs() < 1e-6));
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn parents(self, on: bool) -> Self {
        self.flag(sys::SPATTN_PLAN_PARENTS, on)
    }
    /// Tokens of a page, where such a cache lies in pages, which [`Forward::page_table`](crate::Forward::page_table)
    /// names in each call; 0, the default, is no pages. More than 65,536, what does not divide `seq_k`, pages without
    /// [`starts`](Self::starts), and [`Axes::Thd`] with `starts` but no pages are
    /// [`ErrorKind::Range`](crate::ErrorKind::Range). On a GPU, multiples of 64 or 128 are read fastest.
    pub fn page_size(mut self, tokens: usize) -> Self {
        self.page_size = tokens;
        self
    }
    /// The type of keys and values in such a cache: that of operands if not given, or [`Dtype::F8_E4M3FN`]. Each row of
    /// a token and head then stands for its elements times a scale, 1 unless
    /// [`Forward::k_scales`](crate::Forward::k_scales) says which. Other types, and one without
    /// [`starts`](Self::starts), are [`ErrorKind::Dtype`](crate::ErrorKind::Dtype).
    pub fn cache_dtype(mut self, dtype: Dtype) -> Self {
        self.cache_dtype = Some(dtype);
        self
    }

    fn flag(mut self, flag: u32, on: bool) -> Self {
        self.flags = if on { self.flags | flag } else { self.flags & !flag };
        self
    }

    pub(crate) fn c(&self) -> sys::spattn_problem {
        let mut problem = sized!(sys::spattn_problem);
        problem.flags = self.flags
            | if self.scale.is_some() { sys::SPATTN_PLAN_SCALE } else { 0 }
            | if self.q_offset.is_some() { sys::SPATTN_PLAN_Q_OFFSET } else { 0 };
        problem.batch = size(self.batch);
        (problem.heads_q, problem.heads_kv) = (size(self.heads.0), size(self.heads.1));
        (problem.seq_q, problem.seq_k) = (size(self.seq.0), size(self.seq.1));
        (problem.head_dim, problem.head_dim_v) = (size(self.head_dim.0), size(self.head_dim.1));
        problem.dtype = self.dtype.c();
        problem.axes = self.axes as i32;
        problem.scale = self.scale.unwrap_or(0.0);
        problem.q_offset = self.q_offset.unwrap_or(0);
        problem.softcap = self.softcap;
        problem.page_size = size(self.page_size);
        if let Some(dtype) = self.cache_dtype {
            problem.cache_dtype = dtype.c();
        }
        problem
    }
}

/// A pattern compiled for shapes, with its kernels. Clones share it, and so may threads.
///
/// ```
/// use sparseattn::{causal, window, Context, Problem, View, ViewMut};
/// let plan = Context::cpu()?.plan(&(causal() & window(31, 0)), &Problem::new(1, 2, 128, 16))?;
/// let shape = [1, 128, 2, 16];
/// let (q, kv) = (vec![0.5f32; 4096], vec![0.25f32; 4096]);
/// let (mut out, mut lse) = (vec![0f32; 4096], vec![0f32; 256]);
/// let (q, kv) = (View::new(&q, &shape)?, View::new(&kv, &shape)?);
/// plan.forward(q, kv, kv, ViewMut::new(&mut out, &shape)?).lse(ViewMut::new(&mut lse, &[1, 2, 128])?).run()?;
/// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6)); // an average of equal values
/// println!("{}", plan.explain()?);
/// # Ok::<(), sparseattn::Error>(())
/// ```
pub struct Plan(*mut sys::spattn_plan);

// SAFETY: plans never change, and their count is atomic: sparseattn.h lets any threads share one.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    pub(crate) fn own(handle: *mut sys::spattn_plan) -> Self {
        Plan(handle)
    }
    pub(crate) fn handle(&self) -> *const sys::spattn_plan {
        self.0
    }

    /// Kernel, blocks, work, cost and what else was considered.
    pub fn explain(&self) -> Result<String> {
        // SAFETY: fill_text brings as much memory as it says.
        fill_text(|buffer, capacity, needed| unsafe { sys::spattn_plan_explain(self.0, buffer, capacity, needed) })
    }

    /// The same, with each row by name that could not serve this problem on this machine.
    pub fn explain_all(&self) -> Result<String> {
        // SAFETY: as in explain.
        fill_text(|buffer, capacity, needed| unsafe { sys::spattn_plan_explain_all(self.0, buffer, capacity, needed) })
    }

    /// The kernel row that a pass runs, as `SPATTN_FORCE_KERNEL` reads it; `None` where the pass was not planned.
    pub fn kernel(&self, pass: Pass) -> Option<String> {
        // SAFETY: the text lives as long as the plan.
        let name = unsafe { sys::spattn_plan_kernel(self.0, pass as i32) };
        // SAFETY: as above.
        (!name.is_null()).then(|| unsafe { text(name) })
    }

    /// Counts over all batch entries and heads, with work and traffic.
    pub fn stats(&self) -> Result<Stats> {
        let mut stats = sized!(sys::spattn_stats);
        // SAFETY: the struct is as long as it says.
        check(unsafe { sys::spattn_plan_stats(self.0, &mut stats) })?;
        Ok(stats.into())
    }

    /// Bytes of scratch that one call of a pass needs, and their alignment.
    pub fn workspace(&self, pass: Pass) -> Result<(usize, usize)> {
        let (mut bytes, mut align) = (0, 1);
        // SAFETY: both results are usize.
        check(unsafe { sys::spattn_plan_workspace(self.0, pass as i32, &mut bytes, &mut align) })?;
        Ok((bytes, align))
    }
}

impl Clone for Plan {
    fn clone(&self) -> Self {
        // SAFETY: the handle is alive.
        unsafe { sys::spattn_plan_retain(self.0) };
        Plan(self.0)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: this reference is ours.
        unsafe { sys::spattn_plan_release(self.0) };
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("forward", &self.kernel(Pass::Forward))
            .field("backward", &self.kernel(Pass::Backward))
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.explain() {
            Ok(text) => f.write_str(&text),
            Err(error) => write!(f, "<{error}>"),
        }
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Pattern>();
    shared::<Plan>();
    shared::<crate::Context>();
    shared::<crate::Sharding>();
};

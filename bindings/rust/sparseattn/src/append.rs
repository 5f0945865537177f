// SPDX-License-Identifier: MIT
//! New tokens of a cache. Operands have the names and shapes of `spattn_cache_append_args`.
use crate::error::{check, sized, Result};
use crate::run::{optional, options, Start};
use crate::{sys, Context, Problem, View, ViewMut};
use std::ffi::c_void;

/// New tokens that are being described: `run` writes them into a cache.
#[derive(Debug)]
#[must_use = "nothing is written before `run`"]
pub struct Append<'a> {
    context: &'a Context,
    start: Start,
    problem: sys::spattn_problem,
    rows: (View<'a>, Option<View<'a>>),
    cache: (ViewMut<'a>, Option<ViewMut<'a>>),
    starts: View<'a>,
    counts: Option<View<'a>>,
    page_table: Option<View<'a>>,
    query_offsets: Option<View<'a>>,
    k_scales: Option<View<'a>>,
    v_scales: Option<View<'a>>,
    chosen: Option<(ViewMut<'a>, Option<ViewMut<'a>>)>,
}

impl<'a> Append<'a> {
    pub(crate) fn new(
        context: &'a Context,
        start: Start,
        problem: &Problem,
        rows: (View<'a>, Option<View<'a>>),
        cache: (ViewMut<'a>, Option<ViewMut<'a>>),
        starts: View<'a>,
    ) -> Self {
        Append {
            context,
            start,
            problem: problem.c(),
            rows,
            cache,
            starts,
            counts: None,
            page_table: None,
            query_offsets: None,
            k_scales: None,
            v_scales: None,
            chosen: None,
        }
    }

    options! {
        /// How many of an entry's rows are new, the last ones: `[batch]`, i32 or i64; the others are not written, as
        /// where texts of several lengths are padded in front. Without it all are.
        counts: View,
        /// As [`Forward::page_table`](crate::Forward::page_table). Tokens of pages that do not exist are not written.
        page_table: View,
        /// As [`Forward::query_offsets`](crate::Forward::query_offsets): which rows are whose.
        query_offsets: View,
        /// As [`Forward::k_scales`](crate::Forward::k_scales): what keys are divided by before a float8 cache gets
        /// them, rounded to nearest, ties to even. What is then beyond 448 becomes 448, and NaN stays NaN.
        k_scales: View,
        /// The same of values; not where they lie in keys.
        v_scales: View,
    }

    /// Chooses the scale of each row that is written to a float8 cache: its largest magnitude divided by 448, or 1
    /// where all are 0 or one is not finite. The call writes it here, where later ones read it as `k_scales` and
    /// `v_scales`; the latter is `None` where values lie in keys. Without a float8 cache that is
    /// [`ErrorKind::Range`](crate::ErrorKind::Range).
    pub fn choose_scales(mut self, k_scales: ViewMut<'a>, v_scales: impl Into<Option<ViewMut<'a>>>) -> Self {
        self.chosen = Some((k_scales, v_scales.into()));
        self
    }

    /// Writes them: at once in host memory; in a scope, it may be enqueued.
    pub fn run(self) -> Result<()> {
        let rows = [Some(&self.rows.0), self.rows.1.as_ref(), Some(&self.starts), self.counts.as_ref()];
        let written = [Some(&self.cache.0), self.cache.1.as_ref()].map(|view| view.map(ViewMut::view));
        let more = [self.page_table.as_ref(), self.query_offsets.as_ref()];
        let scales = match &self.chosen {
            Some((of_keys, of_values)) => [Some(of_keys.view()), of_values.as_ref().map(ViewMut::view)],
            None => [self.k_scales.as_ref(), self.v_scales.as_ref()],
        };
        self.start.check_all(["k_new", "v_new", "starts", "counts"].into_iter().zip(rows))?;
        self.start.check_all(["k", "v"].into_iter().zip(written))?;
        self.start.check_all(["page_table", "query_offsets"].into_iter().zip(more))?;
        self.start.check_all(["k_scales", "v_scales"].into_iter().zip(scales))?;

        let mut args = sized!(sys::spattn_cache_append_args);
        args.flags = if self.chosen.is_some() { sys::SPATTN_APPEND_SCALES } else { 0 };
        args.stream = self.start.stream();
        let (k_new, v_new) = (self.rows.0.c(), self.rows.1.as_ref().map(View::c));
        let (k, v) = (self.cache.0.view().c(), self.cache.1.as_ref().map(|view| view.view().c()));
        let (starts, counts) = (self.starts.c(), self.counts.as_ref().map(View::c));
        let [page_table, query_offsets] = more.map(|view| view.map(View::c));
        let [k_scales, v_scales] = scales.map(|view| view.map(View::c));
        (args.k_new, args.v_new, args.k, args.v) = (&k_new, optional(&v_new), &k, optional(&v));
        (args.starts, args.counts) = (&starts, optional(&counts));
        (args.page_table, args.query_offsets) = (optional(&page_table), optional(&query_offsets));
        (args.k_scales, args.v_scales) = (optional(&k_scales), optional(&v_scales));
        // SAFETY: views are valid for their shapes; device memory only where somebody waits.
        check(unsafe { sys::spattn_cache_append(self.context.handle(), &self.problem, &args) })
    }

    /// Only enqueues the writing on a `cudaStream_t`.
    ///
    /// # Safety
    /// The stream is live, and until it has done so the memory of all views stays valid, the cache untouched but by what
    /// is enqueued on it.
    pub unsafe fn enqueue(mut self, stream: *mut c_void) -> Result<()> {
        self.start = Start::On(stream, None);
        self.run()
    }
}

impl Context {
    /// Brings new tokens to a cache that plans of this problem, one with [`Problem::starts`], read: `problem.seq_q` of an
    /// entry. Row `i` of entry `b` becomes token `starts[b] + i`; what lies outside of the cache is not written. `rows`
    /// are keys and values of the tokens, `cache` those that plans read; values are `None` where they lie in keys.
    ///
    /// ```
    /// use sparseattn::{causal, Context, Problem, View, ViewMut};
    /// let (context, problem) = (Context::cpu()?, Problem::new(1, 1, 1, 4).seq_k(8).starts(true).page_size(2));
    /// let plan = context.plan(&causal(), &problem)?;
    /// let (mut keys, mut values, table) = ([f32::NAN; 40], [f32::NAN; 40], [3, 0, 4, 1]); // five pages
    /// for token in 0..8 {
    ///     let (row, starts, mut out) = ([token as f32; 4], [token], [0f32; 4]);
    ///     let (row, table) = (View::new(&row, &[1, 1, 1, 4])?, View::new(&table, &[1, 4])?);
    ///     let starts = View::new(&starts, &[1])?;
    ///     let cache = (ViewMut::new(&mut keys, &[5, 2, 1, 4])?, ViewMut::new(&mut values, &[5, 2, 1, 4])?);
    ///     context.append(&problem, (row, row), cache, starts).page_table(table).run()?;
    ///     let (k, v) = (View::new(&keys, &[5, 2, 1, 4])?, View::new(&values, &[5, 2, 1, 4])?);
    ///     let q = View::new(&[0f32; 4], &[1, 1, 1, 4])?; // to which all keys are alike
    ///     plan.forward(q, k, v, ViewMut::new(&mut out, &[1, 1, 1, 4])?).starts(starts).page_table(table).run()?;
    ///     assert!((out[0] - token as f32 / 2.0).abs() < 1e-6); // the mean of 0 ..= token
    /// }
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn append<'a>(
        &'a self,
        problem: &Problem,
        rows: (View<'a>, impl Into<Option<View<'a>>>),
        cache: (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>),
        starts: View<'a>,
    ) -> Append<'a> {
        Append::new(self, Start::Now, problem, (rows.0, rows.1.into()), (cache.0, cache.1.into()), starts)
    }
}

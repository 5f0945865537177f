// SPDX-License-Identifier: MIT
//! Patterns: which keys each query may see. Every constructor is the function of `sparseattn.h` of its name, which says
//! its set and its paper.
use crate::error::{check, fill, fill_text, size, sized, zeros, Error, ErrorKind, Result};
use crate::question::{Csr, Extent, Stats};
use crate::sys;
use crate::tensor::{Element, View, ViewMut};
use std::ffi::{c_void, CString};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{BitAnd, BitAndAssign, BitOr, BitOrAssign, Sub, SubAssign};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::str::FromStr;

/// Which keys each query may see: a value that never changes. Clones share it.
///
/// `|`, `&` and `-` compose patterns as sets. A constructor whose arguments are wrong gives a pattern that holds the
/// error, and so does whatever is composed of it; [`Pattern::check`] and every question tell it.
///
/// ```
/// use sparseattn::{causal, sink, window, ErrorKind, Pattern};
/// let pattern = causal() & (window(1023, 0) | sink(64));
/// assert_eq!(pattern, "causal & (window(1023,0) | sink(64))".parse()?);
/// assert_eq!(pattern.stats(4096)?.row_max, 1024 + 64);
///
/// let wrong = causal() & window(-2, 0);
/// assert_eq!(wrong.stats(4096).unwrap_err().argument(), "left");
/// assert_eq!("cuasal".parse::<Pattern>().unwrap_err().kind(), ErrorKind::Format);
/// # Ok::<(), sparseattn::Error>(())
/// ```
#[derive(Clone)]
pub struct Pattern(Result<Handle>);

/// One counted reference.
struct Handle(*mut sys::spattn_pattern);

// SAFETY: patterns never change, and their count is atomic: sparseattn.h lets any threads share one.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // SAFETY: the handle is alive.
        unsafe { sys::spattn_pattern_retain(self.0) };
        Handle(self.0)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: this reference is ours.
        unsafe { sys::spattn_pattern_release(self.0) };
    }
}

type Made = *mut *mut sys::spattn_pattern;

/// The pattern that a C function makes.
fn make(call: impl FnOnce(Made) -> i32) -> Pattern {
    let mut made = std::ptr::null_mut();
    Pattern(check(call(&mut made)).map(|()| Handle(made)))
}

impl Pattern {
    pub(crate) fn handle(&self) -> Result<*const sys::spattn_pattern> {
        self.0.as_ref().map(|handle| handle.0 as *const _).map_err(Clone::clone)
    }

    /// The error of a constructor whose arguments were wrong.
    pub fn check(&self) -> Result<()> {
        self.handle().map(|_| ())
    }

    /// Bytes that every later release loads, on any machine.
    pub fn save(&self) -> Result<Vec<u8>> {
        let handle = self.handle()?;
        // SAFETY: fill brings as much memory as it says.
        fill(|buffer, capacity, needed| unsafe { sys::spattn_pattern_save(handle, buffer.cast(), capacity, needed) })
    }

    /// The pattern that [`Pattern::save`] wrote.
    pub fn load(bytes: &[u8]) -> Result<Self> {
        // SAFETY: the bytes are borrowed for the call.
        make(|made| unsafe { sys::spattn_pattern_load(bytes.as_ptr().cast(), bytes.len(), made) }).checked()
    }

    fn text(&self) -> Result<String> {
        let handle = self.handle()?;
        // SAFETY: fill_text brings as much memory as it says.
        fill_text(|buffer, capacity, needed| unsafe { sys::spattn_pattern_print(handle, buffer, capacity, needed) })
    }

    fn checked(self) -> Result<Self> {
        self.0.map(|handle| Pattern(Ok(handle)))
    }

    /// Counts on an extent: `4096` is 4096 queries and keys, `(1, 4096)` one query.
    pub fn stats(&self, extent: impl Into<Extent>) -> Result<Stats> {
        let (handle, extent) = (self.handle()?, extent.into().c());
        let mut stats = sized!(sys::spattn_stats);
        // SAFETY: both structs are as long as they say.
        check(unsafe { sys::spattn_pattern_stats(handle, &extent, &mut stats) })?;
        Ok(stats.into())
    }

    /// Whether query row `q` of a head of the first batch entry sees key `k`.
    pub fn keeps(&self, extent: impl Into<Extent>, head: usize, q: usize, k: usize) -> Result<bool> {
        self.keeps_in_batch(extent, 0, head, q, k)
    }

    /// Whether query row `q` of a head of a batch entry sees key `k`.
    pub fn keeps_in_batch(
        &self,
        extent: impl Into<Extent>,
        batch: usize,
        head: usize,
        q: usize,
        k: usize,
    ) -> Result<bool> {
        let (handle, extent) = (self.handle()?, extent.into().c());
        let (batch, head, q, k) = (size(batch), size(head), size(q), size(k));
        let mut kept = 0;
        // SAFETY: the result is an i32.
        check(unsafe { sys::spattn_pattern_keeps(handle, &extent, batch, head, q, k, &mut kept) })?;
        Ok(kept != 0)
    }

    /// `[batch, heads, seq_q, seq_k]`, row-major: 1 where a query sees a key.
    pub fn to_mask(&self, extent: impl Into<Extent>) -> Result<Vec<u8>> {
        let (handle, extent) = (self.handle()?, extent.into());
        let shape = extent.shape()?;
        let mut mask = zeros("out", shape.iter().product())?;
        let view = ViewMut::new(&mut mask, &shape)?;
        // SAFETY: the view is as large as the extent.
        check(unsafe { sys::spattn_pattern_to_mask(handle, &extent.c(), &view.view().c()) })?;
        Ok(mask)
    }

    /// `[height, width]`, row-major: the kept share, 0 to 1, of each cell of a head of the first batch entry.
    ///
    /// ```
    /// let image = sparseattn::causal().to_image(1_000_000, 0, 2, 2)?;
    /// assert_eq!([image[1], image[2]], [0.0, 1.0]);
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn to_image(&self, extent: impl Into<Extent>, head: usize, height: usize, width: usize) -> Result<Vec<f32>> {
        let (handle, extent) = (self.handle()?, extent.into().c());
        let cells = height.checked_mul(width).filter(|cells| *cells <= isize::MAX as usize / 4);
        let Some(cells) = cells else {
            let message = format!("height and width are {height} and {width}; accepted: at most the extent's sizes");
            return Err(Error::new(ErrorKind::Shape, "coverage", message));
        };
        let mut image = zeros("coverage", cells)?;
        let view = ViewMut::new(&mut image, &[height, width])?;
        // SAFETY: the view is as large as it says.
        check(unsafe { sys::spattn_pattern_to_image(handle, &extent, size(head), &view.view().c()) })?;
        Ok(image)
    }

    /// The keys of each query row of a head of the first batch entry.
    pub fn to_csr(&self, extent: impl Into<Extent>, head: usize) -> Result<Csr> {
        let (handle, extent) = (self.handle()?, extent.into());
        let (c, head, none) = (extent.c(), size(head), std::ptr::null());
        let mut nnz = 0;
        // SAFETY: lists that are NULL are not written.
        check(unsafe { sys::spattn_pattern_to_csr(handle, &c, head, none, none, &mut nnz) })?;
        let mut row_ptr = zeros("row_ptr", extent.seq_q() + 1)?;
        let mut columns = zeros("col_idx", nnz as usize)?;
        let rows = row_ptr.len();
        let row_view = ViewMut::new(&mut row_ptr, &[rows])?;
        let column_view = ViewMut::new(&mut columns, &[nnz as usize])?;
        let (row_c, column_c) = (row_view.view().c(), column_view.view().c());
        // SAFETY: the lists are as long as the call before said.
        check(unsafe { sys::spattn_pattern_to_csr(handle, &c, head, &row_c, &column_c, &mut nnz) })?;
        Ok(Csr { row_ptr, columns })
    }
}

impl FromStr for Pattern {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let Ok(text) = CString::new(text) else {
            return Err(Error::new(ErrorKind::Format, "text", "text holds a zero byte; accepted: none".into()));
        };
        // SAFETY: the text is borrowed for the call.
        make(|made| unsafe { sys::spattn_pattern_parse(text.as_ptr(), made) }).checked()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Ok(text) => f.pad(&text),
            Err(error) => write!(f, "<{error}>"),
        }
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pattern({self})")
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            // SAFETY: both handles are alive.
            (Ok(a), Ok(b)) => unsafe { sys::spattn_pattern_equal(a.0, b.0) != 0 },
            (Err(a), Err(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Pattern {}

impl Hash for Pattern {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Ok(handle) => {
                let mut hash = 0;
                // SAFETY: the handle is alive. Where no memory is left, all patterns hash to 0, which is legal.
                unsafe { sys::spattn_pattern_hash(handle.0, &mut hash) };
                hash.hash(state);
            }
            Err(error) => error.hash(state),
        }
    }
}

// ---- analytic patterns --------------------------------------------------------------------------------------------

/// Every key.
pub fn full() -> Pattern {
    // SAFETY: only the result is a pointer; so in all functions of this chapter.
    make(|made| unsafe { sys::spattn_pattern_full(made) })
}

/// No key after the query.
pub fn causal() -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_causal(made) })
}

/// `left` keys before the query, itself, and `right` after it; -1 is all. `window(1023, 0)` is 1024 keys.
pub fn window(left: i64, right: i64) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_window(left, right, made) })
}

/// The first keys.
pub fn sink(tokens: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_sink(size(tokens), made) })
}

/// The keys of the query's own block.
pub fn block_diagonal(block: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_block_diagonal(size(block), made) })
}

/// Every `dilation`-th key of a window, counted from the query; `left` and `right` in tokens, -1 is all.
pub fn dilated(left: i64, right: i64, dilation: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_dilated(left, right, size(dilation), made) })
}

/// Every `stride`-th key, counted from the query.
pub fn strided(stride: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_strided(size(stride), made) })
}

/// The last keys of each block.
pub fn landmark(block: usize, landmarks: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_landmark(size(block), size(landmarks), made) })
}

/// `block_diagonal(block) | landmark(block, landmarks)`.
pub fn fixed(block: usize, landmarks: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_fixed(size(block), size(landmarks), made) })
}

/// The query itself, and the keys 1, 2, 4, 8, ... before it.
pub fn logsparse() -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_logsparse(made) })
}

/// Keys and queries whose position is `offset` modulo `modulus`.
pub fn residue(modulus: usize, offset: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_residue(size(modulus), size(offset), made) })
}

/// Blocks of BigBird, rebuilt from the seed everywhere alike.
pub fn bigbird(block: usize, window_blocks: usize, global_blocks: usize, random_blocks: usize, seed: u64) -> Pattern {
    let mut params = sized!(sys::spattn_bigbird);
    params.block = size(block);
    params.window_blocks = size(window_blocks);
    params.global_blocks = size(global_blocks);
    params.random_blocks = size(random_blocks);
    params.seed = seed;
    // SAFETY: the struct is as long as it says.
    make(|made| unsafe { sys::spattn_pattern_bigbird(&params, made) })
}

// ---- lists --------------------------------------------------------------------------------------------------------

/// An integer that lists may have: `i32` or `i64`.
pub trait Index: Element {}
impl Index for i32 {}
impl Index for i64 {}

/// The pattern that a C function makes of one list.
fn of_list<I: Index>(list: &[I], call: impl FnOnce(*const sys::spattn_tensor, Made) -> i32) -> Pattern {
    match View::new(list, &[list.len()]) {
        Ok(view) => make(|made| call(&view.c(), made)),
        Err(error) => Pattern(Err(error)),
    }
}

/// The same of two lists.
fn of_lists<I: Index>(
    lists: [&[I]; 2],
    call: impl FnOnce(*const sys::spattn_tensor, *const sys::spattn_tensor, Made) -> i32,
) -> Pattern {
    of_list(lists[0], |first, made| {
        let second = View::new(lists[1], &[lists[1].len()]).expect("a slice has its own length");
        let second = second.c();
        call(first, &second, made)
    })
}

/// Keys of the query's own document: documents lie between consecutive numbers.
pub fn documents<I: Index>(cu_seqlens: &[I]) -> Pattern {
    // SAFETY: the view is borrowed for the call; so in all functions of this chapter.
    of_list(cu_seqlens, |list, made| unsafe { sys::spattn_pattern_documents(list, made) })
}

/// These keys, for every query.
pub fn global_keys<I: Index>(positions: &[I]) -> Pattern {
    // SAFETY: as documents.
    of_list(positions, |list, made| unsafe { sys::spattn_pattern_global_keys(list, made) })
}

/// These keys for every query, and every key for the queries at these positions.
pub fn global_tokens<I: Index>(positions: &[I]) -> Pattern {
    // SAFETY: as documents.
    of_list(positions, |list, made| unsafe { sys::spattn_pattern_global_tokens(list, made) })
}

/// The keys before a tree of tokens, and each token's ancestors; -1 marks a root.
pub fn tree<I: Index>(parents: &[I]) -> Pattern {
    // SAFETY: as documents.
    of_list(parents, |list, made| unsafe { sys::spattn_pattern_tree(list, made) })
}

/// Numbers of [`xref`]: 0 is a default, -1 a 0 that is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Xref {
    /// First tokens that all see: 32.
    pub sinks: i64,
    /// Nearest tokens, itself among them: 64.
    pub window: i64,
    /// Most keys of a row: 224.
    pub budget: i64,
    /// Most linked keys of a row: half of the budget, or what sinks and window leave of it.
    pub links: i64,
    /// Keys linked from the last token of an n-gram on: 7.
    pub ngram_keys: i64,
    /// Keys linked before an identifier's token: 3.
    pub symbol_before: i64,
    /// Keys linked after it: 10.
    pub symbol_after: i64,
    /// Tokens whose completed identifiers are linked: 32.
    pub look_back: i64,
    /// Of token `p`, those are linked that occurred up to `max(p / stop_ratio, 4)` times: 48.
    pub stop_ratio: i64,
}

/// Cross-references of code: sinks, a window, and spans around earlier places where the last tokens, the identifier
/// being typed or those just typed already occurred. Causal, from a text's tokens alone.
///
/// `symbols` is `[tokens, 2]`: the identifier that is open at the end of each token, and the one that it completed;
/// -1 for none. Without it, n-grams alone link.
pub fn xref<I: Index>(token_ids: &[I], symbols: Option<View<'_>>, params: Xref) -> Pattern {
    let mut c = sized!(sys::spattn_xref);
    c.sinks = params.sinks;
    c.window = params.window;
    c.budget = params.budget;
    c.links = params.links;
    c.ngram_keys = params.ngram_keys;
    c.symbol_before = params.symbol_before;
    c.symbol_after = params.symbol_after;
    c.look_back = params.look_back;
    c.stop_ratio = params.stop_ratio;
    let tensor = symbols.as_ref().map(View::c);
    let symbols = tensor.as_ref().map_or(std::ptr::null(), |tensor| tensor as *const _);
    // SAFETY: as documents.
    of_list(token_ids, |ids, made| unsafe { sys::spattn_pattern_xref(ids, symbols, &c, made) })
}

/// The pattern of a text that goes on: the text of `pattern`, an [`xref`] itself, and then these tokens, which have no
/// symbols where `symbols` is none. Equal to the pattern of the whole text, in the time of the new tokens when what
/// this function returned is extended once.
pub fn xref_extend<I: Index>(pattern: &Pattern, token_ids: &[I], symbols: Option<View<'_>>) -> Pattern {
    let tensor = symbols.as_ref().map(View::c);
    let symbols = tensor.as_ref().map_or(std::ptr::null(), |tensor| tensor as *const _);
    match pattern.handle() {
        // SAFETY: as documents; the handle lives during the call.
        Ok(handle) => {
            of_list(token_ids, |ids, made| unsafe { sys::spattn_pattern_xref_extend(handle, ids, symbols, made) })
        }
        Err(error) => Pattern(Err(error)),
    }
}

/// Row `q` sees the keys `col_idx[row_ptr[q]..row_ptr[q + 1]]`.
pub fn csr<I: Index>(row_ptr: &[I], col_idx: &[I], seq_k: usize) -> Pattern {
    of_lists([row_ptr, col_idx], |rows, columns, made| {
        // SAFETY: as documents.
        unsafe { sys::spattn_pattern_csr(rows, columns, size(seq_k), 0, made) }
    })
}

/// The same for blocks of `block_q` queries and `block_k` keys.
pub fn bsr<I: Index>(
    row_ptr: &[I],
    col_idx: &[I],
    block_q: usize,
    block_k: usize,
    seq_q: usize,
    seq_k: usize,
) -> Pattern {
    let (block_q, block_k, seq_q, seq_k) = (size(block_q), size(block_k), size(seq_q), size(seq_k));
    of_lists([row_ptr, col_idx], |rows, columns, made| {
        // SAFETY: as documents.
        unsafe { sys::spattn_pattern_bsr(rows, columns, block_q, block_k, seq_q, seq_k, 0, made) }
    })
}

/// Query row `q` sees the keys whose value is not 0: `[seq_q, seq_k]`, `[heads, seq_q, seq_k]` or
/// `[batch, heads, seq_q, seq_k]`, `bool` or `u8`.
pub fn mask(values: View<'_>) -> Pattern {
    // SAFETY: as documents.
    make(|made| unsafe { sys::spattn_pattern_mask(&values.c(), 0, made) })
}

/// A mask sampled from `keep(head, q, k)`. A panic of it arrives at the caller.
///
/// ```
/// let checkerboard = sparseattn::predicate(1, 8, 8, |_, q, k| (q + k) % 2 == 0);
/// assert_eq!(checkerboard.stats(8)?.pairs, 32.0);
/// # Ok::<(), sparseattn::Error>(())
/// ```
pub fn predicate<F>(heads: usize, seq_q: usize, seq_k: usize, keep: F) -> Pattern
where
    F: FnMut(usize, usize, usize) -> bool,
{
    struct Call<F> {
        keep: F,
        panic: Option<Box<dyn std::any::Any + Send>>,
    }
    unsafe extern "C" fn run<F>(user: *mut c_void, head: i64, q: i64, k: i64) -> i32
    where
        F: FnMut(usize, usize, usize) -> bool,
    {
        let call = &mut *user.cast::<Call<F>>();
        match catch_unwind(AssertUnwindSafe(|| (call.keep)(head as usize, q as usize, k as usize))) {
            Ok(kept) => kept as i32,
            Err(panic) => {
                call.panic = Some(panic); // it must not cross C
                -1
            }
        }
    }
    let mut call = Call { keep, panic: None };
    let user = &mut call as *mut Call<F> as *mut c_void;
    let (heads, seq_q, seq_k) = (size(heads), size(seq_q), size(seq_k));
    // SAFETY: the library calls run on this thread, during this call only, with `user`.
    let made = make(|made| unsafe { sys::spattn_pattern_predicate(Some(run::<F>), user, heads, seq_q, seq_k, made) });
    if let Some(panic) = call.panic {
        resume_unwind(panic);
    }
    made
}

/// Up to `max` keys of each query and key head come with each call.
pub fn runtime_tokens(max_tokens_per_row: usize) -> Pattern {
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_runtime_tokens(size(max_tokens_per_row), made) })
}

/// Up to `max` blocks of keys of each block of queries and key head come with each call.
pub fn runtime_blocks(block_q: usize, block_k: usize, max_blocks_per_row: usize) -> Pattern {
    let (block_q, block_k, max) = (size(block_q), size(block_k), size(max_blocks_per_row));
    // SAFETY: as full.
    make(|made| unsafe { sys::spattn_pattern_runtime_blocks(block_q, block_k, max, made) })
}

// ---- composition --------------------------------------------------------------------------------------------------

/// The pattern that a C function makes of others, or the first error among them.
fn compose(parts: &[&Pattern], call: impl FnOnce(*const *const sys::spattn_pattern, usize, Made) -> i32) -> Pattern {
    match parts.iter().map(|part| part.handle()).collect::<Result<Vec<_>>>() {
        Ok(handles) => make(|made| call(handles.as_ptr(), handles.len(), made)),
        Err(error) => Pattern(Err(error)),
    }
}

/// What any part keeps.
pub fn union(parts: &[Pattern]) -> Pattern {
    // SAFETY: the handles live during the call; so in all functions of this chapter.
    compose(&Vec::from_iter(parts), |parts, count, made| unsafe { sys::spattn_pattern_union(parts, count, made) })
}

/// What all parts keep.
pub fn intersection(parts: &[Pattern]) -> Pattern {
    compose(&Vec::from_iter(parts), |parts, count, made| {
        // SAFETY: as union.
        unsafe { sys::spattn_pattern_intersection(parts, count, made) }
    })
}

/// Keys and queries exchanged.
pub fn transpose(pattern: &Pattern) -> Pattern {
    // SAFETY: as union.
    compose(&[pattern], |parts, _, made| unsafe { sys::spattn_pattern_transpose(*parts, made) })
}

/// Query head `h` has the pattern `parts[part_of_head[h]]`.
pub fn per_head(parts: &[Pattern], part_of_head: &[i32]) -> Pattern {
    compose(&Vec::from_iter(parts), |parts, count, made| {
        // SAFETY: as union; the numbers are borrowed for the call.
        unsafe { sys::spattn_pattern_per_head(parts, count, part_of_head.as_ptr(), part_of_head.len(), made) }
    })
}

/// Batch entry `b` has the pattern `parts[part_of_batch[b]]`.
pub fn per_batch(parts: &[Pattern], part_of_batch: &[i32]) -> Pattern {
    compose(&Vec::from_iter(parts), |parts, count, made| {
        // SAFETY: as per_head.
        unsafe { sys::spattn_pattern_per_batch(parts, count, part_of_batch.as_ptr(), part_of_batch.len(), made) }
    })
}

/// An axis of a [`grid`]: how many places it has, and what each sees of them.
#[derive(Clone, Debug)]
pub struct GridAxis {
    places: usize,
    tile: usize,
    part: Pattern,
}

impl GridAxis {
    /// A tile has all places of the axis unless [`tile`](GridAxis::tile) says how many.
    pub fn new(places: usize, part: Pattern) -> Self {
        GridAxis { places, tile: places, part }
    }

    /// So many places of this axis are in a tile: a divisor of all of them.
    pub fn tile(mut self, places: usize) -> Self {
        self.tile = places;
        self
    }
}

/// Tokens on a grid, as of an image (height, width) or a video (frames, height, width): a query sees a key where on each
/// axis the part sees the key's place from the query's. Tokens lie tile after tile, and in a tile one after the other, the
/// last axis fastest both times. Up to 8 axes. [Neighborhood Attention](https://arxiv.org/abs/2204.07143),
/// [Sliding Tile Attention](https://arxiv.org/abs/2502.04507).
pub fn grid(axes: &[GridAxis]) -> Pattern {
    let (sizes, tile): (Vec<_>, Vec<_>) = axes.iter().map(|axis| (size(axis.places), size(axis.tile))).unzip();
    let parts: Vec<_> = axes.iter().map(|axis| &axis.part).collect();
    compose(&parts, |parts, count, made| {
        // SAFETY: as per_head; both lists have a number for each part.
        unsafe { sys::spattn_pattern_grid(sizes.as_ptr(), tile.as_ptr(), parts, count, made) }
    })
}

/// Documents packed one after the other, each with the pattern on its own extent.
pub fn per_document<I: Index>(inner: &Pattern, cu_q: &[I], cu_k: &[I]) -> Pattern {
    match inner.handle() {
        Ok(inner) => of_lists([cu_q, cu_k], |cu_q, cu_k, made| {
            // SAFETY: as documents and union.
            unsafe { sys::spattn_pattern_per_document(inner, cu_q, cu_k, made) }
        }),
        Err(error) => Pattern(Err(error)),
    }
}

/// What is made of a pattern and ranges of tokens.
fn of_ranges<I: Index>(
    inner: &Pattern,
    ranges: &[[I; 2]],
    call: impl FnOnce(*const sys::spattn_pattern, *const sys::spattn_tensor, Made) -> i32,
) -> Pattern {
    match inner.handle() {
        Ok(inner) => {
            let bounds = ranges.concat();
            let view = View::new(&bounds, &[ranges.len(), 2]).expect("a range has two numbers");
            make(|made| call(inner, &view.c(), made))
        }
        Err(error) => Pattern(Err(error)),
    }
}

/// Some rows of a longer extent, as one of several devices has them: `inner` is meant on `seq_q` queries, and the
/// extent's are those from the first number of each range up to the second, one range after the other.
///
/// ```
/// use sparseattn::{causal, rows, Extent};
/// let first_of_two = rows(&causal(), &[[0, 256], [768, 1024]], 1024);
/// assert!(first_of_two.keeps(Extent::new(512, 1024), 0, 256, 768)?);
/// # Ok::<(), sparseattn::Error>(())
/// ```
pub fn rows<I: Index>(inner: &Pattern, ranges: &[[I; 2]], seq_q: usize) -> Pattern {
    of_ranges(inner, ranges, |inner, ranges, made| {
        // SAFETY: as documents and union.
        unsafe { sys::spattn_pattern_rows(inner, ranges, size(seq_q), made) }
    })
}

/// Some keys of a longer extent, as where a cache was thinned out: `inner` is meant on `seq_k` keys, and the extent's
/// are those from the first number of each range up to the second, one range after the other.
///
/// ```
/// use sparseattn::{columns, window, Extent};
/// let kept = columns(&window(9, 0), &[[0, 4], [1000, 1024]], 1024); // the first keys, and the last ones
/// let last_query = Extent::new(1, 28);
/// assert!(kept.keeps(last_query, 0, 0, 18)?); // key 1014 of all, 9 before the last one
/// assert!(!kept.keeps(last_query, 0, 0, 17)?);
/// # Ok::<(), sparseattn::Error>(())
/// ```
pub fn columns<I: Index>(inner: &Pattern, ranges: &[[I; 2]], seq_k: usize) -> Pattern {
    of_ranges(inner, ranges, |inner, ranges, made| {
        // SAFETY: as documents and union.
        unsafe { sys::spattn_pattern_columns(inner, ranges, size(seq_k), made) }
    })
}

macro_rules! operator {
    ($trait:ident, $method:ident, $assign:ident, $assign_method:ident, $made:expr) => {
        operator!($trait, $method, $made, Pattern, Pattern);
        operator!($trait, $method, $made, Pattern, &Pattern);
        operator!($trait, $method, $made, &Pattern, Pattern);
        operator!($trait, $method, $made, &Pattern, &Pattern);
        operator!($assign, $assign_method, $trait, $method);
    };
    ($trait:ident, $method:ident, $made:expr, $left:ty, $right:ty) => {
        impl $trait<$right> for $left {
            type Output = Pattern;
            fn $method(self, other: $right) -> Pattern {
                #[allow(clippy::redundant_closure_call)]
                compose(&[&self, &other], $made)
            }
        }
    };
    ($assign:ident, $assign_method:ident, $trait:ident, $method:ident) => {
        impl $assign for Pattern {
            fn $assign_method(&mut self, other: Pattern) {
                *self = $trait::$method(&*self, other);
            }
        }
        impl $assign<&Pattern> for Pattern {
            fn $assign_method(&mut self, other: &Pattern) {
                *self = $trait::$method(&*self, other);
            }
        }
    };
}
// SAFETY: as union.
operator!(BitOr, bitor, BitOrAssign, bitor_assign, |parts, count, made| unsafe {
    sys::spattn_pattern_union(parts, count, made)
});
// SAFETY: as union.
operator!(BitAnd, bitand, BitAndAssign, bitand_assign, |parts, count, made| unsafe {
    sys::spattn_pattern_intersection(parts, count, made)
});
// SAFETY: as union; there are two parts.
operator!(Sub, sub, SubAssign, sub_assign, |parts, _, made| unsafe {
    sys::spattn_pattern_difference(*parts, *parts.add(1), made)
});

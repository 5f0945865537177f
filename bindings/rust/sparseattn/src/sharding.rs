// SPDX-License-Identifier: MIT
//! A sequence on several ranks. Operands have the names and shapes of `spattn_exchange_args`.
use crate::error::{check, size, sized, Error, ErrorKind, Result};
use crate::run::{check_beside, optional, Start, Stream, Workspace};
use crate::{sys, Context, Pattern, Plan, Problem, View, ViewMut};
use std::ffi::c_void;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};

/// Who holds which tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Split {
    /// Equal shares, one after the other.
    #[default]
    Contiguous,
    /// Of twice as many shares a rank holds two, one counted from the beginning and one from the end, so that causal
    /// attention is as much work for all.
    Zigzag,
    /// Those of each rank, range after range in its order. Every token once.
    Ranges(Vec<Vec<Range<usize>>>),
}

/// What goes between a rank and another: nothing, where that is itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Peer {
    /// Tokens whose keys and values go to it.
    pub tokens_sent: usize,
    /// Tokens whose keys and values come from it.
    pub tokens_received: usize,
    /// The bytes of `sent` that go to it.
    pub sent: Range<usize>,
    /// The bytes of `received` that come from it.
    pub received: Range<usize>,
    /// The bytes of `sent` that gradients from it come back to: other ones than `sent` where operands are float8 alone,
    /// as gradients are wider.
    pub back_sent: Range<usize>,
    /// The bytes of `received` whose gradients go back to it, likewise.
    pub back_received: Range<usize>,
}

/// The tokens whose keys and values a rank's plan takes: those that it holds or receives, in the order of the sequence,
/// and a few between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Seen {
    /// The tokens, as rising ranges.
    pub ranges: Vec<Range<usize>>,
    /// How many tokens the ranges have.
    pub tokens: usize,
}

/// What one of several ranks, which are threads or processes with a device each, has of a sequence: the plan of its
/// queries, and whose keys and values they see. Clones share it, and so may threads.
///
/// Before a rank attends, it receives the keys and values that its queries see and others hold; their gradients go back,
/// and are added up there. How bytes travel is the caller's: MPI, NCCL, channels. On each rank:
///
/// 1. [`pack`](Self::pack), then the bytes of `sent` that [`peer`](Self::peer) says go to each other rank, and those of
///    `received` come from it,
/// 2. [`unpack`](Self::unpack), then passes of [`plan`](Self::plan) with the rank's own queries and the keys and values
///    of the tokens that [`seen`](Self::seen) names: what is not unpacked may be anything,
/// 3. [`pack_gradients`](Self::pack_gradients), then the same way back, from `received` to `sent`,
/// 4. [`add_gradients`](Self::add_gradients).
///
/// Where the problem's [`dtype`](Problem::dtype) is [`Dtype::F8_E4M3FN`](crate::Dtype::F8_E4M3FN), keys and values go
/// as they are, and gradients come back as bf16. A sharding [`with_scales`](Self::with_scales) sends scales of rows,
/// too, so that ranks may round their own tokens; those that all ranks know, one for each head or none, need not be sent.
///
/// ```
/// use sparseattn::{causal, Buffer, Context, Problem, Sharding, Split, View, ViewMut};
/// let (context, problem) = (Context::cpu()?, Problem::new(1, 1, 8, 4)); // of all tokens
/// let of = |rank| Sharding::new(&context, &causal(), &problem, 2, rank, &Split::Contiguous);
/// let (first, second) = (of(0)?, of(1)?);
/// let (mut sent, mut received) = (Buffer::new(first.buffers().0)?, Buffer::new(second.buffers().1)?);
///
/// let tokens = second.seen().tokens; // 8: its queries see all
/// let (held, seen) = ([1, 4, 1, 4], [1, tokens, 1, 4]);
/// let ones = View::new(&[1f32; 16], &held)?; // keys and values of the first, which keeps its own
/// first.pack((ones, ones), &mut sent).run()?;
/// received[second.peer(0)?.received].copy_from_slice(&sent[first.peer(1)?.sent]);
///
/// let threes = View::new(&[3f32; 16], &held)?;
/// let (mut keys, mut values, mut out) = (vec![f32::NAN; tokens * 4], vec![f32::NAN; tokens * 4], [0f32; 16]);
/// let places = (ViewMut::new(&mut keys, &seen)?, ViewMut::new(&mut values, &seen)?);
/// second.unpack((threes, threes), &received, places).run()?;
/// let (k, v, q) = (View::new(&keys, &seen)?, View::new(&values, &seen)?, View::new(&[0f32; 16], &held)?);
/// second.plan().forward(q, k, v, ViewMut::new(&mut out, &held)?).run()?;
/// assert!((out[12] - 2.0).abs() < 1e-6); // the last query sees four ones and four threes
/// # Ok::<(), sparseattn::Error>(())
/// ```
#[derive(Clone)]
pub struct Sharding {
    handle: Handle,
    plan: Plan,
    seen: Seen,
    buffers: (usize, usize),
}

/// One counted reference.
struct Handle(*mut sys::spattn_sharding);

// SAFETY: shardings never change, and their count is atomic: sparseattn.h lets any threads share one.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // SAFETY: the handle is alive.
        unsafe { sys::spattn_sharding_retain(self.0) };
        Handle(self.0)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: this reference is ours.
        unsafe { sys::spattn_sharding_release(self.0) };
    }
}

/// A number for the C ABI; what no i32 holds becomes what the library refuses.
fn number(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Calls a C function that writes ranges where they are not NULL, and always how many there are.
fn read_ranges(mut call: impl FnMut(*const sys::spattn_tensor, &mut i64) -> i32) -> Result<Vec<Range<usize>>> {
    let mut count = 0;
    check(call(std::ptr::null(), &mut count))?;
    let mut ends = vec![0i64; 2 * count as usize];
    let view = ViewMut::new(&mut ends, &[count as usize, 2])?;
    check(call(&view.view().c(), &mut count))?;
    Ok(ends.chunks_exact(2).map(|ends| ends[0] as usize..ends[1] as usize).collect())
}

impl Sharding {
    /// What rank number `rank` of `ranks` sees. The problem is that of all tokens, as many queries as keys. All ranks
    /// are made of equal patterns, problems and splits. The gradient of sink logits has, on each rank, the part of its
    /// queries.
    pub fn new(
        context: &Context,
        pattern: &Pattern,
        problem: &Problem,
        ranks: usize,
        rank: usize,
        split: &Split,
    ) -> Result<Self> {
        // SAFETY: the default stream is legal for setup everywhere.
        unsafe { Self::make(context, pattern, problem, (ranks, rank), split, 0, std::ptr::null_mut()) }
    }

    /// The same; device copies of lists are made on this stream.
    pub fn new_on(
        context: &Context,
        pattern: &Pattern,
        problem: &Problem,
        ranks: usize,
        rank: usize,
        split: &Split,
        stream: &impl Stream,
    ) -> Result<Self> {
        // SAFETY: the trait promises a live stream.
        unsafe { Self::make(context, pattern, problem, (ranks, rank), split, 0, stream.raw()) }
    }

    /// As [`new`](Self::new), of float8 operands whose rows have scales: [`pack`](Self::pack) takes
    /// [`scales`](Exchange::scales) of keys and values, and [`unpack`](Self::unpack) writes them to
    /// [`seen_scales`](Exchange::seen_scales).
    pub fn with_scales(
        context: &Context,
        pattern: &Pattern,
        problem: &Problem,
        ranks: usize,
        rank: usize,
        split: &Split,
    ) -> Result<Self> {
        let flags = sys::SPATTN_SHARDING_SCALES;
        // SAFETY: the default stream is legal for setup everywhere.
        unsafe { Self::make(context, pattern, problem, (ranks, rank), split, flags, std::ptr::null_mut()) }
    }

    /// The same; device copies of lists are made on this stream.
    pub fn with_scales_on(
        context: &Context,
        pattern: &Pattern,
        problem: &Problem,
        ranks: usize,
        rank: usize,
        split: &Split,
        stream: &impl Stream,
    ) -> Result<Self> {
        let flags = sys::SPATTN_SHARDING_SCALES;
        // SAFETY: the trait promises a live stream.
        unsafe { Self::make(context, pattern, problem, (ranks, rank), split, flags, stream.raw()) }
    }

    unsafe fn make(
        context: &Context,
        pattern: &Pattern,
        problem: &Problem,
        (ranks, rank): (usize, usize),
        split: &Split,
        flags: u32,
        stream: *mut c_void,
    ) -> Result<Self> {
        let (pattern, problem) = (pattern.handle()?, problem.c());
        let mut options = sized!(sys::spattn_sharding_options);
        (options.ranks, options.rank, options.flags) = (number(ranks), number(rank), flags);
        let mut rows = Vec::new(); // rank, begin, end
        if let Split::Ranges(of_ranks) = split {
            if of_ranks.len() != ranks {
                let message = format!("ranges are those of {} ranks; accepted: of all, {ranks}", of_ranks.len());
                return Err(Error::new(ErrorKind::Range, "options.ranges", message));
            }
            for (rank, range) in of_ranks.iter().enumerate().flat_map(|(rank, of)| of.iter().map(move |r| (rank, r))) {
                rows.extend([size(rank), size(range.start), size(range.end)]);
            }
        }
        let ranges = View::new(&rows, &[rows.len() / 3, 3])?;
        let ranges = ranges.c();
        match split {
            Split::Contiguous => options.split = sys::SPATTN_SPLIT_CONTIGUOUS as i32,
            Split::Zigzag => options.split = sys::SPATTN_SPLIT_ZIGZAG as i32,
            Split::Ranges(_) => options.ranges = &ranges,
        }
        let mut made = std::ptr::null_mut();
        check(sys::spattn_sharding_create(context.handle(), pattern, &problem, &options, stream, &mut made))?;
        let handle = Handle(made);
        let mut plan = std::ptr::null_mut();
        check(sys::spattn_sharding_plan(handle.0, &mut plan))?;
        let plan = Plan::own(plan);
        let mut tokens = 0;
        let ranges = read_ranges(|ranges, count| sys::spattn_sharding_seen(handle.0, ranges, count, &mut tokens))?;
        let seen = Seen { ranges, tokens: tokens as usize };
        let (mut sent, mut received) = (0, 0);
        check(sys::spattn_sharding_buffers(handle.0, &mut sent, &mut received))?;
        Ok(Sharding { handle, plan, seen, buffers: (sent, received) })
    }

    /// The plan of this rank's queries: as many as it holds tokens, on the keys of [`seen`](Self::seen). Lists that
    /// come with a call are those of its queries, and name tokens by their places among all, as then all are seen.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What a rank holds, in its order.
    pub fn ranges(&self, rank: usize) -> Result<Vec<Range<usize>>> {
        // SAFETY: ranges are NULL, or a tensor that says how much room it has.
        read_ranges(|ranges, count| unsafe { sys::spattn_sharding_ranges(self.handle.0, number(rank), ranges, count) })
    }

    /// How many tokens a rank holds.
    pub fn tokens(&self, rank: usize) -> Result<usize> {
        Ok(self.ranges(rank)?.into_iter().map(|range| range.len()).sum())
    }

    /// The tokens whose keys and values the plan takes. Of a window these are not many more than the rank holds,
    /// however long the sequence is.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    /// What goes between this rank and another.
    pub fn peer(&self, rank: usize) -> Result<Peer> {
        let mut c = sized!(sys::spattn_peer);
        // SAFETY: the struct is as long as it says.
        check(unsafe { sys::spattn_sharding_peer(self.handle.0, number(rank), &mut c) })?;
        let bytes = |begin: u64, count: u64| begin as usize..(begin + count) as usize;
        Ok(Peer {
            tokens_sent: c.tokens_sent as usize,
            tokens_received: c.tokens_received as usize,
            sent: bytes(c.sent_offset, c.sent_bytes),
            received: bytes(c.received_offset, c.received_bytes),
            back_sent: bytes(c.back_sent_offset, c.back_sent_bytes),
            back_received: bytes(c.back_received_offset, c.back_received_bytes),
        })
    }

    /// Bytes of `sent` and of `received`, for either way. Both lie on the plan's device, aligned to 16 bytes, and may
    /// be longer: in host memory a [`Buffer`], on a GPU any memory of bytes.
    pub fn buffers(&self) -> (usize, usize) {
        self.buffers
    }

    /// Brings keys and values that others see to `sent`. `held` are those that this rank holds, in the order of its
    /// [`ranges`](Self::ranges); here and in all exchanges, values are `None` where they lie in keys.
    pub fn pack<'a>(
        &'a self,
        held: (View<'a>, impl Into<Option<View<'a>>>),
        sent: impl Into<ViewMut<'a>>,
    ) -> Exchange<'a> {
        self.exchange(sys::SPATTN_EXCHANGE_PACK, read(held), [None; 2], sent.into().into_view())
    }

    /// Brings the keys and values that this rank holds, and those that it received, to their places among those of
    /// [`seen`](Self::seen). The others there are not written.
    pub fn unpack<'a>(
        &'a self,
        held: (View<'a>, impl Into<Option<View<'a>>>),
        received: impl Into<View<'a>>,
        seen: (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>),
    ) -> Exchange<'a> {
        self.exchange(sys::SPATTN_EXCHANGE_UNPACK, read(held), written(seen), received.into())
    }

    /// The same where `seen` has already what this rank holds.
    pub fn unpack_received<'a>(
        &'a self,
        received: impl Into<View<'a>>,
        seen: (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>),
    ) -> Exchange<'a> {
        self.exchange(sys::SPATTN_EXCHANGE_UNPACK, [None; 2], written(seen), received.into())
    }

    /// Brings gradients of what others hold to `received`, from which they go back. `seen` is what backward of the plan
    /// has written.
    pub fn pack_gradients<'a>(
        &'a self,
        seen: (View<'a>, impl Into<Option<View<'a>>>),
        received: impl Into<ViewMut<'a>>,
    ) -> Exchange<'a> {
        let received = received.into().into_view();
        self.exchange(sys::SPATTN_EXCHANGE_PACK_GRADIENTS, [None; 2], read(seen), received)
    }

    /// Writes gradients of what this rank holds: its own part, and those of others, which came back to `sent`. Sums are
    /// f32 (f64 of such tensors) and rounded once.
    pub fn add_gradients<'a>(
        &'a self,
        seen: (View<'a>, impl Into<Option<View<'a>>>),
        sent: impl Into<View<'a>>,
        held: (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>),
    ) -> Exchange<'a> {
        self.exchange(sys::SPATTN_EXCHANGE_ADD_GRADIENTS, written(held), read(seen), sent.into())
    }

    /// The same sums, in the place of this rank's own gradients in `seen`, which spares their copy.
    pub fn add_gradients_in_place<'a>(
        &'a self,
        seen: (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>),
        sent: impl Into<View<'a>>,
    ) -> Exchange<'a> {
        self.exchange(sys::SPATTN_EXCHANGE_ADD_GRADIENTS, [None; 2], written(seen), sent.into())
    }

    fn exchange<'a>(&'a self, step: u32, held: Keys<'a>, seen: Keys<'a>, buffer: View<'a>) -> Exchange<'a> {
        let (held_scales, seen_scales) = ([None; 2], [None; 2]);
        Exchange { sharding: self, start: Start::Now, step, held, seen, held_scales, seen_scales, buffer }
    }
}

impl fmt::Debug for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharding").field("buffers", &self.buffers).finish_non_exhaustive()
    }
}

/// Keys and values of the same tokens, as far as they are given.
type Keys<'a> = [Option<View<'a>>; 2];

fn read<'a>((k, v): (View<'a>, impl Into<Option<View<'a>>>)) -> Keys<'a> {
    [Some(k), v.into()]
}

fn written<'a>((k, v): (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>)) -> Keys<'a> {
    [Some(k.into_view()), v.into().map(ViewMut::into_view)]
}

/// An exchange that is being described: `run` does this rank's part of it.
#[derive(Debug)]
#[must_use = "nothing is moved before `run`"]
pub struct Exchange<'a> {
    sharding: &'a Sharding,
    start: Start,
    step: u32,
    held: Keys<'a>,
    seen: Keys<'a>,
    held_scales: Keys<'a>,
    seen_scales: Keys<'a>,
    buffer: View<'a>,
}

impl<'a> Exchange<'a> {
    /// Of a sharding [`with_scales`](Sharding::with_scales): what rows of the keys and values that this rank holds are
    /// multiplied by, f32, shaped as these without the last axis. Strides may be 0. [`pack`](Sharding::pack) and
    /// [`unpack`](Sharding::unpack) want them; those of values are `None` where they lie in keys.
    pub fn scales(mut self, held: (View<'a>, impl Into<Option<View<'a>>>)) -> Self {
        self.held_scales = read(held);
        self
    }

    /// Written by [`unpack`](Sharding::unpack) and [`unpack_received`](Sharding::unpack_received): the same of
    /// [`seen`](Sharding::seen).
    pub fn seen_scales(mut self, seen: (ViewMut<'a>, impl Into<Option<ViewMut<'a>>>)) -> Self {
        self.seen_scales = written(seen);
        self
    }
}

impl Exchange<'_> {
    pub(crate) fn starting(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    /// Does it: at once in host memory; in a scope, it may be enqueued.
    pub fn run(self) -> Result<()> {
        let (memory, bytes) = self.buffer.bytes("buffer")?;
        self.start.check("buffer", &self.buffer)?;
        let operands = (["k", "v"].into_iter().zip(&self.held))
            .chain(["seen_k", "seen_v"].into_iter().zip(&self.seen))
            .chain(["k_scales", "v_scales"].into_iter().zip(&self.held_scales))
            .chain(["seen_k_scales", "seen_v_scales"].into_iter().zip(&self.seen_scales))
            .map(|(argument, view)| (argument, view.as_ref()));
        self.start.check_all(operands.clone())?;
        let device = self.buffer.device();
        let any_beside = operands.into_iter().any(|(_, view)| view.is_some_and(|view| view.device() == device));
        check_beside("buffer", any_beside || bytes == 0)?;

        let mut args = sized!(sys::spattn_exchange_args);
        args.stream = self.start.stream();
        let c = |[k, v]: &Keys| [k.as_ref().map(View::c), v.as_ref().map(View::c)];
        let ([k, v], [seen_k, seen_v]) = (c(&self.held), c(&self.seen));
        let ([k_scales, v_scales], [seen_k_scales, seen_v_scales]) = (c(&self.held_scales), c(&self.seen_scales));
        (args.k, args.v) = (optional(&k), optional(&v));
        (args.seen_k, args.seen_v) = (optional(&seen_k), optional(&seen_v));
        (args.k_scales, args.v_scales) = (optional(&k_scales), optional(&v_scales));
        (args.seen_k_scales, args.seen_v_scales) = (optional(&seen_k_scales), optional(&seen_v_scales));
        (args.buffer, args.buffer_bytes) = (memory, bytes);
        // SAFETY: views are valid for their shapes, and those that are written were borrowed exclusively; device memory
        // only where somebody waits.
        check(unsafe { sys::spattn_exchange(self.sharding.handle.0, self.step as i32, &args) })
    }

    /// Only enqueues it on a `cudaStream_t`.
    ///
    /// # Safety
    /// The stream is live, and until it has done so the memory of all views stays valid, what is written untouched but by
    /// what is enqueued on it.
    pub unsafe fn enqueue(self, stream: *mut c_void) -> Result<()> {
        self.starting(Start::On(stream, None)).run()
    }
}

/// Bytes that go to other ranks or come from them, in host memory aligned as exchanges want it: a slice for whatever
/// carries them.
pub struct Buffer {
    memory: Workspace,
    bytes: usize,
}

impl Buffer {
    /// So many bytes, all 0.
    pub fn new(bytes: usize) -> Result<Self> {
        Ok(Buffer { memory: Workspace::allocate("buffer", bytes, 16)?, bytes })
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory.bytes()[..self.bytes]
    }
}
impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[..self.bytes]
    }
}

impl<'a> From<&'a Buffer> for View<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        View::from(&buffer[..])
    }
}
impl<'a> From<&'a mut Buffer> for ViewMut<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        ViewMut::from(&mut buffer[..])
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer of {} bytes", self.bytes)
    }
}

// Nothing here calls the library, so that Miri can run it.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_slices_of_aligned_bytes() {
        for bytes in [0, 1, 100] {
            let mut buffer = Buffer::new(bytes).unwrap();
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % 16), (bytes, 0));
            buffer.fill(7);
            let view = ViewMut::from(&mut buffer);
            let (memory, count) = view.view().bytes("buffer").unwrap();
            // SAFETY: the view lives, and is of so many bytes.
            unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), count).iter_mut().for_each(|x| *x += 1) };
            assert!(buffer.iter().all(|x| *x == 8));
        }
        let error = Buffer::new(usize::MAX).unwrap_err();
        assert_eq!((error.kind(), error.argument()), (ErrorKind::HostMemory, "buffer"));
    }
}

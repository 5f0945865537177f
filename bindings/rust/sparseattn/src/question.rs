// SPDX-License-Identifier: MIT
//! Where a question is asked of a pattern, and what is answered.
use crate::context::answer;
use crate::error::{size, sized, Error, ErrorKind, Result};
use crate::sys;
use std::ffi::c_void;
use std::hash::{Hash, Hasher};

/// The rectangle on which a question is asked. `usize` is so many queries and keys, `(usize, usize)` queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    batch: usize,
    heads: usize,
    seq_q: usize,
    seq_k: usize,
    q_offset: Option<i64>,
    blocks: (usize, usize),
    cancel: Option<Cancel>,
}

/// What ends a question early. Two are equal where they have one address.
#[derive(Clone, Copy, Debug)]
struct Cancel(fn() -> bool);

impl PartialEq for Cancel {
    fn eq(&self, other: &Self) -> bool {
        self.0 as usize == other.0 as usize
    }
}
impl Eq for Cancel {}
impl Hash for Cancel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0 as usize).hash(state);
    }
}

impl Extent {
    /// One batch entry and head; the queries align to the end of the keys; blocks of 64 by 64.
    pub fn new(seq_q: usize, seq_k: usize) -> Self {
        Extent { batch: 1, heads: 1, seq_q, seq_k, q_offset: None, blocks: (64, 64), cancel: None }
    }
    /// Batch entries.
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch;
        self
    }
    /// Query heads.
    pub fn heads(mut self, heads: usize) -> Self {
        self.heads = heads;
        self
    }
    /// The position of the first query; `seq_k - seq_q` if not given.
    pub fn q_offset(mut self, q_offset: i64) -> Self {
        self.q_offset = Some(q_offset);
        self
    }
    /// The unit of the block counts.
    pub fn blocks(mut self, block_q: usize, block_k: usize) -> Self {
        self.blocks = (block_q, block_k);
        self
    }
    /// What is asked some 20 ms apart while the question is answered: `true` ends it with
    /// [`ErrorKind::Cancelled`]. It must not panic, which ends the process. It captures nothing, so that extents can be
    /// copied and compared.
    ///
    /// ```
    /// use sparseattn::{bigbird, ErrorKind, Extent};
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// static STOP: AtomicBool = AtomicBool::new(false);
    /// STOP.store(true, Ordering::Relaxed); // by whoever waits no longer
    /// let extent = Extent::new(1 << 20, 1 << 20).cancel(|| STOP.load(Ordering::Relaxed));
    /// let slow = bigbird(1, 1, 0, 64, 0).stats(extent);
    /// assert_eq!(slow.err().unwrap().kind(), ErrorKind::Cancelled);
    /// ```
    pub fn cancel(mut self, cancel: fn() -> bool) -> Self {
        self.cancel = Some(Cancel(cancel));
        self
    }

    pub(crate) fn c(&self) -> sys::spattn_extent {
        let mut extent = sized!(sys::spattn_extent);
        extent.flags = if self.q_offset.is_some() { sys::SPATTN_EXTENT_Q_OFFSET } else { 0 };
        (extent.batch, extent.heads) = (size(self.batch), size(self.heads));
        (extent.seq_q, extent.seq_k) = (size(self.seq_q), size(self.seq_k));
        extent.q_offset = self.q_offset.unwrap_or(0);
        (extent.block_q, extent.block_k) = (size(self.blocks.0), size(self.blocks.1));
        if let Some(Cancel(cancel)) = self.cancel {
            extent.cancel = Some(ask);
            extent.cancel_user = cancel as *mut c_void;
        }
        extent
    }

    pub(crate) fn seq_q(&self) -> usize {
        self.seq_q
    }

    /// `[batch, heads, seq_q, seq_k]`, of what fits into memory; 0 of batch or heads is 1.
    pub(crate) fn shape(&self) -> Result<[usize; 4]> {
        let shape = [self.batch.max(1), self.heads.max(1), self.seq_q, self.seq_k];
        let elements = shape.iter().try_fold(1usize, |all, axis| all.checked_mul(*axis));
        if elements.filter(|all| *all <= isize::MAX as usize / 8).is_none() {
            let message = format!("extent is {shape:?}; accepted: what fits into memory");
            return Err(Error::new(ErrorKind::Range, "extent", message));
        }
        Ok(shape)
    }
}

unsafe extern "C" fn ask(user: *mut c_void) -> i32 {
    // SAFETY: it is what c() made of such a function, which has the size of a pointer.
    answer(std::mem::transmute::<*mut c_void, fn() -> bool>(user))
}

impl From<usize> for Extent {
    fn from(seq: usize) -> Self {
        Extent::new(seq, seq)
    }
}
impl From<(usize, usize)> for Extent {
    fn from((seq_q, seq_k): (usize, usize)) -> Self {
        Extent::new(seq_q, seq_k)
    }
}

/// Counts, summed over all batch entries and heads.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Kept pairs of a query and a key.
    pub pairs: f64,
    /// Pairs in blocks that are not empty.
    pub visited: f64,
    /// Kept pairs per pair.
    pub density: f64,
    /// Blocks all of whose pairs are kept.
    pub blocks_full: i64,
    /// Blocks some of whose pairs are kept.
    pub blocks_partial: i64,
    /// Blocks none of whose pairs is kept.
    pub blocks_empty: i64,
    /// The fewest keys of a query row.
    pub row_min: i64,
    /// The most keys of a query row.
    pub row_max: i64,
    /// Query rows that see no key.
    pub rows_empty: i64,
    /// Lists and masks, both directions.
    pub layout_bytes: i64,
    /// Of a forward pass, on kept pairs; 0 for a bare pattern.
    pub flops_forward: f64,
    /// Of a backward pass, on kept pairs; 0 for a bare pattern.
    pub flops_backward: f64,
    /// Each operand of a forward pass once; 0 for a bare pattern.
    pub bytes_forward: f64,
    /// Each operand of a backward pass once; 0 for a bare pattern.
    pub bytes_backward: f64,
}

impl From<sys::spattn_stats> for Stats {
    fn from(c: sys::spattn_stats) -> Self {
        Stats {
            pairs: c.pairs,
            visited: c.visited,
            density: c.density,
            blocks_full: c.blocks_full,
            blocks_partial: c.blocks_partial,
            blocks_empty: c.blocks_empty,
            row_min: c.row_min,
            row_max: c.row_max,
            rows_empty: c.rows_empty,
            layout_bytes: c.layout_bytes,
            flops_forward: c.flops_forward,
            flops_backward: c.flops_backward,
            bytes_forward: c.bytes_forward,
            bytes_backward: c.bytes_backward,
        }
    }
}

/// The keys of each query row: `columns[row_ptr[q]..row_ptr[q + 1]]`, increasing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Csr {
    /// One number more than rows.
    pub row_ptr: Vec<i64>,
    /// Keys.
    pub columns: Vec<i32>,
}

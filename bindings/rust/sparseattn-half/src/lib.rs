// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

use sparseattn::{Dtype, Result, View, ViewMut};

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// `half::f16` or `half::bf16`.
pub trait HalfElement: Copy + sealed::Sealed {
    /// What the library calls it.
    const DTYPE: Dtype;
}
impl HalfElement for half::f16 {
    const DTYPE: Dtype = Dtype::F16;
}
impl HalfElement for half::bf16 {
    const DTYPE: Dtype = Dtype::BF16;
}

fn bits<T: HalfElement>(data: &[T]) -> &[u16] {
    // SAFETY: both types are transparent over u16, and every bit pattern is a number.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

fn bits_mut<T: HalfElement>(data: &mut [T]) -> &mut [u16] {
    // SAFETY: as in bits; the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}

/// All of a slice, row-major: as `View::new`.
pub fn view<'a, T: HalfElement>(data: &'a [T], shape: &[usize]) -> Result<View<'a>> {
    if T::DTYPE == Dtype::F16 {
        View::f16(bits(data), shape)
    } else {
        View::bf16(bits(data), shape)
    }
}

/// All of a slice, row-major: as `ViewMut::new`.
pub fn view_mut<'a, T: HalfElement>(data: &'a mut [T], shape: &[usize]) -> Result<ViewMut<'a>> {
    if T::DTYPE == Dtype::F16 {
        ViewMut::f16(bits_mut(data), shape)
    } else {
        ViewMut::bf16(bits_mut(data), shape)
    }
}

/// A slice of which axis `i` moves by `strides[i]` elements: as `View::strided`.
///
/// ```
/// use half::f16;
/// let packed = vec![f16::ONE; 8 * 3 * 4]; // q, k and v of one head, token by token
/// assert!(sparseattn_half::strided(&packed[4..], &[1, 8, 1, 4], &[96, 12, 4, 1]).is_ok());
/// assert!(sparseattn_half::strided(&packed[9..], &[1, 8, 1, 4], &[96, 12, 4, 1]).is_err()); // ends too early
/// ```
pub fn strided<'a, T: HalfElement>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<View<'a>> {
    if T::DTYPE == Dtype::F16 {
        View::f16_strided(bits(data), shape, strides)
    } else {
        View::bf16_strided(bits(data), shape, strides)
    }
}

/// A slice of which axis `i` moves by `strides[i]` elements: as `ViewMut::strided`.
pub fn strided_mut<'a, T: HalfElement>(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Result<ViewMut<'a>> {
    if T::DTYPE == Dtype::F16 {
        ViewMut::f16_strided(bits_mut(data), shape, strides)
    } else {
        ViewMut::bf16_strided(bits_mut(data), shape, strides)
    }
}

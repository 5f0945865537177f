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

/// All of a slice, row-major: as `View::new`.
pub fn view<'a, T: HalfElement>(data: &'a [T], shape: &[usize]) -> Result<View<'a>> {
    // SAFETY: both types are transparent over u16, and every bit pattern is a number.
    let bits = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u16>(), data.len()) };
    if T::DTYPE == Dtype::F16 {
        View::f16(bits, shape)
    } else {
        View::bf16(bits, shape)
    }
}

/// All of a slice, row-major: as `ViewMut::new`.
pub fn view_mut<'a, T: HalfElement>(data: &'a mut [T], shape: &[usize]) -> Result<ViewMut<'a>> {
    // SAFETY: as in view; the borrow is exclusive.
    let bits = unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast::<u16>(), data.len()) };
    if T::DTYPE == Dtype::F16 {
        ViewMut::f16(bits, shape)
    } else {
        ViewMut::bf16(bits, shape)
    }
}

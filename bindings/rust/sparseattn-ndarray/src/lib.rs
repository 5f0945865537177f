// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

use ndarray::{ArrayBase, Data, DataMut, Dimension};
use sparseattn::{Device, Dtype, Result, View, ViewMut};

mod sealed {
    pub trait Sealed {}
}

/// An element that arrays of operands may have.
pub trait ArrayElement: Copy + sealed::Sealed {
    /// What the library calls it.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty: $dtype:ident,)*) => { $(
        impl sealed::Sealed for $type {}
        impl ArrayElement for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )* };
}
elements! {
    f32: F32, f64: F64, i32: I32, i64: I64, u8: U8, bool: BOOL, half::f16: F16, half::bf16: BF16,
}

/// Steps of the axes; one that runs backwards stays negative as an i64, and the library refuses it and names it.
fn strides<S: ndarray::RawData, D: Dimension>(array: &ArrayBase<S, D>) -> Vec<usize> {
    array.strides().iter().map(|stride| *stride as usize).collect()
}

/// An array for reading.
pub fn view<S, D>(array: &ArrayBase<S, D>) -> Result<View<'_>>
where
    S: Data,
    S::Elem: ArrayElement,
    D: Dimension,
{
    // SAFETY: the array's memory is borrowed as long as the view, and valid for its shape and strides.
    unsafe { View::from_raw(array.as_ptr().cast(), S::Elem::DTYPE, Device::Cpu, array.shape(), Some(&strides(array))) }
}

/// An array for writing. One that shares its memory is copied first, as by ndarray itself.
pub fn view_mut<S, D>(array: &mut ArrayBase<S, D>) -> Result<ViewMut<'_>>
where
    S: DataMut,
    S::Elem: ArrayElement,
    D: Dimension,
{
    let data = array.as_mut_ptr();
    // SAFETY: as in view, and the borrow is exclusive.
    unsafe { ViewMut::from_raw(data.cast(), S::Elem::DTYPE, Device::Cpu, array.shape(), Some(&strides(array))) }
}

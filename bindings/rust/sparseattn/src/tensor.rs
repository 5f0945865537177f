// SPDX-License-Identifier: MIT
//! Views of memory that tensors lie in.
use crate::error::{Error, ErrorKind, Result};
use crate::sys;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype {
    code: u8,
    bits: u8,
}

#[allow(missing_docs)]
impl Dtype {
    pub const F32: Dtype = Dtype { code: sys::SPATTN_FLOAT as u8, bits: 32 };
    pub const F64: Dtype = Dtype { code: sys::SPATTN_FLOAT as u8, bits: 64 };
    pub const F16: Dtype = Dtype { code: sys::SPATTN_FLOAT as u8, bits: 16 };
    pub const BF16: Dtype = Dtype { code: sys::SPATTN_BFLOAT as u8, bits: 16 };
    pub const F8_E4M3FN: Dtype = Dtype { code: sys::SPATTN_FLOAT8_E4M3FN as u8, bits: 8 };
    pub const I32: Dtype = Dtype { code: sys::SPATTN_INT as u8, bits: 32 };
    pub const I64: Dtype = Dtype { code: sys::SPATTN_INT as u8, bits: 64 };
    pub const U8: Dtype = Dtype { code: sys::SPATTN_UINT as u8, bits: 8 };
    pub const BOOL: Dtype = Dtype { code: sys::SPATTN_BOOL as u8, bits: 8 };

    pub(crate) fn c(self) -> sys::spattn_dtype {
        sys::spattn_dtype { code: self.code, bits: self.bits, lanes: 1 }
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (code, bits) = (self.code, self.bits);
        match self.code.into() {
            sys::SPATTN_FLOAT => write!(f, "F{bits}"),
            sys::SPATTN_BFLOAT => write!(f, "BF{bits}"),
            sys::SPATTN_INT => write!(f, "I{bits}"),
            sys::SPATTN_UINT => write!(f, "U{bits}"),
            sys::SPATTN_BOOL if bits == 8 => f.write_str("BOOL"),
            sys::SPATTN_FLOAT8_E4M3FN => f.write_str("F8_E4M3FN"),
            _ => write!(f, "Dtype({code}, {bits} bits)"), // of another library's tensor
        }
    }
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The host.
    Cpu,
    /// The NVIDIA GPU of this number.
    Cuda(i32),
}

impl Device {
    pub(crate) fn c(self) -> sys::spattn_device {
        match self {
            Device::Cpu => sys::spattn_device { type_: sys::SPATTN_CPU as i32, index: 0 },
            Device::Cuda(index) => sys::spattn_device { type_: sys::SPATTN_CUDA as i32, index },
        }
    }
}

/// A type whose values may be elements.
///
/// # Safety
/// Values are as large as the dtype says. The library may write any bits that it calculates: each bit pattern of a
/// number must be a value of the type.
pub unsafe trait Element: Copy {
    /// What the library calls it.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty: $dtype:ident,)*) => { $(
        // SAFETY: sizes agree, and every bit pattern is a value; of bool the library writes 0 and 1 only.
        unsafe impl Element for $type { const DTYPE: Dtype = Dtype::$dtype; }
    )* };
}
elements! { f32: F32, f64: F64, i32: I32, i64: I64, u8: U8, bool: BOOL, }

/// Memory of one's own kind as operands: a GPU's buffer, another library's array. [`View::of`] makes views of it.
///
/// ```
/// # use sparseattn::{Device, Dtype, Memory, MemoryMut, View, ViewMut};
/// # use std::ffi::c_void;
/// struct Buffer(Box<[f32]>); // of another library
///
/// // SAFETY: the box is valid for all of its elements, and stays where it is.
/// unsafe impl Memory for Buffer {
///     fn as_ptr(&self) -> *const c_void {
///         self.0.as_ptr().cast()
///     }
///     fn elements(&self) -> usize {
///         self.0.len()
///     }
///     fn dtype(&self) -> Dtype {
///         Dtype::F32
///     }
///     fn device(&self) -> Device {
///         Device::Cpu
///     }
/// }
/// // SAFETY: nobody else writes to a box that is borrowed exclusively.
/// unsafe impl MemoryMut for Buffer {
///     fn as_mut_ptr(&mut self) -> *mut c_void {
///         self.0.as_mut_ptr().cast()
///     }
/// }
///
/// let mut buffer = Buffer(vec![0.0; 24].into());
/// assert!(View::of(&buffer, &[2, 3, 4]).is_ok());
/// assert!(ViewMut::of(&mut buffer, &[5, 5]).is_err());
/// ```
///
/// # Safety
/// While `self` is borrowed, `as_ptr` is where `elements` elements of `dtype` lie on `device`, valid for reads and
/// written by nobody. On a GPU, what is enqueued on other streams than that of the passes has been waited for: by every
/// stream, or by [`Memory::stream`].
pub unsafe trait Memory {
    /// The first element.
    fn as_ptr(&self) -> *const c_void;
    /// How many there are.
    fn elements(&self) -> usize;
    /// Their type.
    fn dtype(&self) -> Dtype;
    /// Where they lie.
    fn device(&self) -> Device;
    /// The `cudaStream_t` that has waited for others, on which alone passes may use it; `None`: any.
    fn stream(&self) -> Option<*mut c_void> {
        None
    }
}

/// [`Memory`] that passes may write.
///
/// # Safety
/// While `self` is borrowed exclusively, the memory is valid for writes too, and nobody else's.
pub unsafe trait MemoryMut: Memory {
    /// The first element.
    fn as_mut_ptr(&mut self) -> *mut c_void;
}

// SAFETY: a slice is what the trait describes.
unsafe impl<T: Element> Memory for [T] {
    fn as_ptr(&self) -> *const c_void {
        <[T]>::as_ptr(self).cast()
    }
    fn elements(&self) -> usize {
        self.len()
    }
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn device(&self) -> Device {
        Device::Cpu
    }
}
// SAFETY: as above.
unsafe impl<T: Element> MemoryMut for [T] {
    fn as_mut_ptr(&mut self) -> *mut c_void {
        <[T]>::as_mut_ptr(self).cast()
    }
}

const MAX_AXES: usize = 4; // of an operand of any function

/// Memory that may be read, with a shape. Copies are cheap.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    data: *mut c_void,
    dtype: Dtype,
    device: Device,
    stream: Option<*mut c_void>, // of Memory
    axes: usize,
    shape: [i64; MAX_AXES],
    strides: [i64; MAX_AXES], // elements
    borrow: PhantomData<&'a [u8]>,
}

// SAFETY: a view is a shared borrow of plain numbers.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}

/// Memory that may be written, with a shape.
#[derive(Debug)]
pub struct ViewMut<'a> {
    view: View<'a>,
    borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> View<'a> {
    /// All of a slice, row-major.
    ///
    /// ```
    /// # use sparseattn::{View, ErrorKind};
    /// let q = vec![0.0f32; 2 * 8 * 4];
    /// assert!(View::new(&q, &[1, 8, 2, 4]).is_ok());
    /// assert_eq!(View::new(&q, &[1, 8, 2, 5]).unwrap_err().kind(), ErrorKind::Shape);
    /// ```
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::of(data, shape)
    }

    /// A slice of which axis `i` moves by `strides[i]` elements.
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        Self::of_strided(data, shape, strides)
    }

    /// All of some memory, row-major.
    pub fn of<M: Memory + ?Sized>(memory: &'a M, shape: &[usize]) -> Result<Self> {
        // SAFETY: whole checks the shape against the memory.
        let view = unsafe { Self::whole(memory.as_ptr(), memory.elements(), memory.dtype(), memory.device(), shape) };
        view.map(|view| View { stream: memory.stream(), ..view })
    }

    /// Memory of which axis `i` moves by `strides[i]` elements.
    pub fn of_strided<M: Memory + ?Sized>(memory: &'a M, shape: &[usize], strides: &[usize]) -> Result<Self> {
        check_within(memory.elements(), shape, strides)?;
        // SAFETY: the shape stays in the memory.
        let view = unsafe { Self::from_raw(memory.as_ptr(), memory.dtype(), memory.device(), shape, Some(strides)) };
        view.map(|view| View { stream: memory.stream(), ..view })
    }

    /// Bits of bfloat16 numbers.
    pub fn bf16(bits: &'a [u16], shape: &[usize]) -> Result<Self> {
        Self::half(bits, Dtype::BF16, shape)
    }

    /// Bits of float16 numbers.
    pub fn f16(bits: &'a [u16], shape: &[usize]) -> Result<Self> {
        Self::half(bits, Dtype::F16, shape)
    }

    /// Bits of float8_e4m3fn numbers, which operands and caches may have: see
    /// [`Problem::dtype`](crate::Problem::dtype) and [`Problem::cache_dtype`](crate::Problem::cache_dtype).
    pub fn f8_e4m3fn(bits: &'a [u8], shape: &[usize]) -> Result<Self> {
        // SAFETY: u8 is as large as the dtype; whole checks the shape.
        unsafe { Self::whole(bits.as_ptr().cast(), bits.len(), Dtype::F8_E4M3FN, Device::Cpu, shape) }
    }

    /// As [`View::bf16`], of which axis `i` moves by `strides[i]` elements.
    ///
    /// ```
    /// # use sparseattn::View;
    /// let packed = vec![0u16; 8 * 3 * 4]; // q, k and v of one head, token by token
    /// let k = View::bf16_strided(&packed[4..], &[1, 8, 1, 4], &[96, 12, 4, 1])?;
    /// assert!(k.shape().eq([1, 8, 1, 4]));
    /// # Ok::<(), sparseattn::Error>(())
    /// ```
    pub fn bf16_strided(bits: &'a [u16], shape: &[usize], strides: &[usize]) -> Result<Self> {
        // SAFETY: u16 is as large as the dtype.
        unsafe { Self::within(bits.as_ptr().cast(), bits.len(), Dtype::BF16, shape, strides) }
    }

    /// As [`View::f16`], of which axis `i` moves by `strides[i]` elements.
    pub fn f16_strided(bits: &'a [u16], shape: &[usize], strides: &[usize]) -> Result<Self> {
        // SAFETY: u16 is as large as the dtype.
        unsafe { Self::within(bits.as_ptr().cast(), bits.len(), Dtype::F16, shape, strides) }
    }

    /// As [`View::f8_e4m3fn`], of which axis `i` moves by `strides[i]` elements.
    pub fn f8_e4m3fn_strided(bits: &'a [u8], shape: &[usize], strides: &[usize]) -> Result<Self> {
        // SAFETY: u8 is as large as the dtype.
        unsafe { Self::within(bits.as_ptr().cast(), bits.len(), Dtype::F8_E4M3FN, shape, strides) }
    }

    fn half(bits: &'a [u16], dtype: Dtype, shape: &[usize]) -> Result<Self> {
        // SAFETY: u16 is as large as the dtype; whole checks the shape.
        unsafe { Self::whole(bits.as_ptr().cast(), bits.len(), dtype, Device::Cpu, shape) }
    }

    /// Any memory: a GPU's, or another library's. Strides count elements.
    ///
    /// # Safety
    /// For `'a` the memory is valid for reads of the whole shape on that device, and written by nobody.
    pub unsafe fn from_raw(
        data: *const c_void,
        dtype: Dtype,
        device: Device,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Self> {
        check_axes(shape, strides.unwrap_or(shape))?;
        let array = |values: &[usize], number: fn(usize) -> i64| {
            let mut array = [0; MAX_AXES];
            array.iter_mut().zip(values).for_each(|(to, from)| *to = number(*from));
            array
        };
        let (axes, shape) = (shape.len(), array(shape, crate::error::size));
        // An axis of another library's that runs backwards keeps its negative stride, which the library refuses by name.
        let strides = strides.map_or_else(|| compact_strides(&shape[..axes]), |strides| array(strides, |s| s as i64));
        let data = data as *mut c_void;
        Ok(View { data, dtype, device, stream: None, axes, shape, strides, borrow: PhantomData })
    }

    /// A DLPack tensor: `spattn_tensor` is byte for byte what every other library calls a `DLTensor`, whose pointer may
    /// be cast. Shape and strides are copied.
    ///
    /// # Safety
    /// Shape and strides are as many as `ndim` says, or the strides NULL. For `'a` the memory is valid for reads of the
    /// whole shape, and written by nobody.
    pub unsafe fn from_dlpack(tensor: &sys::spattn_tensor) -> Result<Self> {
        let refuse = |kind, argument, message| Err(Error::new(kind, argument, message));
        let (code, bits, lanes) = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
        if lanes != 1 {
            return refuse(ErrorKind::Dtype, "dtype", format!("a number has {lanes} lanes; accepted: 1"));
        }
        let device = match (tensor.device.type_ as u32, tensor.device.index) {
            (sys::SPATTN_CPU | sys::SPATTN_CUDA_HOST, _) => Device::Cpu, // pinned memory is the host's
            (sys::SPATTN_CUDA, index) => Device::Cuda(index),
            (other, _) => {
                let [cpu, pinned, gpu] = [sys::SPATTN_CPU, sys::SPATTN_CUDA_HOST, sys::SPATTN_CUDA];
                let message = format!("device type is {other}; accepted: {cpu} and {pinned}, the host's, and {gpu}");
                return refuse(ErrorKind::Device, "device", message);
            }
        };
        let axes = usize::try_from(tensor.ndim).ok().filter(|axes| *axes <= MAX_AXES);
        let Some(axes) = axes else {
            let message = format!("ndim is {}; accepted: 0 to {MAX_AXES}", tensor.ndim);
            return refuse(ErrorKind::Shape, "shape", message);
        };
        let array = |from: *const i64| {
            let mut array = [0; MAX_AXES];
            (0..axes).for_each(|i| array[i] = *from.add(i));
            array
        };
        let shape = array(tensor.shape);
        let is_compact = tensor.strides.is_null();
        let strides = if is_compact { compact_strides(&shape[..axes]) } else { array(tensor.strides) };
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize).cast();
        let dtype = Dtype { code, bits };
        Ok(View { data, dtype, device, stream: None, axes, shape, strides, borrow: PhantomData })
    }

    /// # Safety
    /// As `from_raw`, for so many elements on the host.
    unsafe fn within(
        data: *const c_void,
        elements: usize,
        dtype: Dtype,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self> {
        check_within(elements, shape, strides)?;
        Self::from_raw(data, dtype, Device::Cpu, shape, Some(strides))
    }

    /// # Safety
    /// As `from_raw`, for so many elements.
    unsafe fn whole(
        data: *const c_void,
        elements: usize,
        dtype: Dtype,
        device: Device,
        shape: &[usize],
    ) -> Result<Self> {
        let wanted = shape.iter().try_fold(1usize, |size, axis| size.checked_mul(*axis));
        if wanted != Some(elements) {
            let message = format!("shape is {shape:?}; there are {elements} elements, accepted: as many");
            return Err(Error::new(ErrorKind::Shape, "shape", message));
        }
        Self::from_raw(data, dtype, device, shape, None)
    }

    /// The sizes of the axes.
    pub fn shape(&self) -> impl Iterator<Item = usize> + '_ {
        self.shape[..self.axes].iter().map(|size| *size as usize)
    }
    /// The type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
    /// Where the memory lies.
    pub fn device(&self) -> Device {
        self.device
    }
    /// That of its [`Memory`].
    pub(crate) fn stream(&self) -> Option<*mut c_void> {
        self.stream
    }

    /// Where memory begins of which the C ABI is told address and length, and how many bytes it has.
    pub(crate) fn bytes(&self, argument: &str) -> Result<(*mut c_void, usize)> {
        let bytes = usize::try_from(self.shape[0]).ok().filter(|_| self.axes == 1 && self.dtype == Dtype::U8);
        let Some(bytes) = bytes else {
            let message = format!("{argument} has several axes or no bytes; accepted: one axis of Dtype::U8");
            return Err(Error::new(ErrorKind::Shape, argument, message));
        };
        if bytes > 1 && self.strides[0] != 1 {
            let message = format!("{argument} has bytes {} apart; accepted: 1, no other stride", self.strides[0]);
            return Err(Error::new(ErrorKind::Layout, argument, message));
        }
        Ok((self.data, bytes))
    }

    /// The view as the C ABI has it, valid while `self` is.
    pub(crate) fn c(&self) -> sys::spattn_tensor {
        sys::spattn_tensor {
            data: self.data,
            device: self.device.c(),
            ndim: self.axes as i32,
            dtype: self.dtype.c(),
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            byte_offset: 0,
        }
    }
}

impl<'a> ViewMut<'a> {
    /// As [`View::new`].
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::of(data, shape)
    }
    /// As [`View::strided`].
    pub fn strided<T: Element>(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        Self::of_strided(data, shape, strides)
    }
    /// As [`View::of`].
    pub fn of<M: MemoryMut + ?Sized>(memory: &'a mut M, shape: &[usize]) -> Result<Self> {
        let (elements, dtype, device, stream) = (memory.elements(), memory.dtype(), memory.device(), memory.stream());
        // SAFETY: the borrow is exclusive; whole checks the shape.
        let view = unsafe { View::whole(memory.as_mut_ptr(), elements, dtype, device, shape) };
        view.map(|view| Self::exclusive(View { stream, ..view }))
    }
    /// As [`View::of_strided`].
    pub fn of_strided<M: MemoryMut + ?Sized>(memory: &'a mut M, shape: &[usize], strides: &[usize]) -> Result<Self> {
        check_within(memory.elements(), shape, strides)?;
        let (dtype, device, stream) = (memory.dtype(), memory.device(), memory.stream());
        // SAFETY: the borrow is exclusive; the shape stays in the memory.
        let view = unsafe { View::from_raw(memory.as_mut_ptr(), dtype, device, shape, Some(strides)) };
        view.map(|view| Self::exclusive(View { stream, ..view }))
    }
    /// As [`View::bf16`].
    pub fn bf16(bits: &'a mut [u16], shape: &[usize]) -> Result<Self> {
        Self::half(bits, Dtype::BF16, shape)
    }
    /// As [`View::f16`].
    pub fn f16(bits: &'a mut [u16], shape: &[usize]) -> Result<Self> {
        Self::half(bits, Dtype::F16, shape)
    }
    /// As [`View::f8_e4m3fn`].
    pub fn f8_e4m3fn(bits: &'a mut [u8], shape: &[usize]) -> Result<Self> {
        let (data, elements) = (bits.as_mut_ptr().cast(), bits.len());
        // SAFETY: the borrow is exclusive; u8 is as large as the dtype.
        unsafe { View::whole(data, elements, Dtype::F8_E4M3FN, Device::Cpu, shape).map(Self::exclusive) }
    }
    /// As [`View::bf16_strided`].
    pub fn bf16_strided(bits: &'a mut [u16], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let (data, elements) = (bits.as_mut_ptr().cast(), bits.len());
        // SAFETY: the borrow is exclusive; u16 is as large as the dtype.
        unsafe { View::within(data, elements, Dtype::BF16, shape, strides).map(Self::exclusive) }
    }
    /// As [`View::f16_strided`].
    pub fn f16_strided(bits: &'a mut [u16], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let (data, elements) = (bits.as_mut_ptr().cast(), bits.len());
        // SAFETY: the borrow is exclusive; u16 is as large as the dtype.
        unsafe { View::within(data, elements, Dtype::F16, shape, strides).map(Self::exclusive) }
    }
    /// As [`View::f8_e4m3fn_strided`].
    pub fn f8_e4m3fn_strided(bits: &'a mut [u8], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let (data, elements) = (bits.as_mut_ptr().cast(), bits.len());
        // SAFETY: the borrow is exclusive; u8 is as large as the dtype.
        unsafe { View::within(data, elements, Dtype::F8_E4M3FN, shape, strides).map(Self::exclusive) }
    }
    fn half(bits: &'a mut [u16], dtype: Dtype, shape: &[usize]) -> Result<Self> {
        let (data, elements) = (bits.as_mut_ptr().cast(), bits.len());
        // SAFETY: the borrow is exclusive; u16 is as large as the dtype.
        unsafe { View::whole(data, elements, dtype, Device::Cpu, shape).map(Self::exclusive) }
    }
    /// As [`View::from_raw`].
    ///
    /// # Safety
    /// For `'a` the memory is valid for reads and writes of the whole shape on that device, and nobody else's.
    pub unsafe fn from_raw(
        data: *mut c_void,
        dtype: Dtype,
        device: Device,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Self> {
        View::from_raw(data, dtype, device, shape, strides).map(Self::exclusive)
    }

    /// As [`View::from_dlpack`].
    ///
    /// # Safety
    /// As there, and for `'a` the memory is valid for writes of the whole shape, and nobody else's.
    pub unsafe fn from_dlpack(tensor: &sys::spattn_tensor) -> Result<Self> {
        View::from_dlpack(tensor).map(Self::exclusive)
    }

    fn exclusive(view: View<'a>) -> Self {
        ViewMut { view, borrow: PhantomData }
    }

    /// The same memory for reading, while this view rests.
    pub fn as_view(&self) -> View<'_> {
        self.view
    }
    pub(crate) fn view(&self) -> &View<'a> {
        &self.view
    }
    /// The same memory, of which no other view is made while the borrow lasts.
    pub(crate) fn into_view(self) -> View<'a> {
        self.view
    }
}

impl<'a, T: Element> From<&'a [T]> for View<'a> {
    /// A slice as one axis.
    fn from(data: &'a [T]) -> Self {
        View::new(data, &[data.len()]).expect("a slice has its own length")
    }
}
impl<'a, T: Element> From<&'a mut [T]> for ViewMut<'a> {
    /// A slice as one axis.
    fn from(data: &'a mut [T]) -> Self {
        let shape = [data.len()];
        ViewMut::new(data, &shape).expect("a slice has its own length")
    }
}

fn check_axes(shape: &[usize], strides: &[usize]) -> Result<()> {
    if shape.len() > MAX_AXES {
        let message = format!("shape has {} axes; accepted: at most {MAX_AXES}", shape.len());
        return Err(Error::new(ErrorKind::Shape, "shape", message));
    }
    if shape.len() != strides.len() {
        let message = format!("strides are {}; accepted: one for each of the {} axes", strides.len(), shape.len());
        return Err(Error::new(ErrorKind::Layout, "strides", message));
    }
    Ok(())
}

/// Whether the farthest element that shape and strides reach is one of so many.
fn check_within(elements: usize, shape: &[usize], strides: &[usize]) -> Result<()> {
    check_axes(shape, strides)?;
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(0usize, |last, (axis, stride)| last.checked_add(axis.saturating_sub(1).checked_mul(*stride)?));
    if shape.contains(&0) || last.is_some_and(|last| last < elements) {
        return Ok(());
    }
    let message = format!("shape {shape:?} with strides {strides:?} leaves the memory, which has {elements} elements");
    Err(Error::new(ErrorKind::Layout, "strides", message))
}

/// Of a row-major tensor; sizes that overflow are refused elsewhere.
fn compact_strides(shape: &[i64]) -> [i64; MAX_AXES] {
    let mut strides = [1i64; MAX_AXES];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1]);
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_show_their_names() {
        let all = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E4M3FN, Dtype::I64, Dtype::U8, Dtype::BOOL];
        assert_eq!(format!("{all:?}"), "[F32, F16, BF16, F8_E4M3FN, I64, U8, BOOL]");
    }

    #[test]
    fn views_stay_in_their_slices() {
        let data = [0.0f32; 24];
        assert_eq!(View::new(&data, &[2, 3, 4]).unwrap().strides[..3], [12, 4, 1]);
        assert_eq!(View::new(&data, &[25]).unwrap_err().kind(), ErrorKind::Shape);
        assert_eq!(View::new(&data, &[usize::MAX, 2]).unwrap_err().kind(), ErrorKind::Shape);
        assert_eq!(View::new(&data, &[1, 1, 1, 24, 1]).unwrap_err().kind(), ErrorKind::Shape);
        assert!(View::strided(&data, &[4, 6], &[1, 4]).is_ok());
        assert!(View::strided(&data, &[0, 6], &[1, 400]).is_ok());
        for (shape, strides) in [([4, 6], [2, 4]), ([25, 1], [1, 1]), ([2, 2], [usize::MAX, 1])] {
            assert_eq!(View::strided(&data, &shape, &strides).unwrap_err().kind(), ErrorKind::Layout);
        }
        assert_eq!(View::strided(&data, &[2], &[1, 1]).unwrap_err().argument(), "strides");
        assert!(View::new(&[0u8; 0], &[0]).is_ok());
    }

    #[test]
    fn views_of_bits_stay_in_their_slices() {
        let (mut halves, mut bytes) = ([0u16; 24], [0u8; 24]);
        let (shape, strides, beyond) = ([4, 6], [1, 4], [2, 4]);
        for (view, dtype) in [
            (View::bf16_strided(&halves, &shape, &strides), Dtype::BF16),
            (View::f16_strided(&halves, &shape, &strides), Dtype::F16),
            (View::f8_e4m3fn_strided(&bytes, &shape, &strides), Dtype::F8_E4M3FN),
        ] {
            let view = view.unwrap();
            assert_eq!((view.dtype(), view.strides[..2].to_vec()), (dtype, vec![1, 4]));
        }
        for made in [
            View::bf16_strided(&halves, &shape, &beyond),
            View::f16_strided(&halves, &shape, &beyond),
            View::f8_e4m3fn_strided(&bytes, &shape, &beyond),
        ] {
            assert_eq!(made.unwrap_err().kind(), ErrorKind::Layout);
        }
        for (strides, is_within) in [(strides, true), (beyond, false)] {
            assert_eq!(ViewMut::bf16_strided(&mut halves, &shape, &strides).is_ok(), is_within);
            assert_eq!(ViewMut::f16_strided(&mut halves, &shape, &strides).is_ok(), is_within);
            assert_eq!(ViewMut::f8_e4m3fn_strided(&mut bytes, &shape, &strides).is_ok(), is_within);
        }
    }

    #[test]
    fn c_tensors_point_into_their_view() {
        let mut data = [1i64, 2, 3, 4, 5, 6];
        let view = ViewMut::new(&mut data, &[2, 3]).unwrap();
        let c = view.as_view();
        let c = c.c();
        // SAFETY: the view lives.
        unsafe {
            assert_eq!(std::slice::from_raw_parts(c.shape, 2), [2, 3]);
            *c.data.cast::<i64>().add(5) = 60;
        }
        assert_eq!(data[5], 60);
    }

    #[test]
    fn memory_of_another_library() {
        struct Far(Box<[u8]>);
        // SAFETY: the box is valid for its elements; no pass reads it on a device.
        unsafe impl Memory for Far {
            fn as_ptr(&self) -> *const c_void {
                self.0.as_ptr().cast()
            }
            fn elements(&self) -> usize {
                self.0.len()
            }
            fn dtype(&self) -> Dtype {
                Dtype::U8
            }
            fn device(&self) -> Device {
                Device::Cuda(3)
            }
        }
        // SAFETY: as above.
        unsafe impl MemoryMut for Far {
            fn as_mut_ptr(&mut self) -> *mut c_void {
                self.0.as_mut_ptr().cast()
            }
        }
        let mut far = Far(vec![1; 6].into());
        let view = View::of(&far, &[2, 3]).unwrap();
        assert_eq!((view.device(), view.dtype()), (Device::Cuda(3), Dtype::U8));
        assert_eq!(View::of(&far, &[7]).unwrap_err().argument(), "shape");
        assert_eq!(View::of_strided(&far, &[2, 3], &[3, 2]).unwrap_err().argument(), "strides");
        let view = ViewMut::of_strided(&mut far, &[3, 2], &[1, 3]).unwrap();
        // SAFETY: the view borrows the box.
        unsafe { view.view().c().data.cast::<u8>().add(5).write(9) };
        assert_eq!(*far.0, [1, 1, 1, 1, 1, 9]);
    }

    #[test]
    fn tensors_of_dlpack() {
        let (mut data, shape, strides) = ([1i32, 2, 3, 4, 5, 6, 7], [2i64, 3], [1i64, 2]);
        let mut tensor = sys::spattn_tensor {
            data: data.as_mut_ptr().cast(),
            device: Device::Cpu.c(),
            ndim: 2,
            dtype: Dtype::I32.c(),
            shape: shape.as_ptr(),
            strides: std::ptr::null(),
            byte_offset: 4,
        };
        // SAFETY: shape and strides have two axes; no view reads beyond the data.
        unsafe {
            let view = ViewMut::from_dlpack(&tensor).unwrap();
            assert_eq!((view.view().dtype(), view.view().strides[..2].to_vec()), (Dtype::I32, vec![3, 1]));
            *view.view().c().data.cast::<i32>() = 20;
            tensor.strides = strides.as_ptr();
            assert_eq!(View::from_dlpack(&tensor).unwrap().strides[..2], strides);
            tensor.device.type_ = sys::SPATTN_CUDA_HOST as i32;
            assert_eq!(View::from_dlpack(&tensor).unwrap().device(), Device::Cpu);
            tensor.ndim = 5;
            assert_eq!(View::from_dlpack(&tensor).unwrap_err().kind(), ErrorKind::Shape);
            tensor.ndim = -1;
            assert_eq!(View::from_dlpack(&tensor).unwrap_err().kind(), ErrorKind::Shape);
            tensor.dtype.lanes = 4;
            assert_eq!(View::from_dlpack(&tensor).unwrap_err().kind(), ErrorKind::Dtype);
            (tensor.dtype.lanes, tensor.device.type_) = (1, 99);
            assert_eq!(View::from_dlpack(&tensor).unwrap_err().kind(), ErrorKind::Device);
        }
        assert_eq!(data[1], 20);
    }
}

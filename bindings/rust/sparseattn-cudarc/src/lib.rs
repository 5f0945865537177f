// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs, missing_debug_implementations)]

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use sparseattn::{Context, ContextOptions, Device, Dtype, Error, ErrorKind, Memory, MemoryMut, Pass, Plan, Result};
use std::ffi::c_void;
use std::sync::Arc;

mod sealed {
    pub trait Element {}
    pub trait Buffer {}
}

/// An element that buffers of operands may have.
pub trait DeviceElement: sealed::Element {
    /// What the library calls it.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty: $dtype:ident,)*) => { $(
        impl sealed::Element for $type {}
        impl DeviceElement for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )* };
}
elements! { f32: F32, f64: F64, half::f16: F16, half::bf16: BF16, i32: I32, i64: I64, u8: U8, }

/// A `CudaSlice`, `CudaView` or `CudaViewMut`: other types may not promise what these do.
pub trait Buffer<T>: DevicePtr<T> + sealed::Buffer {}
/// A `CudaSlice` or `CudaViewMut`.
pub trait BufferMut<T>: DevicePtrMut<T> + sealed::Buffer {}

impl<T> sealed::Buffer for CudaSlice<T> {}
impl<T> sealed::Buffer for CudaView<'_, T> {}
impl<T> sealed::Buffer for CudaViewMut<'_, T> {}
impl<T> Buffer<T> for CudaSlice<T> {}
impl<T> Buffer<T> for CudaView<'_, T> {}
impl<T> Buffer<T> for CudaViewMut<'_, T> {}
impl<T> BufferMut<T> for CudaSlice<T> {}
impl<T> BufferMut<T> for CudaViewMut<'_, T> {}

/// A stream of cudarc, for [`Plan::scope`] and [`Context::plan_on`].
#[derive(Debug)]
pub struct Stream(Arc<CudaStream>);

impl Stream {
    /// Of a primary context, which is what `CudaContext::new` gives: the library uses no other.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        if stream.context().is_primary() {
            return Ok(Stream(stream.clone()));
        }
        let message = "stream belongs to a context of its own; accepted: streams of a device's primary context";
        Err(Error::new(ErrorKind::Device, "stream", message.into()))
    }

    /// The GPU of the stream.
    pub fn device(&self) -> Device {
        Device::Cuda(self.0.context().ordinal() as i32)
    }

    /// A context for the GPU of the stream.
    pub fn context(&self) -> Result<Context> {
        Context::with(ContextOptions::new().device(self.device()))
    }

    /// A buffer that passes on this stream read: they wait for whoever writes it on another stream of cudarc's.
    pub fn input<'a, T: DeviceElement>(&'a self, buffer: &'a impl Buffer<T>) -> Input<'a> {
        self.input_as(T::DTYPE, buffer)
    }

    /// A buffer that passes on this stream write: they wait for whoever reads or writes it on another.
    pub fn output<'a, T: DeviceElement>(&'a self, buffer: &'a mut impl BufferMut<T>) -> Output<'a> {
        self.output_as(T::DTYPE, buffer)
    }

    /// As [`Stream::input`], of bytes that are float8 (E4M3FN): operands with scales, or a cache.
    pub fn input_f8_e4m3fn<'a>(&'a self, bytes: &'a impl Buffer<u8>) -> Input<'a> {
        self.input_as(Dtype::F8_E4M3FN, bytes)
    }

    /// As [`Stream::output`], of bytes that are float8 (E4M3FN): a cache that tokens are appended to.
    pub fn output_f8_e4m3fn<'a>(&'a self, bytes: &'a mut impl BufferMut<u8>) -> Output<'a> {
        self.output_as(Dtype::F8_E4M3FN, bytes)
    }

    fn input_as<'a, T>(&'a self, dtype: Dtype, buffer: &'a impl Buffer<T>) -> Input<'a> {
        let (elements, device) = (buffer.len(), device_of(buffer));
        let (pointer, used) = buffer.device_ptr(&self.0);
        let stream = self.0.cu_stream().cast();
        Input { pointer: pointer as *mut c_void, elements, dtype, device, stream, _used: used }
    }

    fn output_as<'a, T>(&'a self, dtype: Dtype, buffer: &'a mut impl BufferMut<T>) -> Output<'a> {
        let (elements, device) = (buffer.len(), device_of(buffer));
        let (pointer, used) = buffer.device_ptr_mut(&self.0);
        let stream = self.0.cu_stream().cast();
        Output(Input { pointer: pointer as *mut c_void, elements, dtype, device, stream, _used: used })
    }

    /// Scratch for one call of a pass at a time.
    pub fn workspace(&self, plan: &Plan, pass: Pass) -> Result<CudaSlice<u8>> {
        let (bytes, _) = plan.workspace(pass)?; // CUDA aligns more than any kernel asks
        self.0.alloc_zeros(bytes.max(1)).map_err(|error| {
            let message = format!("no memory for {bytes} bytes on {:?}: {error}", self.device());
            Error::new(ErrorKind::DeviceMemory, "workspace", message)
        })
    }
}

fn device_of<T>(buffer: &impl DeviceSlice<T>) -> Device {
    Device::Cuda(buffer.stream().context().ordinal() as i32)
}

// SAFETY: the stream is shared, so it lives as long as `self`; to synchronize it waits for all that it was given.
unsafe impl sparseattn::Stream for Stream {
    fn raw(&self) -> *mut c_void {
        self.0.cu_stream().cast()
    }
    fn wait(&self) -> std::result::Result<(), String> {
        self.0.synchronize().map_err(|error| error.to_string())
    }
    fn device(&self) -> Option<Device> {
        Some(Stream::device(self))
    }
}

/// A borrowed buffer. When it is dropped, cudarc notes that the stream uses the buffer until then.
#[derive(Debug)]
pub struct Input<'a> {
    pointer: *mut c_void,
    elements: usize,
    dtype: Dtype,
    device: Device,
    stream: *mut c_void,
    _used: SyncOnDrop<'a>,
}

/// A buffer borrowed exclusively.
#[derive(Debug)]
pub struct Output<'a>(Input<'a>);

// SAFETY: a buffer of cudarc is borrowed as long as `self`, and its stream waits for those who write it.
unsafe impl Memory for Input<'_> {
    fn as_ptr(&self) -> *const c_void {
        self.pointer
    }
    fn elements(&self) -> usize {
        self.elements
    }
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn device(&self) -> Device {
        self.device
    }
    fn stream(&self) -> Option<*mut c_void> {
        Some(self.stream)
    }
}
// SAFETY: as above.
unsafe impl Memory for Output<'_> {
    fn as_ptr(&self) -> *const c_void {
        self.0.as_ptr()
    }
    fn elements(&self) -> usize {
        self.0.elements()
    }
    fn dtype(&self) -> Dtype {
        self.0.dtype()
    }
    fn device(&self) -> Device {
        self.0.device()
    }
    fn stream(&self) -> Option<*mut c_void> {
        self.0.stream()
    }
}
// SAFETY: as above, and the borrow is exclusive.
unsafe impl MemoryMut for Output<'_> {
    fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.pointer
    }
}

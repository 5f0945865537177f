// SPDX-License-Identifier: MIT
//! Statuses of the library as errors.
use crate::sys;
use std::ffi::{c_char, CStr};
use std::fmt;

/// What failed. Kinds are the statuses of `sparseattn.h`, where each is explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum ErrorKind {
    Argument,
    Null,
    StructSize,
    Shape,
    Dtype,
    Device,
    Layout,
    Range,
    Workspace,
    State,
    Unsupported,
    NoKernel,
    NoGpu,
    DriverTooOld,
    UnknownField,
    Resource,
    HostMemory,
    DeviceMemory,
    Cuda,
    Capture,
    Format,
    Callback,
    Cancelled,
    Internal,
    /// The library cannot be opened, or is of another version (feature `load`).
    Load,
    /// A status that this crate does not know: the library is newer.
    Other(i32),
}

const KINDS: [(u32, ErrorKind); 24] = [
    (sys::SPATTN_E_ARGUMENT, ErrorKind::Argument),
    (sys::SPATTN_E_NULL, ErrorKind::Null),
    (sys::SPATTN_E_STRUCT_SIZE, ErrorKind::StructSize),
    (sys::SPATTN_E_SHAPE, ErrorKind::Shape),
    (sys::SPATTN_E_DTYPE, ErrorKind::Dtype),
    (sys::SPATTN_E_DEVICE, ErrorKind::Device),
    (sys::SPATTN_E_LAYOUT, ErrorKind::Layout),
    (sys::SPATTN_E_RANGE, ErrorKind::Range),
    (sys::SPATTN_E_WORKSPACE, ErrorKind::Workspace),
    (sys::SPATTN_E_STATE, ErrorKind::State),
    (sys::SPATTN_E_UNSUPPORTED, ErrorKind::Unsupported),
    (sys::SPATTN_E_NO_KERNEL, ErrorKind::NoKernel),
    (sys::SPATTN_E_NO_GPU, ErrorKind::NoGpu),
    (sys::SPATTN_E_DRIVER_TOO_OLD, ErrorKind::DriverTooOld),
    (sys::SPATTN_E_UNKNOWN_FIELD, ErrorKind::UnknownField),
    (sys::SPATTN_E_RESOURCE, ErrorKind::Resource),
    (sys::SPATTN_E_HOST_MEMORY, ErrorKind::HostMemory),
    (sys::SPATTN_E_DEVICE_MEMORY, ErrorKind::DeviceMemory),
    (sys::SPATTN_E_CUDA, ErrorKind::Cuda),
    (sys::SPATTN_E_CAPTURE, ErrorKind::Capture),
    (sys::SPATTN_E_FORMAT, ErrorKind::Format),
    (sys::SPATTN_E_CALLBACK, ErrorKind::Callback),
    (sys::SPATTN_E_CANCELLED, ErrorKind::Cancelled),
    (sys::SPATTN_E_INTERNAL, ErrorKind::Internal),
];

impl ErrorKind {
    /// The kind of a status of the C ABI.
    pub fn from_status(status: i32) -> Self {
        let known = KINDS.iter().find(|(code, _)| *code as i32 == status);
        known.map_or(ErrorKind::Other(status), |(_, kind)| *kind)
    }
}

/// A failure: which argument, what was given, what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    argument: String,
    native_code: i32,
}

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// What failed.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
    /// What was wrong, what was given, what is accepted.
    pub fn message(&self) -> &str {
        &self.message
    }
    /// The argument that is wrong, under its name in `sparseattn.h`, or nothing.
    pub fn argument(&self) -> &str {
        &self.argument
    }
    /// The `cudaError_t` where CUDA failed, else 0.
    pub fn native_code(&self) -> i32 {
        self.native_code
    }

    /// A failure that is seen on this side of the C ABI, here or in a crate that brings operands: which argument, and
    /// what was wrong with it.
    pub fn new(kind: ErrorKind, argument: &str, message: String) -> Self {
        Error { kind, message, argument: argument.to_string(), native_code: 0 }
    }

    /// The failure of the call that this thread has just made.
    pub(crate) fn last(status: i32) -> Self {
        let mut error = sized!(sys::spattn_error);
        // SAFETY: the struct is as long as it says; the texts live until the next failure of this thread.
        unsafe {
            sys::spattn_last_error(&mut error);
            Error {
                kind: ErrorKind::from_status(status),
                message: text(error.message),
                argument: text(error.argument),
                native_code: error.native_code,
            }
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// A struct of the C ABI with its size, all else zero, which is the default of every field.
macro_rules! sized {
    ($type:ty) => {{
        // SAFETY: the structs of the C ABI are integers, floats and pointers, for which zeros are values.
        let mut made: $type = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<$type>() as u32;
        made
    }};
}
pub(crate) use sized;

pub(crate) fn check(status: i32) -> Result<()> {
    if status == 0 {
        Ok(())
    } else {
        Err(Error::last(status))
    }
}

/// # Safety
/// The pointer is NULL or a C string.
pub(crate) unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    CStr::from_ptr(pointer).to_string_lossy().into_owned()
}

/// So many zeros. What memory cannot hold is an error, where `vec!` would end the process.
pub(crate) fn zeros<T: Clone + Default>(argument: &str, count: usize) -> Result<Vec<T>> {
    let mut made = Vec::new();
    if made.try_reserve_exact(count).is_err() {
        let message = format!(
            "{argument} has {count} numbers of {} bytes; there is no memory for them",
            std::mem::size_of::<T>()
        );
        return Err(Error::new(ErrorKind::HostMemory, argument, message));
    }
    made.resize(count, T::default());
    Ok(made)
}

/// What a C function with a buffer, a capacity and a size needed fills.
pub(crate) fn fill(call: impl Fn(*mut c_char, usize, *mut usize) -> i32) -> Result<Vec<u8>> {
    let mut needed = 0;
    check(call(std::ptr::null_mut(), 0, &mut needed))?;
    let mut buffer = zeros::<u8>("buffer", needed)?;
    check(call(buffer.as_mut_ptr().cast(), needed, &mut needed))?;
    Ok(buffer)
}

/// The same for a text, which ends with a zero.
pub(crate) fn fill_text(call: impl Fn(*mut c_char, usize, *mut usize) -> i32) -> Result<String> {
    let mut bytes = fill(call)?;
    bytes.pop();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A size for the C ABI; what no i64 holds becomes what the library refuses.
pub(crate) fn size(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

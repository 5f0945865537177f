// SPDX-License-Identifier: MIT
#![doc = include_str!("../README.md")]
#![warn(missing_docs, missing_debug_implementations)]

mod append;
mod context;
mod error;
mod pattern;
mod plan;
mod question;
mod run;
mod sharding;
mod tensor;

pub use append::Append;
pub use context::{Context, ContextOptions, LogLevel};
pub use error::{Error, ErrorKind, Result};
pub use pattern::*;
pub use plan::{Axes, Pass, Plan, Problem};
pub use question::{Csr, Extent, Stats};
pub use run::{Backward, Forward, Gradients, Saved, Scope, Scoped, Stream, Workspace};
pub use sharding::{Buffer, Exchange, Peer, Seen, Sharding, Split};
pub use tensor::{Device, Dtype, Element, Memory, MemoryMut, View, ViewMut};

pub use sparseattn_sys as sys;

/// The version of the library: `major * 10000 + minor * 100 + patch`.
pub fn version() -> u32 {
    // SAFETY: it has no precondition.
    unsafe { sys::spattn_version() }
}

/// The number in the name of the shared library: programs work with every library of an equal one.
pub fn abi() -> u32 {
    // SAFETY: it has no precondition.
    unsafe { sys::spattn_abi() }
}

/// Compiler, kernels' architectures and features of the library: one JSON object.
pub fn build_json() -> String {
    // SAFETY: the text is static.
    unsafe { error::text(sys::spattn_build_json()) }
}

/// NVIDIA GPUs of this machine; 0 without a driver.
pub fn device_count() -> Result<usize> {
    let mut count = 0;
    // SAFETY: the result is an i32.
    error::check(unsafe { sys::spattn_device_count(&mut count) })?;
    Ok(count as usize)
}

/// A kernel row of the library.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Kernel {
    /// As [`Plan::kernel`] says it, and the environment's `SPATTN_FORCE_KERNEL` reads it.
    pub name: String,
    /// Whether this machine can run it.
    pub runs_here: bool,
}

/// The kernel rows of every backend of the library, best first. Where the environment has
/// `SPATTN_FORCE_KERNEL=NAME[,NAME]`, plans consider, of each pass, only the named rows where one is named.
///
/// ```
/// use sparseattn::{causal, kernels, Context, Pass, Problem};
/// let chosen = Context::cpu()?.plan(&causal(), &Problem::new(1, 2, 64, 16))?.kernel(Pass::Forward);
/// assert!(kernels().iter().any(|kernel| kernel.runs_here && Some(&kernel.name) == chosen.as_ref()));
/// # Ok::<(), sparseattn::Error>(())
/// ```
pub fn kernels() -> Vec<Kernel> {
    // SAFETY: rows are numbered up to the count; names are static.
    unsafe {
        (0..sys::spattn_kernel_count())
            .map(|row| Kernel {
                name: error::text(sys::spattn_kernel_name(row)),
                runs_here: sys::spattn_kernel_runs_here(row) != 0,
            })
            .collect()
    }
}

/// Opens the library of this name or path, or `libsparseattn.so.0` from where the dynamic linker looks. It must have
/// succeeded before anything else of this crate is used, which panics otherwise.
///
/// # Safety
/// A file of that name that is no libsparseattn may run any code while it is opened. Where another library was opened
/// before, nothing that it has made, such as a pattern or a plan, is used or dropped any more.
#[cfg(feature = "load")]
pub unsafe fn load(path: Option<&std::path::Path>) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let path = path.map(|path| std::ffi::CString::new(path.as_os_str().as_bytes()));
    let path = match path.transpose() {
        Ok(path) => path,
        Err(error) => return Err(Error::new(ErrorKind::Load, "path", error.to_string())),
    };
    sys::load(path.as_deref()).map_err(|error| Error::new(ErrorKind::Load, "path", error.to_string()))
}

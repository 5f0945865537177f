// SPDX-License-Identifier: MIT
//! The library opened at run time. The functions have the names that they have where they are linked; each reads its
//! address, which `load` has written.
use core::ffi::{c_char, c_int, c_void, CStr};
use core::fmt;
use core::sync::atomic::{AtomicPtr, Ordering};

#[cfg_attr(target_os = "linux", link(name = "dl"))] // a part of libc since glibc 2.34
extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

/// Why a library cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no such library; what the dynamic linker said, cut to 255 bytes.
    NotFound(Text),
    /// It is of another version: versions as `major * 10000 + minor * 100 + patch`.
    Version { needs: u32, have: u32 },
    /// It says that it is new enough, yet has no function of this name.
    Missing(&'static str),
}

/// A short text without an allocator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text {
    bytes: [u8; 255],
    length: u8,
}

impl Text {
    fn new(bytes: &[u8]) -> Self {
        let mut text = Text { bytes: [0; 255], length: bytes.len().min(255) as u8 };
        text.bytes[..text.length as usize].copy_from_slice(&bytes[..text.length as usize]);
        text
    }

    pub fn as_str(&self) -> &str {
        let bytes = &self.bytes[..self.length as usize];
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => core::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or(""),
        }
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minor = |version: u32| (version / 10000, version / 100 % 100);
        match self {
            LoadError::NotFound(text) => write!(f, "libsparseattn cannot be opened: {}", text.as_str()),
            LoadError::Version { needs, have } => {
                let (needs, have) = (minor(*needs), minor(*have));
                write!(f, "libsparseattn: needs {}.{}, have {}.{}", needs.0, needs.1, have.0, have.1)
            }
            LoadError::Missing(name) => write!(f, "libsparseattn has no function {name}"),
        }
    }
}

/// Opens the library of this name or path, or `libsparseattn.so.0` from where the dynamic linker looks, for the whole
/// life of the process. Any number of threads may call it; the last library that was opened serves all.
///
/// # Safety
/// A file of that name that is no libsparseattn may run any code while it is opened. Where another library was opened
/// before, nothing that it has made is used or released any more.
pub unsafe fn load(path: Option<&CStr>) -> Result<(), LoadError> {
    const RTLD_NOW: c_int = 2;
    let path = path.map_or(b"libsparseattn.so.0\0".as_ptr().cast(), CStr::as_ptr);
    let library = dlopen(path, RTLD_NOW);
    if library.is_null() {
        let error = dlerror();
        let text = if error.is_null() { &b"no reason is known"[..] } else { CStr::from_ptr(error).to_bytes() };
        return Err(LoadError::NotFound(Text::new(text)));
    }
    let find = |name: &'static str| -> Result<*mut c_void, LoadError> {
        let address = dlsym(library, name.as_ptr().cast());
        let name = name.trim_end_matches('\0');
        if address.is_null() {
            Err(LoadError::Missing(name))
        } else {
            Ok(address)
        }
    };
    // The version first: an old library lacks functions because it is old.
    let version: unsafe extern "C" fn() -> u32 = core::mem::transmute(find("spattn_version\0")?);
    let (needs, have) = (super::SPATTN_VERSION_MAJOR * 10000 + super::SPATTN_VERSION_MINOR * 100, version());
    // Before 1.0 a minor release may break the ABI.
    let is_same = if needs >= 10000 { needs / 10000 == have / 10000 } else { needs / 100 == have / 100 };
    if have < needs || !is_same {
        return Err(LoadError::Version { needs, have });
    }
    super::find_all(&find)
}

/// The address that `load` has found, as the function that it is.
///
/// # Safety
/// `F` is the type of that function.
pub(crate) unsafe fn found<F: Copy>(address: &AtomicPtr<c_void>, name: &str) -> F {
    let address = address.load(Ordering::Acquire);
    assert!(!address.is_null(), "{name} is called before sparseattn_sys::load has succeeded");
    core::mem::transmute_copy(&address)
}

macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        #[allow(non_upper_case_globals)] // each has the name of its function
        mod addresses {
            use core::{ffi::c_void, ptr::null_mut, sync::atomic::AtomicPtr};
            $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(null_mut());)*
        }

        #[allow(clippy::missing_safety_doc)] // sparseattn.h is their manual
        mod called {
            use super::*;
            $(pub unsafe fn $name($($argument: $type),*) $(-> $result)? {
                type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                let function: Function = loader::found(&addresses::$name, stringify!($name));
                function($($argument),*)
            })*
        }
        pub use called::*;

        /// Writes all addresses, or none.
        fn find_all(
            find: &dyn Fn(&'static str) -> Result<*mut core::ffi::c_void, LoadError>,
        ) -> Result<(), LoadError> {
            $(let $name = find(concat!(stringify!($name), "\0"))?;)*
            $(addresses::$name.store($name, core::sync::atomic::Ordering::Release);)*
            Ok(())
        }
    };
}

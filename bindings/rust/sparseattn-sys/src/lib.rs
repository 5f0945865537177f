// SPDX-License-Identifier: MIT
//! The C ABI of libsparseattn, as bindgen reads `sparseattn.h`: the manual is that header.
//!
//! The crate `sparseattn` is the safe interface. Here every function is `unsafe`; enumerators are plain integers, so
//! that a newer library may return values that this crate does not know.
//!
//! Features say where the library comes from: `vendored` (the default) builds it, `system` links an installed one,
//! `load` opens it at run time. With `load`, `load()` must have succeeded before any other function is called.
#![no_std]
#![allow(non_camel_case_types)]

#[cfg(not(feature = "load"))]
macro_rules! functions {
    ($($body:tt)*) => { extern "C" { $($body)* } };
}
#[cfg(feature = "load")]
#[macro_use]
mod loader;
#[cfg(feature = "load")]
pub use loader::{load, LoadError};

include!("bindings.rs");

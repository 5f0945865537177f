// SPDX-License-Identifier: MIT
//! The committed bindings declare what the library exports. That structs lie as C lays them out, the tests say which
//! bindgen writes beside them.
use std::collections::BTreeSet;

#[test]
fn every_exported_function_is_declared() {
    let symbols = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/abi/symbols.txt");
    let Ok(symbols) = std::fs::read_to_string(symbols) else {
        return eprintln!("SKIPPED: this is not a checkout of the project, so there is no list of symbols");
    };
    let exported: BTreeSet<&str> = symbols.split_whitespace().filter(|word| word.starts_with("spattn_")).collect();
    let bindings = include_str!("../src/bindings.rs");
    let declared: BTreeSet<&str> =
        bindings.split("pub fn ").skip(1).filter_map(|text| text.split('(').next()).collect();
    assert!(exported.len() > 50);
    assert_eq!(exported, declared);
}

#[test]
fn the_library_answers() {
    #[cfg(feature = "load")]
    {
        let path = std::env::var("SPARSEATTN_LIBRARY").map(|path| std::ffi::CString::new(path).unwrap());
        unsafe { sparseattn_sys::load(path.ok().as_deref()).unwrap() };
    }
    let version = unsafe { sparseattn_sys::spattn_version() };
    assert_eq!(version / 10000, sparseattn_sys::SPATTN_VERSION_MAJOR);
}

#[cfg(feature = "load")]
#[test]
fn what_is_no_library_is_an_error() {
    let error = unsafe { sparseattn_sys::load(Some(c_str("/nowhere/libsparseattn.so\0"))).unwrap_err() };
    assert!(matches!(error, sparseattn_sys::LoadError::NotFound(_)));
    assert!(error.to_string().contains("/nowhere/"), "{error}");
    let error = unsafe { sparseattn_sys::load(Some(c_str("libc.so.6\0"))).unwrap_err() };
    assert_eq!(error, sparseattn_sys::LoadError::Missing("spattn_version"));
    let error = sparseattn_sys::LoadError::Version { needs: 200, have: 100 };
    assert_eq!(error.to_string(), "libsparseattn: needs 0.2, have 0.1");
}

#[cfg(feature = "load")]
fn c_str(text: &str) -> &std::ffi::CStr {
    std::ffi::CStr::from_bytes_with_nul(text.as_bytes()).unwrap()
}

// SPDX-License-Identifier: MIT
// Written by ./generate from sparseattn.h.

pub const SPATTN_VERSION_MAJOR: u32 = 0;
pub const SPATTN_VERSION_MINOR: u32 = 1;
pub const SPATTN_VERSION_PATCH: u32 = 0;
pub const SPATTN_ABI: u32 = 0;
pub type spattn_status = i32;
pub type spattn_enum = i32;
pub type spattn_stream = *mut ::core::ffi::c_void;
pub const SPATTN_CPU: spattn_device_type = 1;
pub const SPATTN_CUDA: spattn_device_type = 2;
pub const SPATTN_CUDA_HOST: spattn_device_type = 3;
pub const SPATTN_CUDA_MANAGED: spattn_device_type = 13;
pub type spattn_device_type = ::core::ffi::c_uint;
pub const SPATTN_INT: spattn_dtype_code = 0;
pub const SPATTN_UINT: spattn_dtype_code = 1;
pub const SPATTN_FLOAT: spattn_dtype_code = 2;
pub const SPATTN_BFLOAT: spattn_dtype_code = 4;
pub const SPATTN_BOOL: spattn_dtype_code = 6;
pub const SPATTN_FLOAT8_E4M3FN: spattn_dtype_code = 10;
pub type spattn_dtype_code = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_device {
    pub type_: i32,
    pub index: i32,
}
#[test]
fn bindgen_test_layout_spattn_device() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_device> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_device>(), 8usize, "Size of spattn_device");
    assert_eq!(::core::mem::align_of::<spattn_device>(), 4usize, "Alignment of spattn_device");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).type_) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_device::type_"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).index) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_device::index"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_dtype {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}
#[test]
fn bindgen_test_layout_spattn_dtype() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_dtype> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_dtype>(), 4usize, "Size of spattn_dtype");
    assert_eq!(::core::mem::align_of::<spattn_dtype>(), 2usize, "Alignment of spattn_dtype");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).code) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_dtype::code"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).bits) as usize - ptr as usize },
        1usize,
        "Offset of field: spattn_dtype::bits"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).lanes) as usize - ptr as usize },
        2usize,
        "Offset of field: spattn_dtype::lanes"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_tensor {
    pub data: *mut ::core::ffi::c_void,
    pub device: spattn_device,
    pub ndim: i32,
    pub dtype: spattn_dtype,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}
#[test]
fn bindgen_test_layout_spattn_tensor() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_tensor> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_tensor>(), 48usize, "Size of spattn_tensor");
    assert_eq!(::core::mem::align_of::<spattn_tensor>(), 8usize, "Alignment of spattn_tensor");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).data) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_tensor::data"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).device) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_tensor::device"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).ndim) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_tensor::ndim"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dtype) as usize - ptr as usize },
        20usize,
        "Offset of field: spattn_tensor::dtype"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).shape) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_tensor::shape"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).strides) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_tensor::strides"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).byte_offset) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_tensor::byte_offset"
    );
}
pub const SPATTN_OK: spattn_status_codes = 0;
pub const SPATTN_E_ARGUMENT: spattn_status_codes = 1000;
pub const SPATTN_E_NULL: spattn_status_codes = 1001;
pub const SPATTN_E_STRUCT_SIZE: spattn_status_codes = 1002;
pub const SPATTN_E_SHAPE: spattn_status_codes = 1003;
pub const SPATTN_E_DTYPE: spattn_status_codes = 1004;
pub const SPATTN_E_DEVICE: spattn_status_codes = 1005;
pub const SPATTN_E_LAYOUT: spattn_status_codes = 1006;
pub const SPATTN_E_RANGE: spattn_status_codes = 1007;
pub const SPATTN_E_WORKSPACE: spattn_status_codes = 1008;
pub const SPATTN_E_STATE: spattn_status_codes = 1009;
pub const SPATTN_E_UNSUPPORTED: spattn_status_codes = 2000;
pub const SPATTN_E_NO_KERNEL: spattn_status_codes = 2001;
pub const SPATTN_E_NO_GPU: spattn_status_codes = 2002;
pub const SPATTN_E_DRIVER_TOO_OLD: spattn_status_codes = 2003;
pub const SPATTN_E_UNKNOWN_FIELD: spattn_status_codes = 2004;
pub const SPATTN_E_RESOURCE: spattn_status_codes = 3000;
pub const SPATTN_E_HOST_MEMORY: spattn_status_codes = 3001;
pub const SPATTN_E_DEVICE_MEMORY: spattn_status_codes = 3002;
pub const SPATTN_E_CUDA: spattn_status_codes = 4000;
pub const SPATTN_E_CAPTURE: spattn_status_codes = 4001;
pub const SPATTN_E_FORMAT: spattn_status_codes = 5000;
pub const SPATTN_E_CALLBACK: spattn_status_codes = 6000;
pub const SPATTN_E_CANCELLED: spattn_status_codes = 6001;
pub const SPATTN_E_INTERNAL: spattn_status_codes = 9000;
pub type spattn_status_codes = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_error {
    pub struct_size: u32,
    pub status: spattn_status,
    pub native_code: i32,
    pub line: i32,
    pub message: *const ::core::ffi::c_char,
    pub argument: *const ::core::ffi::c_char,
    pub function: *const ::core::ffi::c_char,
}
#[test]
fn bindgen_test_layout_spattn_error() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_error> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_error>(), 40usize, "Size of spattn_error");
    assert_eq!(::core::mem::align_of::<spattn_error>(), 8usize, "Alignment of spattn_error");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_error::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).status) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_error::status"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).native_code) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_error::native_code"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).line) as usize - ptr as usize },
        12usize,
        "Offset of field: spattn_error::line"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).message) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_error::message"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).argument) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_error::argument"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).function) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_error::function"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_context {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_pattern {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_plan {
    _unused: [u8; 0],
}
pub const SPATTN_LOG_OFF: spattn_log_level = 0;
pub const SPATTN_LOG_ERROR: spattn_log_level = 1;
pub const SPATTN_LOG_INFO: spattn_log_level = 2;
pub const SPATTN_LOG_DEBUG: spattn_log_level = 3;
pub type spattn_log_level = ::core::ffi::c_uint;
pub type spattn_log_fn = ::core::option::Option<
    unsafe extern "C" fn(user: *mut ::core::ffi::c_void, level: spattn_enum, text: *const ::core::ffi::c_char),
>;
pub type spattn_alloc_fn = ::core::option::Option<
    unsafe extern "C" fn(
        user: *mut ::core::ffi::c_void,
        device: spattn_device,
        bytes: usize,
        align: usize,
        stream: spattn_stream,
    ) -> *mut ::core::ffi::c_void,
>;
pub type spattn_free_fn = ::core::option::Option<
    unsafe extern "C" fn(
        user: *mut ::core::ffi::c_void,
        device: spattn_device,
        memory: *mut ::core::ffi::c_void,
        bytes: usize,
        stream: spattn_stream,
    ),
>;
pub type spattn_parallel_for_fn = ::core::option::Option<
    unsafe extern "C" fn(
        user: *mut ::core::ffi::c_void,
        tasks: i64,
        body: ::core::option::Option<unsafe extern "C" fn(argument: *mut ::core::ffi::c_void, task: i64)>,
        argument: *mut ::core::ffi::c_void,
    ) -> i32,
>;
pub type spattn_cancel_fn = ::core::option::Option<unsafe extern "C" fn(user: *mut ::core::ffi::c_void) -> i32>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_context_options {
    pub struct_size: u32,
    pub flags: u32,
    pub device: spattn_device,
    pub alloc: spattn_alloc_fn,
    pub free: spattn_free_fn,
    pub alloc_user: *mut ::core::ffi::c_void,
    pub log: spattn_log_fn,
    pub log_user: *mut ::core::ffi::c_void,
    pub log_level: spattn_enum,
    pub cpu_threads: i32,
    pub parallel_for: spattn_parallel_for_fn,
    pub parallel_for_user: *mut ::core::ffi::c_void,
    pub plan_cache: i64,
    pub cancel: spattn_cancel_fn,
    pub cancel_user: *mut ::core::ffi::c_void,
}
#[test]
fn bindgen_test_layout_spattn_context_options() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_context_options> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_context_options>(), 104usize, "Size of spattn_context_options");
    assert_eq!(::core::mem::align_of::<spattn_context_options>(), 8usize, "Alignment of spattn_context_options");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_context_options::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_context_options::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).device) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_context_options::device"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).alloc) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_context_options::alloc"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).free) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_context_options::free"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).alloc_user) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_context_options::alloc_user"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).log) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_context_options::log"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).log_user) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_context_options::log_user"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).log_level) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_context_options::log_level"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).cpu_threads) as usize - ptr as usize },
        60usize,
        "Offset of field: spattn_context_options::cpu_threads"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).parallel_for) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_context_options::parallel_for"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).parallel_for_user) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_context_options::parallel_for_user"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).plan_cache) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_context_options::plan_cache"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).cancel) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_context_options::cancel"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).cancel_user) as usize - ptr as usize },
        96usize,
        "Offset of field: spattn_context_options::cancel_user"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_bigbird {
    pub struct_size: u32,
    pub flags: u32,
    pub block: i64,
    pub window_blocks: i64,
    pub global_blocks: i64,
    pub random_blocks: i64,
    pub seed: u64,
}
#[test]
fn bindgen_test_layout_spattn_bigbird() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_bigbird> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_bigbird>(), 48usize, "Size of spattn_bigbird");
    assert_eq!(::core::mem::align_of::<spattn_bigbird>(), 8usize, "Alignment of spattn_bigbird");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_bigbird::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_bigbird::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).block) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_bigbird::block"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).window_blocks) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_bigbird::window_blocks"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).global_blocks) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_bigbird::global_blocks"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).random_blocks) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_bigbird::random_blocks"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seed) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_bigbird::seed"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_xref {
    pub struct_size: u32,
    pub flags: u32,
    pub sinks: i64,
    pub window: i64,
    pub budget: i64,
    pub links: i64,
    pub ngram_keys: i64,
    pub symbol_before: i64,
    pub symbol_after: i64,
    pub look_back: i64,
    pub stop_ratio: i64,
}
#[test]
fn bindgen_test_layout_spattn_xref() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_xref> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_xref>(), 80usize, "Size of spattn_xref");
    assert_eq!(::core::mem::align_of::<spattn_xref>(), 8usize, "Alignment of spattn_xref");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_xref::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_xref::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).sinks) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_xref::sinks"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).window) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_xref::window"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).budget) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_xref::budget"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).links) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_xref::links"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).ngram_keys) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_xref::ngram_keys"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).symbol_before) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_xref::symbol_before"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).symbol_after) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_xref::symbol_after"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).look_back) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_xref::look_back"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).stop_ratio) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_xref::stop_ratio"
    );
}
pub const SPATTN_BORROW: spattn_pattern_flags = 1;
pub const SPATTN_TRUST: spattn_pattern_flags = 2;
pub type spattn_pattern_flags = ::core::ffi::c_uint;
pub type spattn_keep_fn =
    ::core::option::Option<unsafe extern "C" fn(user: *mut ::core::ffi::c_void, head: i64, q: i64, k: i64) -> i32>;
pub const SPATTN_EXTENT_Q_OFFSET: spattn_extent_flags = 1;
pub type spattn_extent_flags = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_extent {
    pub struct_size: u32,
    pub flags: u32,
    pub batch: i64,
    pub heads: i64,
    pub seq_q: i64,
    pub seq_k: i64,
    pub q_offset: i64,
    pub block_q: i64,
    pub block_k: i64,
    pub cancel: spattn_cancel_fn,
    pub cancel_user: *mut ::core::ffi::c_void,
}
#[test]
fn bindgen_test_layout_spattn_extent() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_extent> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_extent>(), 80usize, "Size of spattn_extent");
    assert_eq!(::core::mem::align_of::<spattn_extent>(), 8usize, "Alignment of spattn_extent");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_extent::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_extent::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).batch) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_extent::batch"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).heads) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_extent::heads"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seq_q) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_extent::seq_q"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seq_k) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_extent::seq_k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).q_offset) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_extent::q_offset"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).block_q) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_extent::block_q"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).block_k) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_extent::block_k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).cancel) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_extent::cancel"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).cancel_user) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_extent::cancel_user"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_stats {
    pub struct_size: u32,
    pub flags: u32,
    pub pairs: f64,
    pub visited: f64,
    pub density: f64,
    pub blocks_full: i64,
    pub blocks_partial: i64,
    pub blocks_empty: i64,
    pub row_min: i64,
    pub row_max: i64,
    pub rows_empty: i64,
    pub layout_bytes: i64,
    pub flops_forward: f64,
    pub flops_backward: f64,
    pub bytes_forward: f64,
    pub bytes_backward: f64,
}
#[test]
fn bindgen_test_layout_spattn_stats() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_stats> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_stats>(), 120usize, "Size of spattn_stats");
    assert_eq!(::core::mem::align_of::<spattn_stats>(), 8usize, "Alignment of spattn_stats");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_stats::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_stats::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).pairs) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_stats::pairs"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).visited) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_stats::visited"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).density) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_stats::density"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).blocks_full) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_stats::blocks_full"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).blocks_partial) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_stats::blocks_partial"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).blocks_empty) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_stats::blocks_empty"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).row_min) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_stats::row_min"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).row_max) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_stats::row_max"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).rows_empty) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_stats::rows_empty"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).layout_bytes) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_stats::layout_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flops_forward) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_stats::flops_forward"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flops_backward) as usize - ptr as usize },
        96usize,
        "Offset of field: spattn_stats::flops_backward"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).bytes_forward) as usize - ptr as usize },
        104usize,
        "Offset of field: spattn_stats::bytes_forward"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).bytes_backward) as usize - ptr as usize },
        112usize,
        "Offset of field: spattn_stats::bytes_backward"
    );
}
pub const SPATTN_BSHD: spattn_axes = 0;
pub const SPATTN_BHSD: spattn_axes = 1;
pub const SPATTN_THD: spattn_axes = 2;
pub type spattn_axes = ::core::ffi::c_uint;
pub const SPATTN_PLAN_BACKWARD: spattn_plan_flags = 1;
pub const SPATTN_PLAN_DETERMINISTIC: spattn_plan_flags = 2;
pub const SPATTN_PLAN_REFERENCE: spattn_plan_flags = 4;
pub const SPATTN_PLAN_Q_OFFSET: spattn_plan_flags = 8;
pub const SPATTN_PLAN_SCALE: spattn_plan_flags = 16;
pub const SPATTN_PLAN_VALUE_IN_KEY: spattn_plan_flags = 32;
pub const SPATTN_PLAN_SINK_LOGITS: spattn_plan_flags = 64;
pub const SPATTN_PLAN_TF32: spattn_plan_flags = 128;
pub const SPATTN_PLAN_STARTS: spattn_plan_flags = 256;
pub const SPATTN_PLAN_PARENTS: spattn_plan_flags = 512;
pub type spattn_plan_flags = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_problem {
    pub struct_size: u32,
    pub flags: u32,
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    pub seq_q: i64,
    pub seq_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub dtype: spattn_dtype,
    pub axes: spattn_enum,
    pub scale: f64,
    pub q_offset: i64,
    pub softcap: f64,
    pub page_size: i64,
    pub cache_dtype: spattn_dtype,
    pub reserved: i32,
}
#[test]
fn bindgen_test_layout_spattn_problem() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_problem> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_problem>(), 112usize, "Size of spattn_problem");
    assert_eq!(::core::mem::align_of::<spattn_problem>(), 8usize, "Alignment of spattn_problem");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_problem::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_problem::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).batch) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_problem::batch"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).heads_q) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_problem::heads_q"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).heads_kv) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_problem::heads_kv"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seq_q) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_problem::seq_q"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seq_k) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_problem::seq_k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).head_dim) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_problem::head_dim"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).head_dim_v) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_problem::head_dim_v"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dtype) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_problem::dtype"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).axes) as usize - ptr as usize },
        68usize,
        "Offset of field: spattn_problem::axes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).scale) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_problem::scale"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).q_offset) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_problem::q_offset"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).softcap) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_problem::softcap"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).page_size) as usize - ptr as usize },
        96usize,
        "Offset of field: spattn_problem::page_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).cache_dtype) as usize - ptr as usize },
        104usize,
        "Offset of field: spattn_problem::cache_dtype"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).reserved) as usize - ptr as usize },
        108usize,
        "Offset of field: spattn_problem::reserved"
    );
}
pub const SPATTN_OP_FORWARD: spattn_op = 0;
pub const SPATTN_OP_BACKWARD: spattn_op = 1;
pub type spattn_op = ::core::ffi::c_uint;
pub const SPATTN_FORWARD_SAME_STEP: spattn_forward_flags = 1;
pub type spattn_forward_flags = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_forward_args {
    pub struct_size: u32,
    pub flags: u32,
    pub stream: spattn_stream,
    pub q: *const spattn_tensor,
    pub k: *const spattn_tensor,
    pub v: *const spattn_tensor,
    pub out: *const spattn_tensor,
    pub lse: *const spattn_tensor,
    pub max_logits: *const spattn_tensor,
    pub indices: *const spattn_tensor,
    pub index_counts: *const spattn_tensor,
    pub workspace: *mut ::core::ffi::c_void,
    pub workspace_bytes: usize,
    pub sink_logits: *const spattn_tensor,
    pub starts: *const spattn_tensor,
    pub page_table: *const spattn_tensor,
    pub query_offsets: *const spattn_tensor,
    pub k_scales: *const spattn_tensor,
    pub v_scales: *const spattn_tensor,
    pub parents: *const spattn_tensor,
    pub q_scales: *const spattn_tensor,
}
#[test]
fn bindgen_test_layout_spattn_forward_args() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_forward_args> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_forward_args>(), 160usize, "Size of spattn_forward_args");
    assert_eq!(::core::mem::align_of::<spattn_forward_args>(), 8usize, "Alignment of spattn_forward_args");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_forward_args::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_forward_args::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).stream) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_forward_args::stream"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).q) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_forward_args::q"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_forward_args::k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_forward_args::v"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).out) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_forward_args::out"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).lse) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_forward_args::lse"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).max_logits) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_forward_args::max_logits"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).indices) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_forward_args::indices"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).index_counts) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_forward_args::index_counts"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).workspace) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_forward_args::workspace"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).workspace_bytes) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_forward_args::workspace_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).sink_logits) as usize - ptr as usize },
        96usize,
        "Offset of field: spattn_forward_args::sink_logits"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).starts) as usize - ptr as usize },
        104usize,
        "Offset of field: spattn_forward_args::starts"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).page_table) as usize - ptr as usize },
        112usize,
        "Offset of field: spattn_forward_args::page_table"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).query_offsets) as usize - ptr as usize },
        120usize,
        "Offset of field: spattn_forward_args::query_offsets"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k_scales) as usize - ptr as usize },
        128usize,
        "Offset of field: spattn_forward_args::k_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v_scales) as usize - ptr as usize },
        136usize,
        "Offset of field: spattn_forward_args::v_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).parents) as usize - ptr as usize },
        144usize,
        "Offset of field: spattn_forward_args::parents"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).q_scales) as usize - ptr as usize },
        152usize,
        "Offset of field: spattn_forward_args::q_scales"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_backward_args {
    pub struct_size: u32,
    pub flags: u32,
    pub stream: spattn_stream,
    pub q: *const spattn_tensor,
    pub k: *const spattn_tensor,
    pub v: *const spattn_tensor,
    pub out: *const spattn_tensor,
    pub lse: *const spattn_tensor,
    pub dout: *const spattn_tensor,
    pub dlse: *const spattn_tensor,
    pub dq: *const spattn_tensor,
    pub dk: *const spattn_tensor,
    pub dv: *const spattn_tensor,
    pub indices: *const spattn_tensor,
    pub index_counts: *const spattn_tensor,
    pub workspace: *mut ::core::ffi::c_void,
    pub workspace_bytes: usize,
    pub sink_logits: *const spattn_tensor,
    pub dsink_logits: *const spattn_tensor,
    pub q_scales: *const spattn_tensor,
    pub k_scales: *const spattn_tensor,
    pub v_scales: *const spattn_tensor,
}
#[test]
fn bindgen_test_layout_spattn_backward_args() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_backward_args> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_backward_args>(), 168usize, "Size of spattn_backward_args");
    assert_eq!(::core::mem::align_of::<spattn_backward_args>(), 8usize, "Alignment of spattn_backward_args");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_backward_args::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_backward_args::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).stream) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_backward_args::stream"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).q) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_backward_args::q"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_backward_args::k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_backward_args::v"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).out) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_backward_args::out"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).lse) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_backward_args::lse"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dout) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_backward_args::dout"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dlse) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_backward_args::dlse"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dq) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_backward_args::dq"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dk) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_backward_args::dk"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dv) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_backward_args::dv"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).indices) as usize - ptr as usize },
        96usize,
        "Offset of field: spattn_backward_args::indices"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).index_counts) as usize - ptr as usize },
        104usize,
        "Offset of field: spattn_backward_args::index_counts"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).workspace) as usize - ptr as usize },
        112usize,
        "Offset of field: spattn_backward_args::workspace"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).workspace_bytes) as usize - ptr as usize },
        120usize,
        "Offset of field: spattn_backward_args::workspace_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).sink_logits) as usize - ptr as usize },
        128usize,
        "Offset of field: spattn_backward_args::sink_logits"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).dsink_logits) as usize - ptr as usize },
        136usize,
        "Offset of field: spattn_backward_args::dsink_logits"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).q_scales) as usize - ptr as usize },
        144usize,
        "Offset of field: spattn_backward_args::q_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k_scales) as usize - ptr as usize },
        152usize,
        "Offset of field: spattn_backward_args::k_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v_scales) as usize - ptr as usize },
        160usize,
        "Offset of field: spattn_backward_args::v_scales"
    );
}
pub const SPATTN_APPEND_SCALES: spattn_append_flags = 1;
pub type spattn_append_flags = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_cache_append_args {
    pub struct_size: u32,
    pub flags: u32,
    pub stream: spattn_stream,
    pub k_new: *const spattn_tensor,
    pub v_new: *const spattn_tensor,
    pub k: *const spattn_tensor,
    pub v: *const spattn_tensor,
    pub starts: *const spattn_tensor,
    pub counts: *const spattn_tensor,
    pub page_table: *const spattn_tensor,
    pub query_offsets: *const spattn_tensor,
    pub k_scales: *const spattn_tensor,
    pub v_scales: *const spattn_tensor,
}
#[test]
fn bindgen_test_layout_spattn_cache_append_args() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_cache_append_args> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_cache_append_args>(), 96usize, "Size of spattn_cache_append_args");
    assert_eq!(::core::mem::align_of::<spattn_cache_append_args>(), 8usize, "Alignment of spattn_cache_append_args");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_cache_append_args::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_cache_append_args::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).stream) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_cache_append_args::stream"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k_new) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_cache_append_args::k_new"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v_new) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_cache_append_args::v_new"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_cache_append_args::k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_cache_append_args::v"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).starts) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_cache_append_args::starts"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).counts) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_cache_append_args::counts"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).page_table) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_cache_append_args::page_table"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).query_offsets) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_cache_append_args::query_offsets"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k_scales) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_cache_append_args::k_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v_scales) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_cache_append_args::v_scales"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_sharding {
    _unused: [u8; 0],
}
pub const SPATTN_SPLIT_CONTIGUOUS: spattn_split = 0;
pub const SPATTN_SPLIT_ZIGZAG: spattn_split = 1;
pub type spattn_split = ::core::ffi::c_uint;
pub const SPATTN_SHARDING_SCALES: spattn_sharding_flags = 1;
pub type spattn_sharding_flags = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_sharding_options {
    pub struct_size: u32,
    pub flags: u32,
    pub ranks: i32,
    pub rank: i32,
    pub split: spattn_enum,
    pub reserved: i32,
    pub ranges: *const spattn_tensor,
}
#[test]
fn bindgen_test_layout_spattn_sharding_options() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_sharding_options> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_sharding_options>(), 32usize, "Size of spattn_sharding_options");
    assert_eq!(::core::mem::align_of::<spattn_sharding_options>(), 8usize, "Alignment of spattn_sharding_options");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_sharding_options::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_sharding_options::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).ranks) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_sharding_options::ranks"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).rank) as usize - ptr as usize },
        12usize,
        "Offset of field: spattn_sharding_options::rank"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).split) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_sharding_options::split"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).reserved) as usize - ptr as usize },
        20usize,
        "Offset of field: spattn_sharding_options::reserved"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).ranges) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_sharding_options::ranges"
    );
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_peer {
    pub struct_size: u32,
    pub flags: u32,
    pub tokens_sent: i64,
    pub tokens_received: i64,
    pub sent_offset: u64,
    pub sent_bytes: u64,
    pub received_offset: u64,
    pub received_bytes: u64,
    pub back_sent_offset: u64,
    pub back_sent_bytes: u64,
    pub back_received_offset: u64,
    pub back_received_bytes: u64,
}
#[test]
fn bindgen_test_layout_spattn_peer() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_peer> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_peer>(), 88usize, "Size of spattn_peer");
    assert_eq!(::core::mem::align_of::<spattn_peer>(), 8usize, "Alignment of spattn_peer");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_peer::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_peer::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).tokens_sent) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_peer::tokens_sent"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).tokens_received) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_peer::tokens_received"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).sent_offset) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_peer::sent_offset"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).sent_bytes) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_peer::sent_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).received_offset) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_peer::received_offset"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).received_bytes) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_peer::received_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).back_sent_offset) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_peer::back_sent_offset"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).back_sent_bytes) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_peer::back_sent_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).back_received_offset) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_peer::back_received_offset"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).back_received_bytes) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_peer::back_received_bytes"
    );
}
pub const SPATTN_EXCHANGE_PACK: spattn_exchange_step = 0;
pub const SPATTN_EXCHANGE_UNPACK: spattn_exchange_step = 1;
pub const SPATTN_EXCHANGE_PACK_GRADIENTS: spattn_exchange_step = 2;
pub const SPATTN_EXCHANGE_ADD_GRADIENTS: spattn_exchange_step = 3;
pub type spattn_exchange_step = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spattn_exchange_args {
    pub struct_size: u32,
    pub flags: u32,
    pub stream: spattn_stream,
    pub k: *const spattn_tensor,
    pub v: *const spattn_tensor,
    pub seen_k: *const spattn_tensor,
    pub seen_v: *const spattn_tensor,
    pub buffer: *mut ::core::ffi::c_void,
    pub buffer_bytes: usize,
    pub k_scales: *const spattn_tensor,
    pub v_scales: *const spattn_tensor,
    pub seen_k_scales: *const spattn_tensor,
    pub seen_v_scales: *const spattn_tensor,
}
#[test]
fn bindgen_test_layout_spattn_exchange_args() {
    const UNINIT: ::core::mem::MaybeUninit<spattn_exchange_args> = ::core::mem::MaybeUninit::uninit();
    let ptr = UNINIT.as_ptr();
    assert_eq!(::core::mem::size_of::<spattn_exchange_args>(), 96usize, "Size of spattn_exchange_args");
    assert_eq!(::core::mem::align_of::<spattn_exchange_args>(), 8usize, "Alignment of spattn_exchange_args");
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize },
        0usize,
        "Offset of field: spattn_exchange_args::struct_size"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).flags) as usize - ptr as usize },
        4usize,
        "Offset of field: spattn_exchange_args::flags"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).stream) as usize - ptr as usize },
        8usize,
        "Offset of field: spattn_exchange_args::stream"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k) as usize - ptr as usize },
        16usize,
        "Offset of field: spattn_exchange_args::k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v) as usize - ptr as usize },
        24usize,
        "Offset of field: spattn_exchange_args::v"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seen_k) as usize - ptr as usize },
        32usize,
        "Offset of field: spattn_exchange_args::seen_k"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seen_v) as usize - ptr as usize },
        40usize,
        "Offset of field: spattn_exchange_args::seen_v"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).buffer) as usize - ptr as usize },
        48usize,
        "Offset of field: spattn_exchange_args::buffer"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).buffer_bytes) as usize - ptr as usize },
        56usize,
        "Offset of field: spattn_exchange_args::buffer_bytes"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).k_scales) as usize - ptr as usize },
        64usize,
        "Offset of field: spattn_exchange_args::k_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).v_scales) as usize - ptr as usize },
        72usize,
        "Offset of field: spattn_exchange_args::v_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seen_k_scales) as usize - ptr as usize },
        80usize,
        "Offset of field: spattn_exchange_args::seen_k_scales"
    );
    assert_eq!(
        unsafe { ::core::ptr::addr_of!((*ptr).seen_v_scales) as usize - ptr as usize },
        88usize,
        "Offset of field: spattn_exchange_args::seen_v_scales"
    );
}
functions! {
    pub fn spattn_version() -> u32;
    pub fn spattn_abi() -> u32;
    pub fn spattn_build_json() -> *const ::core::ffi::c_char;
    pub fn spattn_status_name(status: spattn_status) -> *const ::core::ffi::c_char;
    pub fn spattn_last_error_text() -> *const ::core::ffi::c_char;
    pub fn spattn_last_error(result: *mut spattn_error) -> spattn_status;
    pub fn spattn_context_create(
        options: *const spattn_context_options,
        result: *mut *mut spattn_context,
    ) -> spattn_status;
    pub fn spattn_context_retain(context: *const spattn_context);
    pub fn spattn_context_release(context: *const spattn_context);
    pub fn spattn_device_count(result: *mut i32) -> spattn_status;
    pub fn spattn_pattern_retain(pattern: *const spattn_pattern);
    pub fn spattn_pattern_release(pattern: *const spattn_pattern);
    pub fn spattn_pattern_full(result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_causal(result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_window(left: i64, right: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_sink(tokens: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_block_diagonal(block: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_documents(
        cu_seqlens: *const spattn_tensor,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_dilated(
        left: i64,
        right: i64,
        dilation: i64,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_strided(stride: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_landmark(block: i64, landmarks: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_fixed(block: i64, landmarks: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_logsparse(result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_residue(modulus: i64, offset: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_global_keys(
        positions: *const spattn_tensor,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_global_tokens(
        positions: *const spattn_tensor,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_tree(parents: *const spattn_tensor, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_bigbird(params: *const spattn_bigbird, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_xref(
        token_ids: *const spattn_tensor,
        symbols: *const spattn_tensor,
        params: *const spattn_xref,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_xref_extend(
        pattern: *const spattn_pattern,
        token_ids: *const spattn_tensor,
        symbols: *const spattn_tensor,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_csr(
        row_ptr: *const spattn_tensor,
        col_idx: *const spattn_tensor,
        seq_k: i64,
        flags: u32,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_bsr(
        row_ptr: *const spattn_tensor,
        col_idx: *const spattn_tensor,
        block_q: i64,
        block_k: i64,
        seq_q: i64,
        seq_k: i64,
        flags: u32,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_mask(
        mask: *const spattn_tensor,
        flags: u32,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_predicate(
        keep: spattn_keep_fn,
        user: *mut ::core::ffi::c_void,
        heads: i64,
        seq_q: i64,
        seq_k: i64,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_runtime_tokens(max_tokens_per_row: i64, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_runtime_blocks(
        block_q: i64,
        block_k: i64,
        max_blocks_per_row: i64,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_union(
        parts: *const *const spattn_pattern,
        count: usize,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_intersection(
        parts: *const *const spattn_pattern,
        count: usize,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_difference(
        a: *const spattn_pattern,
        b: *const spattn_pattern,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_transpose(pattern: *const spattn_pattern, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_per_head(
        parts: *const *const spattn_pattern,
        count: usize,
        part_of_head: *const i32,
        heads: usize,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_per_batch(
        parts: *const *const spattn_pattern,
        count: usize,
        part_of_batch: *const i32,
        batch: usize,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_grid(
        sizes: *const i64,
        tile: *const i64,
        parts: *const *const spattn_pattern,
        axes: usize,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_per_document(
        inner: *const spattn_pattern,
        cu_q: *const spattn_tensor,
        cu_k: *const spattn_tensor,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_rows(
        inner: *const spattn_pattern,
        ranges: *const spattn_tensor,
        seq_q: i64,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_columns(
        inner: *const spattn_pattern,
        ranges: *const spattn_tensor,
        seq_k: i64,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_parse(text: *const ::core::ffi::c_char, result: *mut *mut spattn_pattern) -> spattn_status;
    pub fn spattn_pattern_print(
        pattern: *const spattn_pattern,
        buffer: *mut ::core::ffi::c_char,
        capacity: usize,
        needed: *mut usize,
    ) -> spattn_status;
    pub fn spattn_pattern_equal(a: *const spattn_pattern, b: *const spattn_pattern) -> i32;
    pub fn spattn_pattern_hash(pattern: *const spattn_pattern, result: *mut u64) -> spattn_status;
    pub fn spattn_pattern_save(
        pattern: *const spattn_pattern,
        buffer: *mut ::core::ffi::c_void,
        capacity: usize,
        needed: *mut usize,
    ) -> spattn_status;
    pub fn spattn_pattern_load(
        bytes: *const ::core::ffi::c_void,
        size: usize,
        result: *mut *mut spattn_pattern,
    ) -> spattn_status;
    pub fn spattn_pattern_stats(
        pattern: *const spattn_pattern,
        extent: *const spattn_extent,
        result: *mut spattn_stats,
    ) -> spattn_status;
    pub fn spattn_pattern_keeps(
        pattern: *const spattn_pattern,
        extent: *const spattn_extent,
        batch: i64,
        head: i64,
        q: i64,
        k: i64,
        result: *mut i32,
    ) -> spattn_status;
    pub fn spattn_pattern_to_mask(
        pattern: *const spattn_pattern,
        extent: *const spattn_extent,
        out: *const spattn_tensor,
    ) -> spattn_status;
    pub fn spattn_pattern_to_image(
        pattern: *const spattn_pattern,
        extent: *const spattn_extent,
        head: i64,
        coverage: *const spattn_tensor,
    ) -> spattn_status;
    pub fn spattn_pattern_to_csr(
        pattern: *const spattn_pattern,
        extent: *const spattn_extent,
        head: i64,
        row_ptr: *const spattn_tensor,
        col_idx: *const spattn_tensor,
        nnz: *mut i64,
    ) -> spattn_status;
    pub fn spattn_plan_create(
        context: *const spattn_context,
        pattern: *const spattn_pattern,
        problem: *const spattn_problem,
        stream: spattn_stream,
        result: *mut *mut spattn_plan,
    ) -> spattn_status;
    pub fn spattn_plan_retain(plan: *const spattn_plan);
    pub fn spattn_plan_release(plan: *const spattn_plan);
    pub fn spattn_plan_workspace(
        plan: *const spattn_plan,
        op: spattn_enum,
        bytes: *mut usize,
        align: *mut usize,
    ) -> spattn_status;
    pub fn spattn_plan_stats(plan: *const spattn_plan, result: *mut spattn_stats) -> spattn_status;
    pub fn spattn_plan_kernel(plan: *const spattn_plan, op: spattn_enum) -> *const ::core::ffi::c_char;
    pub fn spattn_plan_explain(
        plan: *const spattn_plan,
        buffer: *mut ::core::ffi::c_char,
        capacity: usize,
        needed: *mut usize,
    ) -> spattn_status;
    pub fn spattn_plan_explain_all(
        plan: *const spattn_plan,
        buffer: *mut ::core::ffi::c_char,
        capacity: usize,
        needed: *mut usize,
    ) -> spattn_status;
    pub fn spattn_forward(plan: *const spattn_plan, args: *const spattn_forward_args) -> spattn_status;
    pub fn spattn_backward(plan: *const spattn_plan, args: *const spattn_backward_args) -> spattn_status;
    pub fn spattn_cache_append(
        context: *const spattn_context,
        problem: *const spattn_problem,
        args: *const spattn_cache_append_args,
    ) -> spattn_status;
    pub fn spattn_sharding_create(
        context: *const spattn_context,
        pattern: *const spattn_pattern,
        problem: *const spattn_problem,
        options: *const spattn_sharding_options,
        stream: spattn_stream,
        result: *mut *mut spattn_sharding,
    ) -> spattn_status;
    pub fn spattn_sharding_retain(sharding: *const spattn_sharding);
    pub fn spattn_sharding_release(sharding: *const spattn_sharding);
    pub fn spattn_sharding_plan(sharding: *const spattn_sharding, result: *mut *mut spattn_plan) -> spattn_status;
    pub fn spattn_sharding_ranges(
        sharding: *const spattn_sharding,
        rank: i32,
        ranges: *const spattn_tensor,
        count: *mut i64,
    ) -> spattn_status;
    pub fn spattn_sharding_seen(
        sharding: *const spattn_sharding,
        ranges: *const spattn_tensor,
        count: *mut i64,
        tokens: *mut i64,
    ) -> spattn_status;
    pub fn spattn_sharding_peer(sharding: *const spattn_sharding, rank: i32, result: *mut spattn_peer)
        -> spattn_status;
    pub fn spattn_sharding_buffers(
        sharding: *const spattn_sharding,
        sent_bytes: *mut usize,
        received_bytes: *mut usize,
    ) -> spattn_status;
    pub fn spattn_exchange(
        sharding: *const spattn_sharding,
        step: spattn_enum,
        args: *const spattn_exchange_args,
    ) -> spattn_status;
    pub fn spattn_kernel_count() -> i32;
    pub fn spattn_kernel_name(row: i32) -> *const ::core::ffi::c_char;
    pub fn spattn_kernel_runs_here(row: i32) -> i32;
}

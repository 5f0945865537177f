/* SPDX-License-Identifier: MIT
 *
 * What a handler needs of XLA's foreign function interface, declared once more.
 *
 * XLA promises the layout of these structs (xla/ffi/api/c_api.h of https://github.com/openxla/xla), so a handler is
 * compiled without its headers: the wheel needs no JAX to be built, and no compiler to be used. tests/test_jax.py
 * compiles a program that compares each offset and number with the header of the JAX that is installed.
 */
#ifndef SPARSEATTN_XLA_FFI_H
#define SPARSEATTN_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum xla_code { XLA_CANCELLED = 1, XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_UNIMPLEMENTED = 12,
                XLA_INTERNAL = 13 };
enum xla_dtype { XLA_S32 = 4, XLA_S64 = 5, XLA_U8 = 6, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16,
                 XLA_F8E4M3FN = 20 };
enum xla_extension_kind { XLA_METADATA = 1 };
enum xla_attribute_kind { XLA_ARRAY = 1 };

typedef struct xla_error xla_error;             /* XLA's own */
typedef struct xla_execution xla_execution;     /* XLA's own: the call as it runs */

typedef struct xla_extension {
    size_t struct_size;
    int32_t kind; /* xla_extension_kind */
    struct xla_extension* next;
} xla_extension;

typedef struct xla_version {
    size_t struct_size;
    xla_extension* extensions;
    int major, minor;
} xla_version;

typedef struct xla_metadata { /* a handler writes it when it is asked what it is */
    size_t struct_size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata* metadata;
} xla_metadata_extension;

typedef struct xla_buffer { /* dense, row-major */
    size_t struct_size;
    xla_extension* extensions;
    int32_t dtype; /* xla_dtype */
    void* data;
    int64_t rank;
    int64_t* sizes;
} xla_buffer;

typedef struct xla_span {
    const char* text; /* without a final 0 */
    size_t length;
} xla_span;

typedef struct xla_array {
    int32_t dtype; /* xla_dtype */
    size_t size;
    void* data;
} xla_array;

typedef struct xla_buffers {
    size_t struct_size;
    xla_extension* extensions;
    int64_t size;
    int32_t* kinds;
    xla_buffer** items;
} xla_buffers;

typedef struct xla_attributes { /* sorted by name */
    size_t struct_size;
    xla_extension* extensions;
    int64_t size;
    int32_t* kinds; /* xla_attribute_kind */
    xla_span** names;
    void** items;
} xla_attributes;

typedef struct xla_error_create {
    size_t struct_size;
    xla_extension* extensions;
    const char* message;
    int32_t code; /* xla_code */
} xla_error_create;

typedef struct xla_stream_get {
    size_t struct_size;
    xla_extension* extensions;
    xla_execution* execution;
    void* stream; /* out: a cudaStream_t */
} xla_stream_get;

typedef struct xla_memory_allocate {
    size_t struct_size;
    xla_extension* extensions;
    xla_execution* execution;
    size_t bytes, align;
    void* data; /* out */
} xla_memory_allocate;

typedef struct xla_memory_free {
    size_t struct_size;
    xla_extension* extensions;
    xla_execution* execution;
    size_t bytes;
    void* data;
} xla_memory_free;

typedef struct xla_device_get {
    size_t struct_size;
    xla_extension* extensions;
    xla_execution* execution;
    int32_t ordinal; /* out */
} xla_device_get;

typedef struct xla_api {
    size_t struct_size;
    xla_extension* extensions;
    xla_version version;
    const void* internal;
    xla_error* (*create_error)(xla_error_create*);
    void* before_stream[3];
    xla_error* (*get_stream)(xla_stream_get*);
    void* before_memory[4];
    xla_error* (*allocate_memory)(xla_memory_allocate*);
    xla_error* (*free_memory)(xla_memory_free*);
    void* before_device[6];
    xla_error* (*get_device)(xla_device_get*);
} xla_api;

typedef struct xla_call {
    size_t struct_size;
    xla_extension* extensions;
    const xla_api* api;
    xla_execution* execution;
    int32_t stage;
    xla_buffers operands, results;
    xla_attributes attributes;
} xla_call;

#endif

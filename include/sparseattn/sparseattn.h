/* SPDX-License-Identifier: MIT
 *
 * sparseattn.h - sparse attention behind a stable C ABI.
 *
 * A user says which keys each query may see (a pattern), binds it to shapes (a plan) and runs the plan many times.
 *
 *     pattern  ->  plan  ->  forward, backward
 *
 * Reading rules that hold for every declaration here:
 *   - Functions return spattn_status unless they cannot fail; results come last. On failure a result handle is set to
 *     NULL, result structs stay untouched, and spattn_last_error says which argument, what was given, what is accepted.
 *   - Handles are immutable once made and reference counted. A `const T*` handle may be used by many threads at once.
 *     Releasing NULL does nothing.
 *   - A sized struct starts with struct_size = sizeof(the struct). Zero is the default of every other field. A larger
 *     struct of a newer header is accepted as long as the tail that this library does not know is zero.
 *   - Tensors, strings and structs are borrowed for the call. Returned strings are static, thread-local or a handle's
 *     own, with which they go: never free.
 *   - Enumerators only name values; fields and parameters are int32_t, so new values never break an old caller.
 *   - [host]   touches no device.
 *     [setup]  may allocate, start threads, load kernels or synchronise.
 *     [launch] allocates nothing (but for plans with SPATTN_PLAN_REFERENCE; and a CPU context starts its threads with its
 *              first call); on a GPU it only enqueues work on `stream`.
 *
 * Chapters: 1 values, 2 status, 3 context, 4 pattern, 5 plan, 6 run, 7 several devices, 8 introspection.
 */
#ifndef SPARSEATTN_SPARSEATTN_H
#define SPARSEATTN_SPARSEATTN_H

#include <stddef.h>
#include <stdint.h>

#define SPATTN_VERSION_MAJOR 0
#define SPATTN_VERSION_MINOR 1
#define SPATTN_VERSION_PATCH 0
#define SPATTN_ABI 0 /* equals the number in the SONAME */

#if defined(SPATTN_CFFI)
#define SPATTN_API
#elif defined(__GNUC__)
#define SPATTN_API __attribute__((visibility("default")))
#else
#define SPATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. values -------------------------------------------------------------------------------------------------- */

typedef int32_t spattn_status; /* 0 is success; the thousands digit is the family */
typedef int32_t spattn_enum;   /* every enumerated field is this wide */
typedef void* spattn_stream;   /* a cudaStream_t; ignored on the CPU */

/* Byte for byte DLPack's DLDevice, DLDataType and DLTensor, so that a DLTensor* may be passed as it is. */
enum spattn_device_type { SPATTN_CPU = 1, SPATTN_CUDA = 2, SPATTN_CUDA_HOST = 3, SPATTN_CUDA_MANAGED = 13 };
enum spattn_dtype_code {
    SPATTN_INT = 0,
    SPATTN_UINT = 1,
    SPATTN_FLOAT = 2,
    SPATTN_BFLOAT = 4,
    SPATTN_BOOL = 6,
    SPATTN_FLOAT8_E4M3FN = 10 /* 8 bits. Up to 448, no infinity (arXiv:2209.05433) */
};

typedef struct spattn_device {
    int32_t type; /* spattn_device_type */
    int32_t index;
} spattn_device;

typedef struct spattn_dtype {
    uint8_t code; /* spattn_dtype_code */
    uint8_t bits;
    uint16_t lanes; /* must be 1 */
} spattn_dtype;

/* A view of somebody's memory. `data + byte_offset` must be aligned to the size of an element. */
typedef struct spattn_tensor {
    void* data;
    spattn_device device;
    int32_t ndim;
    spattn_dtype dtype;
    const int64_t* shape;
    const int64_t* strides; /* elements; NULL = compact, row-major; ignored on axes of size 1 */
    uint64_t byte_offset;
} spattn_tensor;

/* ---- 2. status  [host] ------------------------------------------------------------------------------------------ */

enum spattn_status_codes {
    SPATTN_OK = 0,
    SPATTN_E_ARGUMENT = 1000,    /* the caller passed something wrong */
    SPATTN_E_NULL = 1001,        /* a required pointer is NULL */
    SPATTN_E_STRUCT_SIZE = 1002, /* struct_size is smaller than the first release's struct */
    SPATTN_E_SHAPE = 1003,
    SPATTN_E_DTYPE = 1004,
    SPATTN_E_DEVICE = 1005,
    SPATTN_E_LAYOUT = 1006, /* strides, alignment or overlap */
    SPATTN_E_RANGE = 1007,
    SPATTN_E_WORKSPACE = 1008,
    SPATTN_E_STATE = 1009,
    SPATTN_E_UNSUPPORTED = 2000, /* legal, but not offered by this build on this machine */
    SPATTN_E_NO_KERNEL = 2001,
    SPATTN_E_NO_GPU = 2002,
    SPATTN_E_DRIVER_TOO_OLD = 2003,
    SPATTN_E_UNKNOWN_FIELD = 2004, /* a field of a newer header is set */
    SPATTN_E_RESOURCE = 3000,
    SPATTN_E_HOST_MEMORY = 3001,
    SPATTN_E_DEVICE_MEMORY = 3002,
    SPATTN_E_CUDA = 4000, /* native_code has the cudaError_t */
    SPATTN_E_CAPTURE = 4001,
    SPATTN_E_FORMAT = 5000, /* a text or bytes that cannot be read */
    SPATTN_E_CALLBACK = 6000,
    SPATTN_E_CANCELLED = 6001, /* the cancel of a context or an extent ended a call */
    SPATTN_E_INTERNAL = 9000
};

typedef struct spattn_error {
    uint32_t struct_size;
    spattn_status status;
    int32_t native_code; /* cudaError_t where status is 4xxx, else 0 */
    int32_t line;        /* of the library's source, for bug reports */
    const char* message; /* what was wrong, what was given, what is accepted */
    const char* argument; /* "q", "problem.head_dim", ... or "" */
    const char* function; /* the public function that failed */
} spattn_error;

SPATTN_API uint32_t spattn_version(void); /* of the library: major * 10000 + minor * 100 + patch */
SPATTN_API uint32_t spattn_abi(void);
SPATTN_API const char* spattn_build_json(void); /* compiler, kernels' architectures, features: one JSON object */
SPATTN_API const char* spattn_status_name(spattn_status status); /* "SPATTN_E_SHAPE"; "SPATTN_E_UNKNOWN" otherwise */

/* The last failure on this thread. A success leaves it as it was. Never NULL. The next failure replaces the texts, and
 * what was returned before then points nowhere: ask in a statement after the call, not beside it among the arguments of
 * one printf, whose order C leaves open. */
SPATTN_API const char* spattn_last_error_text(void);
SPATTN_API spattn_status spattn_last_error(spattn_error* result);

/* ---- 3. context  [setup] ---------------------------------------------------------------------------------------- */

typedef struct spattn_context spattn_context;
typedef struct spattn_pattern spattn_pattern;
typedef struct spattn_plan spattn_plan;

/* Callbacks may come from any thread, must not unwind and must not call back into the object that calls them. */
enum spattn_log_level { SPATTN_LOG_OFF = 0, SPATTN_LOG_ERROR = 1, SPATTN_LOG_INFO = 2, SPATTN_LOG_DEBUG = 3 };
typedef void (*spattn_log_fn)(void* user, spattn_enum level, const char* text);
typedef void* (*spattn_alloc_fn)(void* user, spattn_device device, size_t bytes, size_t align, spattn_stream stream);
typedef void (*spattn_free_fn)(void* user, spattn_device device, void* memory, size_t bytes, spattn_stream stream);

/* Runs body(argument, t) once for every t in [0, tasks), on any threads, and returns when all are done: 0, or another
 * number to fail the call. */
typedef int32_t (*spattn_parallel_for_fn)(void* user, int64_t tasks, void (*body)(void* argument, int64_t task),
                                          void* argument);

/* Asked during spattn_plan_create, spattn_sharding_create, a run on the CPU, and a question of 4g, on the thread that made
 * the call: some 20 ms apart, or after a step that takes longer, as a long row does of SPATTN_PLAN_REFERENCE, and a table
 * of gigabytes. Not 0 ends the call with SPATTN_E_CANCELLED, and what a run or a question has written means nothing. */
typedef int32_t (*spattn_cancel_fn)(void* user);

typedef struct spattn_context_options {
    uint32_t struct_size;
    uint32_t flags;              /* 0 */
    spattn_device device;        /* {0, 0}: the first GPU that has kernels in this build, else the CPU */
    spattn_alloc_fn alloc;       /* memory of plans and of call scratch that the library takes itself; with `free` */
    spattn_free_fn free;         /* NULL = the library's own */
    void* alloc_user;
    spattn_log_fn log;           /* NULL = silent, or stderr where the environment sets SPATTN_LOG=error|info|debug */
    void* log_user;
    spattn_enum log_level;       /* spattn_log_level; has an effect only with `log`; 0 = SPATTN_LOG_INFO */
    int32_t cpu_threads;         /* 0 = all that this process may use; at most 4096; results never depend on it */
    spattn_parallel_for_fn parallel_for; /* the host's own threads; NULL = ours */
    void* parallel_for_user;
    int64_t plan_cache; /* plans kept for equal (pattern, problem), least recently used out: 0 = 64, -1 = none */
    spattn_cancel_fn cancel; /* NULL = calls end when they are done */
    void* cancel_user;
} spattn_context_options;
/* Kept plans hold up to 256 MiB together, or 4 MiB for each of more than 64; the last one is kept whatever it holds. */
SPATTN_API spattn_status spattn_context_create(const spattn_context_options* options, /* NULL = all defaults */
                                               spattn_context** result);
SPATTN_API void spattn_context_retain(const spattn_context* context);
SPATTN_API void spattn_context_release(const spattn_context* context);
SPATTN_API spattn_status spattn_device_count(int32_t* result); /* GPUs; 0, not an error, without a driver */

/* ---- 4. pattern  [host] -----------------------------------------------------------------------------------------
 *
 * A pattern says which keys each query may see. On an extent of seq_q queries and seq_k keys, query row i stands at
 * position p = i + q_offset (q_offset is seq_k - seq_q unless given, so queries align to the end of the keys, and may
 * be negative). It sees the keys k of the set beside its constructor, cut to [0, seq_k). `mod` and `/` are floored.
 * Nothing implies causal. -1 as a bound means unbounded.
 */
SPATTN_API void spattn_pattern_retain(const spattn_pattern* pattern);
SPATTN_API void spattn_pattern_release(const spattn_pattern* pattern);

/* 4a. Analytic patterns: any length, no storage. The comment is the text form and the set. */

/* full: every key. */
SPATTN_API spattn_status spattn_pattern_full(spattn_pattern** result);
/* causal: k <= p. */
SPATTN_API spattn_status spattn_pattern_causal(spattn_pattern** result);
/* window(left,right): p - left <= k <= p + right. The query itself counts: window(1023,0) is 1024 keys.
 * left, right >= -1. Longformer (arXiv:2004.05150), Mistral (arXiv:2310.06825). */
SPATTN_API spattn_status spattn_pattern_window(int64_t left, int64_t right, spattn_pattern** result);
/* sink(tokens): k < tokens, whatever p. tokens >= 0. StreamingLLM (arXiv:2309.17453). */
SPATTN_API spattn_status spattn_pattern_sink(int64_t tokens, spattn_pattern** result);
/* block_diagonal(block): k / block = p / block; nothing for p < 0. block >= 1. */
SPATTN_API spattn_status spattn_pattern_block_diagonal(int64_t block, spattn_pattern** result);
/* documents(cu_seqlens): k and p in the same [cu[t], cu[t+1]). cu_seqlens: host tensor [documents + 1], int32 or int64,
 * not decreasing, first >= 0. Copied. */
SPATTN_API spattn_status spattn_pattern_documents(const spattn_tensor* cu_seqlens, spattn_pattern** result);
/* dilated(left,right,dilation): p - left <= k <= p + right and (k - p) mod dilation = 0; left and right in tokens,
 * >= -1; dilation >= 1. Longformer, NATTEN (arXiv:2209.15001). */
SPATTN_API spattn_status spattn_pattern_dilated(int64_t left, int64_t right, int64_t dilation, spattn_pattern** result);
/* strided(stride): (k - p) mod stride = 0. stride >= 1. Sparse Transformer's strided attention is
 * causal & (window(stride,0) | strided(stride)). Child et al. 2019 (arXiv:1904.10509). */
SPATTN_API spattn_status spattn_pattern_strided(int64_t stride, spattn_pattern** result);
/* landmark(block,landmarks): k mod block >= block - landmarks: the last keys of each block. 0 <= landmarks <= block.
 * Landmark Attention (arXiv:2305.16300). */
SPATTN_API spattn_status spattn_pattern_landmark(int64_t block, int64_t landmarks, spattn_pattern** result);
/* fixed(block,landmarks): block_diagonal(block) | landmark(block,landmarks). Child et al. 2019. */
SPATTN_API spattn_status spattn_pattern_fixed(int64_t block, int64_t landmarks, spattn_pattern** result);
/* logsparse: p - k in {0, 1, 2, 4, 8, ...}. LogSparse Transformer (arXiv:1907.00235). */
SPATTN_API spattn_status spattn_pattern_logsparse(spattn_pattern** result);
/* residue(modulus,offset): k mod modulus = offset where p mod modulus = offset, else nothing. 0 <= offset < modulus.
 * LongNet (arXiv:2307.02486) is a union of block_diagonal(w) & residue(r,o). */
SPATTN_API spattn_status spattn_pattern_residue(int64_t modulus, int64_t offset, spattn_pattern** result);
/* global_keys(positions): k in positions. positions: host tensor [count], int32 or int64, each >= 0, any order, repeats
 * count once. Copied. */
SPATTN_API spattn_status spattn_pattern_global_keys(const spattn_tensor* positions, spattn_pattern** result);
/* global_tokens(positions): k in positions, or p in positions. Arguments as global_keys. Longformer. */
SPATTN_API spattn_status spattn_pattern_global_tokens(const spattn_tensor* positions, spattn_pattern** result);
/* tree(parents): with T = count and node(x) = x - (seq_k - T): the keys before the tree, and every node(k) that is an
 * ancestor of node(p) or node(p) itself. parents: host tensor [T], int32 or int64; -1 marks a root, else a node of
 * [0, T); cycles are an error. T may not exceed seq_k, nor seq_q exceed T. Copied. SpecInfer (arXiv:2305.09781). */
SPATTN_API spattn_status spattn_pattern_tree(const spattn_tensor* parents, spattn_pattern** result);

/* 4b. Patterns of several numbers: seeded random, so that every language rebuilds the same one, and links within a
 * text. */
typedef struct spattn_bigbird {
    uint32_t struct_size;
    uint32_t flags;         /* 0 */
    int64_t block;          /* tokens, >= 1 */
    int64_t window_blocks;  /* total width in blocks: odd, or 0 */
    int64_t global_blocks;  /* >= 0 */
    int64_t random_blocks;  /* >= 0, a row */
    uint64_t seed;
} spattn_bigbird;
/* bigbird(block,window,global,random,seed): with I = p / block and J = k / block: 2 |I - J| < window, or J < global, or
 * I < global, or J in R(I); nothing for p < 0. R(I): splitmix64 from seed + I * 0x9E3779B97F4A7C15, J = x mod
 * ceil(seq_k / block), blocks that row I already sees are skipped; stops at `random` blocks or when none is left. The
 * same for all heads; depends on seq_k. BigBird (arXiv:2007.14062). */
SPATTN_API spattn_status spattn_pattern_bigbird(const spattn_bigbird* params, spattn_pattern** result);

typedef struct spattn_xref { /* -1 stands for a 0 that is meant; window and budget have none */
    uint32_t struct_size;
    uint32_t flags;        /* 0 */
    int64_t sinks;         /* first tokens that all see: 0 = 32 */
    int64_t window;        /* nearest tokens, itself among them: 0 = 64 */
    int64_t budget;        /* most keys of a row, >= sinks + window: 0 = 224 */
    int64_t links;         /* most linked keys of a row, <= budget - sinks - window: 0 = that, or half of the budget */
    int64_t ngram_keys;    /* linked from the last token of an n-gram on: 0 = 7 */
    int64_t symbol_before; /* linked before an identifier's token: 0 = 3 */
    int64_t symbol_after;  /* linked after it: 0 = 10 */
    int64_t look_back;     /* tokens whose completed identifiers are linked: 0 = 32 */
    int64_t stop_ratio;    /* those are that occurred up to max(p / stop_ratio, 4) times so far: 0 = 48; -1: all are */
} spattn_xref;
/* xref([ids],[symbols],sinks,window,budget,links,ngram_keys,symbol_before,symbol_after,look_back,stop_ratio):
 * cross-references of code and structured text, made from a text's tokens alone, causal. Position p sees the keys
 * k <= p that are sinks (k < sinks), linked, or in its window: the widest one, of `window` tokens or more, with which
 * the row has at most `budget` keys. Links are appended in this order, a key once, until there are `links`; each is a
 * span of keys, in rising order, cut to [sinks, p - window]:
 *   1. for n = 4, 3, 2: the 3 latest m < p - window where the n tokens that end at m equal those that end at p: keys
 *      [m, m + ngram_keys);
 *   2. the 2 latest and then the first m <= p - window with open(m) = open(p), unless that is -1: keys
 *      [m - symbol_before, m + symbol_after];
 *   3. for c = p, p - 1, ..., p - look_back + 1: where u = completed(c) is not -1, and open(m) = u for at most
 *      max(p / stop_ratio, 4) positions m <= p: the latest and then the first m <= p - window with open(m) = u, with
 *      keys as in 2.
 * token_ids: host tensor [tokens], int32 or int64, any numbers. symbols: host tensor [tokens, 2], int32 or int64, or
 * NULL for a text without identifiers: open(p), the identifier that the text up to the end of token p ends with, and
 * completed(p), the last identifier that token p brought to its end; -1 for none, any number >= 0 for an identifier.
 * params: NULL = all defaults. A row depends on no later token, so that the pattern of a text is that of each of its
 * beginnings, too: the extent's seq_k may be at most the number of tokens, and positions beyond them see nothing. In a
 * text, numbers may be left out from the end, and a 0 is a 0. Copied. */
SPATTN_API spattn_status spattn_pattern_xref(const spattn_tensor* token_ids, const spattn_tensor* symbols,
                                             const spattn_xref* params, spattn_pattern** result);
/* The xref pattern of a text that goes on, as when a model writes it: the tokens of `pattern`, which must be an xref
 * itself, and then token_ids [more], with symbols [more, 2], or NULL where they have none. Equal to the pattern of the
 * whole text. In the time that the new tokens take and one step per 512 tokens, if `pattern` was returned by this
 * function and is extended for the first time; else as long as making it anew. SPATTN_E_ARGUMENT for another pattern. */
SPATTN_API spattn_status spattn_pattern_xref_extend(const spattn_pattern* pattern, const spattn_tensor* token_ids,
                                                    const spattn_tensor* symbols, spattn_pattern** result);

/* 4c. Index patterns: lists for one extent. Row q is query row q of the extent, not a position; the extent's sizes must
 * be the pattern's own (SPATTN_E_SHAPE where a question is asked on others), and q_offset plays no part. Arrays are
 * host tensors, copied unless borrowed. */
enum spattn_pattern_flags {
    SPATTN_BORROW = 1 << 0, /* keep the caller's arrays: alive and unchanged until the pattern, and every pattern and
                               plan made of it, is released: contexts do not cache these. Index arrays of stride 1;
                               masks of stride 1 along the keys */
    SPATTN_TRUST = 1 << 1   /* col_idx is not checked; keys kept are unspecified where it breaks the rules */
};
/* csr([row_ptr],[col_idx],seq_k): row q sees the keys col_idx[row_ptr[q]] .. col_idx[row_ptr[q + 1] - 1]. row_ptr:
 * [seq_q + 1], from 0, not decreasing, up to the length of col_idx (always checked). col_idx: [nnz], in [0, seq_k),
 * strictly increasing in a row. Each int32 or int64. SPATTN_E_RANGE for numbers, SPATTN_E_SHAPE for lengths that break
 * this. */
SPATTN_API spattn_status spattn_pattern_csr(const spattn_tensor* row_ptr, const spattn_tensor* col_idx, int64_t seq_k,
                                            uint32_t flags, spattn_pattern** result);
/* bsr([row_ptr],[col_idx],block_q,block_k,seq_q,seq_k): the same for blocks: row q sees, of the blocks J of keys that
 * block row q / block_q lists, the keys k with k / block_k = J. row_ptr: [ceil(seq_q / block_q) + 1]; col_idx in
 * [0, ceil(seq_k / block_k)). */
SPATTN_API spattn_status spattn_pattern_bsr(const spattn_tensor* row_ptr, const spattn_tensor* col_idx, int64_t block_q,
                                            int64_t block_k, int64_t seq_q, int64_t seq_k, uint32_t flags,
                                            spattn_pattern** result);
/* mask([values],sizes): row q sees the keys whose value is not 0. mask: [seq_q, seq_k], [heads, seq_q, seq_k] or
 * [batch, heads, seq_q, seq_k], bool or uint8, any strides, none negative. A batch or heads of 1 (also one that the mask
 * lacks) serves every batch entry or head of the extent; any other size must be the extent's. */
SPATTN_API spattn_status spattn_pattern_mask(const spattn_tensor* mask, uint32_t flags, spattn_pattern** result);
/* A mask [heads, seq_q, seq_k] sampled from a function: > 0 keeps, 0 does not, < 0 fails with SPATTN_E_CALLBACK. Called
 * on this thread, once for each pair, never after this call. heads: 1 .. 2^20; seq_q, seq_k: 1 .. 2^31 - 1; their product
 * at most 2^30. */
typedef int32_t (*spattn_keep_fn)(void* user, int64_t head, int64_t q, int64_t k);
SPATTN_API spattn_status spattn_pattern_predicate(spattn_keep_fn keep, void* user, int64_t heads, int64_t seq_q,
                                                  int64_t seq_k, spattn_pattern** result);

/* 4d. Lists that each call brings: a plan knows their shape, spattn_forward and spattn_backward bring `indices`. Such
 * a pattern stands alone or, once, under & with patterns of other kinds, which then choose among the listed keys, and
 * under rows; all else is SPATTN_E_UNSUPPORTED, and so are questions about its keys. Lists are multisets: a key listed
 * twice counts twice; an entry below 0 or beyond the keys is absent. Statistics of a plan take all lists as full. */
/* runtime_tokens(max): each (query, kv head) lists up to max keys. max: 1 .. 2^31 - 1. DeepSeek Sparse Attention
 * (arXiv:2512.02556). */
SPATTN_API spattn_status spattn_pattern_runtime_tokens(int64_t max_tokens_per_row, spattn_pattern** result);
/* runtime_blocks(block_q,block_k,max): each (block q / block_q of query rows, kv head) lists up to max blocks J, which
 * are the keys k with k / block_k = J. All are 1 and more, block_q and block_k * max at most 2^31 - 1. NSA
 * (arXiv:2502.11089), MoBA (arXiv:2502.13189). */
SPATTN_API spattn_status spattn_pattern_runtime_blocks(int64_t block_q, int64_t block_k, int64_t max_blocks_per_row,
                                                       spattn_pattern** result);

/* 4e. Composition: A | B, A & B, A - B, transpose(P) = { k : p in P(k) }; per_head chooses a part by QUERY head,
 * per_batch by batch entry (padding masks). Parts are retained. count: 1 .. 2^16; part_of_head: [heads], part_of_batch:
 * [batch], 1 .. 2^20 entries in [0, count). Both need an extent of exactly that many heads or batch entries.
 *
 * All that this chapter makes of patterns nests up to 200 levels deep, of which a pattern of no other is one, and has up
 * to 2^16 parts in all: those of its parts count as well, each as often as it is there, but transposes do not. | and &
 * take in the parts of their own kind, and - those of its first part. More is SPATTN_E_RANGE, for the argument that brings
 * most. What plans on caches and shardings make of their pattern counts, too: `causal & P` is a level and 2 parts more,
 * columns of rows 2 levels and 2 parts. */
SPATTN_API spattn_status spattn_pattern_union(const spattn_pattern* const* parts, size_t count,
                                              spattn_pattern** result);
SPATTN_API spattn_status spattn_pattern_intersection(const spattn_pattern* const* parts, size_t count,
                                                     spattn_pattern** result);
SPATTN_API spattn_status spattn_pattern_difference(const spattn_pattern* a, const spattn_pattern* b,
                                                   spattn_pattern** result);
SPATTN_API spattn_status spattn_pattern_transpose(const spattn_pattern* pattern, spattn_pattern** result);
SPATTN_API spattn_status spattn_pattern_per_head(const spattn_pattern* const* parts, size_t count,
                                                 const int32_t* part_of_head, size_t heads, spattn_pattern** result);
SPATTN_API spattn_status spattn_pattern_per_batch(const spattn_pattern* const* parts, size_t count,
                                                  const int32_t* part_of_batch, size_t batch, spattn_pattern** result);

/* grid([sizes],[tile],A,B,...): tokens on a grid, as of an image (height, width) or a video (frames, height, width),
 * with a pattern for each axis: p sees k where A sees, from p's place on the first axis, k's place there, B on the
 * second, and so on. Tokens lie tile after tile, and in a tile one after the other, the last axis fastest both times.
 * Tokens before 0 and beyond the product of the sizes see nothing and are not seen. A part is meant on as many queries
 * and keys as its axis has places, and has no lists that come with a call (SPATTN_E_UNSUPPORTED). Parts are retained.
 * axes: 1 .. 8; sizes: [axes], each >= 1, their product at most 2^31 - 1; tile: [axes], divisors of the sizes, or NULL:
 * the whole grid is one tile. Axial attention (arXiv:1912.12180), Neighborhood Attention (arXiv:2204.07143), Sliding
 * Tile Attention (arXiv:2502.04507). */
SPATTN_API spattn_status spattn_pattern_grid(const int64_t* sizes, const int64_t* tile,
                                             const spattn_pattern* const* parts, size_t axes, spattn_pattern** result);

/* per_document([cu_q],[cu_k],P): documents packed one after the other: query row i of document t,
 * cu_q[t] <= i < cu_q[t + 1], sees cu_k[t] + P(i - cu_q[t]), with P on that document's own extent, aligned to its end.
 * Rows of no document see nothing: the documents may begin after the extent's first token and end before its last.
 * cu_q, cu_k: host tensors [documents + 1], int32 or int64, not decreasing, first >= 0, last at most the extent's seq_q
 * and seq_k. Copied: the lengths belong to the pattern. With SPATTN_THD, batches of sequences of several lengths. */
SPATTN_API spattn_status spattn_pattern_per_document(const spattn_pattern* inner, const spattn_tensor* cu_q,
                                                     const spattn_tensor* cu_k, spattn_pattern** result);

/* rows([begin,end,...],seq_q,P): some rows of a longer extent: P is meant on one of seq_q queries, aligned to the end of
 * the keys, and row i is its row r(i), where r counts through the ranges [begin, end), one after the other. The extent
 * has as many queries as the ranges have rows (SPATTN_E_SHAPE), and its q_offset plays no part. ranges: host tensor
 * [ranges, 2], int32 or int64, 0 <= begin < end <= seq_q, in any order, and rows may be there more than once. Copied.
 * Lists that come with a call are those of the extent's own rows. */
SPATTN_API spattn_status spattn_pattern_rows(const spattn_pattern* inner, const spattn_tensor* ranges, int64_t seq_q,
                                             spattn_pattern** result);
/* columns([begin,end,...],seq_k,P): some keys of a longer extent, as where a cache was thinned out: P is meant on one of
 * seq_k keys, whose end is as far from the queries as that of the extent's, and key j is its key c(j), where c counts
 * through the ranges. The extent has as many keys as these (SPATTN_E_SHAPE). ranges as in rows, up to seq_k. P has no
 * lists that come with a call (SPATTN_E_UNSUPPORTED): they name the extent's own keys, under & with this. */
SPATTN_API spattn_status spattn_pattern_columns(const spattn_pattern* inner, const spattn_tensor* ranges, int64_t seq_k,
                                                spattn_pattern** result);

/* 4f. Text. `|` binds loosest; `&` and `-` equally, left to right; spaces are free. parse(print(p)) equals p. The
 * lists of one constructor print inline up to 64 numbers together, beyond that as `documents(#hash)`, which parse
 * refuses. Two-call form: `needed` gets the bytes with the final 0; with capacity 0 nothing is written, with too small a
 * capacity the call fails with SPATTN_E_RANGE. */
SPATTN_API spattn_status spattn_pattern_parse(const char* text, spattn_pattern** result);
SPATTN_API spattn_status spattn_pattern_print(const spattn_pattern* pattern, char* buffer, size_t capacity,
                                              size_t* needed);

/* Equality and hash: nested unions and intersections flattened, duplicates dropped, commutative operands sorted,
 * X & (Y - Z) as (X & Y) - Z, on every level until nothing changes; no other law. The hash is the same in every process
 * and release. equal: 1, or 0 (also where there is no memory to compare); two NULLs are equal. */
SPATTN_API int32_t spattn_pattern_equal(const spattn_pattern* a, const spattn_pattern* b);
SPATTN_API spattn_status spattn_pattern_hash(const spattn_pattern* pattern, uint64_t* result);

/* Bytes that every later release loads, on any machine, whatever the pattern holds. save: two-call form, `needed` gets
 * the bytes. equal(load(save(p)), p). Bytes that are damaged or mean nothing: SPATTN_E_FORMAT with the byte they fail
 * at. */
SPATTN_API spattn_status spattn_pattern_save(const spattn_pattern* pattern, void* buffer, size_t capacity,
                                             size_t* needed);
SPATTN_API spattn_status spattn_pattern_load(const void* bytes, size_t size, spattn_pattern** result);

/* 4g. Questions a person asks of a pattern. */
enum spattn_extent_flags { SPATTN_EXTENT_Q_OFFSET = 1 << 0 };
typedef struct spattn_extent { /* the rectangle a question is asked on */
    uint32_t struct_size;
    uint32_t flags;       /* spattn_extent_flags */
    int64_t batch, heads; /* 0 = 1; at most 2^20 */
    int64_t seq_q, seq_k; /* >= 1, at most 2^31 - 1 */
    int64_t q_offset;     /* -2^40 .. 2^40, read only with SPATTN_EXTENT_Q_OFFSET; else seq_k - seq_q */
    int64_t block_q, block_k; /* unit of the block counts: 0 = 64, else 1..1024 */
    spattn_cancel_fn cancel;  /* NULL = calls end when they are done */
    void* cancel_user;
} spattn_extent;

typedef struct spattn_stats { /* sums over all batch entries and heads */
    uint32_t struct_size;
    uint32_t flags;
    double pairs;                                      /* kept (query, key) pairs */
    double visited;                                    /* pairs in blocks that are not empty */
    double density;                                    /* pairs / (batch * heads * seq_q * seq_k) */
    int64_t blocks_full, blocks_partial, blocks_empty;
    int64_t row_min, row_max;                          /* kept keys of a query row */
    int64_t rows_empty;
    int64_t layout_bytes;                              /* lists and masks, both directions; 0 for a bare pattern that
                                                          was counted without making them */
    double flops_forward, flops_backward;              /* on kept pairs: 2 (head_dim + head_dim_v), and 2.5 times that,
                                                          a pair; 0 for a bare pattern */
    double bytes_forward, bytes_backward;              /* each operand once; 0 for a bare pattern */
} spattn_stats;

/* Beyond 2^16 rows of blocks, 2^12 where they are no whole periods, patterns that repeat (most of 4a, and what is composed
 * of them) are counted by their closed forms: time and memory then hardly depend on the length. */
SPATTN_API spattn_status spattn_pattern_stats(const spattn_pattern* pattern, const spattn_extent* extent,
                                              spattn_stats* result);
/* 1 where query row q of (batch, head) sees key k, else 0. */
SPATTN_API spattn_status spattn_pattern_keeps(const spattn_pattern* pattern, const spattn_extent* extent, int64_t batch,
                                              int64_t head, int64_t q, int64_t k, int32_t* result);
/* out: host tensor [batch, heads, seq_q, seq_k], bool or uint8, any strides, none negative: 1 where kept, else 0. */
SPATTN_API spattn_status spattn_pattern_to_mask(const spattn_pattern* pattern, const spattn_extent* extent,
                                                const spattn_tensor* out);
/* coverage: host tensor [height, width], float32, of any size up to the extent's: the kept share, 0..1, of each cell.
 * Cell (y, x) is rows [y * seq_q / height, (y + 1) * seq_q / height) and likewise keys. Batch entry 0. */
SPATTN_API spattn_status spattn_pattern_to_image(const spattn_pattern* pattern, const spattn_extent* extent,
                                                 int64_t head, const spattn_tensor* coverage);
/* row_ptr: host int64 [seq_q + 1]; col_idx: host int32 or int64 [>= nnz]. nnz is always written; with col_idx NULL only
 * row_ptr (if given) and nnz are. Columns increase in a row. Batch entry 0. */
SPATTN_API spattn_status spattn_pattern_to_csr(const spattn_pattern* pattern, const spattn_extent* extent, int64_t head,
                                               const spattn_tensor* row_ptr, const spattn_tensor* col_idx,
                                               int64_t* nnz);

/* ---- 5. plan  [setup] ------------------------------------------------------------------------------------------- */

enum spattn_axes {
    SPATTN_BSHD = 0, /* tensors are [batch, seq, heads, head_dim]; lse is [batch, heads_q, seq_q] in both */
    SPATTN_BHSD = 1, /* [batch, heads, seq, head_dim] */
    SPATTN_THD = 2   /* [tokens, heads, head_dim] with batch 1, seq_q and seq_k tokens; lse is [heads_q, tokens].
                        Sequences of several lengths lie one after the other: per_document, or documents, or the queries
                        of a cache's entries */
};
enum spattn_plan_flags {
    SPATTN_PLAN_BACKWARD = 1 << 0,      /* spattn_backward will be called */
    SPATTN_PLAN_DETERMINISTIC = 1 << 1, /* bit-equal results between calls; on the CPU they always are, and on a GPU all but
                                           those gradients that spattn_plan_explain names under "bits" */
    SPATTN_PLAN_REFERENCE = 1 << 2,     /* the plain double-precision rows: slow, the truth */
    SPATTN_PLAN_Q_OFFSET = 1 << 3,      /* q_offset is meant, even if 0 */
    SPATTN_PLAN_SCALE = 1 << 4,         /* scale is meant, even if 0 */
    SPATTN_PLAN_VALUE_IN_KEY = 1 << 5,  /* v is k[..., :head_dim_v]: v and dv are NULL, dk receives the sum of both
                                           gradients. head_dim_v <= head_dim */
    SPATTN_PLAN_SINK_LOGITS = 1 << 6,   /* sink_logits will be given to each call */
    SPATTN_PLAN_TF32 = 1 << 7,          /* float32 may be rounded to TF32, 11 significant bits, for the tensor cores of
                                           Ampere and later: q, k, v and p, and backward dout and ds, are then off by up
                                           to 2^-11 of themselves as they enter products, which add up in float32. A
                                           permission: where no such kernel serves, as on the CPU, and for other dtypes,
                                           nothing is rounded. spattn_plan_kernel names kernels of "tf32" */
    SPATTN_PLAN_STARTS = 1 << 8,        /* keys lie in a cache that calls fill: each says where its queries begin.
                                           Forward alone */
    SPATTN_PLAN_PARENTS = 1 << 9        /* with SPATTN_PLAN_STARTS: the queries of an entry are nodes of trees, and each
                                           call says whose children they are */
};
/* A cache. With SPATTN_PLAN_STARTS seq_k is how many tokens the cache of a batch entry has room for, and seq_q how many
 * queries a call has of each. The pattern is that of the whole sequence, [seq_k, seq_k] with q_offset 0: arrays of csr,
 * mask and their like have as many rows, and bigbird draws its blocks among all of them. It is cut to what is causal.
 * Query i of entry b is its row starts[b] + i, where starts comes with each call, on the plan's device: one plan, and one
 * captured graph, serve a sequence as it grows. Rows outside [0, seq_k) see nothing: entries that have less to ask, or
 * nothing. Keys after a query are never seen, so that what was not written yet may hold anything. spattn_plan_stats then
 * speaks of the whole sequence.
 *
 * With SPATTN_THD each call also says how many queries entries have, as servers batch prompts beside tokens that are
 * decoded. seq_q is how many rows q has, [seq_q, heads_q, head_dim], and those of entry b are rows query_offsets[b] ..
 * query_offsets[b + 1] - 1, any number of them: the first is its row starts[b]. Rows before all offsets or after them see
 * nothing, so that one graph serves fewer queries, too. Offsets lie in 0 .. seq_q and do not fall; else results mean
 * nothing. Such a cache has a page_size, which may be all of seq_k.
 *
 * Lists that come with a call name tokens of the sequence: those of runtime_tokens, or of runtime_blocks with a block_q
 * of 1, alone or under causal. Either way no query sees a key after it. With SPATTN_THD each row of q has a list.
 *
 * With SPATTN_PLAN_PARENTS the queries of an entry are drafts of several continuations, nodes of trees, as SpecInfer
 * verifies them (https://arxiv.org/abs/2305.09781). parents, which comes with each call, on the plan's device, has the
 * number of each query's parent among those of its entry, from 0, or -1 for a root, which follows token starts[b] - 1.
 * Of the keys that the pattern keeps a query then sees those before starts[b], its own, and its ancestors'; for the
 * pattern it is row starts[b] + i, however deep it stands. A number that is negative, or not below the query's own,
 * counts as -1. Lists that come with a call need no parents: they can leave out what a query is not to see.
 *
 * page_size, where it is not 0, says that keys lie in pages of so many tokens, which belong to any entry, or to several
 * (PagedAttention: https://arxiv.org/abs/2309.06180): token t of entry b is token t % page_size of page
 * page_table[b][t / page_size]. No memory outside of the pages is read, whatever the table holds (but see
 * SPATTN_FORWARD_SAME_STEP): entries that nobody needs may be anything, and what comes of a page outside [0, pages) that a
 * query sees means nothing.
 *
 * cache_dtype, where it is float8, says that k and v have elements of one byte. Each row of a token and kv head stands
 * for its elements times a scale of its own, of k_scales or v_scales, which are 1 where a call has none. Kernels may
 * round that product to dtype, once, and take probabilities below 2^-23 for 0. spattn_cache_append writes such rows.
 *
 * A dtype of float8_e4m3fn is that of q, k and v, and out is bfloat16. Each row of a token and head stands for its elements
 * times a scale of its own, of q_scales, k_scales or v_scales, which are 1 where a call has none. Kernels may round that
 * product to bfloat16, once. Gradients are of bfloat16, and of what rows stand for, so that who has rounded to float8 may
 * hand them on as they are (a straight-through estimator: https://arxiv.org/abs/1308.3432). A cache is not read so: it has
 * queries of 16 bits or more. */
typedef struct spattn_problem {
    uint32_t struct_size;
    uint32_t flags; /* spattn_plan_flags */
    int64_t batch, heads_q, heads_kv;   /* batch 0 .. 2^20 (with THD 1, or of a cache 1 and more); heads 1 .. 2^16,
                                           heads_q a multiple of heads_kv */
    int64_t seq_q, seq_k;               /* 0 .. 2^31 - 1 */
    int64_t head_dim, head_dim_v;       /* 1 .. 1024; head_dim_v 0 = head_dim */
    spattn_dtype dtype;                 /* of q, k, v, out and their gradients: float32, float16, float64
                                           or bfloat16; or of q, k and v alone, float8_e4m3fn. lse, sinks and
                                           scales are float32 */
    spattn_enum axes;                   /* spattn_axes */
    double scale;                       /* finite; 1 / sqrt(head_dim) unless SPATTN_PLAN_SCALE */
    int64_t q_offset;                   /* -2^40 .. 2^40; seq_k - seq_q unless SPATTN_PLAN_Q_OFFSET; 0 without it, as
                                           scale is without its flag */
    double softcap;                     /* 0 = none, else 1e-6 .. 1e30 */
    int64_t page_size;                  /* with SPATTN_PLAN_STARTS: 0 = none, else 1 .. 65536, divides seq_k */
    spattn_dtype cache_dtype;           /* with SPATTN_PLAN_STARTS, of k and v: {0, 0, 0} = dtype, else dtype or
                                           {SPATTN_FLOAT8_E4M3FN, 8, 1} */
    int32_t reserved;                   /* 0 */
} spattn_problem;

/* Compiles the pattern for these shapes and chooses kernels. The plan keeps what it needs of context and pattern alive.
 * stream: where device copies of lists are made; NULL on the CPU. */
SPATTN_API spattn_status spattn_plan_create(const spattn_context* context, const spattn_pattern* pattern,
                                            const spattn_problem* problem, spattn_stream stream, spattn_plan** result);
SPATTN_API void spattn_plan_retain(const spattn_plan* plan);
SPATTN_API void spattn_plan_release(const spattn_plan* plan);

enum spattn_op { SPATTN_OP_FORWARD = 0, SPATTN_OP_BACKWARD = 1 };
/* Scratch that one call of op needs, on the plan's device. Its content means nothing between calls, but for those with
 * SPATTN_FORWARD_SAME_STEP. */
SPATTN_API spattn_status spattn_plan_workspace(const spattn_plan* plan, spattn_enum op, size_t* bytes, size_t* align);
SPATTN_API spattn_status spattn_plan_stats(const spattn_plan* plan, spattn_stats* result);
/* Name of the kernel row that op runs; of a plan in pieces, the name for each, with commas between them, as
 * SPATTN_FORCE_KERNEL reads them. Lives as long as the plan. NULL where plan or op is none, or op was not planned. */
SPATTN_API const char* spattn_plan_kernel(const spattn_plan* plan, spattn_enum op);
/* Kernel, blocks, work, cost and what else was considered, as text. Two-call form as spattn_pattern_print. Rows that
 * could not serve this problem on this machine are counted by their reasons; explain_all names each of them. */
SPATTN_API spattn_status spattn_plan_explain(const spattn_plan* plan, char* buffer, size_t capacity, size_t* needed);
SPATTN_API spattn_status spattn_plan_explain_all(const spattn_plan* plan, char* buffer, size_t capacity,
                                                 size_t* needed);

/* ---- 6. run  [launch] -------------------------------------------------------------------------------------------
 *
 *     s = scale * q kT, where the pattern keeps (query, key); p = softmax(s); out = p v; lse = log(sum(exp(s)))
 *
 * With a softcap, s = softcap * tanh(scale * q kT / softcap). A learned sink adds a score without a value, z of each
 * query head, to every row of it: p = exp(s - lse), lse = log(sum(exp(s)) + exp(z)), and
 * dsink = sum over rows of exp(z - lse) * (dlse - rowsum(dout * out)).
 *
 * What a query does not see cannot change its result, whatever it holds, NaN and infinity included: neither out and
 * lse, nor gradients. A key's gradients come from the queries that see it alone. (On a CPU not a bit changes; on a GPU a
 * row with such a neighbour may be summed in another order.)
 *
 * A query that sees no key gets out 0, lse -infinity and gradients 0. With a sink its lse is z, and so its dlse counts
 * in dsink. A batch of 0, a seq_q or seq_k of 0 is legal: there is nothing to see, and the data of a tensor without
 * elements may be NULL. Inputs may overlap each other; an output overlaps nothing, itself included. Outputs may lie
 * between each other, as dk and dv in one tensor, and their strides need not nest; where thousands of steps do not tell
 * whether two elements share a byte, they count as if they did. Gradients overwrite. workspace may be NULL only where
 * spattn_plan_workspace says 0 bytes; one workspace a concurrent call.
 *
 * Results are the same bits for any number of threads. Kernels of 16 bits may take numbers below 2^-126 for 0, as matrix
 * units do. On a CPU a call rounds as the thread does that makes it, and raises flags of floating-point exceptions,
 * division by zero among them: none of these may trap. Shapes below are for SPATTN_BHSD; any strides, none negative.
 */
enum spattn_forward_flags {
    /* With SPATTN_PLAN_STARTS, in a model's second layer and those behind it: what an earlier forward has made of starts,
     * page_table, query_offsets and parents is still in the workspace, and is not made again. The caller promises that
     * the earlier one was of this plan, had this workspace and succeeded, and is done or stands before this one on the
     * stream; that nothing but forwards with this flag has written there since; and that these operands, which are
     * given again, have the same numbers, and k and v the same shapes and strides. All else may differ. Nothing of this
     * is checked: where it does not hold, results mean nothing, and memory outside of k and v may be read. */
    SPATTN_FORWARD_SAME_STEP = 1 << 0
};
typedef struct spattn_forward_args {
    uint32_t struct_size;
    uint32_t flags; /* spattn_forward_flags; SPATTN_E_STATE for what the plan has no use for */
    spattn_stream stream;
    const spattn_tensor* q;   /* [batch, heads_q, seq_q, head_dim] */
    const spattn_tensor* k;   /* [batch, heads_kv, seq_k, head_dim] */
    const spattn_tensor* v;   /* [batch, heads_kv, seq_k, head_dim_v]; NULL with SPATTN_PLAN_VALUE_IN_KEY */
    const spattn_tensor* out; /* out [batch, heads_q, seq_q, head_dim_v] */
    const spattn_tensor* lse; /* out [batch, heads_q, seq_q] float32, optional */
    const spattn_tensor* max_logits;   /* out [batch, heads_q, seq_q] float32, optional: the largest s, -infinity where
                                          no key is seen. SPATTN_E_UNSUPPORTED where the plan's kernel does not write
                                          it: all kernels of the CPU do */
    const spattn_tensor* indices;      /* [batch, rows, heads_kv, max] int32 or int64: with runtime_tokens and
                                          runtime_blocks, else NULL. rows = seq_q, or its blocks; no batch with THD */
    const spattn_tensor* index_counts; /* [batch, rows, heads_kv] int32 or int64, optional: entries of a list that
                                          count, the first ones; cut to [0, max] */
    void* workspace;
    size_t workspace_bytes;
    const spattn_tensor* sink_logits; /* [heads_q] float32, finite or -infinity; NULL without SPATTN_PLAN_SINK_LOGITS */
    const spattn_tensor* starts;      /* [batch] int32 or int64: with SPATTN_PLAN_STARTS, else NULL */
    const spattn_tensor* page_table;  /* [batch, seq_k / page_size] int32 or int64: with a page_size, else NULL. k and v
                                         are then [pages, heads_kv, page_size, head_dim], or [pages, page_size, heads_kv,
                                         head_dim] for SPATTN_BSHD and SPATTN_THD, of any number of pages from 1. From
                                         one page to the next are as many rows in v as in k: page_size or more, and on a
                                         GPU, where page_size is a multiple of the kernel's blocks, so many blocks */
    const spattn_tensor* query_offsets; /* [batch + 1] int32 or int64: with SPATTN_PLAN_STARTS and SPATTN_THD, else
                                           NULL */
    const spattn_tensor *k_scales, *v_scales; /* float32, optional: with a float8 cache or dtype, else NULL. Shaped as k
                                                 without head_dim: of each token and kv head; strides may be 0, as where
                                                 heads have one scale each. As many rows from page to page as k.
                                                 v_scales is NULL with SPATTN_PLAN_VALUE_IN_KEY */
    const spattn_tensor* parents; /* [batch, seq_q] int32 or int64, no batch with THD: with SPATTN_PLAN_PARENTS, else
                                     NULL */
    const spattn_tensor* q_scales; /* float32, optional: with a float8 dtype, else NULL. Shaped as q without head_dim;
                                      strides may be 0 */
} spattn_forward_args;
SPATTN_API spattn_status spattn_forward(const spattn_plan* plan, const spattn_forward_args* args);

typedef struct spattn_backward_args {
    uint32_t struct_size;
    uint32_t flags; /* 0 */
    spattn_stream stream;
    const spattn_tensor *q, *k, *v, *out, *lse; /* as in forward; out and lse as it wrote them */
    const spattn_tensor* dout;                  /* [batch, heads_q, seq_q, head_dim_v] */
    const spattn_tensor* dlse; /* [batch, heads_q, seq_q] float32: gradient that arrives at lse, optional */
    const spattn_tensor *dq, *dk, *dv;          /* out, shaped as q, k, v; dv NULL where v is */
    const spattn_tensor *indices, *index_counts; /* the same lists as in forward */
    void* workspace;
    size_t workspace_bytes;
    const spattn_tensor* sink_logits;  /* as in forward */
    const spattn_tensor* dsink_logits; /* out [heads_q] float32, optional; only with sink_logits */
    const spattn_tensor *q_scales, *k_scales, *v_scales; /* as in forward */
} spattn_backward_args;
SPATTN_API spattn_status spattn_backward(const spattn_plan* plan, const spattn_backward_args* args);

/* New tokens of a cache, written to where plans of this problem, one with SPATTN_PLAN_STARTS, read them: as many as it
 * has queries. Row i of entry b becomes token starts[b] + i, in the page that page_table names; with SPATTN_THD
 * query_offsets says which rows are whose. These three are thus those of the forward that follows. Of the problem no more
 * than sizes, dtypes, axes and SPATTN_PLAN_VALUE_IN_KEY matters.
 *
 * Tokens outside [0, seq_k), those of pages outside [0, pages), and rows that are nobody's are not written, and what is
 * not written stays as it is. Where two rows have one place, each element and each scale there is that of one of them.
 * k_new and v_new may overlap each other; k and v overlap nothing.
 *
 * A float8 cache receives k_new and v_new divided by their scale, in float32, and rounded to nearest, ties to even. What
 * is beyond 448 becomes 448, NaN stays NaN. With SPATTN_APPEND_SCALES the call chooses the scale of each row that it
 * writes: its largest magnitude divided by 448, but at least 2^-126, or 1 where all are 0 or one is not finite. It writes
 * that to k_scales and v_scales; without the flag it reads them.
 *
 * On a GPU this is one kernel. A graph may capture it once the process has made a plan of a cache on that GPU, or has
 * called this there. */
enum spattn_append_flags {
    SPATTN_APPEND_SCALES = 1 << 0 /* k_scales and v_scales are written: of a float8 cache */
};
typedef struct spattn_cache_append_args {
    uint32_t struct_size;
    uint32_t flags; /* spattn_append_flags */
    spattn_stream stream;
    const spattn_tensor* k_new;  /* [batch, heads_kv, seq_q, head_dim] */
    const spattn_tensor* v_new;  /* [batch, heads_kv, seq_q, head_dim_v]; NULL with SPATTN_PLAN_VALUE_IN_KEY */
    const spattn_tensor* k;      /* written: the cache, as in forward */
    const spattn_tensor* v;      /* written: the same; NULL with SPATTN_PLAN_VALUE_IN_KEY */
    const spattn_tensor* starts; /* [batch] int32 or int64 */
    const spattn_tensor* counts; /* [batch] int32 or int64, optional: only the last counts[b] rows of entry b are
                                    written, as where texts of several lengths are padded in front; cut to [0, seq_q].
                                    NULL with SPATTN_THD */
    const spattn_tensor* page_table;    /* as in forward */
    const spattn_tensor* query_offsets; /* as in forward */
    const spattn_tensor *k_scales, *v_scales; /* as in forward; with SPATTN_APPEND_SCALES required, and overlap nothing */
} spattn_cache_append_args;
SPATTN_API spattn_status spattn_cache_append(const spattn_context* context, const spattn_problem* problem,
                                             const spattn_cache_append_args* args);

/* ---- 7. several devices  [setup], exchanges [launch] ------------------------------------------------------------
 *
 * Context parallelism: the tokens of one sequence lie on several ranks, as MPI and NCCL call processes, or threads, that
 * have a device each. A rank holds the queries, keys and values of some tokens. Before it attends it receives those keys
 * and values that its queries see and others hold, in blocks of 128 tokens, and no more: of a window what lies beside
 * its own tokens, of sinks the first block. Every query attends at its own place, so that a pattern means what it means
 * on one device. Gradients of keys and values go back to the rank that holds them, and are added up there.
 *
 * How bytes travel is the caller's. Two buffers on each rank, `sent` and `received`, have the part of one rank after the
 * other, as ncclSend and ncclRecv, or MPI_Alltoallv, take them (spattn_sharding_peer says where). On each rank:
 *
 *     SPATTN_EXCHANGE_PACK              k, v                    -> sent
 *     by the caller                     sent, to each rank      -> received, from each
 *     SPATTN_EXCHANGE_UNPACK            k, v, received          -> seen_k, seen_v
 *     spattn_forward                    q, seen_k, seen_v       -> out
 *     spattn_backward                                           -> dq, seen_dk, seen_dv
 *     SPATTN_EXCHANGE_PACK_GRADIENTS    seen_dk, seen_dv        -> received
 *     by the caller                     received, to each rank  -> sent, from each: the way back
 *     SPATTN_EXCHANGE_ADD_GRADIENTS     seen_dk, seen_dv, sent  -> dk, dv, or into seen_dk, seen_dv
 *
 * The keys that the plan takes, `seen`, are those that the rank holds or receives, in the order of the sequence, with
 * a few between them that nobody here sees: of a window not many more than it holds, however long the sequence is.
 *
 * The sums are float32 (float64 of such tensors), of parts that were rounded to the dtype, and rounded once: the rank's
 * own part first, then those of others in the order of ranks.
 *
 * With a dtype of float8_e4m3fn, k and v go as they are, a byte an element, and gradients come back as bfloat16. Where
 * rows have scales, SPATTN_SHARDING_SCALES sends those of keys and values with them: then ranks may round their own
 * tokens without a word to each other. Scales that all ranks know need not be sent: none, or one for each head that is
 * the same everywhere, go to the passes as they are, with strides of 0. q_scales are the rank's own.
 */
typedef struct spattn_sharding spattn_sharding;

enum spattn_split {
    SPATTN_SPLIT_CONTIGUOUS = 0, /* equal shares, one after the other */
    SPATTN_SPLIT_ZIGZAG = 1      /* of twice as many shares rank r holds number r and, counted from the end, number r
                                    again, so that causal attention is as much work for all */
};
enum spattn_sharding_flags {
    SPATTN_SHARDING_SCALES = 1 << 0 /* exchanges have scales, too: with a float8 dtype */
};
typedef struct spattn_sharding_options {
    uint32_t struct_size;
    uint32_t flags;              /* spattn_sharding_flags */
    int32_t ranks, rank;         /* ranks >= 1, 0 <= rank < ranks: how many there are, and which one this is */
    spattn_enum split;           /* spattn_split: who holds which tokens; 0 with ranges */
    int32_t reserved;            /* 0 */
    const spattn_tensor* ranges; /* NULL, or host tensor [ranges, 3], int32 or int64, of (rank, begin, end): a rank holds
                                    its tokens [begin, end), range after range. Every token once, one for each rank */
} spattn_sharding_options;

/* Finds what each rank sees, and makes the plan of this one's queries. All ranks make theirs of equal pattern and
 * problem, and of options that differ in rank alone. problem: of all tokens, seq_q = seq_k, without SPATTN_PLAN_STARTS.
 * A sink's gradient has, on each rank, the part of its queries. stream: as of spattn_plan_create. SPATTN_E_RANGE for
 * ranges that leave a token out, hold it twice, or leave a rank without one, for fewer tokens than ranks (with zigzag
 * twice as many), and for scales where dtype is not float8; SPATTN_E_UNSUPPORTED for a cache; else as
 * spattn_plan_create. */
SPATTN_API spattn_status spattn_sharding_create(const spattn_context* context, const spattn_pattern* pattern,
                                                const spattn_problem* problem, const spattn_sharding_options* options,
                                                spattn_stream stream, spattn_sharding** result);
SPATTN_API void spattn_sharding_retain(const spattn_sharding* sharding);
SPATTN_API void spattn_sharding_release(const spattn_sharding* sharding);

/* The plan of this rank's queries: seq_q is how many tokens it holds, seq_k how many keys are `seen`. Lists that come with
 * a call are those of its queries, and name tokens by their places among all, as then all are `seen`. */
SPATTN_API spattn_status spattn_sharding_plan(const spattn_sharding* sharding, spattn_plan** result);
/* What a rank holds. ranges: host int64 [>= count, 2], or NULL; count is always written. */
SPATTN_API spattn_status spattn_sharding_ranges(const spattn_sharding* sharding, int32_t rank,
                                                const spattn_tensor* ranges, int64_t* count);
/* The tokens of `seen`: rising ranges, and how many tokens these have. ranges, count: as of spattn_sharding_ranges. */
SPATTN_API spattn_status spattn_sharding_seen(const spattn_sharding* sharding, const spattn_tensor* ranges,
                                              int64_t* count, int64_t* tokens);

typedef struct spattn_peer { /* what goes between this rank and another: nothing, where that is itself */
    uint32_t struct_size;
    uint32_t flags;
    int64_t tokens_sent, tokens_received; /* tokens whose keys and values go to it, and come from it */
    uint64_t sent_offset, sent_bytes, received_offset, received_bytes; /* its parts of the buffers */
    uint64_t back_sent_offset, back_sent_bytes, back_received_offset, back_received_bytes; /* the same parts on the
                                             way back, still named after their buffers: gradients in the part of
                                             `received` go to it, and what comes from it belongs in the part of `sent`.
                                             Other numbers with a float8 dtype alone, as gradients are wider */
} spattn_peer;
SPATTN_API spattn_status spattn_sharding_peer(const spattn_sharding* sharding, int32_t rank, spattn_peer* result);
/* Bytes of both buffers: where the parts of the last rank end, there or back, whichever is further. */
SPATTN_API spattn_status spattn_sharding_buffers(const spattn_sharding* sharding, size_t* sent_bytes,
                                                 size_t* received_bytes);

enum spattn_exchange_step {
    SPATTN_EXCHANGE_PACK = 0,
    SPATTN_EXCHANGE_UNPACK = 1, /* tokens that nobody here sees are not written */
    SPATTN_EXCHANGE_PACK_GRADIENTS = 2,
    SPATTN_EXCHANGE_ADD_GRADIENTS = 3
};
typedef struct spattn_exchange_args {
    uint32_t struct_size;
    uint32_t flags;                         /* 0 */
    spattn_stream stream;
    const spattn_tensor *k, *v;             /* or gradients of these: [batch, heads_kv, tokens, head_dim], and head_dim_v,
                                               of the tokens that this rank holds. NULL in PACK_GRADIENTS; in UNPACK where
                                               seen_k and seen_v have them already; in ADD_GRADIENTS for sums that
                                               take the place of the rank's own gradients in these, which spares copies */
    const spattn_tensor *seen_k, *seen_v;   /* the same of the tokens of `seen`. NULL in PACK */
    void* buffer;                           /* sent in PACK and ADD_GRADIENTS, else received. On the plan's device,
                                               aligned to 16 bytes; may be NULL where it has 0 bytes */
    size_t buffer_bytes;                    /* as many as spattn_sharding_buffers says, or more; the step's own parts,
                                               which spattn_peer has, are enough */
    const spattn_tensor *k_scales, *v_scales; /* float32, with SPATTN_SHARDING_SCALES beside k and v of PACK and UNPACK,
                                                 else NULL. Shaped as these without head_dim; strides may be 0 */
    const spattn_tensor *seen_k_scales, *seen_v_scales; /* the same beside seen_k and seen_v of UNPACK, which writes
                                                           them, each an own number */
} spattn_exchange_args;                     /* v, seen_v and their scales are NULL with SPATTN_PLAN_VALUE_IN_KEY */
/* Tensors are of the problem's axes, any strides, and of its dtype; gradients are bfloat16 where that is float8.
 * SPATTN_E_STATE for one that the step has no use for, SPATTN_E_NULL for one that it lacks, SPATTN_E_WORKSPACE for a
 * buffer that is too short, SPATTN_E_LAYOUT for one off its alignment or for what overlaps an output. Errors name
 * gradients as the fields are named: "k", "seen_k". */
SPATTN_API spattn_status spattn_exchange(const spattn_sharding* sharding, spattn_enum step,
                                         const spattn_exchange_args* args);

/* ---- 8. introspection  [host] -----------------------------------------------------------------------------------
 *
 * The kernel rows of every backend of this build, best first. The environment's SPATTN_FORCE_KERNEL=NAME[,NAME] pins
 * rows for plans made after it is set: of each pass, only a named row is considered where one is named.
 */
SPATTN_API int32_t spattn_kernel_count(void);
SPATTN_API const char* spattn_kernel_name(int32_t row);    /* NULL outside [0, count) */
SPATTN_API int32_t spattn_kernel_runs_here(int32_t row);   /* 1 where this machine can run it, else 0 */

#ifdef __cplusplus
}
#endif
#endif

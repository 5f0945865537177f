# SPDX-License-Identifier: MIT
"""Structs grow at their end. The library's readers and writers, compiled against a header whose every sized struct has
one field more, still serve programs that were built with the structs of the first release."""
import re
import subprocess

import capi
import pytest

FIRST = {"error": 40, "context_options": 88, "bigbird": 48, "xref": 80, "extent": 64, "stats": 120, "problem": 88,
         "forward_args": 96, "backward_args": 128,
         "cache_append_args": 80, "sharding_options": 32, "peer": 56, "exchange_args": 64}
RESULTS = {"error", "stats", "peer"}
SIZED = re.compile(r"typedef struct (spattn_\w+) \{[^}]*?uint32_t struct_size;.*?\} \1;", re.S)

SOURCE = """
#include <cstddef>
#include <cstdio>
#include <vector>

#include "api/args.h"

using namespace spattn;

template <class Body>
static spattn_status status_of(Body body) {
    try {
        body();
        return SPATTN_OK;
    } catch (const Error& error) {
        return error.status;
    }
}

static int wrong = 0;
#define DEMAND(ok) \\
    if (!(ok)) std::printf("%s: %s\\n", name, #ok), ++wrong

// What a caller passes: `size` bytes of a struct that starts with its size, then memory that is nobody's.
template <class S>
struct Given {
    std::vector<unsigned char> bytes;
    explicit Given(size_t size) : bytes(sizeof(S) + 64, 0x5a) {
        std::fill_n(bytes.begin(), size, 0);
        const uint32_t number = uint32_t(size);
        std::memcpy(bytes.data(), &number, sizeof number);
    }
    S* get() { return reinterpret_cast<S*>(bytes.data()); }
};

template <class S>
static void check_read(const char* name, size_t first) {
    S read{};
    const auto status = [&](Given<S>& given) { return status_of([&] { read = read_struct(given.get(), name); }); };
    Given<S> old(first), whole(sizeof(S)), newer(sizeof(S) + 8), future(sizeof(S) + 8);
    read.grown = 7;
    DEMAND(status(old) == SPATTN_OK && read.grown == 0);
    Given<S> shorter(first - 1);
    DEMAND(status(shorter) == SPATTN_E_STRUCT_SIZE);
    whole.get()->grown = 5;
    DEMAND(status(whole) == SPATTN_OK && read.grown == 5);
    DEMAND(status(newer) == SPATTN_OK && read.grown == 0);
    future.bytes[sizeof(S) + 7] = 1;
    DEMAND(status(future) == SPATTN_E_UNKNOWN_FIELD);
}

template <class S>
static void check_write(const char* name, size_t first) {
    S value{};
    value.grown = 5;
    const auto status = [&](Given<S>& to) { return status_of([&] { write_struct(to.get(), value, name); }); };
    Given<S> old(first), whole(sizeof(S)), newer(sizeof(S) + 8), shorter(first - 1);
    DEMAND(status(old) == SPATTN_OK && old.bytes[first] == 0x5a);
    DEMAND(status(whole) == SPATTN_OK && whole.get()->grown == 5);
    DEMAND(status(newer) == SPATTN_OK && newer.get()->grown == 5 && newer.get()->struct_size == sizeof(S) + 8);
    DEMAND(status(shorter) == SPATTN_E_STRUCT_SIZE);
}

int main() {
    CALLS
    return wrong != 0;
}
"""


def grow(text):
    """The header with a field more at the end of each sized struct, and the names of these."""
    names = []

    def add(found):
        names.append(found[1].removeprefix("spattn_"))
        return found[0].replace(f"}} {found[1]};", f"    int64_t grown;\n}} {found[1]};")

    return SIZED.sub(add, text), names


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    text, names = grow(capi.HEADER.read_text())
    (folder / "sparseattn").mkdir()
    (folder / "sparseattn" / "sparseattn.h").write_text(text)
    calls = "\n    ".join(f'check_{"write" if name in RESULTS else "read"}<spattn_{name}>("{name}", {FIRST[name]});'
                          for name in names if name in FIRST)
    (folder / "grown.cpp").write_text(SOURCE.replace("CALLS", calls))
    src = capi.ROOT / "src"
    sources = [str(src / name) for name in ("api/args.cpp", "core/tensor.cpp", "core/text.cpp")]
    subprocess.run(["c++", "-std=c++20", "-O0", f"-I{folder}", f"-I{src}", "grown.cpp", *sources, "-o", "grown"],
                   cwd=folder, check=True)
    return folder / "grown", names


def test_every_sized_struct_is_here(grown):
    assert set(grown[1]) == set(FIRST)


def test_old_programs_are_served(grown):
    done = subprocess.run([grown[0]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

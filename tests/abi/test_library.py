# SPDX-License-Identifier: MIT
"""The shared library as a loader sees it: what it exports, what it needs, what it says of itself."""
import json
import pathlib
import re
import subprocess
import sys

import capi
import pytest

HERE = pathlib.Path(__file__).resolve().parent
MAY_NEED = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2",
            "ld-linux-aarch64.so.1"}
SANITIZERS = {"libasan.so.8", "libubsan.so.1", "libasan.so.6"}


def output(*command):
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text
    return text


def read(library_file, *options):
    return output("readelf", "--wide", *options, library_file)


def exported(library_file):
    symbols = {line.split()[2] for line in output("nm", "-D", "--defined-only", library_file).splitlines()}
    nodes = {s for s in symbols if s.startswith("SPARSEATTN_")}  # the version script's own node
    return {s.split("@")[0] for s in symbols - nodes}


def declared():
    return set(re.findall(r"SPATTN_API\s[^;(]*?\b(spattn_\w+)\(", capi.HEADER.read_text()))


def test_exports_are_the_header_and_the_committed_list(library_file):
    committed = (HERE / "symbols.txt").read_text().split()
    assert len(committed) > 40 and committed == sorted(committed)
    assert declared() == set(committed)
    assert exported(library_file) == set(committed)


def test_exports_carry_a_version(library_file):
    versioned = re.findall(r"(spattn_\w+)@@?(\w+\.\d+)", read(library_file, "--dyn-syms"))
    assert {name for name, _ in versioned} == declared()
    assert {version for _, version in versioned} == {"SPARSEATTN_0.1"}


def test_needs_nothing_but_the_system(library_file):
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", read(library_file, "--dynamic")))
    assert "libc.so.6" in needed
    assert needed <= MAY_NEED | SANITIZERS


def test_dynamic_section(library_file):
    text = read(library_file, "--dynamic")
    assert "Library soname: [libsparseattn.so.0]" in text
    assert "NODELETE" in text
    assert "TEXTREL" not in text
    assert "RPATH" not in text and "RUNPATH" not in text


def test_stack_is_not_executable(library_file):
    flags = re.search(r"GNU_STACK\s+(?:0x\w+\s+){5}(\S+)", read(library_file, "--segments"))
    assert flags and "E" not in flags[1]


def test_abi_number_is_the_soname(library, library_file):
    assert f"libsparseattn.so.{library.c.spattn_abi()}]" in read(library_file, "--dynamic")


def test_build_describes_itself(library):
    built = json.loads(capi.ffi.string(library.c.spattn_build_json()).decode())
    version = library.c.spattn_version()
    assert built["version"] == f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    assert built["abi"] == library.c.spattn_abi()
    assert "cpu" in built["backends"]
    assert built["kernels"] == library.c.spattn_kernel_count()


LOADS = """
import _ctypes, ctypes, resource, sys
for turn in range(200):
    handle = _ctypes.dlopen(sys.argv[1], 2)
    assert ctypes.CFUNCTYPE(ctypes.c_uint32)(_ctypes.dlsym(handle, "spattn_version"))() > 0
    pattern = ctypes.c_void_p()
    assert ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(_ctypes.dlsym(handle, "spattn_pattern_causal"))(
        ctypes.addressof(pattern)) == 0
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_ctypes.dlsym(handle, "spattn_pattern_release"))(pattern)
    _ctypes.dlclose(handle)
    if turn == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_loading_and_unloading_two_hundred_times(library_file):
    done = subprocess.run([sys.executable, "-c", LOADS, library_file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2048  # KiB


@pytest.mark.parametrize("wrong", ["window(1", "sink(-1)"])
def test_errors_reach_another_language(library, wrong):
    with pytest.raises(capi.Failure) as failure:
        library.parse(wrong)
    assert failure.value.status == "SPATTN_E_FORMAT"
    assert "spattn_pattern_parse" in str(failure.value) and "text" in str(failure.value)

# SPDX-License-Identifier: MIT
"""The header is C and C++ of every dialect, cffi reads it, and its structs lie in memory as they always did."""
import importlib.util
import itertools
import pathlib
import re
import shutil
import subprocess

import capi
import pytest

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = capi.ROOT / "include"
DIALECTS = {"c": ["c99", "c11", "c17"], "c++": ["c++17", "c++20"]}
COMPILERS = [compiler for compiler in ("gcc", "clang") if shutil.which(compiler)]
STRICT = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}"]


def compile_text(text, *options, compiler=COMPILERS[0]):
    return subprocess.run([compiler, *options, "-"], input=text, capture_output=True, text=True)


def headers():
    found = sorted(INCLUDE.rglob("*.h*"))
    assert capi.HEADER in found
    return found


@pytest.mark.parametrize("compiler", COMPILERS)
def test_each_header_alone_and_twice(compiler):
    for header, (language, dialects) in itertools.product(headers(), DIALECTS.items()):
        if header.suffix == ".hpp" and language == "c":
            continue
        for dialect in dialects:
            include = f'#include "{header.relative_to(INCLUDE)}"\n'
            done = compile_text(include + include + "int main(void) { return 0; }\n", "-x", language, f"-std={dialect}",
                                "-fsyntax-only", *STRICT, compiler=compiler)
            assert done.returncode == 0, f"{compiler} -std={dialect} {header.name}\n{done.stderr}"


def test_a_wrong_header_would_be_seen():
    assert compile_text("int x = ;\n", "-x", "c", "-std=c99", "-fsyntax-only", *STRICT).returncode != 0
    assert compile_text("enum { a, };\n#include <nothing.h>\n", "-x", "c", "-fsyntax-only", *STRICT).returncode != 0


def test_no_name_without_our_prefix():
    text = re.sub(r"/\*.*?\*/", "", capi.HEADER.read_text(), flags=re.S)
    macros = re.findall(r"#define\s+(\w+)", text)
    enumerators = re.findall(r"\b([A-Z][A-Z0-9_]+)\s*=", text)
    types = re.findall(r"^(?:typedef )?(?:struct|enum) (\w+)", text, flags=re.M)
    types += [name for kind in capi.ffi.list_types() for name in kind]
    assert len(macros) > 4 and len(enumerators) > 20 and len(types) > 20
    assert [name for name in macros + enumerators if not name.startswith(("SPATTN_", "SPARSEATTN_"))] == []
    assert [name for name in types if not name.startswith("spattn_")] == []


# ---- layout in memory ----

def structs():
    """Name and type of each struct with fields, as cffi understands the header."""
    names = [n for n in capi.ffi.list_types()[0] if n.startswith("spattn_")]
    types = [(n, capi.ffi.typeof(n)) for n in sorted(names)]
    return [(n, t) for n, t in types if t.kind == "struct" and t.fields]


def layout_by_cffi():
    lines = []
    for name, kind in structs():
        lines.append(f"{name} {capi.ffi.sizeof(kind)}")
        lines += [f"    {field} {place.offset} {capi.ffi.sizeof(place.type)}" for field, place in kind.fields]
    return "\n".join(lines) + "\n"


def layout_by(tmp_path, language, dialect):
    prints = []
    for name, kind in structs():
        prints.append(f'printf("{name} %d\\n", (int)sizeof({name}));')
        prints += [f'printf("    {f} %d %d\\n", (int)offsetof({name}, {f}), (int)sizeof((({name}*)0)->{f}));'
                   for f, _ in kind.fields]
    begin = ["#include <stdio.h>", "#include <sparseattn/sparseattn.h>", "int main(void) {"]
    text = "\n".join([*begin, *prints, "return 0; }"])
    program = tmp_path / dialect
    done = compile_text(text, "-x", language, f"-std={dialect}", f"-I{INCLUDE}", "-o", str(program))
    assert done.returncode == 0, done.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def test_structs_lie_as_committed(tmp_path):
    """layout.txt changes by appended fields only; after such a change: pytest prints what to commit."""
    golden = (HERE / "layout.txt").read_text()
    assert layout_by_cffi() == golden
    assert layout_by(tmp_path, "c", "c99") == golden
    assert layout_by(tmp_path, "c++", "c++20") == golden


def test_structs_have_no_holes():
    """Bytes between fields would look like fields of a newer header."""
    assert len(structs()) >= 10
    for name, kind in structs():
        end = 0
        for field, place in kind.fields:
            assert place.offset == end, f"{name}.{field} begins at {place.offset}, after a hole from {end}"
            end += capi.ffi.sizeof(place.type)
        assert end == capi.ffi.sizeof(kind), f"{name} ends with {capi.ffi.sizeof(kind) - end} bytes of padding"


def test_sized_structs_begin_with_their_size():
    sized = [(name, kind) for name, kind in structs() if kind.fields[0][0] == "struct_size"]
    assert len(sized) >= 8
    for name, kind in sized:
        assert kind.fields[0][1].type.cname == "uint32_t", name


# ---- DLPack ----

def dlpack():
    """Compiler options for a real dlpack.h, and its text: the apache-tvm-ffi wheel's, or Debian's libdlpack-dev."""
    package = importlib.util.find_spec("tvm_ffi")
    options = [f"-I{pathlib.Path(package.origin).parent / 'include'}"] if package else []
    done = compile_text("#include <dlpack/dlpack.h>\n", "-x", "c", "-E", "-P", *options)
    if done.returncode:
        pytest.skip("no dlpack.h here: neither the apache-tvm-ffi wheel nor libdlpack-dev is installed")
    return options, done.stdout


def test_tensors_are_dlpack_tensors_byte_for_byte():
    options, theirs_text = dlpack()
    same = ["sizeof(spattn_tensor) == sizeof(DLTensor)", "sizeof(spattn_device) == sizeof(DLDevice)",
            "sizeof(spattn_dtype) == sizeof(DLDataType)"]
    for ours, theirs, fields in (
            ("spattn_tensor", "DLTensor", ["data", "device", "ndim", "dtype", "shape", "strides", "byte_offset"]),
            ("spattn_dtype", "DLDataType", ["code", "bits", "lanes"])):
        same += [f"offsetof({ours}, {f}) == offsetof({theirs}, {f})" for f in fields]
        same += [f"sizeof((({ours}*)0)->{f}) == sizeof((({theirs}*)0)->{f})" for f in fields]
    same += ["offsetof(spattn_device, type) == offsetof(DLDevice, device_type)",
             "offsetof(spattn_device, index) == offsetof(DLDevice, device_id)"]
    same += [f"(int)SPATTN_{ours} == (int)kDL{theirs}" for ours, theirs in (
        ("CPU", "CPU"), ("CUDA", "CUDA"), ("CUDA_HOST", "CUDAHost"), ("CUDA_MANAGED", "CUDAManaged"), ("INT", "Int"),
        ("UINT", "UInt"), ("FLOAT", "Float"), ("BFLOAT", "Bfloat"), ("BOOL", "Bool")) if f"kDL{theirs}" in theirs_text]
    text = "#include <stddef.h>\n#include <dlpack/dlpack.h>\n#include <sparseattn/sparseattn.h>\n"
    text += "".join(f'_Static_assert({claim}, "{claim}");\n' for claim in same)
    done = compile_text(text, "-x", "c", "-std=c11", "-fsyntax-only", f"-I{INCLUDE}", *options)
    assert done.returncode == 0, done.stderr

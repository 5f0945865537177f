# SPDX-License-Identifier: MIT
"""Strangers' projects in C99 and C++17 use the library in every way in which it is given away: the shared and the
static library of an installation that has moved, through find_package and pkg-config, the Python package's prefix, and
FetchContent. What they compile are the examples, which check their own answer."""
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "bindings" / "examples"
COMPILERS = {"gcc": "g++", "clang": "clang++"}  # of the consumers; the library itself wants a newer clang
STRICT = ["-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pedantic-errors"]
PKG_CONFIG = shutil.which("pkg-config") or shutil.which("pkgconf")


def run(*command, **environment):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def library_folder(prefix):
    return next(path.parent for path in prefix.rglob("libsparseattn.so"))


@pytest.fixture(scope="module")
def prefix(build, tmp_path_factory):
    """An installation that was moved after it was made."""
    folder = tmp_path_factory.mktemp("consumers")
    run("cmake", "--install", build, "--prefix", folder / "installed")
    return (folder / "installed").rename(folder / "moved")


def demand_answers(programs, **environment):
    answers = {run(program, **environment) for program in programs}
    assert len(answers) == 1 and "by differences" in answers.pop()


def has(compiler):
    return shutil.which(compiler) and shutil.which(COMPILERS[compiler])


BY_COMPILER = pytest.mark.parametrize("compiler", [
    pytest.param(c, marks=pytest.mark.skipif(not has(c), reason=f"no {c} and {COMPILERS[c]} here")) for c in COMPILERS])


@BY_COMPILER
@pytest.mark.parametrize("target", ["sparseattn", "sparseattn_static"])
def test_find_package(prefix, compiler, target, tmp_path):
    run("cmake", "-S", ROOT / "tests" / "cpp" / "consumer", "-B", tmp_path, f"-DEXAMPLES={EXAMPLES}",
        f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTARGET={target}", CC=compiler, CXX=COMPILERS[compiler])
    run("cmake", "--build", tmp_path)
    demand_answers([tmp_path / "in_c", tmp_path / "in_cpp"])


@BY_COMPILER
@pytest.mark.parametrize("is_static", [False, True])
def test_pkg_config(prefix, compiler, is_static, tmp_path):
    if not PKG_CONFIG:
        pytest.skip("no pkg-config here, nor the pkgconf wheel")
    library = library_folder(prefix)
    options = ["--static"] if is_static else []
    where = {"PKG_CONFIG_PATH": str(library / "pkgconfig")}
    flags = run(PKG_CONFIG, "--cflags", "--libs", *options, "sparseattn", **where).split()
    if is_static:  # the archive, not the shared library beside it
        flags[flags.index("-lsparseattn")] = "-l:libsparseattn.a"
    run(compiler, "-std=c99", *STRICT, EXAMPLES / "attention.c", "-o", tmp_path / "in_c", *flags, "-lm")
    run(COMPILERS[compiler], "-std=c++17", *STRICT, EXAMPLES / "attention.cpp", "-o", tmp_path / "in_cpp", *flags)
    for name in "decode", "ranks":
        run(compiler, "-std=c99", *STRICT, EXAMPLES / f"{name}.c", "-o", tmp_path / name, *flags, "-lm")
    where = {"LD_LIBRARY_PATH": "" if is_static else str(library)}
    demand_answers([tmp_path / "in_c", tmp_path / "in_cpp"], **where)
    assert "decoded one by one" in run(tmp_path / "decode", **where)
    assert run(tmp_path / "ranks", **where).count("off one pass") == 4


@BY_COMPILER
def test_a_static_object_uses_the_static_library(prefix, compiler, tmp_path):
    """Objects of a program may be made before those of a library that is linked into it."""
    source = tmp_path / "program.cpp"
    source.write_text("""
#include <sparseattn/sparseattn.hpp>
namespace sa = sparseattn;
static const sa::Context context(sa::cpu);
int main() {
    sa::Problem problem;
    problem.starts = true;
    float token = 3, k = 0, v = 0, out = 0;
    const int32_t start = 0;
    sa::CacheAppend append;
    append.k_new = append.v_new = sa::view(&token, {1, 1, 1, 1});
    append.k = sa::view(&k, {1, 1, 1, 1}), append.v = sa::view(&v, {1, 1, 1, 1}), append.starts = sa::view(&start, {1});
    context.append(problem, append);
    sa::Forward args;
    args.q = args.k = append.k, args.v = append.v, args.out = sa::view(&out, {1, 1, 1, 1}), args.starts = append.starts;
    context.plan(sa::causal(), problem).forward(args);
    return out == 3 ? 0 : 1;
}
""")
    library = library_folder(prefix) / "libsparseattn.a"
    program = tmp_path / "program"
    run(COMPILERS[compiler], "-std=c++17", *STRICT, f"-I{prefix / 'include'}", source, library, "-o", program,
        "-pthread", "-ldl", "-lrt")
    run(program)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_fetch_content(build, compiler):
    """With fewer kernels: to compile all takes minutes, and how a library is linked does not depend on them."""
    c, cxx = "gcc", "g++"
    if compiler == "clang":
        newest = next((version for version in range(30, 15, -1) if shutil.which(f"clang++-{version}")), None)
        if not newest:
            pytest.skip("no clang++-16 or newer here, which the library's own sources want")
        c, cxx = f"clang-{newest}", f"clang++-{newest}"
    folder = build.parent / f"consumer-{compiler}"
    run("cmake", "-S", ROOT / "tests" / "cpp" / "consumer", "-B", folder, f"-DEXAMPLES={EXAMPLES}", f"-DFETCHED={ROOT}",
        "-DCMAKE_CXX_FLAGS=-DSPATTN_CPU_ONE_VECTOR_ARCH", "-DCMAKE_BUILD_TYPE=Debug", CC=c, CXX=cxx)
    run("cmake", "--build", folder, "--parallel", os.cpu_count())
    demand_answers([folder / "in_c", folder / "in_cpp"])


@BY_COMPILER
def test_prefix_of_the_python_package(compiler, tmp_path):
    if importlib.util.find_spec("sparseattn") is None:
        pytest.skip("the Python package is not installed here")
    prefix = run(sys.executable, "-m", "sparseattn", "prefix").strip()
    run("cmake", "-S", ROOT / "tests" / "cpp" / "consumer", "-B", tmp_path, f"-DEXAMPLES={EXAMPLES}",
        f"-DCMAKE_PREFIX_PATH={prefix}", CC=compiler, CXX=COMPILERS[compiler])
    run("cmake", "--build", tmp_path)
    demand_answers([tmp_path / "in_c", tmp_path / "in_cpp"])


def test_example_in_python():
    if importlib.util.find_spec("sparseattn") is None:
        pytest.skip("the Python package is not installed here")
    assert "by differences" in run(sys.executable, EXAMPLES / "attention.py")


@BY_COMPILER
def test_structs_by_the_names_of_some_fields(compiler, tmp_path):
    source = tmp_path / "program.cpp"
    source.write_text("""
#include <sparseattn/sparseattn.hpp>
namespace sa = sparseattn;
void use(const sa::Context& context, const sa::View& x) {
    const sa::Plan plan = context.plan(sa::causal(), {.seq_q = 8, .seq_k = 8, .backward = true});
    plan.forward({.q = x, .k = x, .v = x, .out = x});
    plan.backward({.q = x, .k = x, .v = x, .out = x, .lse = x, .dout = x, .dq = x, .dk = x, .dv = x});
    context.append({.seq_k = 8, .starts = true}, {.k_new = x, .v_new = x, .k = x, .v = x, .starts = x});
    if (sa::causal().keeps({8, 8}, 1, 2)) sa::causal().to_mask({.seq_q = 8, .seq_k = 8}, x);
}
""")
    run(COMPILERS[compiler], "-std=c++20", *STRICT, f"-I{ROOT / 'include'}", "-fsyntax-only", source)


@BY_COMPILER
def test_header_without_exceptions_and_rtti(compiler, tmp_path):
    source = tmp_path / "program.cpp"
    source.write_text('#include <sparseattn/sparseattn.hpp>\nint main() { return sparseattn::full() ? 0 : 1; }\n')
    run(COMPILERS[compiler], "-std=c++17", *STRICT, "-fno-exceptions", "-fno-rtti", f"-I{ROOT / 'include'}",
        "-fsyntax-only", source)

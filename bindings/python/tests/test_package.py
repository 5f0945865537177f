# SPDX-License-Identifier: MIT
"""What pip brings: the library once, nothing that it needs beside it, files by which C and C++ programs find it; and a
source package that has all it takes to build it again."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT

import sparseattn as sa

PACKAGE = Path(sa.__file__).resolve().parent
FOLDER = ROOT / "bindings" / "python"
# What every Linux has, the loader by its processor's name, and the library itself.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux.*|libsparseattn\.so\.0")
MOST_BYTES = 5 << 20


def run(*command, **more):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def binaries():
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]


@pytest.fixture
def own_library():
    """Skips the packages of tests/run that take the library of a build, with all that an installation there has."""
    if (PACKAGE / "lib" / f"libsparseattn.so.{sa.version()}").exists():
        pytest.skip("this package did not compile its library: tests/run all")


@pytest.fixture
def wheel(own_library):
    found = sorted((ROOT / "build" / "wheels").glob("sparseattn-*.whl"))
    if not found:
        pytest.skip("no wheel in build/wheels: tests/run all")
    return found[-1]


def test_the_library_is_there_once(own_library):
    names = sorted(path.relative_to(PACKAGE).as_posix() for path in binaries())
    assert [name for name in names if not name.startswith("_native")] == ["_xla.so", "lib/libsparseattn.so.0"]
    assert len(names) <= 3


def test_nothing_but_the_system_is_needed():
    if not shutil.which("readelf"):
        pytest.skip("no readelf here")
    needed = {path.name: re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", path)) for path in binaries()}
    assert any(needed.values())
    assert {name: [one for one in libraries if not SYSTEM.fullmatch(one)] for name, libraries in needed.items()} == {
        name: [] for name in needed
    }


def test_the_wheel_is_small_and_runs_on_any_linux(wheel):
    assert wheel.stat().st_size <= MOST_BYTES
    assert "-cp39-abi3-linux" in wheel.name or importlib.util.find_spec("sparseattn._native").origin.endswith(".py")
    if not importlib.util.find_spec("auditwheel"):
        pytest.skip("no auditwheel here")
    said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    assert re.search(r'platform tag[^"]*"manylinux_\d+_\d+_', said), said


README = (ROOT / "README.md").read_text()
PROGRAM = next(text for text in re.findall(r"^```c\n(.*?)^```", README, flags=re.S | re.M) if "int main" in text)
SAYS = "query 1023: 260 keys, mean 881.75\n"


@pytest.fixture
def prefix():
    if not shutil.which("cc"):
        pytest.skip("no C compiler here")
    return run(sys.executable, "-m", "sparseattn", "prefix").strip()


def test_c_programs_find_it_through_cmake(prefix, tmp_path):
    cmake = shutil.which("cmake")
    if not cmake:
        pytest.skip("no cmake here")
    (tmp_path / "example.c").write_text(PROGRAM)
    consumer = ROOT / "tests" / "package" / "consumer"
    options = [f"-DPROGRAM={tmp_path / 'example.c'}", f"-DCMAKE_PREFIX_PATH={prefix}", "-DTARGET=sparseattn"]
    run(cmake, "-S", consumer, "-B", tmp_path / "build", *options, "-DLANGUAGE=C")
    run(cmake, "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "program").endswith(SAYS)


def test_c_programs_find_it_through_pkg_config(prefix, tmp_path):
    tool = shutil.which("pkg-config") or shutil.which("pkgconf")
    if not tool:
        pytest.skip("no pkg-config here, nor the pkgconf wheel")
    (tmp_path / "example.c").write_text(PROGRAM)
    flags = run(tool, "--cflags", "--libs", "sparseattn", env={"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"}).split()
    run("cc", "example.c", "-o", "example", *flags, f"-Wl,-rpath,{prefix}/lib", "-lm", cwd=tmp_path)
    assert run(tmp_path / "example").endswith(SAYS)


# ---- the source package ----


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The source package, unpacked far from the checkout."""
    pytest.importorskip("scikit_build_core", minversion="1.0")
    folder = tmp_path_factory.mktemp("sdist")
    build = f"import sys; sys.path.insert(0, '.'); import backend; print(backend.build_sdist({str(folder)!r}))"
    name = run(sys.executable, "-c", build, cwd=FOLDER).split()[-1]
    with tarfile.open(folder / name) as packed:
        assert not [entry.name for entry in packed if entry.issym() or entry.islnk()]
        packed.extractall(folder)
    return folder / name.removesuffix(".tar.gz")


def test_sources_are_whole(sources):
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    library = run("git", "ls-files", "src", "cuda", "include", "CMakeLists.txt", "LICENSE", cwd=ROOT).split()
    binding = run("git", "ls-files", ".", ":!library", cwd=FOLDER).split()
    wanted = {f"library/{path}" for path in library} | {path for path in binding if not path.endswith(".gitignore")}
    packed = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    assert len(library) > 200 and wanted - packed == set() and packed - wanted <= {"PKG-INFO"}


def test_sources_configure_alone(sources, tmp_path):
    cmake = shutil.which("cmake")
    if not cmake or tuple(map(int, run(cmake, "--version").split()[2].split(".")[:2])) < (3, 26):
        pytest.skip("no cmake from 3.26 on here")
    options = ["-DSPATTN_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}", "-DSKBUILD_SABI_COMPONENT="]
    run(cmake, "-S", sources, "-B", tmp_path, *options)
    cache = (tmp_path / "CMakeCache.txt").read_text()
    assert str(sources / "library") in cache and str(ROOT) not in cache.replace(sys.executable, "").replace(
        sys.prefix, ""
    )


@pytest.mark.parametrize(
    "settings, asks",
    [
        ({"cmake.define.SPATTN_CUDA": "ON"}, True),
        ({"skbuild.cmake.define.SPATTN_CUDA": "ON"}, True),
        ({"cmake.args": "-DSPATTN_CUDA=ON"}, True),
        ({"cmake.define.SPATTN_CUDA": "ON", "cmake.define.SPATTN_CUDA_ROOT": "/opt/cuda"}, False),
        ({"cmake.define.SPATTN_CUDA": "OFF"}, False),
        (None, False),
    ],
)
def test_nvcc_is_asked_for_where_it_is_wanted_and_missing(settings, asks, monkeypatch):
    pytest.importorskip("scikit_build_core", minversion="1.0")
    monkeypatch.chdir(FOLDER)
    monkeypatch.delenv("CUDACXX", raising=False)
    spec = importlib.util.spec_from_file_location("backend", FOLDER / "backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.setattr(backend.shutil, "which", lambda name, **_: None)
    monkeypatch.setattr(backend.skbuild, "get_requires_for_build_wheel", lambda _: ["cmake"])
    assert (backend.get_requires_for_build_wheel(settings) == ["cmake", *backend.CUDA]) == asks

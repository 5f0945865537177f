# SPDX-License-Identifier: MIT
"""The Rust crates against the library of this build: their own tests and documentation, the library opened at run time,
the examples, the crates that bring other people's together with ours, Miri, style, and the oldest Rust. What cannot be
tried here is skipped, and says why."""
import importlib.util
import os
import pathlib
import re
import shutil
import sys

import capi
import pytest
from crates import (CRATES, OLDEST, SYSTEM, WORKSPACE, demand_crate, demand_dependencies, demand_tests,
                    demand_toolchain, run, skip_what_says_so, succeeds)

# Each with its oldest Rust, which other people's crates decide, and the features that its tests need.
WITH_OTHER_PEOPLES = {"sparseattn-half": ("1.81", SYSTEM), "sparseattn-ndarray": ("1.81", SYSTEM),
                      "sparseattn-cudarc": ("1.88", [*SYSTEM, "--features", "cuda-12080"])}
MANIFESTS = [CRATES, *(CRATES / crate for crate in (*WITH_OTHER_PEOPLES, "sparseattn-candle"))]


def test_crates_and_their_documentation(cargo):
    demand_tests(cargo("test", *WORKSPACE), 45)


def test_library_opened_at_run_time(cargo):
    demand_tests(cargo("test", "--tests", "--no-default-features", "--features", "sparseattn/load"), 35)


@pytest.mark.parametrize("example, answer", [
    (["attention"], "by differences"),
    (["draw", "--", "causal & window(9,0)", "64"], "% kept"),
    (["ranks"], "receives 384 of 3072"),
    (["top_k"], "256 keys"),
    (["train"], "with its neighbours"),
])
def test_examples(cargo, example, answer):
    assert answer in cargo("run", "--release", "-p", "sparseattn", *SYSTEM, "--example", *example)


def test_host_time(cargo):
    output = cargo("test", "--release", "-p", "sparseattn", *SYSTEM, "--test", "host_time", "--", "--nocapture")
    skip_what_says_so(output)
    assert "forward of one token" in output


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A crate of somebody who has the library installed."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "src").mkdir()
    (folder / "Cargo.toml").write_text(f"""\
[package]
name = "stranger"
version = "0.1.0"
edition = "2021"

[dependencies]
sparseattn = {{ path = "{CRATES / 'sparseattn'}", default-features = false, features = ["system"] }}
""")
    (folder / "src" / "lib.rs").write_text("""\
#[test]
fn it_counts() {
    assert_eq!((sparseattn::causal() & sparseattn::window(1, 0)).stats(8).unwrap().pairs, 15.0);
}
""")
    return folder


@pytest.fixture(scope="module")
def prefix(build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed here")  # paths may have spaces
    run("cmake", "--install", build, "--prefix", folder)
    return folder


def library_folder(prefix):
    return next(path.parent for path in prefix.rglob("libsparseattn.so"))


def test_stranger_with_a_prefix(cargo, stranger, prefix):
    where = {"SPARSEATTN_DIR": str(prefix), "LD_LIBRARY_PATH": str(library_folder(prefix))}
    demand_tests(cargo("test", cwd=stranger, **where), 1)


def test_stranger_with_the_archive_alone(cargo, stranger, prefix, tmp_path):
    shutil.copy(library_folder(prefix) / "libsparseattn.a", tmp_path)
    demand_tests(cargo("test", cwd=stranger, SPARSEATTN_DIR=str(tmp_path), LD_LIBRARY_PATH=None), 1)


def test_stranger_with_pkg_config(cargo, stranger, prefix):
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config here, nor the pkgconf wheel")
    library = library_folder(prefix)
    where = {"PKG_CONFIG_PATH": str(library / "pkgconfig"), "LD_LIBRARY_PATH": str(library)}
    demand_tests(cargo("test", cwd=stranger, SPARSEATTN_DIR=None, **where), 1)


def test_stranger_with_the_python_package(cargo, stranger):
    if importlib.util.find_spec("sparseattn") is None:
        pytest.skip("the Python package is not installed here")
    prefix = run(sys.executable, "-m", "sparseattn", "prefix").strip()
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    demand_tests(cargo("test", cwd=stranger, SPARSEATTN_DIR=None, PATH=path, PKG_CONFIG_PATH="/nowhere",
                       LD_LIBRARY_PATH=f"{prefix}/lib"), 1)


@pytest.mark.parametrize("crate", WITH_OTHER_PEOPLES)
def test_crates_with_other_peoples(cargo, crate):
    _, features = WITH_OTHER_PEOPLES[crate]
    output = cargo("test", *features, "--", "--nocapture", cwd=demand_crate(crate))
    demand_tests(output, 1)
    skip_what_says_so(output)


def test_bindings_name_what_the_header_names(library):
    bindings = (CRATES / "sparseattn-sys" / "src" / "bindings.rs").read_text()
    for node in capi.functions():
        names = [parameter.name for parameter in node.type.args.params if parameter.name]
        signature = re.search(rf"pub fn {node.name}\((.*?)\)(;|\s+->)", bindings, flags=re.S)
        assert signature, f"{node.name} is not in bindings.rs"
        assert re.findall(r"(\w+): ", signature[1]) == names, node.name
    for name, fields in structs():
        body = re.search(rf"pub struct {name} {{(.*?)}}", bindings, flags=re.S)
        assert body, f"{name} is not in bindings.rs"
        assert re.findall(r"pub (\w+): ", body[1]) == [{"type": "type_"}.get(field, field) for field in fields], name
    values = dict(re.findall(r"pub const (SPATTN_\w+): \w+ = (\d+);", bindings))
    enumerators = re.findall(r"\b(SPATTN_\w+) = ", capi.native.declarations())
    assert len(enumerators) > 50
    for name in enumerators:
        assert int(values[name]) == getattr(library.c, name), name


def test_bindings_are_bindgens():
    if not shutil.which("bindgen"):
        pytest.skip("no bindgen here, so that types were not compared: cargo install bindgen-cli, and libclang")
    run("./generate", "--check", cwd=CRATES / "sparseattn-sys")


def structs():
    """Each struct of the header with the names of its fields."""
    for name in capi.ffi.list_types()[0]:
        kind = capi.ffi.typeof(name)
        if name.startswith("spattn_") and kind.kind == "struct" and kind.fields:
            yield name, [field for field, _ in kind.fields]


def test_style(cargo):
    for tool in ("fmt", "clippy"):
        if not succeeds("cargo", tool, "--version"):
            pytest.skip(f"no cargo-{tool} here: rustup component add rustfmt clippy; Debian's rustfmt, rust-clippy")
    for folder in MANIFESTS:
        cargo("fmt", "--check", cwd=folder)
    cargo("clippy", "--all-targets", *WORKSPACE, "--", "-D", "warnings")
    for crate, (_, features) in WITH_OTHER_PEOPLES.items():
        cargo("clippy", "--all-targets", *features, "--", "-D", "warnings", cwd=demand_crate(crate))


def test_miri(cargo, build):
    """The parts that need no library, in the interpreter that sees undefined behaviour."""
    if not succeeds("cargo", "+nightly", "miri", "--version"):
        pytest.skip("no Miri here: rustup toolchain install nightly --component miri --component rust-src")
    nothing_linked = ["--no-default-features", "--features", "load"]
    output = cargo("+nightly", "miri", "test", "--lib", "-p", "sparseattn", *nothing_linked,
                   MIRIFLAGS="-Zmiri-strict-provenance", CARGO_TARGET_DIR=str(build.parent / "rust-miri"))
    demand_tests(output, 5)


@pytest.mark.parametrize("crate", [None, *WITH_OTHER_PEOPLES])
def test_oldest_version(cargo, build, crate):
    oldest, features = WITH_OTHER_PEOPLES[crate] if crate else (OLDEST, WORKSPACE)
    toolchain = demand_toolchain(f"{oldest}.0")
    folder = demand_dependencies(crate) if crate else CRATES
    cargo(toolchain, "check", "--all-targets", *features, cwd=folder,
          CARGO_TARGET_DIR=str(build.parent / f"rust-{oldest}"))

# SPDX-License-Identifier: MIT
"""The crates as a registry would give them: packaged from what git tracks, unpacked, and built by a stranger's crate
with the C++ that lies in the package."""
import shutil
import subprocess

import pytest
from crates import ROOT, demand_tests, run

STRANGER = """\
[package]
name = "stranger"
version = "0.1.0"
edition = "2021"

[workspace]

[dependencies]
sparseattn = "0.1"

[patch.crates-io]
sparseattn = { path = "../sparseattn" }
sparseattn-sys = { path = "../sparseattn-sys" }
"""
PROGRAM = """\
#[test]
fn it_counts() {
    assert_eq!((sparseattn::causal() & sparseattn::window(1, 0)).stats(8).unwrap().pairs, 15.0);
}
"""


@pytest.fixture(scope="module")
def packages(cargo, build):
    """Both packages, unpacked where they always lie, so that a compiler's cache knows them again."""
    folder = build.parent / "packaged"
    shutil.rmtree(folder, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is no clone of git's, so that nobody knows what a clean one has")
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "clone" / name, follow_symlinks=False)
    try:
        cargo("package", "--workspace", "--no-verify", "--allow-dirty", cwd=folder / "clone" / "bindings" / "rust",
              CARGO_TARGET_DIR=str(folder / "target"))
    except AssertionError as failure:
        if "sparseattn-sys` found" not in str(failure):
            raise
        pytest.skip("cargo here is older than 1.90, and packages crates that need each other only from a registry")
    for package in sorted((folder / "target" / "package").glob("*.crate")):
        run("tar", "-xzf", package, "-C", folder)
        (folder / package.stem).rename(folder / package.stem.rsplit("-", 1)[0])
    return folder


def test_packages_are_whole(packages):
    assert (packages / "sparseattn-sys" / "native" / "src" / "api").is_dir()
    for crate in ("sparseattn-sys", "sparseattn"):
        assert not [path for path in (packages / crate).rglob("*") if path.is_symlink()]
        assert (packages / crate / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_stranger_builds_the_package(packages):
    """With fewer kernels: to compile all takes minutes, and how a crate is linked does not depend on them. With CMake's
    own generator, which is what a stranger has."""
    stranger = packages / "stranger"
    (stranger / "src").mkdir(parents=True)
    (stranger / "Cargo.toml").write_text(STRANGER)
    (stranger / "src" / "lib.rs").write_text(PROGRAM)
    demand_tests(run("cargo", "test", cwd=stranger, CMAKE_GENERATOR=None, CXXFLAGS="-DSPATTN_CPU_REFERENCE_ONLY",
                     CARGO_NET_OFFLINE="true", CARGO_TARGET_DIR=str(packages / "target"),
                     CCACHE_BASEDIR=str(packages)), 1)

# SPDX-License-Identifier: MIT
"""The Rust crates against the library of this build, without a network: their own tests and documentation, the library
opened at run time, a stranger's crate, and the crates that bring other people's together with ours. What cannot be
tried here is skipped, and says why."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CRATES = ROOT / "bindings" / "rust"
OLDEST = "1.74"
SYSTEM = ["--no-default-features", "--features", "system"]


def run(*command, cwd=CRATES, **environment):
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=os.environ | environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def numbers(version):
    return tuple(map(int, version.split(".")))


@pytest.fixture(scope="session")
def cargo(build):
    """Runs cargo with the library of this build, offline; everything that it makes lies in build/rust."""
    if not shutil.which("cargo"):
        pytest.skip(f"no cargo: Rust {OLDEST} or newer, https://rustup.rs, or rustc-web and cargo-web of Debian 12")
    version = re.search(r"\d+\.\d+", subprocess.run(["cargo", "--version"], capture_output=True, text=True).stdout)
    if not version or numbers(version[0]) < numbers(OLDEST):
        pytest.skip(f"cargo {version and version[0]} is older than {OLDEST}, which the crates need")
    where = {"SPARSEATTN_DIR": str(build), "SPARSEATTN_LIBRARY": str(build / "libsparseattn.so"),
             "LD_LIBRARY_PATH": str(build), "CARGO_TARGET_DIR": str(build.parent / "rust"), "CARGO_NET_OFFLINE": "true"}

    def call(*arguments, **environment):
        return run("cargo", *arguments, **where | environment)
    return call


def demand_tests(output, least):
    assert sum(map(int, re.findall(r"^test result: ok. (\d+) passed", output, flags=re.M))) >= least, output[-8000:]


def test_crates_and_their_documentation(cargo):
    demand_tests(cargo("test", "--no-default-features", "--features", "sparseattn/system"), 40)


def test_library_opened_at_run_time(cargo):
    demand_tests(cargo("test", "--tests", "--no-default-features", "--features", "sparseattn/load"), 30)


def test_examples(cargo):
    system = ["--no-default-features", "--features", "system", "-p", "sparseattn"]
    assert "by differences" in cargo("run", "--example", "attention", *system)
    assert "% kept" in cargo("run", "--example", "draw", *system, "--", "causal & window(9,0)", "64")


def test_strangers_crate(cargo, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "Cargo.toml").write_text(f"""\
[package]
name = "stranger"
version = "0.1.0"
edition = "2021"

[dependencies]
sparseattn = {{ path = "{CRATES / 'sparseattn'}", default-features = false, features = ["system"] }}
""")
    (tmp_path / "src" / "lib.rs").write_text("""\
#[test]
fn it_counts() {
    assert_eq!((sparseattn::causal() & sparseattn::window(1, 0)).stats(8).unwrap().pairs, 15.0);
}
""")
    demand_tests(cargo("test", cwd=tmp_path), 1)


@pytest.mark.parametrize("crate", ["sparseattn-half", "sparseattn-ndarray"])
def test_crates_with_other_peoples(cargo, crate):
    folder = CRATES / crate
    offline = os.environ | {"CARGO_NET_OFFLINE": "true"}
    if subprocess.run(["cargo", "fetch"], cwd=folder, env=offline, capture_output=True).returncode:
        pytest.skip(f"what {crate} depends on is not in cargo's cache: cd {folder.relative_to(ROOT)} && cargo fetch")
    demand_tests(cargo("test", *SYSTEM, cwd=folder), 1)


def test_bindings_are_current(cargo):
    if not shutil.which("bindgen"):
        pytest.skip("no bindgen here: cargo install bindgen-cli, and libclang")
    run("./generate", "--check", cwd=CRATES / "sparseattn-sys")


def test_style(cargo):
    if not shutil.which("cargo-fmt"):
        pytest.skip("no rustfmt here")
    for folder in (CRATES, CRATES / "sparseattn-half", CRATES / "sparseattn-ndarray"):
        cargo("fmt", "--check", cwd=folder)


def test_oldest_version(cargo, build):
    toolchain = f"+{OLDEST}.0"
    if subprocess.run(["cargo", toolchain, "--version"], capture_output=True).returncode:
        pytest.skip(f"no Rust {OLDEST} here: rustup toolchain install {OLDEST}.0")
    cargo(toolchain, "check", "--tests", "--no-default-features", "--features", "sparseattn/system",
          CARGO_TARGET_DIR=str(build.parent / f"rust-{OLDEST}"))

# SPDX-License-Identifier: MIT
"""What the tests of the crates share: cargo with the library of this build, and what counts as an answer."""
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
WORKSPACE = ["--no-default-features", "--features", "sparseattn/system"]


def run(*command, cwd=CRATES, **environment):
    """What a command prints; a variable that is None is not set for it."""
    environment = {name: value for name, value in (os.environ | environment).items() if value is not None}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def succeeds(*command, cwd=CRATES, **environment):
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True).returncode == 0


def numbers(version):
    return tuple(map(int, version.split(".")))


def demand_cargo():
    if not shutil.which("cargo"):
        pytest.skip(f"no cargo here: Rust {OLDEST} or newer, https://rustup.rs, or cargo-web, rustc-web of Debian 12")
    if numbers(cargo_version()) < numbers(OLDEST):
        pytest.skip(f"cargo {cargo_version()} is older than {OLDEST}, which the crates need")


def cargo_version():
    """Major and minor number."""
    return re.search(r"\d+\.\d+", subprocess.run(["cargo", "--version"], capture_output=True, text=True).stdout)[0]


def demand_toolchain(version):
    """Rustup's name of a version, where it is here."""
    if not succeeds("cargo", f"+{version}", "--version"):
        pytest.skip(f"no Rust {version} here: rustup toolchain install {version} --profile minimal")
    return f"+{version}"


def demand_crate(crate):
    """What a crate depends on, for a cargo that is new enough for it. Its folder."""
    oldest = re.search(r'^rust-version = "([\d.]+)"', (CRATES / crate / "Cargo.toml").read_text(), flags=re.M)[1]
    if numbers(cargo_version()) < numbers(oldest):
        pytest.skip(f"cargo {cargo_version()} is older than {oldest}, which {crate} needs")
    return demand_dependencies(crate)


def demand_dependencies(crate):
    """Other people's crates in cargo's cache, else from their registry."""
    folder = CRATES / crate
    if not any(succeeds("cargo", "fetch", *offline, cwd=folder) for offline in (["--offline"], [])):
        pytest.skip(f"what {crate} depends on cannot be fetched: cd {folder.relative_to(ROOT)} && cargo fetch")
    return folder


def demand_tests(output, least):
    assert sum(map(int, re.findall(r"^test result: ok. (\d+) passed", output, flags=re.M))) >= least, output[-8000:]


def skip_what_says_so(output):
    """A crate's tests print why they make no check; that is a skipped test here, not one that passed."""
    found = re.search(r"^SKIPPED: (.*)", output, flags=re.M)
    if found:
        pytest.skip(found[1])

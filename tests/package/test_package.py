# SPDX-License-Identifier: MIT
"""The installed library works for a stranger: the README's programs, through pkg-config and find_package, in a prefix
that has moved since."""
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from capi import ROOT

HERE = pathlib.Path(__file__).resolve().parent


def run(*command, **environment):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def snippets(language):
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    assert found, f"the README shows no {language}"
    return found


@pytest.fixture(scope="module")
def prefix(build, tmp_path_factory):
    """An installation that was moved after it was made."""
    folder = tmp_path_factory.mktemp("package")
    run("cmake", "--install", build, "--prefix", folder / "installed")
    (folder / "installed").rename(folder / "moved")
    return folder / "moved"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The README's C program."""
    whole = [text for text in snippets("c") if "int main" in text]
    assert whole
    path = tmp_path_factory.mktemp("readme") / "example.c"
    path.write_text(whole[0])
    assert len([line for line in whole[0].splitlines() if line.strip()]) <= 45
    return path


def library_folder(prefix):
    return next(path.parent for path in prefix.rglob("libsparseattn.so"))


def test_files(prefix):
    library = library_folder(prefix)
    assert (library / "libsparseattn.so").readlink() == pathlib.Path("libsparseattn.so.0")
    assert (library / "libsparseattn.so.0").resolve().name == "libsparseattn.so.0.1.0"
    assert (library / "pkgconfig" / "sparseattn.pc").is_file()
    assert (library / "cmake" / "sparseattn" / "sparseattnConfig.cmake").is_file()
    headers = {path.name for path in (prefix / "include").rglob("*") if path.is_file()}
    assert headers == {path.name for path in (ROOT / "include" / "sparseattn").iterdir()}


def test_nothing_remembers_where_it_was_built(prefix, build):
    texts = [path for path in library_folder(prefix).rglob("*") if path.suffix in (".cmake", ".pc")]
    assert len(texts) >= 4
    for path in texts:
        assert str(build) not in path.read_text() and str(ROOT) not in path.read_text(), path
        assert str(prefix.parent) not in path.read_text(), path


def test_readme_program_through_pkg_config(prefix, program, tmp_path):
    pkg_config = shutil.which("pkg-config") or shutil.which("pkgconf")
    if not pkg_config:
        pytest.skip("no pkg-config here, nor the pkgconf wheel")
    where = {"PKG_CONFIG_PATH": str(library_folder(prefix) / "pkgconfig")}
    flags = run(pkg_config, "--cflags", "--libs", "sparseattn", **where).split()
    assert run(pkg_config, "--modversion", "sparseattn", **where).strip() == "0.1.0"
    run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", program, "-o", tmp_path / "program", *flags)
    assert "out" in run(tmp_path / "program", LD_LIBRARY_PATH=str(library_folder(prefix)))


def test_readme_program_through_cmake(prefix, program, tmp_path):
    run("cmake", "-S", HERE / "consumer", "-B", tmp_path, f"-DPROGRAM={program}", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert "out" in run(tmp_path / "program")


def test_cmake_refuses_another_version(prefix, program, tmp_path):
    consumer = tmp_path / "consumer"
    shutil.copytree(HERE / "consumer", consumer)
    script = (consumer / "CMakeLists.txt").read_text()
    (consumer / "CMakeLists.txt").write_text(script.replace("sparseattn 0.1 ", "sparseattn 0.2 "))
    done = subprocess.run(["cmake", "-S", consumer, "-B", tmp_path / "build", f"-DPROGRAM={program}",
                           f"-DCMAKE_PREFIX_PATH={prefix}"], capture_output=True, text=True)
    assert done.returncode != 0 and "sparseattn" in done.stderr


def test_readme_python():
    if importlib.util.find_spec("sparseattn") is None:
        pytest.skip("the Python package is not installed here")
    for text in snippets("python"):
        run(sys.executable, "-c", text)

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


def run(*command, cwd=None, **environment):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd,
                          env=os.environ | environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def snippets(language):
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    assert found, f"the README shows no {language}"
    return found


@pytest.fixture(scope="module")
def prefix(build, tmp_path_factory):
    """An installation that was moved after it was made, to where the README puts it: ~/.local of a user."""
    folder = tmp_path_factory.mktemp("package")
    run("cmake", "--install", build, "--prefix", folder / "installed")
    (folder / "home").mkdir()
    return (folder / "installed").rename(folder / "home" / ".local")


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
    assert (library / "libsparseattn.a").is_file()
    headers = {path.name for path in (prefix / "include").rglob("*") if path.is_file()}
    assert headers == {path.name for path in (ROOT / "include" / "sparseattn").iterdir()}


def test_nothing_remembers_where_it_was_built(prefix, build):
    texts = [path for path in library_folder(prefix).rglob("*") if path.suffix in (".cmake", ".pc")]
    assert len(texts) >= 4
    for path in texts:
        assert str(build) not in path.read_text() and str(ROOT) not in path.read_text(), path
        assert str(prefix.parent) not in path.read_text(), path


PROGRAMS = {  # what stands for `cc example.c` in the README's line
    "as written": "cc example.c",
    "C99": "cc -std=c99 -pedantic-errors -Wall -Wextra -Werror example.c",
    "C11": "cc -std=c11 -pedantic-errors -Wall -Wextra -Werror example.c",
    "C++17": "c++ -std=c++17 -pedantic-errors -Wall -Wextra -Werror -x c++ example.c",
}
SAYS = """\
query    0:   1 keys, mean 0.00
query  341: 260 keys, mean 210.24
query  682: 260 keys, mean 545.99
query 1023: 260 keys, mean 881.75
"""


@pytest.fixture
def shell(prefix, program, tmp_path):
    """Runs lines in a shell whose user has the installation at home, and the README's program before her."""
    pkg_config = shutil.which("pkg-config") or shutil.which("pkgconf")
    if not pkg_config:
        pytest.skip("no pkg-config here, nor the pkgconf wheel")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pkg-config").symlink_to(pkg_config)
    shutil.copy(program, tmp_path)
    where = {"HOME": str(prefix.parent), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return lambda lines: run("sh", "-e", "-c", lines, cwd=tmp_path, **where)


def use_lines():
    """What the README says to do once the library is installed."""
    lines = next(text for text in snippets("sh") if "example.c" in text).splitlines()
    return "\n".join(lines[next(n for n, line in enumerate(lines) if line.startswith("export")):])


@pytest.mark.parametrize("compiler", PROGRAMS.values(), ids=PROGRAMS)
def test_readme_program_through_pkg_config(shell, compiler):
    assert use_lines().count("cc example.c") == 1 and "./example" in use_lines()
    assert shell(use_lines().replace("cc example.c", compiler)) == SAYS


def test_static_library_through_pkg_config(shell):
    lines = use_lines().replace("cc example.c", "cc -static example.c").replace("--libs", "--libs --static")
    assert shell(lines + "\nldd example 2>&1 || true").removeprefix(SAYS).strip() == "not a dynamic executable"


def test_examples_as_their_readme_says(shell):
    examples = ROOT / "bindings" / "examples"
    text = (examples / "README.md").read_text()
    export = re.search("`(export .*?)`", text)[1]
    commands = re.findall("`(c(?:c|\\+\\+) .*?)`", text)
    assert len(commands) == 4
    for command in commands:
        shell(f"cp {examples}/*.c {examples}/*.cpp .\n{export}\n{command}")


def test_pkg_config_knows_the_version(shell):
    assert shell("PKG_CONFIG_PATH=~/.local/lib/pkgconfig pkg-config --modversion sparseattn") == "0.1.0\n"


@pytest.mark.parametrize("target", ["sparseattn", "sparseattn_static"])
@pytest.mark.parametrize("language", ["C", "CXX"])
def test_readme_program_through_cmake(prefix, program, tmp_path, target, language):
    run("cmake", "-S", HERE / "consumer", "-B", tmp_path, f"-DPROGRAM={program}", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DTARGET={target}", f"-DLANGUAGE={language}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "program") == SAYS
    needed = run("ldd", tmp_path / "program")
    assert ("libsparseattn" in needed) == (target == "sparseattn")


def test_static_library_has_no_global_name_but_the_headers(prefix):
    lines = run("nm", "--extern-only", "--defined-only", library_folder(prefix) / "libsparseattn.a").splitlines()
    names = {line.split()[-1] for line in lines if len(line.split()) == 3}
    assert names == set((ROOT / "tests" / "abi" / "symbols.txt").read_text().split())


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

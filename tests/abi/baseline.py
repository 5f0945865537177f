#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The ABI as libabigail sees it. baseline.abi is the promise: what programs that are built today rely on. After a
change that is meant (before a release: any; after one: only what old programs do not notice), write it anew:

    python tests/abi/baseline.py
"""
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

import pycparser.c_generator

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import capi  # noqa: E402

BASELINE = HERE / "baseline.abi"


def why_not():
    """Why there is nothing to compare with here, or ""."""
    missing = [tool for tool in ("abidw", "abidiff") if not shutil.which(tool)]
    if missing:
        return f"abigail-tools are not installed: no {', '.join(missing)}"
    return "" if platform.machine() == "x86_64" else f"baseline.abi is of x86_64, this is {platform.machine()}"


def twin_source(include):
    """A C file that defines each function that the header declares, and one more for each enumeration, which functions
    take as a number: libabigail reads debug information, which the
    library is built without. That both export the same names is a test of test_library.py, and that the library's
    functions have the header's types the compiler sees to."""
    declared = [pycparser.c_generator.CGenerator().visit(node) for node in capi.functions()]
    bodies = [text + (" {}" if text.startswith("void spattn_") else " { return 0; }") for text in declared]
    bodies += [f"void takes_{name}(enum {name} value) {{ (void)value; }}"
               for name in re.findall(r"^enum (\w+) {", capi.HEADER.read_text(), flags=re.M)]
    return "\n".join([f'#include "{include}"', *bodies]) + "\n"


def build_twin(folder, edit=lambda text: text):
    """The twin of the library; `edit` may change the texts of the header and of the source."""
    (folder / capi.HEADER.name).write_text(edit(capi.HEADER.read_text()))
    (folder / "twin.c").write_text(edit(twin_source(capi.HEADER.name)))
    subprocess.run(["cc", "-g", "-O0", "-shared", "-fPIC", "-Wl,-soname,libsparseattn.so.0", "-o", "twin.so", "twin.c"],
                   cwd=folder, check=True)
    return folder / "twin.so"


def dump(twin):
    """Of a twin, without a word about the machine it was made on."""
    return subprocess.run(["abidw", "--no-show-locs", "--no-corpus-path", "--no-comp-dir-path", twin.name],
                          cwd=twin.parent, check=True, capture_output=True, text=True).stdout


def changes(twin):
    """What abidiff says of a twin against the baseline; "" where nothing that old programs rely on has changed."""
    done = subprocess.run(["abidiff", "--no-added-syms", BASELINE, twin], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        BASELINE.write_text(dump(build_twin(pathlib.Path(folder))))

# SPDX-License-Identifier: MIT
"""Makes cffi's view of the library from its header:  native.py COMPILER HEADER OUTPUT

OUTPUT ending in .c becomes the source of an extension module; ending in .py, a module that opens the library at run
time, for machines without Python.h. Both offer `ffi` and `lib`. The stable ABI's macro comes from the build.
"""

import pathlib
import subprocess
import sys

from cffi import FFI

OPEN = """
import os
lib = ffi.dlopen(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libsparseattn.so.{abi}"))
"""


HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "sparseattn" / "sparseattn.h"


def declarations(header: pathlib.Path = HEADER, compiler: str = "cc", more: str = "") -> str:
    """The header, and more, after the C preprocessor, as cffi's parser wants it.

    Without the system headers: cffi knows their types.
    """
    own = "\n".join(line for line in header.read_text().splitlines() if not line.startswith("#include"))
    command = [compiler, "-E", "-P", "-DSPATTN_CFFI", "-x", "c", "-"]
    return subprocess.run(command, input=own + more, capture_output=True, text=True, check=True).stdout


def view(header: pathlib.Path = HEADER, compiler: str = "cc") -> FFI:
    """cffi's view of the library, of which tests and benches open their own: view().dlopen(path)."""
    ffi = FFI()
    ffi.cdef(declarations(header, compiler))
    return ffi


def main(compiler: str, header: str, output: str) -> None:
    ffi = view(pathlib.Path(header), compiler)
    if output.endswith(".c"):
        ffi.set_source("sparseattn._native", "#include <sparseattn/sparseattn.h>")
        ffi.emit_c_code(output)
    else:
        ffi.set_source("sparseattn._native", None)
        ffi.emit_python_code(output)
        abi = declarations(pathlib.Path(header), compiler, more="\nSPATTN_ABI").split()[-1]
        with open(output, "a") as file:
            file.write(OPEN.format(abi=abi))


if __name__ == "__main__":
    main(*sys.argv[1:])

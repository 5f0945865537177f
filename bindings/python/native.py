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


def preprocess(compiler: str, source: str) -> str:
    """source after the C preprocessor, as cffi's parser wants it."""
    command = [compiler, "-E", "-P", "-DSPATTN_CFFI", "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def main(compiler: str, header: str, output: str) -> None:
    text = pathlib.Path(header).read_text()
    # Without the system headers: cffi knows their types.
    own = "\n".join(line for line in text.splitlines() if not line.startswith("#include"))
    ffi = FFI()
    ffi.cdef(preprocess(compiler, own))
    if output.endswith(".c"):
        ffi.set_source("sparseattn._native", "#include <sparseattn/sparseattn.h>")
        ffi.emit_c_code(output)
    else:
        ffi.set_source("sparseattn._native", None)
        ffi.emit_python_code(output)
        abi = preprocess(compiler, own + "\nSPATTN_ABI").split()[-1]
        with open(output, "a") as file:
            file.write(OPEN.format(abi=abi))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: MIT
"""Includes point down, never up or sideways. The table is the architecture: folder -> what it may include. A folder
inside another has a row of its own where its files may include more or less than those of the floor around it."""
import re

ARCH = {"tile", "ptx", "runtime", "plan/call.h", "plan/kernel.h", "plan/cache.h", "plan/call_lists.h",
        "plan/dispatch.h", "plan/exchange.h", "plan/float8.h", "layout/view.h", "core"}
MAY_INCLUDE = {
    "src": {
        "core": {"core"},
        "pattern": {"pattern", "core"},
        "layout": {"layout", "pattern", "core"},
        "layout/orders": {"layout/orders", "layout", "pattern", "core"},
        "plan": {"plan", "layout/orders", "layout", "pattern", "core"},
        "cpu": {"cpu", "plan/call.h", "plan/kernel.h", "plan/backends.h", "plan/cache.h", "plan/call_lists.h",
                "plan/exchange.h", "plan/float8.h", "layout/view.h", "core"},
        "api": {"api", "plan", "layout", "pattern", "core"},
    },
    "cuda": {
        "ptx": {"ptx"},
        "tile": {"tile", "ptx", "core"},
        "runtime": {"runtime", "plan/call.h", "plan/kernel.h", "layout/view.h", "core"},
        "layout": {"tile", "runtime", "layout/view.h", "core"},
        "any": {"any"} | ARCH,
        "sm80": {"sm80", "any"} | ARCH,  # any is the floor: what an arch does not do itself
        "sm90": {"sm90", "sm80", "any"} | ARCH,  # nor those before it
        "sm100": {"sm100", "sm80", "any"} | ARCH,
    },
}
SUFFIXES = {".h", ".hpp", ".cpp", ".c", ".cuh", ".cu", ".inc"}
PUBLIC = "sparseattn"        # include/sparseattn: everyone's
CUDA_HEADER = re.compile(r"cuda|cublas|cub/|nv/|mma\.h")


def sources(root, *folders):
    """Every C, C++ and CUDA file below these folders."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)


def includes(path):
    """(line number, < or ", what is included)."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line)
        if match:
            yield number, match[1], match[2]


def folder_of(path, table):
    """The innermost folder of the path that has a row, else the outermost."""
    parts = path.split("/")[:-1]
    rows = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((row for row in rows if row in table), parts[0])


def may(allowed, wanted, table):
    return wanted in allowed or "/" in wanted and folder_of(wanted, table) in allowed | {PUBLIC}


def floor_violations(root):
    """src and cuda, folder by folder."""
    for base, table in MAY_INCLUDE.items():
        for path in sources(root, base):
            parts = path.relative_to(root / base).parts
            if len(parts) < 2:
                continue  # a list at the top of cuda
            folder = folder_of("/".join(parts), table)
            if folder not in table:
                yield f"{path}: no row for {base}/{folder} in tests/house/arrows.py"
                continue
            for number, kind, wanted in includes(path):
                if kind == '"' and not may(table[folder], wanted, table):
                    yield f"{path}:{number}: {folder} must not include {wanted}"


def common_violations(root):
    """What holds for every file of every floor."""
    on_device = [root / folder for folder in ("cuda", "tests/gpu", "tests/emulator", "tests/random/cuda_device.cpp",
                                          "bench/gpu")]
    for path in sources(root, "include", "src", "cuda", "tests", "bench", "bindings"):
        for number, kind, wanted in includes(path):
            if "../" in wanted:
                yield f"{path}:{number}: {wanted} climbs; paths start at src, cuda or include"
            if kind == "<" and CUDA_HEADER.search(wanted) and not any(map(path.is_relative_to, on_device)):
                yield f"{path}:{number}: CUDA header {wanted} outside cuda"


def outsider_violations(root):
    """Bindings, bench and the ABI tests see the public header and their own files."""
    inside = set(MAY_INCLUDE["src"]) | set(MAY_INCLUDE["cuda"])
    for path in sources(root, "bindings", "bench", "tests/abi", "include"):
        for number, kind, wanted in includes(path):
            if kind == '"' and wanted.split("/")[0] in inside:
                yield f"{path}:{number}: must not include {wanted}: the public header is all it may see"


def violations(root):
    return [*floor_violations(root), *common_violations(root), *outsider_violations(root)]

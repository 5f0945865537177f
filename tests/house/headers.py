# SPDX-License-Identifier: MIT
"""Does every header compile alone? A header that some source includes first is known to, because that source compiles;
so is one that such a header includes first. The compiler need see the others only."""
import concurrent.futures
import os
import platform
import re
import subprocess

FOLDERS = ("src", "include", "tests")     # each is an include path, too
# Headers that mean nothing alone, and why.
SKIPPED = {
    **{f"tests/{name}.h": "sees CUDA's headers, which not every build has"
       for name in ("gpu/gpu", "emulator/cta", "emulator/device", "emulator/launch", "emulator/tensor_map",
                    "emulator/runtime/launch")},
    **{f"src/cpu/{name}.h": "is written over elements, which an arch brings that multiplies them"
       for name in ("avx512/tiles", "amx/tile_product", "generic/panel", "generic/lift")},
    "tests/emulator/cpu/amx/registers.h": "is for AVX-512",
    **{f"src/cpu/generic/{name}.h": "is written over tiles, which an arch brings that has them"
       for name in ("panels", "panel_forward", "panel_backward", "panel_cost", "panel_rows", "gathered_panels",
                    "gather_forward_panels", "gather_backward_panels")},
}
X86 = ("avx2", "avx512", "avx512bf16", "amx", "amxfp16")
NEON = ("neon", "neonbf16")
ARCHS = {"x86_64": X86, "AMD64": X86, "aarch64": NEON, "arm64": NEON}


def first_include(path):
    """What a file includes before anything else, where that is a header of ours."""
    match = re.search(r'^\s*#\s*include\s*([<"])([^>"]+)', path.read_text(), flags=re.M)
    return match[2] if match and match[1] == '"' else None


def find_headers(root):
    """Include name -> path."""
    return {str(path.relative_to(root / folder)): path for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.h"))}


def find_proven(root, headers):
    """Headers that a source of the build, or a proven header, includes first."""
    proven = set()
    wanted = [first_include(path) for folder in ("src", "tests") for path in (root / folder).rglob("*.cpp")]
    while wanted:
        name = wanted.pop()
        if name in headers and name not in proven:
            proven.add(name)
            wanted.append(first_include(headers[name]))
    return proven


def flags_of(root, name):
    """Compiler flags of an arch's folder, or None where it is for another processor."""
    match = re.match(r"cpu/(avx2|avx512|avx512bf16|amx|amxfp16|neon|neonbf16)/", name)
    if not match:
        return []
    rows = dict(re.findall(r"^SPATTN_CPU_ARCH\((\w+), ?(.*)\)", (root / "src/cpu/archs.inc").read_text(), flags=re.M))
    return rows[match[1]].split() if match[1] in ARCHS.get(platform.machine(), ()) else None


def compile_alone(root, compiler, folder, name):
    """What the compiler says of a file that includes this header alone."""
    source = folder / (name.replace("/", "_") + ".cpp")
    source.write_text(f'#include "{name}"\n')
    paths = [option for base in FOLDERS for option in ("-I", str(root / base))]
    done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-w", *flags_of(root, name), *paths, str(source)],
                          capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    return f"{name}: {errors[0] if errors else done.stderr}" if done.returncode else None


def violations(root, compiler, folder):
    """(headers that were judged, complaints)."""
    headers = find_headers(root)
    proven = find_proven(root, headers)
    skipped = {name for name, path in headers.items() if str(path.relative_to(root)) in SKIPPED}
    rest = [name for name in headers if name not in proven | skipped and flags_of(root, name) is not None]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda name: compile_alone(root, compiler, folder, name), rest)
        return len(proven) + len(rest), [complaint for complaint in found if complaint]

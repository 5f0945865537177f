# SPDX-License-Identifier: MIT
"""Is the house in order? What is law fails; habits only warn. A check that finds nothing to check fails."""
import re
import subprocess
import warnings

import arrows
import headers
import pytest
import words
from capi import ROOT

FILE_HABIT = {".cuh": 600, ".h": 400, ".cpp": 400, ".py": 400}
FUNCTION_HABIT = 60


# ---- arrows ----

def test_arrows():
    counted = sum(1 for path in arrows.sources(ROOT, "src") for _ in arrows.includes(path))
    assert counted > 100
    assert arrows.violations(ROOT) == []


@pytest.mark.parametrize("file, line", [
    ("src/core/error.h", '#include "plan/plan.h"'),
    ("src/cpu/avx2/vec.h", '#include "plan/plan.h"'),
    ("src/cpu/cpu.cpp", '#include "layout/layout.h"'),
    ("src/pattern/full.cpp", '#include "../core/text.h"'),
    ("src/plan/select.cpp", "#include <cuda_runtime.h>"),
    ("src/helpers/text.h", '#include "core/text.h"'),
    ("src/layout/build.cpp", '#include "layout/orders/listed.h"'),
    ("src/cpu/cpu.cpp", '#include "layout/orders/side.h"'),
    ("cuda/sm80/block_forward.cuh", '#include "sm90/block_forward.h"'),
    ("cuda/ptx/wgmma.h", '#include "core/dtype.h"'),
    ("cuda/layout/top_k.cu", '#include "layout/layout.h"'),
    ("bench/main.cpp", '#include "plan/plan.h"'),
    ("tests/abi/misuse.cpp", '#include "core/tensor.h"'),
])
def test_arrows_see_a_planted_include(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    assert arrows.violations(tmp_path)


# ---- headers ----

@pytest.fixture(scope="module")
def compiler(build):
    return re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), flags=re.M)[1]


def test_headers_compile_alone(compiler, tmp_path):
    judged, complaints = headers.violations(ROOT, compiler, tmp_path)
    assert judged > 100
    assert complaints == []


def test_a_header_that_needs_another_is_seen(compiler, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/needy.h").write_text("#pragma once\nstd::string text();\n")
    assert headers.compile_alone(tmp_path, compiler, tmp_path, "needy.h")


# ---- words, comments and rows ----

def test_words_have_one_meaning():
    assert len(words.sources(ROOT)) > 200
    assert list(words.banned(ROOT)) == []


def test_comments_have_a_subject():
    assert sum(1 for path in words.sources(ROOT) for _ in words.comments(path)) > 1000
    assert list(words.without_subject(ROOT)) == []


@pytest.mark.parametrize("line, find", [
    ("const int32_t* class_of;", words.banned),
    ("// Work orders of one worker.", words.banned),
    ("int32_t rows;  // Of a class", words.without_subject),
    ("// Of each mask, the share.", words.without_subject),
])
def test_words_see_a_planted_line(tmp_path, line, find):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/planted.h").write_text("int32_t before;\n" + line.replace("Work orders", "work orders") + "\n")
    assert list(find(tmp_path))


def test_rows_stand_one_a_line():
    """A row of a list is a line: what one adds or takes away is one line of a diff."""
    lists = [ROOT / "src/cpu/archs.inc", ROOT / "cuda/archs.inc", *sorted((ROOT / "cuda").glob("*/kernels.inc"))]
    rows = 0
    for path in lists:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip() and not line.startswith(("//", "#")):
                assert re.fullmatch(r"SPATTN_\w+\([^()]*(\([^()]*\)[^()]*)*\)", line), f"{path}:{number}: {line}"
                rows += 1
    assert rows > 10


# ---- symbols of arch objects ----

def arch_objects(build):
    """Objects that hold, or may come to hold, instructions that not every machine has: what the build has of archs.inc,
    but for the reference, which is written with the standard library and compiled without flags."""
    archs = re.findall(r"^SPATTN_CPU_ARCH\((\w+),", (ROOT / "src/cpu/archs.inc").read_text(), flags=re.M)
    objects = [path for arch in archs if arch != "reference"
               for path in (build / "src/CMakeFiles" / f"spattn_cpu_{arch}.dir").rglob("*.o")]
    assert len(objects) >= 2
    return objects


def symbols(path):
    text = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    assert text, f"{path} has no symbol"
    return text.splitlines()


def test_arch_objects_offer_nothing_weak(build):
    """The linker may hand a weak function to code that runs on older machines, with this arch's instructions in it."""
    weak = [f"{path}: {line}" for path in arch_objects(build) for line in symbols(path) if re.search(r" [VWu] ", line)]
    assert weak == []


def test_arch_objects_export_only_their_table(build):
    for path in arch_objects(build):
        arch = path.parent.name
        strong = [line for line in symbols(path) if re.search(r" [TDBR] ", line)]
        assert strong, path
        assert [line for line in strong if f"spattn::cpu::{arch}" not in line] == []


# ---- texts ----

def tracked(*suffixes):
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"],
                           capture_output=True, text=True, check=True).stdout.splitlines()
    found = [ROOT / name for name in names if name.endswith(suffixes) and (ROOT / name).exists()]
    assert found
    return found


def test_each_source_names_its_license():
    files = tracked(".h", ".cpp", ".inc", ".py", ".cmake", "CMakeLists.txt", ".c", ".cu", ".cuh")
    assert len(files) > 80
    texts = [(path, path.read_text()) for path in files]
    assert [str(path) for path, text in texts if text and "SPDX-License-Identifier: MIT" not in text[:200]] == []


def functions(path):
    """(line, length) of functions, by the indentation that clang-format gives them."""
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        head = re.match(r"^(\s*)(?!if|for|while|switch|else|namespace|struct|class|return|\})[\w].*\).*\{$", line)
        if head:
            end = next((n for n in range(start + 1, len(lines)) if lines[n] == head[1] + "}"), start)
            yield start + 1, end - start + 1


def habits(path):
    """What of a file is beyond the habit."""
    lines = path.read_text().splitlines()
    if len(lines) > (700 if path.name == "sparseattn.h" else FILE_HABIT[path.suffix]):
        yield f"{len(lines)} lines"
    wide = sum(len(line) > 120 for line in lines)
    if wide:
        yield f"{wide} lines wider than 120 columns"
    if path.suffix != ".py":
        yield from (f"line {start}: a function of {length} lines" for start, length in functions(path)
                    if length > FUNCTION_HABIT)


def test_habits():
    """Long files, lines and functions are allowed, but said aloud: there may be a seam."""
    files = tracked(*FILE_HABIT)
    assert sum(1 for path in files if path.suffix == ".cpp" for _ in functions(path)) > 100
    beyond = [f"{path.relative_to(ROOT)}: {habit}" for path in files for habit in habits(path)]
    if beyond:
        warnings.warn("beyond the habit:\n" + "\n".join(beyond))

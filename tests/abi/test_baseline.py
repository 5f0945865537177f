# SPDX-License-Identifier: MIT
"""What programs rely on has not changed since baseline.abi was written: functions, their types, fields, enumerators."""
import re

import baseline
import pytest

pytestmark = pytest.mark.skipif(bool(baseline.why_not()), reason=baseline.why_not())


def test_nothing_has_changed(tmp_path):
    said = baseline.changes(baseline.build_twin(tmp_path))
    assert not said, f"{said}\nIf that is meant: python tests/abi/baseline.py"


def test_the_baseline_names_no_machine():
    text = baseline.BASELINE.read_text()
    assert len(re.findall("<elf-symbol ", text)) > 40
    assert len(re.findall("<enumerator ", text)) > 40
    assert re.findall(r"='/[^']*'", text) == []


BREAKS = {
    "a function is gone": ("spattn_pattern_window", "spattn_pattern_band"),
    "a field is gone": ("    int64_t rows_empty;\n", ""),
    "a field is wider": ("int32_t cpu_threads;", "int64_t cpu_threads;"),
    "fields have changed places": ("int64_t seq_q, seq_k; ", "int64_t seq_k, seq_q; "),
    "an argument is narrower": ("int64_t left, int64_t right", "int32_t left, int32_t right"),
    "an enumerator has another value": ("SPATTN_E_SHAPE = 1003", "SPATTN_E_SHAPE = 1103"),
    "a result is of another type": ("uint32_t spattn_abi(void)", "uint64_t spattn_abi(void)"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_seen(tmp_path, what):
    old, new = BREAKS[what]
    touched = []

    def edit(text):
        touched.append(old in text)
        return text.replace(old, new)

    twin = baseline.build_twin(tmp_path, edit)
    assert any(touched), f"the header has no {old}"
    assert baseline.changes(twin)


def test_what_is_added_breaks_nothing(tmp_path):
    def edit(text):
        return text.replace("SPATTN_E_INTERNAL = 9000", "SPATTN_E_INTERNAL = 9000, SPATTN_E_MORE = 9001").replace(
            "uint32_t spattn_abi(void) {", "int spattn_more(void) { return 0; }\nuint32_t spattn_abi(void) {")

    assert baseline.changes(baseline.build_twin(tmp_path, edit)) == ""

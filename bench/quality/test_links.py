# SPDX-License-Identifier: MIT
"""The links in Python are those of the library, and another order of them is another pattern."""

import links
import numpy as np
import patterns
import pictures
import pytest


@pytest.fixture(scope="module")
def text():
    words = pictures.Words()
    return patterns.Text(words, words.ids(pictures.SOURCE.read_text())[:1200])


@pytest.mark.parametrize("budget", [112, 160, 224])
def test_links_are_those_of_the_library(text, budget):
    mask = patterns.xref_in_order(text, budget, links.ORDER).to_mask(len(text))
    assert np.array_equal(mask, patterns.xref(text, budget).to_mask(len(text)))


def test_no_identifier(text):
    none = np.full_like(text.symbols, -1)
    of_ngrams = patterns.xref_in_order(patterns.Text(None, text.ids, none), 224, links.ORDER)
    assert np.array_equal(
        of_ngrams.to_mask(len(text)), patterns.xref(text, 224, identifiers=False).to_mask(len(text))
    )


def test_another_order_leaves_out_other_links(text):
    mask, other = (patterns.make(name, text, 160)[0].to_mask(len(text)) for name in ("xref", "xref_identifiers_first"))
    assert np.array_equal(mask.sum(axis=-1), other.sum(axis=-1)) and (mask != other).sum() > len(text)
    found = links.links_of(text.ids, text.symbols, 32, 64, 144, ("open", "recent", "ngrams"))
    kinds = [list(row.values()) for row in found]
    assert {"open", "recent", "ngrams"} == {kind for row in kinds for kind in row}
    assert all(row == sorted(row, key=("open", "recent", "ngrams").index) for row in kinds)
    assert max(map(len, found)) == 48

# SPDX-License-Identifier: MIT
"""The statistics against enumeration, against values known from the literature, and against scipy where it is."""

import itertools

import numpy as np
import paired
import pytest


def enumerated(differences):
    """The signed-rank test by its definition: all choices of signs."""
    differences = [one for one in differences if one]
    ordered = sorted(map(abs, differences))
    rank = {value: np.mean([n + 1 for n, other in enumerate(ordered) if other == value]) for value in ordered}
    ranks, whole = [rank[abs(one)] for one in differences], sum(rank[abs(one)] for one in differences)

    def lower(signs):
        positive = sum(r for r, sign in zip(ranks, signs) if sign > 0)
        return min(positive, whole - positive)

    seen = lower(differences)
    choices = list(itertools.product((-1, 1), repeat=len(ranks)))
    return sum(lower(signs) <= seen + 1e-9 for signs in choices) / len(choices)


@pytest.mark.parametrize("seed", range(30))
def test_wilcoxon_is_the_enumeration_of_signs(seed):
    rng = np.random.default_rng(seed)
    differences = rng.integers(-6, 9, rng.integers(1, 11)).tolist()  # with ties and zeros
    if any(differences):
        assert paired.wilcoxon(differences) == pytest.approx(enumerated(differences))


def test_wilcoxon_of_known_tables():
    """Ten differences of one sign: 2 / 2^10. Darwin's maize, as in Fisher's Design of Experiments: p = 0.0413."""
    assert paired.wilcoxon(range(1, 11)) == pytest.approx(2 / 1024)
    maize = [6.125, -8.375, 1, 2, 0.75, 2.875, 3.5, 5.125, 1.75, 3.625, 7, 3, 9.375, 7.5, -6]
    assert paired.wilcoxon(maize) == pytest.approx(0.0413, abs=1e-4)
    assert paired.wilcoxon([0, 0]) == 1


def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for size in (5, 20, 49):
        differences = rng.standard_normal(size) + 0.3
        assert paired.wilcoxon(differences) == pytest.approx(stats.wilcoxon(differences, method="exact").pvalue)
    one, other = rng.random((2, 60)) < [[0.4], [0.7]]
    worse, better = int((one & ~other).sum()), int((~one & other).sum())
    assert paired.mcnemar(one, other) == pytest.approx(stats.binomtest(worse, worse + better).pvalue)
    values = rng.integers(0, 5, 40)
    np.testing.assert_allclose(paired.ranks(values), stats.rankdata(values))


def test_holm():
    """Holm's procedure on Wikipedia's four p-values, and in any order."""
    assert paired.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.holm([0.5, 0.9]) == [1, 1] and paired.holm([]) == []


def test_cliffs_delta():
    assert paired.cliffs_delta([3, 4], [1, 2]) == 1 and paired.cliffs_delta([1], [1]) == 0
    assert paired.cliffs_delta([1, 2, 3], [2, 3, 4]) == pytest.approx((1 - 6) / 9)


def test_mcnemar():
    """Ten questions that one alone answers and two that the other alone does: 2 (1 + 12 + 66) / 2^12."""
    one, other = [1] * 10 + [0] * 2 + [1] * 5, [0] * 10 + [1] * 2 + [1] * 5
    assert paired.mcnemar(one, other) == pytest.approx(2 * 79 / 4096) and paired.mcnemar([1], [1]) == 1
    with pytest.raises(ValueError, match="accepted"):
        paired.mcnemar([1], [1, 0])


def test_bootstrap_covers_the_mean():
    """Of 300 samples of a skewed distribution the interval must hold the true mean about 95 times in 100."""
    rng = np.random.default_rng(1)
    held = [
        low <= 1 <= high
        for low, high in (paired.bootstrap(rng.exponential(size=48), draws=1000)[1:] for _ in range(300))
    ]
    assert 0.88 < np.mean(held) < 0.98
    mean, low, high = paired.bootstrap([0.1, 0.2, 0.4])
    assert low < mean < high and paired.bootstrap([0.1, 0.2, 0.4]) == (mean, low, high)
    assert paired.bootstrap([2.0]) == (2, 2, 2)
    with pytest.raises(ValueError, match="no units"):
        paired.bootstrap([])

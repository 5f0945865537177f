# SPDX-License-Identifier: MIT
"""Reading in torch beside sparseattn.quality, which reads with NumPy, on a random model."""

import numpy as np
import pytest
import sparseattn as sa
from sparseattn.quality import beside

pytest.importorskip("torch")
import patterns  # noqa: E402
import reading  # noqa: E402
import small  # noqa: E402
import torch  # noqa: E402

TOKENS, FIRST, BUDGET = 600, 150, 224
NAMES = ["sink_window", "xref", "strided", "block_topk_16_mean", "block_topk_32_minmax", "oracle"]
WATCHED = [3, 70]


@pytest.fixture(scope="module")
def made():
    """Token ids, and patterns of them by name."""
    source = small.documents()[0].text
    ids = np.array(small.Bytes().encode(source).ids[:TOKENS])
    text = patterns.Text(small.Bytes(), ids)
    return ids, {name: patterns.make(name, text, BUDGET) for name in NAMES}


@pytest.fixture(scope="module")
def numpy_readings(made):
    ids, others = made

    def on_arrays(choose):
        return choose and (lambda q, k: choose(torch.from_numpy(q), torch.from_numpy(k)).numpy())

    model = small.numpy_model()
    others = {name: beside.Attention(pattern, on_arrays(choose)) for name, (pattern, choose) in others.items()}
    dense = beside.read_dense(model, ids, FIRST, others, lambda share: None)
    return dense, {
        name: beside.read_beside(model, dense, other, lambda share: None, WATCHED) for name, other in others.items()
    }


@pytest.mark.parametrize("operands, rounding", [(torch.float32, 1e-5), (torch.float16, 5e-3)])
def test_readings_are_those_of_numpy(made, numpy_readings, operands, rounding):
    ids, others = made
    model = reading.Model(small.numpy_model(), operands=operands)
    others = {name: reading.Attention(*one, TOKENS, model) for name, one in others.items()}
    dense, (right, right_readings) = reading.read_dense(model, ids, FIRST, others, WATCHED), numpy_readings
    close = {"rtol": rounding, "atol": rounding}

    def require_close(found, expected, name):
        """In the mean, and in nearly all rows: where two blocks suit a query alike, rounding may choose another one."""
        np.testing.assert_allclose(found.mean(), expected.mean(), **close, err_msg=name)
        assert np.isclose(found, expected, **close).mean() >= (0.99 if operands == torch.float32 else 0.95), name

    np.testing.assert_allclose(dense.nll, right.nll, **close)
    np.testing.assert_allclose(dense.log_p, right.log_p, **close)
    np.testing.assert_allclose(dense.watched, right.log_p[:, WATCHED], **close)
    np.testing.assert_allclose(dense.far_mass, right.far_mass, **close)
    assert (dense.right != right.right).mean() <= rounding
    for name, other in others.items():
        found, expected = reading.read_beside(model, dense, other, WATCHED), right_readings[name]
        for number in ("nll", "kl", "watched"):
            require_close(getattr(found, number), getattr(expected, number), name)
        assert (found.right != expected.right).mean() <= rounding and (found.same != expected.same).mean() <= rounding
        for number, of_layers in dense.kept[name].items():
            np.testing.assert_allclose(of_layers, getattr(right.kept[name], number), **close, err_msg=name)
        assert 0 < other.require_right(name) < 1e-3


@pytest.mark.parametrize("name", ["xref", "block_topk_16_mean"])
@pytest.mark.parametrize("worst", ["wrong", "nan"])
def test_wrong_attention_ends_the_study(made, name, worst, monkeypatch):
    ids, others = made
    model = reading.Model(small.numpy_model())
    other = reading.Attention(*others[name], TOKENS, model)
    dense = reading.read_dense(model, ids, FIRST, {})

    def attend(q, k, v, lists):
        out, lse = real(q, k, v, lists[..., 20:])  # forgets some sinks
        out[-1, 0, 0] = torch.nan if worst == "nan" else out[-1, 0, 0]
        return out, lse

    real = reading.attend_to_lists
    monkeypatch.setattr(reading, "attend_to_lists", attend)
    reading.read_beside(model, dense, other)
    with pytest.raises(SystemExit, match="differs from dense masked attention"):
        other.require_right(name)


def test_far_keys_are_those_of_the_far_pattern():
    lists = torch.arange(TOKENS, dtype=torch.int32).expand(1, TOKENS, 1, TOKENS)
    found = reading.only_far(lists)[0, :, 0] >= 0
    np.testing.assert_array_equal(found.numpy(), sa.parse(beside.FAR).to_mask(TOKENS)[0, 0])

"""figures/quality*.py: the parts that need neither a real model nor llama.cpp."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from plain import uneven
from tiny_model import LLAMA, random_weights, write

from kvq.formats import find_format
from kvq.layers import parse_policy
from kvq.model import decoder, load
from kvq.tensor import quantize

FIGURES = Path(__file__).resolve().parents[2] / "figures"


def script(name):
    spec = importlib.util.spec_from_file_location(name, FIGURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


llama_cpp, quality = script("quality_llama_cpp"), script("quality")


def test_the_order_of_the_file_is_what_the_decoder_left():
    rows = uneven((30, 7))  # three heads of 10 rows, as in a file
    split = decoder.half_split(rows, 3)
    back = llama_cpp.file_order(split.T.reshape(7, 3, 10)).reshape(7, 30).T
    assert not np.array_equal(split, rows)
    np.testing.assert_array_equal(back, rows)


@pytest.mark.parametrize("rotated", [False, True])
def test_numbers_go_through_the_bytes_of_a_format(rotated):
    x = uneven((2, 5, 64))
    q4, f32 = (find_format(f"ggml:{name}") for name in ("q4_0", "f32"))
    stored = llama_cpp.stored(x, q4, rotated)
    error = np.abs(stored - x).max() / np.abs(x).max()
    assert 1e-3 < error < 0.2
    plain = q4.decode(q4.encode(x), x.shape)
    assert np.array_equal(stored, plain) != rotated
    np.testing.assert_allclose(llama_cpp.stored(x, f32, rotated), x, atol=1e-4)


def test_the_table_pairs_the_systems_position_by_position():
    rng = np.random.default_rng(0)

    def points(shift):
        d = [rng.standard_normal(n) / 9 + shift for n in (7, 4)]
        same = {"kl": 0.5, "agree": True}
        return [
            {"nll": 2 + x, "d": x} | {k: np.full(len(x), v) for k, v in same.items()}
            for x in d
        ]

    ours = {case: points(0.1) for case in llama_cpp.CASES}
    theirs = {case: points(0.3) for case in llama_cpp.CASES}
    rows = llama_cpp.table(ours, theirs, {kind: 4.5 for kind, _ in llama_cpp.CASES})
    assert [r["system"] for r in rows[:2]] == ["kvq", "llama.cpp"]
    assert len(rows) == 26
    case = ("q4_0", True)
    mine = [r for r in rows if (r["type"], r["rotated"]) == ("q4_0", "yes")]
    a, b = (np.concatenate([p["d"] for p in x[case]]) for x in (ours, theirs))
    for row, d in zip(mine, (a, b), strict=True):
        assert row["tokens"] == 11
        assert row["change_percent"] == pytest.approx(100 * np.expm1(d.mean()))
        assert row["difference_percent"] == pytest.approx(100 * np.mean(b - a))
        se = 100 * np.std(b - a, ddof=1) / np.sqrt(11)
        assert row["difference_se_percent"] == pytest.approx(se)


def test_all_at_once_gives_early_queries_scales_of_later_tokens(tmp_path):
    plain = load(write(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA)))
    policy = parse_policy("int2-token-g32/int4-channel-g32")
    at_once = quality.WholeWindow(**vars(plain), policy=policy)
    x = uneven((50, 20))
    got, exact = (m.heads(0, x, np.arange(50)) for m in (at_once, plain))
    np.testing.assert_array_equal(got.q, exact.q)
    for name, scheme in (("k", policy.key), ("v", policy.value)):
        expected = quantize(getattr(exact, name), scheme).dequantize()
        np.testing.assert_array_equal(getattr(got, name), expected)
    grown = quantize(exact.v[:, :8], policy.value).dequantize()
    assert not np.array_equal(got.v[:, :8], grown)

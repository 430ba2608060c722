"""The exercises' checks: they pass right answers and name the mistake of wrong ones."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks

ROUND = np.rint


# --- right answers --------------------------------------------------------------------
def symmetric(x, b):
    s = np.abs(x).max() / (2 ** (b - 1) - 1)
    return ROUND(x / (s or 1)), s


def asymmetric(x, b):
    s = (x.max() - x.min()) / (2**b - 1)
    return ROUND((x - x.min()) / (s or 1)), s, x.min()


def grouped(x, b, G):
    parts = []
    for i in range(0, x.shape[1], G):
        group = x[:, i : i + G]
        s = np.abs(group).max(axis=1, keepdims=True) / (2 ** (b - 1) - 1)
        parts.append(s * ROUND(group / s))
    return np.concatenate(parts, axis=1)


def unpack_pairs(packed):
    return np.stack([packed & 15, packed >> 4], axis=1).ravel()


def pack_quads(codes):
    return codes.reshape(-1, 4) @ [1, 4, 16, 64]


def sqnr(b, xmax, sigma):
    return 10 * np.log10(12 * sigma**2 / (2 * xmax / 2**b) ** 2)


def best_group(groups, bits, errors, budget):
    return groups[np.argmin(np.where(bits <= budget, errors, np.inf))]


RIGHT = {
    checks.check_bits_per_number: lambda b, G: b + 16 / G,
    checks.check_cache_bytes: lambda L, T, H, D, b, G: (
        2 * L * T * H * D * (b / 8 + 2 / G)
    ),
    checks.check_users: lambda memory, weights, cache: max(
        (memory - weights) // cache, 0
    ),
    checks.check_longest_context: lambda budget, token, block: (
        budget // (token * block) * block
    ),
    checks.check_symmetric: symmetric,
    checks.check_asymmetric: asymmetric,
    checks.check_sqnr: sqnr,
    checks.check_grouped: grouped,
    checks.check_grouped_per_channel: lambda x, b, G: grouped(x.T, b, G).T,
    checks.check_ragged_bits: lambda b, G, D: b + 32 * -(-D // G) / D,
    checks.check_best_group: best_group,
    checks.check_unpack_pairs: unpack_pairs,
    checks.check_pack_quads: pack_quads,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def drop_ragged_group(x, b, G):
    x_hat = np.zeros_like(x)
    whole = x.shape[1] // G * G
    x_hat[:, :whole] = grouped(x[:, :whole], b, G)
    return x_hat


def symmetric_by_max(x, b):
    return symmetric(x, b)[0], x.max() / 3


def symmetric_cut_off(x, b):
    s = symmetric(x, b)[1]
    return np.trunc(x / (s or 1)), s


def symmetric_divides_by_zero(x, b):
    s = np.abs(x).max() / 3
    with np.errstate(invalid="ignore"):
        return ROUND(x / s), s


def asymmetric_integer_zero(x, b):
    code, s, z = asymmetric(x, b)
    return code, s, ROUND(-z / (s or 1))


def asymmetric_forgets_zero(x, b):
    _, s, z = asymmetric(x, b)
    return ROUND(x / (s or 1)), s, z


def asymmetric_constant_lost(x, b):
    code, s, z = asymmetric(x, b)
    return (code, s, z) if s else (code, 0.0, 0.0)


WRONG = [
    (checks.check_bits_per_number, lambda b, G: b, "scale is not counted"),
    (checks.check_bits_per_number, lambda b, G: b + 2 / G, "bits and bytes"),
    (checks.check_bits_per_number, lambda b, G: b / 8 + 2 / G, "bytes per number"),
    (
        checks.check_cache_bytes,
        lambda L, T, H, D, b, G: L * T * H * D * (b / 8 + 2 / G),
        "a factor 2 is missing",
    ),
    (
        checks.check_cache_bytes,
        lambda L, T, H, D, b, G: 2 * L * T * H * D * (b + 2 / G),
        "b is in bits",
    ),
    (checks.check_users, lambda m, w, c: m // c, "weights are not counted"),
    (checks.check_users, lambda m, w, c: (m - w) // c, "leave room for 0 users"),
    (checks.check_users, lambda m, w, c: max(m - w, 0) / c, "use //"),
    (checks.check_longest_context, lambda m, t, n: m // t, "whole blocks"),
    (checks.check_longest_context, lambda m, t, n: m // t // n, "blocks, not tokens"),
    (checks.check_symmetric, symmetric_by_max, "also where x is negative"),
    (checks.check_symmetric, symmetric_cut_off, "cut off, not rounded"),
    (checks.check_symmetric, symmetric_divides_by_zero, "division by zero"),
    (checks.check_asymmetric, asymmetric_integer_zero, "not a code"),
    (checks.check_asymmetric, asymmetric_forgets_zero, "subtracted before"),
    (checks.check_asymmetric, asymmetric_constant_lost, "likely cause"),
    (checks.check_sqnr, lambda b, x, s: 2 * sqnr(b, x, s), "10 log10, not 20"),
    (checks.check_sqnr, lambda b, x, s: sqnr(b, x / 2, s), "2 xmax wide"),
    (checks.check_grouped, drop_ragged_group, "last, smaller group is missing"),
    (checks.check_grouped, lambda x, b, G: grouped(x, b, 10), "a whole row"),
    (checks.check_grouped, lambda x, b, G: grouped(x.T, b, G).T, "down a column"),
    (checks.check_grouped_per_channel, grouped, "along a row"),
    (checks.check_ragged_bits, lambda b, G, D: b + 32 / G, "3, not 2.5"),
    (checks.check_ragged_bits, lambda b, G, D: b + 32 * (D // G) / D, "round up"),
    (checks.check_best_group, lambda g, b, e, m: g[np.argmin(e)], "ignored"),
    (checks.check_best_group, lambda g, b, e, m: g[b <= m].min(), "smallest group"),
    (checks.check_unpack_pairs, lambda p: unpack_pairs(p << 4 | p >> 4), "swapped"),
    (
        checks.check_unpack_pairs,
        lambda p: np.concatenate([p & 15, p >> 4]),
        "must alternate",
    ),
    (
        checks.check_pack_quads,
        lambda c: pack_quads(c.reshape(-1, 4)[:, ::-1]),
        "lowest bits",
    ),
    (checks.check_pack_quads, lambda c: c.reshape(-1, 4).sum(axis=1), "sum of"),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    assert_explained(check, wrong, cause)


# --- how answers are compared ---------------------------------------------------------
def test_worst_element_is_named_with_both_values():
    with pytest.raises(AssertionError, match=r"\[1, 0\]: expected 3, got 7"):
        checks.compare("x", [[1, 2.5], [7, 4]], [[1, 2], [3, 4]])


def test_not_a_number_is_the_worst_element():
    with pytest.raises(AssertionError, match=r"1 of 2 .*\n.*\[1\]: .*got nan"):
        checks.compare("x", [1.0, np.nan], [1.0, 2.0])


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (None, "return"),
        ("seven", "expected numbers"),
        ([1, 2, 3], r"got shape \(3,\), expected \(2,\)"),
        ([[1], [2, 3]], "expected numbers"),
    ],
)
def test_an_answer_of_the_wrong_kind_is_explained(got, text):
    with pytest.raises(AssertionError, match=text):
        checks.compare("x", got, [1, 2])


def test_a_single_result_in_place_of_a_tuple_is_explained():
    with pytest.raises(AssertionError, match=r"got ndarray; expected \(codes, s\)"):
        checks.check_symmetric(lambda x, b: x)


def test_an_unusual_mistake_is_admitted():
    with pytest.raises(AssertionError, match="none of the usual ones"):
        checks.check_bits_per_number(lambda b, G: 17.0)

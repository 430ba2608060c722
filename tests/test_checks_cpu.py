"""Checks of the lesson on the fast path of a CPU."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks


# --- right answers --------------------------------------------------------------------
def place(t, d, bits):
    """By the sentence of the layout: look through a word for the channel."""
    planes = 8 // bits
    for byte in range(4):
        for plane in range(planes):
            row, odd = divmod(d - 4 * plane - byte, 4 * planes)
            if not odd:
                return t // 32, row, t - t // 32 * 32, byte, plane
    raise ValueError(f"no field holds channel {d}")


def bounds(h, beta, J, B):
    return J / h, B / (beta / 8)


def fold(q, s, z):
    return np.array([a * b for a, b in zip(q, s, strict=True)]), float(np.dot(z, q))


def round_row(x, levels, bits):
    a = max(map(abs, x)) / levels
    Q = np.array([round(number / a) for number in x])
    middle = sum(range(2**bits)) / 2**bits
    return a, Q, middle * (sum(x) - a * sum(Q))


RIGHT = {
    checks.check_block_place: place,
    checks.check_bounds: bounds,
    checks.check_fold: fold,
    checks.check_round_row: round_row,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def field_by_field(t, d, bits):
    """As `kvq.packing` packs: the fields of a byte one after the other."""
    panel, row, lane, _, _ = place(t, d, bits)
    return panel, row, lane, *divmod(d % (32 // bits), 8 // bits)


def with_back(back):
    """round_row with another pay-back, back(rest, levels, bits)."""

    def answer(x, levels, bits):
        a, Q, _ = round_row(x, levels, bits)
        return a, Q, back(x - a * Q, levels, bits)

    return answer


def cut_off(x, levels, bits):
    a = np.abs(x).max() / levels
    Q = (x / a).astype(int)
    return a, Q, (2**bits - 1) / 2 * (x - a * Q).sum()


def of_the_maximum(x, levels, bits):
    a = x.max() / levels
    Q = np.round(x / a)
    return a, Q, (2**bits - 1) / 2 * (x - a * Q).sum()


WRONG = [
    (checks.check_block_place, field_by_field, "neighbouring bytes"),
    (
        checks.check_block_place,
        lambda t, d, bits: (
            t // 32,
            d // (8 // bits),
            t % 32,
            *place(t, d, bits)[3:],
        ),
        "32 / bits channels",
    ),
    (
        checks.check_block_place,
        lambda t, d, bits: (
            t % 3,
            place(t, d, bits)[1],
            t // 3,
            *place(t, d, bits)[3:],
        ),
        "tokens of a panel are neighbours",
    ),
    (
        checks.check_block_place,
        lambda t, d, bits: (0, place(t, d, bits)[1], t, *place(t, d, bits)[3:]),
        "another one",
    ),
    (
        checks.check_block_place,
        lambda t, d, bits: (*place(t, d, bits)[:4], place(t, d, bits)[4] * bits),
        "not bits",
    ),
    (
        checks.check_block_place,
        lambda t, d, bits: (*place(t, d, bits)[:3], d % 4, d // 4),
        "follow the row",
    ),
    (checks.check_bounds, lambda h, b, J, B: (J, bounds(h, b, J, B)[1]), "divide by h"),
    (checks.check_bounds, lambda h, b, J, B: (J * h, 8 * B / b), "not less"),
    (checks.check_bounds, lambda h, b, J, B: (J / h, B / b), "has 8 bits"),
    (checks.check_bounds, lambda h, b, J, B: (J / h, B / b / 8), "beta is in bits"),
    (checks.check_bounds, lambda h, b, J, B: (J / h, 8 * B / b / h), "serves all"),
    (checks.check_bounds, lambda h, b, J, B: (J / h, B), "bytes per second"),
    (
        checks.check_bounds,
        lambda h, b, J, B: (1 / (J / h), 1 / (8 * B / b)),
        "not seconds",
    ),
    (checks.check_fold, lambda q, s, z: (q * s, (q * s) @ z), "not x"),
    (checks.check_fold, lambda q, s, z: (q * s, z.sum()), "as often"),
    (checks.check_fold, lambda q, s, z: (q * s, 0.0), "zeros are missing"),
    (checks.check_fold, lambda q, s, z: (q / s, q @ z), "multiplied"),
    (checks.check_fold, lambda q, s, z: (q * s + z, q @ z), "not a part of x"),
    (checks.check_fold, lambda q, s, z: (q @ s, q @ z), "not their sum"),
    (checks.check_fold, lambda q, s, z: (q * s, q * z), "one number y"),
    (checks.check_fold, lambda q, s, z: q * s, "expected .x, y."),
    (checks.check_round_row, cut_off, "do not cut off"),
    (checks.check_round_row, of_the_maximum, "negative numbers"),
    (
        checks.check_round_row,
        with_back(lambda rest, levels, bits: 2 ** (bits - 1) * rest.sum()),
        "is .2.bits - 1. / 2",
    ),
    (
        checks.check_round_row,
        with_back(lambda rest, levels, bits: (2**bits - 1) * rest.sum()),
        "not the largest one",
    ),
    (
        checks.check_round_row,
        with_back(lambda rest, levels, bits: levels / 2 * rest.sum()),
        "bits wide",
    ),
    (
        checks.check_round_row,
        with_back(lambda rest, levels, bits: -(2**bits - 1) / 2 * rest.sum()),
        "with its sign",
    ),
    (
        checks.check_round_row,
        with_back(lambda rest, levels, bits: (2**bits - 1) / 2 * np.abs(rest).sum()),
        "not of its size",
    ),
    (
        checks.check_round_row,
        with_back(lambda rest, levels, bits: rest.sum()),
        "multiply",
    ),
]


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_wrong_answer_is_explained(check, answer, words):
    assert_explained(check, answer, words)

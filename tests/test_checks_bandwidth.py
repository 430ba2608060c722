"""Checks of the lessons on tensor cores, predicted and measured bandwidth."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks


# --- right answers --------------------------------------------------------------------
def products(T, D, h, cache_is):
    rows, columns = (T, h) if cache_is == "A" else (h, T)
    return sum(1 for _ in np.ndindex(-(-rows // 16), -(-columns // 8), -(-D // 16)))


def place(r, c):
    """By the table of the PTX manual: look through what each lane holds."""
    for lane in range(32):
        g, t = divmod(lane, 4)
        for register in range(4):
            row, column = g + 8 * (register % 2), 2 * t + 8 * (register // 2)
            if row == r and c - column in (0, 1):
                return lane, register, c - column
    raise ValueError(f"no lane holds row {r}, column {c}")


def folded_output(p, levels, s, z):
    width = levels.shape[1] // s.shape[1]
    o = [(p * s[:, c // width]) @ levels[:, c] for c in range(levels.shape[1])]
    return np.array(o) + np.repeat(p @ z, width)


def power_for(x, n):
    power = 1.0
    while x * power >= 2.0**n:
        power /= 2
    while x * power < 2.0 ** (n - 1):
        power *= 2
    return power


def seconds(n, i, B, J, t0):
    return t0 + n * max(1 / B, i / J)


def long_speedup(b, G, i, B, J):
    return 16 / (b + 32 / G) / max(1, i * B / J)


def half_gain(a, r, t0):
    """By bisection of the equation of the exercise."""
    low, high = 0.0, 1e6
    for _ in range(200):
        T = (low + high) / 2
        reached = (t0 + a * T) / (t0 + a * T / r) >= (1 + r) / 2
        low, high = (low, T) if reached else (T, high)
    return high


def summary(x):
    x = sorted(x)
    return x[2], (x[3] - x[1]) / x[2]  # of five


def moved(n, b, G):
    packed = n * b / 8 + 4 * n / G
    return 4 * n, packed + 8 * n, packed


def crossover(tokens, a, b):
    found = None
    for T, x, y in reversed(list(zip(tokens, a, b, strict=True))):
        if y >= x:
            return found
        found = T
    return found


RIGHT = {
    checks.check_products: products,
    checks.check_fragment_place: place,
    checks.check_undo_magic: lambda n: (1 / 2**n, -1024 / 2**n),
    checks.check_folded_output: folded_output,
    checks.check_power_for: power_for,
    checks.check_kernel_seconds: seconds,
    checks.check_long_speedup: long_speedup,
    checks.check_bytes_for_share: lambda x, B, t0: t0 * B / (1 / x - 1),
    checks.check_half_gain_tokens: half_gain,
    checks.check_summary: summary,
    checks.check_bytes_moved: moved,
    checks.check_crossover: crossover,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def registers_swapped(r, c):
    lane, register, half = place(r, c)
    return lane, (0, 2, 1, 3)[register], half


def first_faster(tokens, a, b):
    return next((T for T, x, y in zip(tokens, a, b, strict=True) if y < x), None)


WRONG = [
    (checks.check_products, lambda T, D, h, p: T * h * D / 2048, "round up"),
    (
        checks.check_products,
        lambda T, D, h, p: products(T, 1, h, p),
        "16 at a time",
    ),
    (
        checks.check_products,
        lambda T, D, h, p: products(T, D, h, "BA"[p == "B"]),
        "8 columns",
    ),
    (checks.check_products, lambda T, D, h, p: products(T, D, 1, p), "own place"),
    (checks.check_fragment_place, registers_swapped, "8 rows further down"),
    (
        checks.check_fragment_place,
        lambda r, c: (4 * r + c % 8 // 2, *place(r, c)[1:]),
        "r % 8",
    ),
    (
        checks.check_fragment_place,
        lambda r, c: (4 * (r % 8) + c // 2, *place(r, c)[1:]),
        "2t and 2t . 8",
    ),
    (
        checks.check_fragment_place,
        lambda r, c: (4 * (r % 8) + c % 4, *place(r, c)[1:]),
        "two neighbouring",
    ),
    (
        checks.check_fragment_place,
        lambda r, c: (r % 8 + 8 * (c % 8 // 2), *place(r, c)[1:]),
        "4 lanes share a row",
    ),
    (checks.check_undo_magic, lambda n: (2**-n, -1024), "the 1024 as well"),
    (checks.check_undo_magic, lambda n: (2**n, -1024 * 2**n), "divide by 2"),
    (checks.check_undo_magic, lambda n: (2**-n, 1024 / 2**n), "do not add it"),
    (
        checks.check_undo_magic,
        lambda n: (1 / max(n, 1), -1024 / max(n, 1)),
        "2.n times as large",
    ),
    (
        checks.check_folded_output,
        lambda p, x, s, z: folded_output(p, x, s, 0 * z),
        "zeros are missing",
    ),
    (
        checks.check_folded_output,
        lambda p, x, s, z: (
            folded_output(p, x, s, 0 * z)
            + np.repeat(z.sum(0), x.shape[1] // z.shape[1])
        ),
        "weighted by p",
    ),
    (
        checks.check_folded_output,
        lambda p, x, s, z: folded_output(p, x, s, s * z),
        "not multiplied by s",
    ),
    (
        checks.check_folded_output,
        lambda p, x, s, z: p @ (np.tile(s, 4) * x + np.tile(z, 4)),
        "share a group",
    ),
    (
        checks.check_folded_output,
        lambda p, x, s, z: np.repeat(s.mean(0), 4) * (p @ x) + np.repeat(p @ z, 4),
        "its own scale",
    ),
    (
        checks.check_power_for,
        lambda x, n: 2.0 ** (n - np.ceil(np.log2(x))),
        "reach 2.n",
    ),
    (checks.check_power_for, lambda x, n: power_for(x, n - 1), "below 2"),
    (checks.check_power_for, lambda x, n: power_for(x, n + 1), "or above"),
    (checks.check_power_for, lambda x, n: 2.0**n / x, "no power of two"),
    (checks.check_power_for, lambda x, n: np.log2(power_for(x, n)), "exponent"),
    (
        checks.check_kernel_seconds,
        lambda n, i, B, J, t0: seconds(n, i, B, J, 0),
        "the start counts",
    ),
    (
        checks.check_kernel_seconds,
        lambda n, i, B, J, t0: t0 + n / B + i * n / J,
        "is not added",
    ),
    (
        checks.check_kernel_seconds,
        lambda n, i, B, J, t0: t0 + n * min(1 / B, i / J),
        "not the faster",
    ),
    (
        checks.check_kernel_seconds,
        lambda n, i, B, J, t0: t0 + max(n / B, i / J),
        "for each byte",
    ),
    (
        checks.check_long_speedup,
        lambda b, G, i, B, J: long_speedup(b, np.inf, i, B, J),
        "32 / G bits",
    ),
    (
        checks.check_long_speedup,
        lambda b, G, i, B, J: long_speedup(b, G, 0, B, J),
        "count as well",
    ),
    (
        checks.check_long_speedup,
        lambda b, G, i, B, J: 1 / long_speedup(b, G, i, B, J),
        "upside down",
    ),
    (
        checks.check_long_speedup,
        lambda b, G, i, B, J: long_speedup(b, G, i, B, J) / 8,
        "bits and bytes",
    ),
    (
        checks.check_long_speedup,
        lambda b, G, i, B, J: 2 / B / max((b + 32 / G) / 8 / B, i / J),
        "i is per byte",
    ),
    (checks.check_bytes_for_share, lambda x, B, t0: x * t0 * B, "divide by 1 - x"),
    (checks.check_bytes_for_share, lambda x, B, t0: x / (1 - x) * t0, "the time"),
    (
        checks.check_bytes_for_share,
        lambda x, B, t0: (1 / x - 1) * t0 * B,
        "that of the start",
    ),
    (
        checks.check_bytes_for_share,
        lambda x, B, t0: t0 * B / (1 - x),
        "with the start",
    ),
    (checks.check_half_gain_tokens, lambda a, r, t0: t0 / a, "multiply by r"),
    (checks.check_half_gain_tokens, lambda a, r, t0: t0 / a / r, "16 bits r times"),
    (
        checks.check_half_gain_tokens,
        lambda a, r, t0: (r - 2) * t0 / a,
        "not of the speed-up",
    ),
    (checks.check_half_gain_tokens, lambda a, r, t0: r / a, "all terms have t0"),
    (
        checks.check_summary,
        lambda x: (np.mean(x), summary(x)[1] * summary(x)[0] / np.mean(x)),
        "the mean follows",
    ),
    (
        checks.check_summary,
        lambda x: (x[2], summary(x)[1] * summary(x)[0] / x[2]),
        "sort first",
    ),
    (
        checks.check_summary,
        lambda x: (summary(x)[0], summary(x)[1] * summary(x)[0]),
        "divide by the median",
    ),
    (
        checks.check_summary,
        lambda x: (summary(x)[0], np.ptp(x) / summary(x)[0]),
        "not the extremes",
    ),
    (
        checks.check_summary,
        lambda x: (summary(x)[0], np.std(x) / summary(x)[0]),
        "standard deviation",
    ),
    (
        checks.check_bytes_moved,
        lambda n, b, G: (4 * n, 4 * n + moved(n, b, G)[2], moved(n, b, G)[2]),
        "read again",
    ),
    (
        checks.check_bytes_moved,
        lambda n, b, G: (4 * n, 8 * n, moved(n, b, G)[2]),
        "read as well",
    ),
    (checks.check_bytes_moved, lambda n, b, G: moved(n, b, np.inf), "scales and"),
    (
        checks.check_bytes_moved,
        lambda n, b, G: moved(n, 8 * b, G / 8),
        "a byte has 8 bits",
    ),
    (
        checks.check_bytes_moved,
        lambda n, b, G: (2 * n, moved(n, b, G)[1] - 4 * n, moved(n, b, G)[2]),
        "has 4 bytes",
    ),
    (checks.check_crossover, first_faster, "faster once"),
    (
        checks.check_crossover,
        lambda t, a, b: crossover(t, [x + 1e-9 for x in a], b),
        "equal is not",
    ),
    (checks.check_crossover, lambda t, a, b: crossover(t, a, b) or t[-1], "never"),
]


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_wrong_answer_is_explained(check, answer, words):
    assert_explained(check, answer, words)

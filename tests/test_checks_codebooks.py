"""Checks of the lessons on codebooks and on rotation."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks


# --- right answers --------------------------------------------------------------------
def nearest_code(y, levels):
    return np.abs(np.asarray(y)[..., None] - levels).argmin(axis=-1)


def lloyd_round(y, levels):
    code = nearest_code(y, levels)
    return [
        y[code == i].mean() if (code == i).any() else c for i, c in enumerate(levels)
    ]


def scale_errors(x, levels, factors):
    s = factors * np.abs(x).max() / levels.max()
    x_hat = levels[nearest_code(x / s[:, None], levels)] * s[:, None]
    return s, (x_hat - x) ** 2


def best_scale(x, levels, factors):
    s, error = scale_errors(x, levels, factors)
    return s[error.sum(axis=1).argmin()]


def shared_scale(x, top):
    exponents = [np.frexp(value)[1] for value in (np.abs(x).max(), top)]
    return np.ldexp(1.0, exponents[0] - exponents[1])


RIGHT = {
    checks.check_nearest_code: nearest_code,
    checks.check_lloyd_round: lloyd_round,
    checks.check_best_scale: best_scale,
    checks.check_shared_scale: shared_scale,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def lloyd_round_with_zeros(y, levels):
    code = nearest_code(y, levels)
    n = np.bincount(code, minlength=len(levels))
    return np.bincount(code, y, len(levels)) / np.maximum(n, 1)


def lloyd_round_divides_by_zero(y, levels):
    code = nearest_code(y, levels)
    with np.errstate(invalid="ignore"):
        return np.bincount(code, y, len(levels)) / np.bincount(
            code, minlength=len(levels)
        )


def scale_of_largest_error(x, levels, factors):
    s, error = scale_errors(x, levels, factors)
    return s[error.max(axis=1).argmin()]


WRONG = [
    (
        checks.check_nearest_code,
        lambda y, levels: levels[nearest_code(y, levels)],
        "return their indices",
    ),
    (
        checks.check_nearest_code,
        lambda y, levels: np.searchsorted(levels, y),
        "halfway between",
    ),
    (checks.check_nearest_code, lambda y, levels: 1 + nearest_code(y, levels), "less"),
    (checks.check_lloyd_round, lloyd_round_with_zeros, "stays where it is"),
    (checks.check_lloyd_round, lloyd_round_divides_by_zero, "0 / 0"),
    (checks.check_lloyd_round, lambda y, levels: levels, "not means"),
    (
        checks.check_best_scale,
        lambda x, levels, f: best_scale(x, levels, f) * 2 / 3.8,
        "return the scale",
    ),
    (
        checks.check_best_scale,
        lambda x, levels, f: 2 * best_scale(x, levels, f),
        "divide by the largest level",
    ),
    (checks.check_best_scale, scale_of_largest_error, "add the errors"),
    (
        checks.check_shared_scale,
        lambda x, top: np.log2(shared_scale(x, top)),
        "2 to its power",
    ),
    (
        checks.check_shared_scale,
        lambda x, top: 2 ** np.floor(np.log2(np.abs(x).max() / top)),
        "round each logarithm",
    ),
    (
        checks.check_shared_scale,
        lambda x, top: 2 ** np.floor(np.log2(np.abs(x).max())),
        "of the largest level",
    ),
]


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_wrong_answer_is_explained(check, answer, words):
    assert_explained(check, answer, words)

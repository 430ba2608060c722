"""Checks of the lessons on codebooks and on rotation."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import Policy, Scheme, checks
from kvq.transforms import hadamard_matrix


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


def fast_hadamard(x):
    return x @ hadamard_matrix(len(x))


def store_rotated(x, levels):
    y = fast_hadamard(x)
    s = np.linalg.norm(y) / np.sqrt(len(x))
    return fast_hadamard(s * levels[nearest_code(y / s, levels)])


def papers(**changes):
    rotated = {"per": "token", "group": None, "transform": "hadamard"}
    key, value = (Scheme(2, per, 32, "asymmetric") for per in ("channel", "token"))
    quarot = (Scheme(b, levels="asymmetric", **rotated) for b in (4, 2))
    turbo = Scheme(4, levels="lloyd-max", **rotated)
    return {
        "kivi-2": Policy(key, value, residual=128),
        "k4v2": Policy(*quarot),
        "turbo": Policy(turbo, turbo),
        **changes,
    }


RIGHT = {
    checks.check_nearest_code: nearest_code,
    checks.check_lloyd_round: lloyd_round,
    checks.check_best_scale: best_scale,
    checks.check_shared_scale: shared_scale,
    checks.check_fast_hadamard: fast_hadamard,
    checks.check_store_rotated: store_rotated,
    checks.check_shrink_factor: lambda x, x_hat: np.vdot(x, x_hat) / np.vdot(x, x),
    checks.check_paper_policies: papers(),
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


def store_unrotated(x, levels):
    s = np.linalg.norm(x) / np.sqrt(len(x))
    return s * levels[nearest_code(x / s, levels)]


def store_by_largest(x, levels):
    y = fast_hadamard(x)
    s = np.abs(y).max() / 1.5
    return fast_hadamard(s * levels[nearest_code(y / s, levels)])


SWAPPED = Policy(
    Scheme(2, "token", 32, "asymmetric"),
    Scheme(2, "channel", 32, "asymmetric"),
    residual=128,
)

WRONG = [
    (
        checks.check_fast_hadamard,
        lambda x: fast_hadamard(x) * len(x) ** 0.5,
        "in every round",
    ),
    (checks.check_fast_hadamard, lambda x: x, "nothing was added"),
    (
        checks.check_store_rotated,
        lambda x, levels: fast_hadamard(store_rotated(x, levels)),
        "rotate back",
    ),
    (checks.check_store_rotated, store_unrotated, "rotate before"),
    (checks.check_store_rotated, store_by_largest, "not the largest"),
    (checks.check_shrink_factor, lambda x, x_hat: np.vdot(x, x_hat), "divide by"),
    (
        checks.check_shrink_factor,
        lambda x, x_hat: np.corrcoef(x.ravel(), x_hat.ravel())[0, 1],
        "none of the usual",
    ),
    (
        checks.check_shrink_factor,
        lambda x, x_hat: 1 - np.vdot(x, x_hat) / np.vdot(x, x),
        "what is left",
    ),
    (checks.check_paper_policies, papers(turbo=None), "turbo: got None"),
    (
        checks.check_paper_policies,
        papers(**{"kivi-2": SWAPPED}),
        "key.per: got 'token'",
    ),
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

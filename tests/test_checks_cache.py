"""Checks of the lessons on outliers, on keys and values, and on the growing cache."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks
from kvq.attention import softmax
from kvq.transforms import hadamard_matrix


# --- right answers --------------------------------------------------------------------
def static_share(x):
    return np.sum(x.mean(axis=0) ** 2) / np.sum((x**2).mean(axis=0))


def rotated_scores(q, k):
    return (k @ hadamard_matrix(len(q))) @ q / np.sqrt(len(q))


def smooth(k):
    m = k.mean(axis=1, keepdims=True)
    return k - m, m


def weight_moved(S, delta):
    return np.abs(softmax(S + delta) - softmax(S)).sum() / 2


def split(T, R, G):
    quantized = max(T - R, 0) // G * G
    return quantized, T - quantized


def stored_bits(arrays, n):
    return sum(a.size * a.itemsize * 8 for a in arrays) / n


RIGHT = {
    checks.check_static_share: static_share,
    checks.check_rotated_scores: rotated_scores,
    checks.check_smooth: smooth,
    checks.check_largest_channels: lambda x, n: np.argsort(-np.abs(x).max(axis=0))[:n],
    checks.check_weight_moved: weight_moved,
    checks.check_logit_bound: lambda q, s: np.abs(q).sum() * s / 2 / len(q) ** 0.5,
    checks.check_value_error: lambda p, eps: np.linalg.norm(p * eps),
    checks.check_safe_step: lambda q, d: d * len(q) ** 0.5 / np.abs(q).sum(),
    checks.check_split: split,
    checks.check_stored_bits: stored_bits,
    checks.check_block_key: lambda tenant, scheme, tokens: (tenant, scheme, tokens),
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def smooth_without_axis(k):
    m = k.mean(axis=1)
    return k - m[:, None], m


def smooth_all_heads(k):
    m = np.repeat(k.mean(axis=(0, 1), keepdims=True), len(k), axis=0)
    return k - m, m


def smooth_adds(k):
    return k + k.mean(axis=1, keepdims=True), k.mean(axis=1, keepdims=True)


def moved_unnormalized(S, delta):
    return np.abs(np.exp(S + delta) - np.exp(S)).sum() / 2


def partial_groups(T, R, G):
    return max(T - R, 0), min(T, R)


def negative_counts(T, R, G):
    quantized = (T - R) // G * G
    return quantized, T - quantized


WRONG = [
    (checks.check_static_share, lambda x: static_share(x.T), "axis 0"),
    (checks.check_static_share, lambda x: 1 - static_share(x), "not static"),
    (
        checks.check_static_share,
        lambda x: np.sum(x.mean(axis=0) ** 2) / np.sum(x**2),
        "mean over the tokens",
    ),
    (
        checks.check_rotated_scores,
        lambda q, k: k @ q / np.sqrt(len(q)),
        "query must be rotated",
    ),
    (checks.check_rotated_scores, lambda q, k: rotated_scores(q, k) * 8**0.5, "sqrt"),
    (checks.check_smooth, smooth_without_axis, "keepdims"),
    (checks.check_smooth, smooth_all_heads, "each head has its own"),
    (checks.check_smooth, smooth_adds, "m was added"),
    (
        checks.check_largest_channels,
        lambda x, n: np.argsort(x.max(axis=0))[-n:],
        "absolute value",
    ),
    (
        checks.check_largest_channels,
        lambda x, n: np.argsort(np.abs(x).mean(axis=0))[-n:],
        "by the mean",
    ),
    (checks.check_weight_moved, lambda S, d: 2 * weight_moved(S, d), "halve the sum"),
    (checks.check_weight_moved, moved_unnormalized, "add up to 1"),
    (
        checks.check_logit_bound,
        lambda q, s: np.linalg.norm(q) * s / 2 / len(q) ** 0.5,
        "2-norm",
    ),
    (
        checks.check_logit_bound,
        lambda q, s: np.abs(q).sum() * s / len(q) ** 0.5,
        "half a step",
    ),
    (checks.check_value_error, lambda p, eps: p @ eps, "cancel in part"),
    (checks.check_value_error, lambda p, eps: np.sqrt(p @ eps**2), "be squared"),
    (
        checks.check_safe_step,
        lambda q, d: 2 * d * len(q) ** 0.5 / np.abs(q).sum(),
        "both scores move",
    ),
    (checks.check_split, partial_groups, "whole groups leave"),
    (checks.check_split, negative_counts, "no negative counts"),
    (checks.check_split, lambda T, R, G: (T // G * G, T % G), "newest R tokens"),
    (checks.check_split, lambda T, R, G: split(T, R, G)[::-1], "order is"),
    (checks.check_stored_bits, lambda a, n: stored_bits(a, n) / 8, "byte has 8"),
    (checks.check_stored_bits, lambda a, n: stored_bits(a[:1], n), "every array"),
    (
        checks.check_stored_bits,
        lambda a, n: 8 * sum(x.size for x in a) / n,
        "not elements",
    ),
    (checks.check_block_key, lambda n, s, t: [n, s, t], "a list"),
    (checks.check_block_key, lambda n, s, t: object(), "same key"),
    (checks.check_block_key, lambda n, s, t: (s, t), "tenant is not part"),
    (checks.check_block_key, lambda n, s, t: (n, t), "scheme is not part"),
    (checks.check_block_key, lambda n, s, t: (n, s, frozenset(t)), "order of the"),
    (checks.check_block_key, lambda n, s, t: (n, s, len(t)), "order of the"),
    (checks.check_block_key, lambda n, s, t: (n, s, t[:2]), "last token"),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    assert_explained(check, wrong, cause)

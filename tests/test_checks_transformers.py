"""The checks of the lesson on Transformers accept right answers, explain wrong ones."""

import pytest
from answers import assert_explained, assert_passes

from kvq import KVCache, checks


class Layer:
    def __init__(self, policy):
        self.store = KVCache(policy)

    def update(self, k, v):
        self.store.append(k, v)
        return self.store.keys(), self.store.values()


def mask_sizes(T, t, W):
    first = max(T - W + 1, 0)
    return T + t - first, first


RIGHT = {
    checks.check_cache_layer: Layer,
    checks.check_mask_sizes: mask_sizes,
    checks.check_times_quantized: lambda p, T, F: sum(range(p, T + 1, F)),
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


class OnlyNew(Layer):
    def update(self, k, v):
        return tuple(x[:, -k.shape[1] :] for x in super().update(k, v))


class Exact(Layer):
    def __init__(self, policy):
        super().__init__("fp32")


class ReadsFirst(Layer):
    def update(self, k, v):
        old = (k[:, :0], v[:, :0])
        if self.store.rows:
            old = self.store.keys(), self.store.values()
        super().update(k, v)
        return old


class Swapped(Layer):
    def update(self, k, v):
        return super().update(k, v)[::-1]


def sizes(first):
    return lambda T, t, W: (T + t - first(T, t, W), first(T, t, W))


WRONG = [
    (checks.check_cache_layer, OnlyNew, "wants all of them"),
    (checks.check_cache_layer, Exact, "must see what is stored"),
    (checks.check_cache_layer, ReadsFirst, "first, then read"),
    (checks.check_cache_layer, Swapped, "are swapped"),
    (checks.check_mask_sizes, sizes(lambda T, t, W: max(T - W, 0)), "not W"),
    (checks.check_mask_sizes, sizes(lambda T, t, W: max(T + t - W, 0)), "not the last"),
    (checks.check_mask_sizes, sizes(lambda T, t, W: T - W + 1), "before token 0"),
    (
        checks.check_mask_sizes,
        lambda T, t, W: (min(T, W - 1), max(T - W + 1, 0)),
        "too",
    ),
    (checks.check_mask_sizes, lambda *x: mask_sizes(*x)[::-1], "where they begin"),
    (checks.check_times_quantized, lambda p, T, F: p + (T - p) // F * F, "every flush"),
    (checks.check_times_quantized, lambda p, T, F: sum(range(p + F, T + 1, F)), "once"),
    (checks.check_times_quantized, lambda p, T, F: sum(range(p, T + F, F)), "before"),
    (checks.check_times_quantized, lambda p, T, F: 1 + (T - p) // F, "counts flushes"),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    assert_explained(check, wrong, cause)

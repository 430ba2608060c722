"""A chunk of tokens against the reference, which takes them one by one in float64."""

from dataclasses import replace

import numpy as np
import pytest
from plain import uneven

from kvq.attention import attention
from kvq.cache import KVCache
from kvq.model.attend import attend, tokens_seen
from kvq.scheme import PRESETS, Policy, Scheme

T, SCALE = 75, 16**-0.5
K, V, Q = uneven((2, T, 16)), uneven((2, T, 12), 1), uneven((6, T, 16), 2)
KEYS = Scheme(3, "channel", 8, "asymmetric")
VALUES = Scheme(2, "token", 5, "asymmetric")
POLICIES = {
    "fp32": PRESETS["fp32"],
    "token": Policy(Scheme(4, "token", 8), VALUES),
    "token, window": Policy(Scheme(4, "token", 8), VALUES, residual=11),
    "blocks": Policy(KEYS, VALUES),
    "blocks, window, sinks": Policy(KEYS, VALUES, residual=13, sinks=3),
    "two blocks": Policy(KEYS, Scheme(4, "head", 12), residual=5),
    "all sinks": Policy(KEYS, VALUES, sinks=90),
    "all window": Policy(KEYS, VALUES, residual=75),
}


def one_by_one(policy, window=None):
    cache, out = KVCache(policy), []
    for i in range(T):
        token = slice(i, i + 1)
        cache.append(K[:, token], V[:, token])
        mask = None if window is None else np.arange(i + 1) > i - window
        out.append(cache.attend(Q[:, token], scale=SCALE, mask=mask))
    return np.concatenate(out, axis=-2), cache


def in_chunks(policy, sizes, window=None):
    cache, out, start = KVCache(policy), [], 0
    for n in sizes:
        part = slice(start, start + n)
        out.append(attend(cache, Q[:, part], K[:, part], V[:, part], SCALE, window))
        start += n
    assert start == T
    return np.concatenate(out, axis=-2), cache


# float32 scores up to some 1e3 are off by 1e-4, which moves weights by as much.
TOLERANCE = 2e-3


@pytest.mark.parametrize("sizes", [[75], [1] * 75, [1, 30, 2, 41, 1], [64, 11]])
@pytest.mark.parametrize("name", POLICIES)
def test_chunks_of_any_size_answer_as_single_tokens_do(name, sizes):
    expected, slow = one_by_one(POLICIES[name])
    out, fast = in_chunks(POLICIES[name], sizes)
    assert out.dtype == np.float32
    assert out.shape == expected.shape == (6, T, 12)
    assert np.abs(out - expected).max() < TOLERANCE
    np.testing.assert_array_equal(fast.keys(), slow.keys())
    np.testing.assert_array_equal(fast.values(), slow.values())


@pytest.mark.parametrize("window", [1, 4, 30])
@pytest.mark.parametrize("name", ["token, window", "blocks, window, sinks"])
def test_a_sliding_window_hides_what_is_older(name, window):
    expected, _ = one_by_one(POLICIES[name], window)
    out, _ = in_chunks(POLICIES[name], [20, 55], window)
    assert np.abs(out - expected).max() < TOLERANCE


@pytest.mark.parametrize("window", [14, 30])
@pytest.mark.parametrize("sizes", [[75], [1] * 75, [1, 30, 2, 41, 1], [64, 11]])
@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_that_slides_answers_as_one_that_keeps_all(name, sizes, window):
    policy = POLICIES[name]
    if policy.residual >= window:
        policy = replace(policy, residual=0)
    expected, _ = one_by_one(policy, window)
    cache, out, start = KVCache(policy, sliding_window=window), [], 0
    for n in sizes:
        part = slice(start, start + n)
        out.append(attend(cache, Q[:, part], K[:, part], V[:, part], SCALE, window))
        start += n
        assert tokens_seen(cache) == start
    assert np.abs(np.concatenate(out, axis=-2) - expected).max() < TOLERANCE
    if sizes == [1] * 75 and policy.sinks < 75:
        assert len(cache) < policy.sinks + window + policy.block


def test_a_sliding_window_of_one_sees_only_itself():
    out, _ = in_chunks(POLICIES["fp32"], [75], window=1)
    np.testing.assert_allclose(out, np.repeat(V, 3, axis=0), rtol=1e-6)


def test_an_unquantized_cache_gives_plain_attention():
    out, _ = in_chunks(POLICIES["fp32"], [33, 42])
    expected = attention(Q, K, V, causal=True)
    assert np.abs(out - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["blocks", "blocks, window, sinks", "token, window"])
def test_to_store_the_whole_chunk_first_would_be_noticed(name):
    """Then early queries would read blocks whose scales know of later tokens."""
    expected, _ = one_by_one(POLICIES[name])
    cache = KVCache(POLICIES[name])
    cache.append(K, V)
    assert np.abs(cache.attend(Q, scale=SCALE) - expected).max() > 20 * TOLERANCE


# With a window of 13, the crop leaves more tokens stored than its length would have.
@pytest.mark.parametrize(("residual", "stored"), [(6, 32), (13, 32)])
def test_after_a_crop_the_window_is_what_it_was_read_as(residual, stored):
    policy = replace(POLICIES["blocks"], residual=residual)
    fast, slow = KVCache(policy), KVCache(policy)
    for cache in (fast, slow):
        cache.append(K[:, :50], V[:, :50])
        cache.crop(37)  # cuts the block of tokens 32..39, where it is stored
        assert cache.report()[0]["quantized"] == stored
    out = attend(fast, Q[:, 37:60], K[:, 37:60], V[:, 37:60], SCALE)
    for i in range(37, 60):
        slow.append(K[:, i : i + 1], V[:, i : i + 1])
        expected = slow.attend(Q[:, i : i + 1], scale=SCALE)
        assert np.abs(out[:, i - 37 : i - 36] - expected).max() < TOLERANCE

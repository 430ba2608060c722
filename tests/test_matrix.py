"""Every way to use a cache, with every width: no hole that a second request finds.

A48, kekzl/imp#1349: the first request succeeds and every later one dies, because one
path lacks one dtype.
"""

import numpy as np
import pytest

from kvq import KVCache, Policy, Scheme
from kvq.paging import BlockPool, PrefixIndex, open_sequence
from kvq.scheme import FP16

T = 150
RNG = np.random.default_rng(0)
K, V = RNG.standard_normal((2, 1, 3, T, 64)).astype(np.float16)
Q = RNG.standard_normal((9, 1, 64)).astype(np.float32)
TOKENS = list(range(T))


def policy(bits, per, residual):
    if bits == 16:
        return Policy(FP16, FP16, residual=residual)
    key = Scheme(bits, per, 32, "asymmetric")
    return Policy(key, Scheme(bits, "token", 32, "asymmetric"), residual=residual)


def whole(p):
    cache = KVCache(p)
    cache.append(K[0], V[0])
    return cache


def paged(p):
    pool = BlockPool(p, 16, block=32, kv_heads=3, head_dim=64)
    index = PrefixIndex(pool, "model")
    table, matched = open_sequence(index, TOKENS, "tenant")
    assert matched == 0
    table.append(TOKENS, K, V)
    return index, table


def cold(p):
    return whole(p).attend(Q)


def chunked(p):
    cache = KVCache(p)
    for start in range(0, T, 17):
        cache.append(K[0, :, start : start + 17], V[0, :, start : start + 17])
    return cache.attend(Q)


def cropped(p):
    cache = KVCache(p)
    cache.append(
        np.concatenate([K[0], K[0, :, :8]], 1),
        np.concatenate([V[0]] * 2, 1)[:, : T + 8],
    )
    cache.crop(T)
    exact = p.split(T + 8)[1] == p.split(T)[1]  # else tokens that went are gone
    return cache.attend(Q) if exact else None


def in_blocks(p):
    return paged(p)[1].attend(0, Q)


def prefix_hit(p):
    index, first = paged(p)
    table, matched = open_sequence(index, TOKENS, "tenant")
    assert matched == p.split(T)[1] // 32 * 32 > 0
    table.append(TOKENS[matched:], K[:, :, matched:], V[:, :, matched:])
    assert np.array_equal(first.attend(0, Q), table.attend(0, Q))
    return table.attend(0, Q)


def sliding(p):
    cache = KVCache(p, sliding_window=T)
    cache.append(K[0], V[0])
    return cache.attend(Q)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("per", ["token", "channel", "head"])
@pytest.mark.parametrize("residual", [0, 40])
@pytest.mark.parametrize("way", [chunked, cropped, in_blocks, prefix_hit, sliding])
def test_every_way_gives_the_same_attention(bits, per, residual, way):
    p = policy(bits, per, residual)
    out = way(p)
    if out is not None:
        np.testing.assert_allclose(out, cold(p), rtol=1e-12, atol=1e-12)

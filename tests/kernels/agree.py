"""The three classes in which backends agree with the reference, and data to show it.

codes, scales, zeros    exactly
dequantized values      within 1 unit in the last place
attention               within twice the error of the same computation done naively
                        in float32
"""

import numpy as np
from plain import uneven

from kvq.attention import attention
from kvq.cache import KVCache
from kvq.tensor import quantize


def same_stored(a, b):
    """Codes, scales and zeros, bit for bit."""
    assert [x.shape for x in a.arrays] == [x.shape for x in b.arrays]
    assert [x.dtype for x in a.arrays] == [x.dtype for x in b.arrays]
    assert [x.tobytes() for x in a.arrays] == [x.tobytes() for x in b.arrays]
    assert (a.shape, a.scheme) == (b.shape, b.scheme)


def check_pack(run, x, scheme):
    """run(x, scheme) stores x as `kvq.quantize` does. Returns what it gave."""
    packed = run(x, scheme)
    same_stored(packed, quantize(x, scheme))
    return packed


def check_dequant(run, qt):
    """run(qt) is x_hat within 1 unit in the last place."""
    expected, x_hat = qt.dequantize(), run(qt)
    assert x_hat.dtype == np.float32
    assert x_hat.shape == expected.shape
    np.testing.assert_array_max_ulp(x_hat, expected, maxulp=1)


def read(cache, b):
    """k_hat, v_hat (H_kv, T, D) of sequence b, in float32: what attention reads."""
    ((k, v),) = cache.tiles(b, None) if cache.lengths[b] else [[None, None]]
    return k, v


def naive_float32(q, k, v, scale, softcap=None, sink_logits=None):
    """Attention of q (H_q, 1, D) over all tokens: one sum after the other, in float32.

    m, l and o are sums in the order of the tokens, a score is one in that of channels.
    """
    ratio, q = len(q) // len(k), q[:, 0].astype(np.float32)
    k, v = (np.repeat(x, ratio, axis=0).swapaxes(0, 1) for x in (k, v))
    S = sum(q[:, c] * k[:, :, c] for c in range(q.shape[-1])) * np.float32(scale)
    if softcap:
        S = np.float32(softcap) * np.tanh(S / np.float32(softcap))
    sink = np.full(len(q), -np.inf) if sink_logits is None else np.asarray(sink_logits)
    sink = sink.astype(np.float32)
    m = np.maximum(S.max(axis=0), sink)
    p = np.exp(S - m)
    l = sum(p, start=np.exp(sink - m))  # noqa: E741
    o = sum(p[t, :, None] * v[t] for t in range(len(v)))
    return (o / l[:, None])[:, None]


def check_decode(run, q, cache, **options):
    """run(q, cache, ...) is attention within twice the error of `naive_float32`."""
    out = run(q, cache, **options)
    assert out.dtype == (np.float64 if str(run) == "numpy" else np.float32)
    assert out.shape == q.shape
    rows = q[None] if q.ndim == 3 else q
    for b, (q_b, out_b) in enumerate(
        zip(rows.astype(np.float32), out.reshape(rows.shape), strict=True)
    ):
        check_attention(out_b, q_b, *read(cache, b), **options)
    return out


def check_attention(out, q, k, v, scale=None, **options):
    """One sequence; k and v are None where it holds no token.

    Of one order of the sums the error may be small by chance: that of the naive
    computation is the largest of some orders of channels and tokens.
    """
    if k is None:
        np.testing.assert_array_equal(out, 0)
        return
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = attention(q, k, v, scale=scale, **options)
    rng, naive = np.random.default_rng(0), []
    for _ in range(6):
        c, t = (rng.permutation(n) for n in (k.shape[-1], k.shape[-2]))
        values = naive_float32(q[..., c], k[:, t][..., c], v[:, t], scale, **options)
        naive.append(np.linalg.norm(values - exact))
    assert np.linalg.norm(out - exact) <= 2 * max(naive)


def filled(policy, shape, lengths=None, dtype=np.float32, seed=0):
    """A cache that got uneven keys and values of `shape` (B, H_kv, T, D) in pieces.

    lengths : tokens of each sequence; T of all of them by default.
    """
    k, v = (uneven(shape, seed + i).astype(dtype) for i in range(2))
    B, _, T, _ = shape
    lengths = [T] * B if lengths is None else lengths
    mask = np.arange(T) < np.asarray(lengths)[:, None]
    cache = KVCache(policy)
    for piece in (slice(0, T // 2), slice(T // 2, T // 2 + 1), slice(T // 2 + 1, T)):
        cache.append(k[..., piece, :], v[..., piece, :], mask[:, piece])
    return cache


def queries(B, H_q, D, seed=7, dtype=np.float32):
    """q (B, H_q, 1, D), Gaussian."""
    q = np.random.default_rng(seed).standard_normal((B, H_q, 1, D))
    return q.astype(dtype)

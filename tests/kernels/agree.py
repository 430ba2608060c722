"""The three classes in which backends agree with the reference, and data to show it.

codes, scales, zeros    exactly
dequantized values      within 1 unit in the last place
attention               within twice the error of the same computation done naively:
                        in float32, or with tensor cores' products of two 16-bit
                        numbers (`naive_tensor_cores`)
"""

import numpy as np
from plain import uneven

from kvq.attention import attention
from kvq.cache import KVCache
from kvq.dtypes import numpy_dtype
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


# --- by tensor cores ------------------------------------------------------------------
def naive_tensor_cores(q, parts, scale, softcap=None, sink_logits=None, above=0):
    """Attention of q (H_q, 1, D) by products of two 16-bit numbers, sums in float32.

    parts : [(k, v, dtype)], tokens whose numbers are multiplied as `dtype`, "float16"
        or "bfloat16"; k and v are (s, level, z), arrays (H_kv, T, D): s level + z.
    above : what m has more than the largest score; it changes nothing but roundings.

    q (s level + z) has more than two factors, and a product has two: something must be
    rounded first. The kernels fold: q s is rounded, once, and a level is exact. So this
    does the same, one product at a time. To round k_hat = s level + z instead is no
    measure of it: 2 symmetric bits have the levels -1, 0 and 1, s level is exact then,
    and what is left is the error of another computation, without a rounding that every
    kernel that multiplies codes has to make.
    """
    ratio = len(q) // len(parts[0][0][0])
    S = [_folded(q, k, ratio, dtype).sum(2, dtype=np.float32) for k, _, dtype in parts]
    S = np.concatenate(S, axis=1) * np.float32(scale)
    if softcap:
        S = np.float32(softcap) * np.tanh(S / np.float32(softcap))
    sink = np.full(len(q), -np.inf) if sink_logits is None else sink_logits
    m = np.maximum(S.max(axis=1), sink).astype(np.float32) + np.float32(above)
    p = np.exp(S - m[:, None])
    l = p.sum(axis=1) + np.exp(sink - m)  # noqa: E741
    o, start = 0, 0
    for _, v, dtype in parts:
        stop = start + v[0].shape[1]
        x = p[:, start:stop, None]
        o = o + _folded(x, v, ratio, dtype).sum(1, dtype=np.float32)
        start = stop
    return (o / l[:, None])[:, None]


def _folded(x, side, ratio, dtype):
    """x (s level + z), x s rounded, for each token and channel: float32."""
    s, level, z = (a.repeat(ratio, axis=0).astype(np.float32) for a in side)
    x = rounded(x, dtype)
    return rounded(x * s, dtype) * level + x * z


def rounded(x, dtype):
    """float32 values of `dtype`."""
    return np.asarray(x, np.float32).astype(numpy_dtype(dtype)).astype(np.float32)


def check_tensor_cores(out, q, parts, scale, **options):
    """One sequence, out (H_q, 1, D); parts as for `naive_tensor_cores`.

    With one m the roundings of p may be small by chance: the error of the naive
    computation is the largest of some.
    """
    if not sum(k[0].shape[1] for k, _, _ in parts):
        np.testing.assert_array_equal(out, 0)
        return
    k, v = (
        np.concatenate([s * level + z for s, level, z in sides], axis=1)
        for sides in list(zip(*parts, strict=True))[:2]
    )
    exact = attention(q.astype(float), k, v, scale=scale, **options)
    naive = [
        naive_tensor_cores(q, parts, scale, above=m, **options) - exact
        for m in (0, 0.15, 0.3, 0.45)
    ]
    assert np.linalg.norm(out - exact) <= 2 * max(map(np.linalg.norm, naive))


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

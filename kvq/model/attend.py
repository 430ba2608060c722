r"""Attention over a `KVCache` for many new tokens at once, each at its own length.

A cache that grows token by token answers the query of token i when it holds i + 1
tokens, and `Policy.split(i + 1)` says which of them are still in full precision. A
chunk of tokens is answered here as if it had come token by token:

    token j as query i sees it = stored   if j < end(i),   sinks and window otherwise
    end(i) = sinks + quantized tokens at length i + 1

So a block of a KIVI cache is read as it is stored by every query that comes after the
block left the window, and as it was by the queries before. Nothing of the future leaks
into a group's scale, and chunks of any size give the same numbers.
"""

from functools import lru_cache

import numpy as np


def attend(cache, q, k, v, scale, window=None):
    """Append k and v, then attend with q, as if the tokens had come one by one.

    cache : a `KVCache` of one sequence, with values of its own (not a latent cache). It
        may slide by the same `window`: what it gives up is not seen.
    q : (H_q, t, D), k : (H_kv, t, D), v : (H_kv, t, D_v), the new tokens.
    window : a sliding window W: query i sees the tokens i - W + 1 .. i; None: 0 .. i.
    Returns float32 (H_q, t, D_v). Arithmetic is float32 (`KVCache.attend` is the
    reference, in float64, for queries that all see the cache as it is now).
    """
    before = tokens_seen(cache)
    fresh_k, fresh_v = _with_window(cache, k, v)
    start = before + k.shape[-2] - fresh_k.shape[-2]  # position of fresh_k[:, 0]
    cache.append(k, v)
    ((stored_k, stored_v),) = cache.tiles(tile=None)
    T = tokens_seen(cache)
    i = np.arange(before, T)  # positions of the queries, and of what is stored:
    j = np.arange(T - len(cache), T)  # (sinks before a gap are not seen, wherever)
    end = np.maximum(_ends(cache.policy, before, T), start)
    # Stored by now, but in full precision when query i came: late, full[i].
    seen = _seen(i, j, window)
    late = slice(*np.searchsorted(j, (end[0], end[-1])))
    full = seen[:, late] & (j[late] >= end[:, None])
    fresh = slice(end[0] - start, end[-1] - start)

    Q = _by_kv_head(q.astype(np.float32) * np.float32(scale), len(k))
    S = _product(Q, stored_k.swapaxes(-1, -2))
    if full.any():
        S_fresh = _product(Q, fresh_k[:, fresh].swapaxes(-1, -2))
        np.copyto(S[..., late], S_fresh, where=full)
    P = softmax(S, seen)
    out = _product(P, stored_v)
    if full.any():
        lost = fresh_v[:, fresh] - stored_v[:, late]
        out += _product(P[..., late] * full, lost)
    return out.reshape(len(q), len(i), -1)


def tokens_seen(cache):
    """Tokens that have come: those stored, and those a sliding cache has given up."""
    return len(cache) + (cache.rows[0][0].dropped if cache.rows else 0)


@lru_cache(maxsize=1024)
def _ends(policy, before, T):
    """end(i) = sinks + quantized tokens at length i + 1, for i = before .. T - 1."""
    return tuple(sum(policy.split(i + 1)[:2]) for i in range(before, T))


def _with_window(cache, *new):
    """The cache's window and the new tokens after it, in full precision, float32."""
    if not cache.rows:
        return [x.astype(np.float32) for x in new]
    return [
        np.concatenate([stream.window, x], axis=-2, dtype=np.float32)
        for stream, x in zip(cache.rows[0], new, strict=True)
    ]


def _by_kv_head(x, H_kv):
    """(H_q, t, D) -> (H_kv, H_q / H_kv, t, D): the queries that share a KV head."""
    return x.reshape(H_kv, -1, *x.shape[1:])


def _product(a, b):
    """a (H_kv, g, t, n) times b (H_kv, n, m), as one matrix product per KV head."""
    H_kv, g, t, n = a.shape
    return (a.reshape(H_kv, g * t, n) @ b).reshape(H_kv, g, t, -1)


def _seen(i, j, window):
    """bool (t, T): the query at position i sees token j <= i, and j > i - window."""
    i = i[:, None]
    return j <= i if window is None else (j <= i) & (j > i - window)


def softmax(S, seen):
    r"""p_j = exp(S_j - m) / sum_j exp(S_j - m) over the tokens seen. Overwrites S."""
    np.copyto(S, -np.inf, where=~seen)
    S -= S.max(axis=-1, keepdims=True)
    with np.errstate(under="ignore"):
        np.exp(S, out=S)
    S /= S.sum(axis=-1, keepdims=True)
    return S

r"""Attention over packed codes, one tile of tokens at a time.

With the scores S_t = q . k_t / sqrt(D) of a tile's tokens, and the state (m, l, o) of
all tokens before it, the online softmax is

    m' = max(m, max_t S_t)
    l' = l exp(m - m') + sum_t exp(S_t - m')
    o' = o exp(m - m') + sum_t exp(S_t - m') v_t          attention = o / l

Two versions: v1 is these lines as a loop for each query head, in float64. v2 takes all
query heads of a KV head together, so that a row of the tile is read once for all of
them, and sums in float32, eight or sixteen at a time.
"""

import math

import numpy as np
from numba import njit

from kvq.attention import Partial, empty_partial, sink_partial, visible
from kvq.dtypes import as_float_array
from kvq.kernels.cpu.codes import dequant
from kvq.tensor import QuantizedTensor

TILE = 128  # tokens dequantized at a time: 64 KiB per head of 128 channels


def decode(
    q,
    cache,
    *,
    version="v2",
    scale=None,
    causal=True,
    mask=None,
    softcap=None,
    sink_logits=None,
):
    """What `cache.attend(q, ...)` gives, in float32. version : "v1" or "v2".

    Raises TypeError or ValueError as `cache.attend` does.
    """
    attend = {"v1": attend_tile, "v2": attend_tile_together}[version]
    q = as_float_array(q, "q")
    queries = q[None] if q.ndim == 3 else q
    _check_queries(queries, cache)
    if mask is not None:
        mask = np.asarray(mask)
        mask = mask[None] if mask.ndim == 3 and q.ndim == 3 else mask
    keep = visible((*queries.shape[:-1], len(cache)), mask=mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.stack(
        [
            _decode_row(
                attend,
                queries[b],
                cache,
                b,
                keep[b],
                scale,
                causal,
                softcap,
                sink_logits,
            )
            for b in range(len(queries))
        ]
    )
    return out[0] if q.ndim == 3 else out


def _check_queries(q, cache):
    B = len(cache.rows)
    if q.ndim != 4 or len(q) != B:
        raise ValueError(
            f"q {q.shape}; expected (B, H_q, T_q, D) with B = {B} sequences "
            "(append first)"
        )
    H_kv, _, D = cache.rows[0][0].window.shape
    if q.shape[1] % H_kv or q.shape[-1] != D:
        raise ValueError(
            f"q {q.shape}; expected H_q a multiple of {H_kv} (KV heads) and D = {D}"
        )


def _decode_row(attend, q, cache, b, keep, scale, causal, softcap, sink_logits):
    """Attention of q (H_q, T_q, D) over sequence `b`: float32 (H_q, T_q, D_v)."""
    T, shape = cache.lengths[b], q.shape[:-1]
    D_v = cache.value_dim or cache.rows[b][-1].window.shape[-1]
    if sink_logits is None:
        state = empty_partial(shape, D_v)
    else:
        state = sink_partial(sink_logits, shape, D_v)
    m, l, o = state.m.copy(), state.l, state.o  # noqa: E741
    keep = visible((*shape, T), causal, keep[..., :T])
    q = np.ascontiguousarray(q, np.float64)
    start = 0
    for k, v in tiles(cache, b, D_v):
        stop = start + k.shape[1]
        seen = np.ascontiguousarray(keep[..., start:stop])
        attend(q, k, v, seen, float(scale), float(softcap or 0), m, l, o)
        start = stop
    return Partial(m, l, o).out.astype(np.float32)


def tiles(cache, b, D_v):
    """(k, v) of consecutive tokens of sequence `b`, float32, at most TILE of them."""
    streams = [(s.sinks, *s.chunks, s.window) for s in cache.rows[b]]
    for pieces in zip(*streams, strict=True):
        T = pieces[0].shape[-2]
        for start in range(0, T, TILE):
            tile = [_read(piece, start, min(start + TILE, T)) for piece in pieces]
            # In a latent cache the values are the leading columns of the keys.
            yield tile[0], np.ascontiguousarray(tile[-1][..., :D_v])


def _read(piece, start, stop):
    """The tokens start..stop-1 of one stored piece, float32 (H_kv, t, D)."""
    if isinstance(piece, np.ndarray):
        return np.ascontiguousarray(piece[:, start:stop], np.float32)
    if not isinstance(piece, QuantizedTensor) or piece.scheme.full_precision:
        return piece.dequantize(start, stop)
    return dequant(piece, start, stop)


# A sum may be taken in any order: in the order written, it could not be vectorized.
@njit(cache=True, fastmath={"reassoc"})
def _dot(a, b):
    total = 0.0
    for d in range(a.shape[0]):
        total += a[d] * b[d]
    return total


@njit(cache=True)
def attend_tile(q, k, v, keep, scale, softcap, m, l, o):  # noqa: E741
    """Update m, l (H_q, T_q) and o (H_q, T_q, D_v), float64, in place.

    q : float64 (H_q, T_q, D). k, v : float32 (H_kv, T, D) and (H_kv, T, D_v).
    keep : bool (H_q, T_q, T); what is not kept is not read. softcap : 0 is none.
    """
    H_q, T_q, D_v = o.shape
    H_kv, T = k.shape[:2]
    S = np.empty(T)
    for h in range(H_q):
        g = h // (H_q // H_kv)  # grouped-query attention
        for i in range(T_q):
            top = m[h, i]
            for t in range(T):
                if keep[h, i, t]:
                    S[t] = scale * _dot(q[h, i], k[g, t])
                    if softcap > 0:
                        S[t] = softcap * math.tanh(S[t] / softcap)
                    top = max(top, S[t])
            if top == -np.inf:
                continue  # nothing seen so far
            shrink = math.exp(m[h, i] - top)
            m[h, i] = top
            l[h, i] *= shrink
            o[h, i] *= shrink
            for t in range(T):
                if keep[h, i, t]:
                    p = math.exp(S[t] - top)
                    l[h, i] += p
                    for d in range(D_v):
                        o[h, i, d] += p * v[g, t, d]


@njit(cache=True)
def attend_tile_together(q, k, v, keep, scale, softcap, m, l, o):  # noqa: E741
    """`attend_tile`, with the query heads of a KV head side by side; its arguments."""
    H_q, T_q, D = q.shape
    H_kv, T, D_v = v.shape
    R = H_q // H_kv
    S, rows = np.empty((R, T), np.float32), np.empty((R, D), np.float32)
    total, sums = np.empty(R), np.empty((R, D_v), np.float32)
    for g in range(H_kv):
        heads = slice(g * R, (g + 1) * R)
        for i in range(T_q):
            rows[:] = q[heads, i] * scale
            scores(rows, k[g], S)
            weights(S, keep[heads, i], softcap, m[heads, i], l[heads, i], total)
            sum_values(S, v[g], sums)
            for r in range(R):
                h = g * R + r
                for d in range(D_v):
                    o[h, i, d] = o[h, i, d] * total[r] + sums[r, d]


@njit(cache=True, fastmath={"reassoc", "contract"})
def scores(q, k, S):
    """S (R, T) = q (R, D) k (T, D)^T, float32."""
    for t in range(len(k)):
        for r in range(len(q)):
            total = np.float32(0)
            for d in range(k.shape[1]):
                total += q[r, d] * k[t, d]
            S[r, t] = total


@njit(cache=True)
def weights(S, keep, softcap, m, l, shrink):  # noqa: E741
    """S (R, T) becomes exp(S - m'), 0 where not kept; m, l follow. shrink = exp(m -
    m')."""
    for r in range(len(S)):
        top, T = m[r], S.shape[1]
        for t in range(T):
            if softcap > 0:
                S[r, t] = softcap * math.tanh(S[r, t] / softcap)
            if keep[r, t]:
                top = max(top, S[r, t])
        shrink[r] = 1.0 if top == -np.inf else math.exp(m[r] - top)
        m[r] = top
        l[r] *= shrink[r]
        for t in range(T):
            S[r, t] = math.exp(S[r, t] - top) if keep[r, t] else 0.0
            l[r] += S[r, t]


@njit(cache=True, fastmath={"contract"})
def sum_values(p, v, out):
    """out (R, D) = p (R, T) v (T, D), float32."""
    out[:] = np.float32(0)
    for t in range(len(v)):
        for r in range(len(p)):
            for d in range(v.shape[1]):
                out[r, d] += p[r, t] * v[t, d]

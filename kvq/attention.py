r"""Softmax attention, whole, in pieces, and over a cache that is never materialized.

    Attention(q, K, V) = softmax(q K^T / sqrt(D)) V

Shapes everywhere: q (H_q, T_q, D), K (H_kv, T, D), V (H_kv, T, D_v), each with an
optional leading batch axis. H_q is a multiple of H_kv; query head h reads KV head
h // (H_q / H_kv) (grouped-query attention). Everything is computed in float64.
"""

from dataclasses import dataclass

import numpy as np


# --- scores and weights ---------------------------------------------------------------
def scores(q, k, scale=None, softcap=None):
    r"""S = scale * q K^T, scale = 1/sqrt(D);  with a soft cap c: c * tanh(S / c).

    Returns float64 (..., H_q, T_q, T).
    Raises ValueError if H_q is not a multiple of H_kv, the shapes do not match or c is
    not positive.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    _check_heads(q, k)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r}; valid: a number > 0 or None")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = scale * _merge_heads(_split_heads(q, k) @ k[..., None, :, :].swapaxes(-1, -2))
    return S if softcap is None else softcap * np.tanh(S / softcap)


def _check_heads(q, k):
    if q.ndim not in (3, 4) or k.ndim != q.ndim or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {q.shape} and k {k.shape} do not match; expected "
            "([B,] H_q, T_q, D) and ([B,] H_kv, T, D)"
        )
    if k.shape[-3] < 1 or q.shape[-3] % k.shape[-3] or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"{q.shape[-3]} query heads cannot share {k.shape[-3]} KV heads "
            f"(q {q.shape}, k {k.shape})"
        )


def _split_heads(x, k):
    """(..., H_q, T_q, n) -> (..., H_kv, H_q / H_kv, T_q, n)."""
    H_q, H_kv = x.shape[-3], k.shape[-3]
    return x.reshape(*x.shape[:-3], H_kv, H_q // H_kv, *x.shape[-2:])


def _merge_heads(x):
    """(..., H_kv, H_q / H_kv, T_q, n) -> (..., H_q, T_q, n)."""
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])


def _combine(P, v):
    """P V for grouped heads: P (..., H_q, T_q, T), v (..., H_kv, T, D_v)."""
    return _merge_heads(_split_heads(P, v) @ v[..., None, :, :])


def visible(shape, causal=False, mask=None):
    """Which token each query may see: bool (..., H_q, T_q, T).

    causal : the queries are the newest T_q of the T tokens; each sees itself and
        what came before.
    mask : bool, True = may see; (T,) or the rank of the scores, and broadcastable
        to `shape` = (..., H_q, T_q, T). Raises ValueError otherwise.
    """
    keep = np.ones(shape, bool)
    if causal:
        T_q, T = shape[-2:]
        keep &= np.arange(T) <= np.arange(T - T_q, T)[:, None]
    if mask is not None:
        mask = np.asarray(mask)
        if mask.dtype != bool:
            raise TypeError(f"mask has dtype {mask.dtype}; expected bool (True = see)")
        fits = mask.ndim in (1, len(shape)) and all(
            m in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False)
        )
        if not fits:
            raise ValueError(f"mask {mask.shape} does not broadcast to {shape}")
        keep &= mask
    return keep


def softmax(S):
    r"""p_j = exp(S_j - m) / sum_j exp(S_j - m), m = max_j S_j; 0 if all S = -inf."""
    p = _exp(S - _finite_max(S))
    total = p.sum(axis=-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def _finite_max(S):
    """max_j S_j, or 0 where there is none: -inf - (-inf) is not a number."""
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    return np.where(np.isneginf(m), 0.0, m)


def _exp(S):
    """exp, where underflow to zero is meant."""
    with np.errstate(under="ignore"):
        return np.exp(S)


def attention_weights(
    q, k, *, scale=None, causal=False, mask=None, softcap=None, sink_logits=None
):
    r"""P = softmax(scale * q K^T): float64 (..., H_q, T_q, T).

    sink_logits : (H_q,), a learned logit per head that takes part in the softmax and
        has no value vector: p_j = exp(S_j) / (exp(sink) + sum_j exp(S_j)).
    The other arguments are those of `scores` and `visible`.
    """
    S = scores(q, k, scale, softcap)
    S = np.where(visible(S.shape, causal, mask), S, -np.inf)
    if sink_logits is None:
        return softmax(S)
    sink = _sink_column(sink_logits, S.shape)
    return softmax(np.concatenate([sink, S], axis=-1))[..., 1:]


def _sink_column(sink_logits, shape):
    sink = np.asarray(sink_logits, np.float64)
    if sink.shape != shape[-3:-2]:
        raise ValueError(
            f"sink_logits {sink.shape}; expected one per query head, ({shape[-3]},)"
        )
    return np.broadcast_to(sink[:, None, None], (*shape[:-1], 1))


def attention(q, k, v, **options):
    r"""softmax(q K^T / sqrt(D)) V: float64 (..., H_q, T_q, D_v).

    A query that may see no token gives zeros. `options` are those of
    `attention_weights`. What no query may see may hold anything, NaN included.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    _check_heads(q, k)
    _check_values(k, v)
    S_shape = (*q.shape[:-1], k.shape[-2])
    seen = visible(S_shape, options.get("causal", False), options.get("mask"))
    k, v = _without_unseen(k, seen), _without_unseen(v, seen)
    return _combine(attention_weights(q, k, **options), v)


def _check_values(k, v):
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in heads or T")


def _without_unseen(x, seen):
    """x with zeros at the tokens that no query sees: 0 * NaN would be NaN."""
    used = seen.any(axis=(-3, -2))
    return np.where(used[..., None, :, None], x, 0.0)


# --- attention in pieces --------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some of the tokens, not yet normalized.

    m : max score; l : sum_j exp(S_j - m); both (..., H_q, T_q).
    o : sum_j exp(S_j - m) v_j, (..., H_q, T_q, D_v).
    """

    m: np.ndarray
    l: np.ndarray  # noqa: E741 (the field's own name)
    o: np.ndarray

    @property
    def out(self):
        """o / l, the attention output; zeros where nothing was seen."""
        l = self.l[..., None]  # noqa: E741
        return np.divide(self.o, l, out=np.zeros_like(self.o), where=l > 0)

    @property
    def lse(self):
        """m + log l, the log-sum-exp of the scores; -inf where nothing was seen."""
        log_l = np.log(self.l, out=np.full_like(self.l, -np.inf), where=self.l > 0)
        return np.where(self.l > 0, self.m + log_l, -np.inf)


def empty_partial(shape, D_v):
    """The neutral element of `merge`: m = -inf, l = 0, o = 0.

    shape : (..., H_q, T_q).
    """
    return Partial(np.full(shape, -np.inf), np.zeros(shape), np.zeros((*shape, D_v)))


def partial_attention(q, k, v, *, scale=None, softcap=None, keep=None):
    r"""(m, l, o) of the tokens in k and v.

    keep : bool (..., H_q, T_q, T), which token each query sees; None: all of them.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    _check_heads(q, k)
    _check_values(k, v)
    if keep is not None:
        k, v = _without_unseen(k, keep), _without_unseen(v, keep)
    S = scores(q, k, scale, softcap)
    if keep is not None:
        S = np.where(keep, S, -np.inf)
    m = S.max(axis=-1, initial=-np.inf)
    p = _exp(S - _finite_max(S))
    return Partial(m, p.sum(axis=-1), _combine(p, v))


def merge(a, b):
    r"""Two partials of disjoint tokens as one.

    m = max(m_a, m_b)
    l = l_a exp(m_a - m) + l_b exp(m_b - m),   o likewise
    """
    m = np.maximum(a.m, b.m)
    safe = np.where(np.isneginf(m), 0.0, m)
    w_a, w_b = _exp(a.m - safe), _exp(b.m - safe)
    o = a.o * w_a[..., None] + b.o * w_b[..., None]
    return Partial(m, a.l * w_a + b.l * w_b, o)


def sink_partial(sink_logits, shape, D_v):
    """A sink logit as a partial: m = sink, l = 1, o = 0 (it has no value)."""
    m = _sink_column(sink_logits, (*shape, 1))[..., 0]
    return Partial(m, np.ones(shape), np.zeros((*shape, D_v)))


def decode(
    q,
    tiles,
    tokens,
    D_v,
    *,
    scale=None,
    causal=True,
    mask=None,
    softcap=None,
    sink_logits=None,
):
    r"""Online softmax: attention over tiles of a cache, one tile at a time.

    q : (..., H_q, T_q, D). tiles : an iterable of (k, v), consecutive tokens, that
    hold `tokens` tokens in all; each is read, used and dropped. D_v : the width of
    the values. The options are those of `attention`; with `causal`, the queries are
    the newest tokens.
    Returns the merged Partial; `.out` is the attention output, float64.
    Raises ValueError if the tiles hold more or fewer tokens.
    """
    q = np.asarray(q, np.float64)
    shape = q.shape[:-1]
    state = empty_partial(shape, D_v)
    if sink_logits is not None:
        state = sink_partial(sink_logits, shape, D_v)
    keep = visible((*shape, tokens), causal, mask)
    start = 0
    for k, v in tiles:
        stop = start + np.shape(k)[-2]
        part = partial_attention(
            q, k, v, scale=scale, softcap=softcap, keep=keep[..., start:stop]
        )
        state, start = merge(state, part), stop
    if start != tokens:
        raise ValueError(f"the tiles hold {start} tokens, not tokens={tokens}")
    return state

"""Decode attention with integer dot products: a cache in blocks, threads, a merge.

    prepared = prepare(cache)            the codes in the layout of `blocks.py`, once
    out = decode(q, prepared)            as often as needed

The work is cut into tasks, a split of the tokens of one KV head each. How many depends
on the cache alone, and their results are merged in their order: the number of threads
never changes a bit of the output.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvq.dtypes import as_float_array
from kvq.kernels.cpu import blocks, simd
from kvq.kernels.cpu.dots import LOG2E, Exact, Partials, Side, attend_tasks
from kvq.kernels.decode.gather import gather
from kvq.kernels.host import Version, first_invalid, invalid
from kvq.kernels.layouts import from_words
from kvq.quantizer import integer_levels

SPLIT = 64  # blocks of a split: 4096 tokens
CANONICAL = Version("v4", "cpu/fast")
LIMITS = {
    "bits": blocks.BITS,
    "levels": ("symmetric", "asymmetric"),
    "scale_dtype": ("float16",),
    "transform": (None,),
}
GROUPS = {"channel": (32, 64, 128), "token": (None, 32, 64, 128, 256)}
PER = {"key": ("token", "channel"), "value": ("token",)}


def unavailable():
    """None, or why this CPU cannot run it."""
    if not simd.available():
        return "the CPU lacks AVX-512 VNNI"
    return None


def unsupported(policy, D=None):
    """None, or why a cache of this policy and head dimension cannot be prepared."""
    if policy.value is None:
        return "value=None (a latent cache); valid: a Scheme"
    for side in ("key", "value"):
        scheme = getattr(policy, side)
        reason = first_invalid(scheme, {**LIMITS, "per": PER[side]})
        reason = reason or invalid("group", scheme.group, GROUPS[scheme.per])
        if reason:
            return f"{side}: {reason}"
    if D is not None and D % 32:
        return f"D={D}; valid: multiples of 32"
    return None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A cache in blocks. B, H_kv : sequences and KV heads.

    tokens : int64 (B H_kv,), quantized ones. keys, values : `dots.Side`; exact :
    `dots.Exact`.
    """

    B: int
    H_kv: int
    D: int
    tokens: np.ndarray
    keys: tuple
    values: tuple
    exact: tuple

    @property
    def nbytes(self):
        """Bytes of everything that a decode step reads."""
        sides = (self.keys, self.values)
        arrays = [a for s in sides for a in (s.codes, s.scale, *[s.zero] * s.has_zero)]
        return sum(a.nbytes for a in (*arrays, self.exact.k, self.exact.v))


def prepare(cache):
    """A KVCache in blocks, to be decoded many times.

    Raises ValueError for an empty cache, or what `unsupported` names.
    """
    gathered = gather(cache, CANONICAL)
    B, H_kv, _, _, D = gathered.shape
    reason = unsupported(cache.policy, D)
    if reason:
        raise ValueError(f"integer dot products do not support {reason}")
    exact = [
        side.exact.astype(np.float32).reshape(B * H_kv, -1, D)
        for side in (gathered.k, gathered.v)
    ]
    coded, in_full = np.repeat(gathered.lengths.astype(np.int64), H_kv, axis=0).T
    keys, values = _keys(gathered.k, B * H_kv, D), _values(gathered.v, B * H_kv, D)
    return Prepared(
        B, H_kv, D, coded.copy(), keys, values, Exact(*exact, in_full.copy())
    )


def _keys(side, N, D):
    piece = blocks.key_piece(side.scheme)
    return _side(side, N, D, piece, blocks.pack_keys)


def _values(side, N, D):
    piece = blocks.value_piece(side.scheme, D)
    return _side(side, N, D, piece, blocks.pack_values)


def _side(side, N, D, piece, pack):
    """A `dots.Side` of a gathered one."""
    scheme = side.scheme
    codes = from_words(side.codes, scheme.bits, D).reshape(N, -1, D)
    metadata = [
        np.zeros((1, 1, 1), np.uint16)
        if a is None
        else np.ascontiguousarray(a).view(np.uint16).reshape(N, *a.shape[2:])
        for a in (side.scale, side.zero)
    ]
    return Side(
        pack(codes, scheme.bits, piece),
        *metadata,
        scheme.bits,
        min(scheme.group or D, D) if scheme.per == "token" else scheme.group,
        piece,
        int(scheme.per == "channel"),
        int(scheme.has_zero),
        integer_levels(scheme)[2],
    )


def decode(q, cache, *, scale=None, softcap=None, sink_logits=None, threads=None):
    """Attention of one query token of each sequence: float32 of the shape of q.

    q : (B, H_q, 1, D), or (H_q, 1, D) for a single sequence. cache : a `Prepared`, or a
    KVCache. threads : at most so many (default: one for each core that the process
    may use). Raises TypeError or ValueError.
    """
    cache = cache if isinstance(cache, Prepared) else prepare(cache)
    q = as_float_array(q, "q")
    H_q = _checked_heads(q, cache)
    N, R = cache.B * cache.H_kv, H_q // cache.H_kv
    scale = cache.D**-0.5 if scale is None else scale
    rows = (q.astype(np.float32) * np.float32(scale)).reshape(N, R, cache.D)
    longest = -(-int(cache.tokens.max(initial=0)) // blocks.UNIT)
    splits = max(-(-longest // SPLIT), 1)
    partials = _partials(N * splits, R, cache.D)
    work = rows, cache.tokens, cache.keys, cache.values, cache.exact
    _run(N * splits, threads, splits, *work, np.float32(softcap or 0), partials)
    return _merge(partials, splits, sink_logits, cache.B).reshape(q.shape)


def _checked_heads(q, cache):
    """H_q. Raises ValueError for queries that do not fit."""
    B = 1 if q.ndim == 3 else len(q)
    if q.ndim not in (3, 4) or B != cache.B or q.shape[-2] != 1:
        raise ValueError(f"q {q.shape}; expected ({cache.B}, H_q, 1, {cache.D})")
    H_q = q.shape[-3]
    if H_q < 1 or H_q % cache.H_kv or q.shape[-1] != cache.D:
        raise ValueError(
            f"q {q.shape}; expected H_q a multiple of {cache.H_kv} (KV heads) and "
            f"D = {cache.D}"
        )
    return H_q


def _partials(tasks, R, D):
    """Room for the results: the dot products take one head, or a multiple of 4."""
    heads = R if R == 1 else -(-R // 4) * 4
    shapes = (tasks, heads), (tasks, heads), (tasks, heads, D)
    return Partials(*(np.zeros(shape, np.float32) for shape in shapes)), R


def _run(tasks, threads, splits, *work):
    """The tasks, in contiguous parts, one for each thread."""
    *work, (partials, _) = work
    count = min(threads or len(os.sched_getaffinity(0)), tasks)
    cuts = [tasks * i // count for i in range(count + 1)]
    parts = list(pairwise(cuts))
    if count == 1:
        return attend_tasks(*parts[0], splits, *work, partials)
    jobs = [
        _pool(count).submit(attend_tasks, *part, splits, *work, partials)
        for part in parts[1:]
    ]
    attend_tasks(*parts[0], splits, *work, partials)
    for job in jobs:
        job.result()
    return None


@lru_cache(maxsize=4)
def _pool(threads):
    """Threads that wait for work: to start them would cost more than short contexts."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="kvq-decode")


#     M = max_i m_i    l = sum_i l_i 2^(m_i - M)    o = sum_i o_i 2^(m_i - M) / l
def _merge(results, splits, sink_logits, B):
    """(N, R, D) of partial results, in the order of the splits."""
    (m, l, o), R = results  # noqa: E741
    N, D = len(m) // splits, o.shape[-1]
    m, l = (a[:, :R].reshape(N, splits, R) for a in (m, l))  # noqa: E741
    o = o[:, :R].reshape(N, splits, R, D)
    M = m.max(axis=1)
    if sink_logits is not None:
        sinks = np.asarray(sink_logits, np.float32) * LOG2E
        sinks = np.broadcast_to(sinks.reshape(1, -1), (B, sinks.size)).reshape(N, R)
        M = np.maximum(M, sinks)
    weight = np.exp2(m - M[:, None])
    total, out = (l * weight).sum(axis=1), (o * weight[..., None]).sum(axis=1)
    if sink_logits is not None:
        total += np.exp2(sinks - M)
    return np.divide(
        out, total[..., None], out=np.zeros_like(out), where=total[..., None] > 0
    )

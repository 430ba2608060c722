"""Decode attention over blocks of codes: what is supported, threads, the merge.

    cache = KVCache("kivi-4", layout="blocks")      codes go into blocks as they come
    out = decode(q, cache)                          or cache.attend(q, backend="auto")

The work is cut into tasks, a split of the tokens of one KV head each. How many depends
on the cache alone, and their results are merged in their order: the number of threads
never changes a bit of the output.
"""

from functools import partial

import numpy as np

from kvq.cache import KVCache
from kvq.dtypes import as_float_array
from kvq.kernels.cpu import simd
from kvq.kernels.cpu.attend import Shape, attend_tasks, merge
from kvq.kernels.cpu.blocks import UNIT
from kvq.kernels.cpu.threads import run, worth

LOG2E = 1.4426950408889634  # the compiled loops take powers of 2
SECONDS_OF_A_NUMBER = 1 / 16e9  # a block of 128 tokens of one head: about 2 us
SPLIT = 32  # blocks of a split: 4096 tokens
VERSIONS = ("v3", "v4")
NOTHING_EXACT = np.zeros((0, 4), np.int64)
NO_SINKS = np.zeros((1, 0), np.float32)


# --- what is supported ----------------------------------------------------------------
def unavailable(version="v4"):
    """None, or why this CPU cannot run a version."""
    if version == "v4" and not simd.available():
        return "the CPU lacks AVX-512 VNNI"
    return None


def version_for(policy):
    """The version for a policy: "v4" where the CPU has it and no code has 8 bits.

    Queries and weights of one byte add an error of 1 to 2 %: little beside that of
    codes of 4 bits, and three times that of codes of 8.
    """
    few = all(scheme.bits < 8 for scheme in policy.schemes)
    return "v4" if few and unavailable("v4") is None else "v3"


# --- decode ---------------------------------------------------------------------------
def decode(
    q,
    cache,
    *,
    scale=None,
    softcap=None,
    sink_logits=None,
    version=None,
    terms=1,
    threads=None,
):
    """Attention of one query token of each sequence: float32 of the shape of q.

    q : (B, H_q, 1, D), or (H_q, 1, D) for a single sequence.
    cache : a KVCache with layout="blocks"; another is put into blocks, every time.
    version : "v3", "v4" or None (see `version_for`).
    terms : of v4, 1 or 2; bytes that stand for a number of the query, and a weight.
    threads : at most so many (default: one for each core that the process may use).
    Raises TypeError or ValueError; RuntimeError for a version that cannot run here.
    """
    rows, q = in_blocks(cache).rows, _float32(q)
    R, D = _heads_per_kv_head(q, rows), q.shape[-1]
    terms = _terms(version or version_for(cache.policy), terms)
    queries = q.reshape(len(rows), -1, R, D)
    sinks = _sinks(sink_logits, queries.shape[1:3])
    scale = LOG2E * float(D**-0.5 if scale is None else scale)
    softcap = LOG2E * float(softcap or 0)
    work = [
        _Row(row, rows_q, terms, scale, softcap)
        for row, rows_q in zip(rows, queries, strict=True)
    ]
    count = worth(SECONDS_OF_A_NUMBER * sum(row.numbers for row in work), threads)
    run([partial(*part) for part in _parts(work, count)], count)
    if any(row.wrong for row in work):
        as_float_array(q, "q")  # raises, and names the number
    out = np.empty_like(queries)
    for row, o in zip(work, out, strict=True):
        merge(row.parts, sinks, o)
    return out.reshape(q.shape)


def in_blocks(cache):
    """The cache itself if its tokens lie in blocks, else one of the same tokens.

    Raises TypeError for anything but a KVCache; ValueError for an empty one or for
    what `unsupported` names.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is {type(cache).__name__}; expected KVCache")
    if not cache.rows:
        raise ValueError("the cache holds no sequences (append first)")
    if cache.layout == "blocks":
        return cache
    return cache.with_layout("blocks")


def _float32(q):
    if isinstance(q, np.ndarray) and q.dtype == np.float32:
        return np.ascontiguousarray(q)
    return np.ascontiguousarray(as_float_array(q, "q", finite=False), np.float32)


def _heads_per_kv_head(q, rows):
    """Raises ValueError for queries that do not fit."""
    H_kv, _, D = rows[0][0].window.shape
    B = 1 if q.ndim == 3 else len(q)
    if q.ndim not in (3, 4) or len(rows) != B or q.shape[-2] != 1:
        raise ValueError(f"q {q.shape}; expected ({len(rows)}, H_q, 1, {D})")
    H_q = q.shape[-3]
    if H_q < 1 or H_q % H_kv or q.shape[-1] != D:
        raise ValueError(
            f"q {q.shape}; expected H_q a multiple of {H_kv} (KV heads) and D = {D}"
        )
    return H_q // H_kv


def _terms(version, terms):
    """How many bytes stand for a number of the query; 0: the number itself."""
    if version not in VERSIONS:
        raise ValueError(f"unknown version {version!r}; valid: {', '.join(VERSIONS)}")
    if terms not in (1, 2):
        raise ValueError(f"terms={terms!r}; valid: 1, 2")
    if reason := unavailable(version):
        raise RuntimeError(f"{version} cannot run here: {reason}")
    return terms if version == "v4" else 0


def _sinks(sink_logits, heads):
    if sink_logits is None:
        return NO_SINKS
    return (np.float32(LOG2E) * np.asarray(sink_logits, np.float32)).reshape(heads)


class _Row:
    """The tasks of one sequence, and where their results go."""

    def __init__(self, row, q, terms, scale, softcap):
        H, R, D = q.shape
        sinks, tokens, window = row[0].lengths
        self.splits = max(-(-tokens // UNIT) // SPLIT, 1)
        self.count, self.wrong = H * self.splits, False
        self.numbers = 2 * H * D * (sinks + tokens + window)
        self.parts = np.empty((H, self.splits, R, D + 2), np.float32)
        keys, values = map(_store, row)
        # With the arrays, should a store put its tokens elsewhere meanwhile.
        self.kept = keys.place, values.place
        shape = Shape(R, _room(R, keys.scheme, values.scheme, D), D, terms)
        self.exact = _exact(row) if sinks or window else ()
        self.arguments = (
            self.splits,
            shape,
            q,
            scale,
            tokens,
            *(fields for fields, _ in self.kept),
            _addresses(self.exact) if self.exact else NOTHING_EXACT,
            softcap,
            self.parts,
        )

    def run(self, first, last):
        """Compute these tasks. wrong: whether a query is not finite."""
        if attend_tasks(first, last, *self.arguments):
            self.wrong = True


def _room(R, key, value, D):
    """`Shape.heads`. Keys whose scales belong to tokens come panel by panel."""
    pairs = key.per == "channel" and key.group >= 64 and D % 64 == 0
    pairs &= value.group is None or value.group >= 64
    return 1 if R == 1 and pairs else -(-R // 4) * 4


def _store(stream):
    """The Store of a stream; an empty one where nothing is quantized yet."""
    H, _, D = stream.window.shape
    (blocks,) = stream.chunks or (stream.layout.empty(stream.scheme, H, 0, D),)
    return blocks.store


def _exact(row):
    """Pairs of tokens of keys and of values in full precision, binary16 or float32 (H,
    E, D): sinks and window. The newest query sees all of them, in any order."""
    pairs = [[getattr(stream, part) for stream in row] for part in ("sinks", "window")]
    return [_alike(*pair) for pair in pairs if pair[0].size]


def _alike(k, v):
    dtype = np.float16 if k.dtype == v.dtype == np.float16 else np.float32
    return np.ascontiguousarray(k, dtype), np.ascontiguousarray(v, dtype)


def _addresses(exact):
    """int64 (parts, 4), as `attend_exact` takes them."""
    return np.array(
        [
            (k.ctypes.data, v.ctypes.data, k.shape[1], k.dtype == np.float16)
            for k, v in exact
        ],
        np.int64,
    )


def _parts(rows, threads):
    """(run of a row, first, last): about four parts for each thread, of whole tasks."""
    if threads == 1:
        return [(row.run, 0, row.count) for row in rows]
    size = sum(row.numbers for row in rows) / (4 * threads)
    parts = []
    for row in rows:
        step = max(int(row.count * size / max(row.numbers, 1)), 1)
        for first in range(0, row.count, step):
            parts.append((row.run, first, min(first + step, row.count)))
    return parts

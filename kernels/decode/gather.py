"""A `KVCache` as the decode kernels read it: one array per part, rows padded.

    codes, scale, zero    the quantized tokens, chunks one after the other
    exact                 sinks and window; the one newest query sees all of them, so
                          that their order does not matter
    lengths               (quantized, exact) tokens of each sequence

What lies past a sequence's lengths is never read.
"""

from dataclasses import dataclass

import numpy as np

from kvq.cache import KVCache
from kvq.kernels.host import Version, narrow
from kvq.kernels.layouts import row_words, to_words
from kvq.scheme import Policy, Scheme

# Stands for the scheme where nothing is quantized: a kernel must be given numbers.
NOTHING = Scheme(8, "token", None)


@dataclass(frozen=True, eq=False)
class Side:
    """The keys, or the values, of all sequences.

    scheme : of the quantized tokens.
    codes : uint32 (B, H_kv, T_cap, W), the words of a token.
    scale, zero : (B, H_kv, groups of T_cap, groups of D); zero may be None.
    exact : (B, H_kv, R_cap, D), float16 or float32.
    """

    scheme: Scheme
    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    exact: np.ndarray

    @property
    def group(self):
        """(gt, gc): tokens and channels that share a scale."""
        return self.scheme.group_shape(1, 1, self.exact.shape[-1])[1:]


@dataclass(frozen=True, eq=False)
class PreparedCache:
    """The tokens of a cache, to be used in its place.

    version : the Version of `decode` that it was made for; those with the same layout
        of words read it, too.
    It stays as it is when the cache grows: prepare it again after an append.
    """

    policy: Policy
    version: Version
    lengths: np.ndarray
    k: Side
    v: Side

    def __len__(self):
        """Tokens of the longest sequence."""
        return int(self.lengths.sum(axis=1).max())

    @property
    def shape(self):
        """(B, H_kv, T_cap, R_cap, D)"""
        B, H_kv, R_cap, D = self.k.exact.shape
        return B, H_kv, self.k.codes.shape[2], R_cap, D


def gather(cache, version):
    """The PreparedCache of a KVCache, for a Version.

    Raises TypeError for anything else, ValueError for a cache without sequences, with
    a sliding window, without values, or whose keys and values differ in width.
    """
    _check(cache)
    sides = zip(*cache.rows, strict=True)
    k, v = (_side(streams, version.layout) for streams in sides)
    lengths = [[_tokens(p) for p in _pieces(row[0])] for row in cache.rows]
    return PreparedCache(cache.policy, version, np.array(lengths, np.int32), k, v)


def _check(cache):
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache is {type(cache).__name__}; expected KVCache or PreparedCache"
        )
    if not cache.rows:
        raise ValueError("the cache holds no sequences (append first)")
    if cache.sliding_window is not None:
        raise ValueError(
            f"no kernel reads sliding_window={cache.sliding_window}; valid: None"
        )
    widths = [stream.window.shape[-1] for stream in cache.rows[0]]
    if len(widths) != 2 or widths[0] != widths[1]:
        raise ValueError(
            f"no kernel reads a cache of widths {widths}; valid: keys and values of "
            "the same D"
        )


def _pieces(stream):
    """(quantized, exact) parts of a Stream; each piece is (H_kv, t, D)."""
    if stream.scheme.full_precision:
        numbers = [chunk.codes for chunk in stream.chunks]
        return [], [stream.sinks, *numbers, stream.window]
    return list(stream.chunks), [stream.sinks, stream.window]


def _tokens(pieces):
    return sum(piece.shape[-2] for piece in pieces)


def _side(streams, layout):
    """The Side of the streams of all sequences."""
    scheme, window = streams[0].scheme, streams[0].window
    if scheme.full_precision:
        scheme = NOTHING
    H, _, D = window.shape
    coded, exact = zip(*map(_pieces, streams), strict=True)
    words = [[to_words(c.unpack(), scheme.bits, layout) for c in row] for row in coded]
    W, columns = row_words(D, scheme.bits, layout), scheme.metadata_shape(H, 1, D)[2]
    number = narrow(scheme.scale_dtype)
    zeros = [[c.zero for c in row] for row in coded] if scheme.has_zero else None
    return Side(
        scheme,
        codes=_stack(words, (H, W), np.uint32),
        scale=_stack([[c.scale for c in row] for row in coded], (H, columns), number),
        zero=zeros and _stack(zeros, (H, columns), number),
        exact=_stack(exact, (H, D), narrow(*{a.dtype.name for r in exact for a in r})),
    )


def _stack(rows, shape, dtype):
    """[pieces (H, t, n) of each sequence] -> (B, H, longest, n), padded with zeros."""
    H, n = shape
    out = np.zeros((len(rows), H, max(map(_tokens, rows)), n), dtype)
    for b, pieces in enumerate(rows):
        start = 0
        for piece in pieces:
            stop = start + piece.shape[-2]
            out[b, :, start:stop] = piece
            start = stop
    return out

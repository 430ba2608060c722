"""A `KVCache` as the tensor-core kernels read it: pages, and a table that finds them.

    pages          (number, H_kv, words) uint32, see `kernels/pages.py`
    exact_pages    likewise: sinks and window in full precision, float16 or bfloat16
    table          int32 (B, P_cap + E_cap): the numbers of a sequence's pages in order,
                   P_cap of `pages`, then E_cap of `exact_pages`
    lengths        int32 (B, 2): tokens of both kinds
    largest        float32 (B, H_kv, 2): the largest scale of the keys, of the values

The order of the pages in memory is free. Slots without a token hold zeros. A cache in
full precision has all of its tokens in `exact_pages`.
"""

from dataclasses import dataclass

import numpy as np

from kvq.dtypes import numpy_dtype
from kvq.kernels.decode.gather import gather
from kvq.kernels.host import Version
from kvq.kernels.layouts import from_words
from kvq.kernels.pages import PageLayout
from kvq.scheme import FP16, PRESETS, Policy

PLAIN = Version("plain", "")  # of `gather`: one row of codes after the other
NUMBERS = {"float16": FP16, "bfloat16": PRESETS["bf16"].key}


@dataclass(frozen=True, eq=False)
class Paged:
    """The arrays above; `layout` and `exact` describe the pages.

    version : the Version of `decode` that it was made for.
    """

    version: Version
    policy: Policy
    layout: PageLayout
    exact: PageLayout
    pages: np.ndarray
    exact_pages: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    largest: np.ndarray

    def __len__(self):
        """Tokens of the longest sequence."""
        return int(self.lengths.sum(axis=1).max())

    @property
    def shape(self):
        """(B, H_kv, P_cap, E_cap, D)"""
        B, H_kv, _ = self.largest.shape
        E_cap = len(self.exact_pages) // B
        return B, H_kv, self.table.shape[1] - E_cap, E_cap, self.layout.D


def prepare(cache, version):
    """The Paged of a KVCache, for a Version.

    Raises TypeError or ValueError as `gather` does, ValueError for what is stored in
    full precision but neither as float16 nor as bfloat16.
    """
    found = gather(cache, PLAIN)
    dtype = _exact_dtype(cache, version)
    exact = [side.exact.astype(dtype) for side in (found.k, found.v)]
    if cache.policy.key.full_precision:
        key = value = NUMBERS[dtype.name]
        sides = [(x[:, :, :0], None, None) for x in exact]
    else:
        key, value = found.k.scheme, found.v.scheme
        sides = [
            (from_words(side.codes, side.scheme.bits, found.shape[-1]), *numbers)
            for side in (found.k, found.v)
            for numbers in [(side.scale, side.zero)]
        ]
    return paged(*sides, *exact, found.lengths, key, value, version=version)


def _exact_dtype(cache, version):
    """Of the sinks, windows and numbers of a KVCache. Raises ValueError."""
    names = {
        piece.dtype.name
        for row in cache.rows
        for stream in row
        for piece in (stream.sinks, stream.window, *map(_numbers, stream.chunks))
        if piece.size
    }
    if len(names) > 1 or not names <= set(NUMBERS):
        raise ValueError(
            f"numbers in full precision are {' and '.join(sorted(names))}; "
            f"{version.name} reads {' or '.join(NUMBERS)}"
        )
    return numpy_dtype(*names) if names else np.dtype(np.float16)


def _numbers(chunk):
    """What a chunk stores in full precision."""
    return chunk.codes if chunk.scheme.full_precision else np.empty(0)


def paged(k, v, k_exact, v_exact, lengths, key, value, order=None, version=PLAIN):
    """Pages of arrays whose rows are padded.

    k, v : (codes (B, H_kv, T, D) uint8, scale, zero or None). k_exact, v_exact :
    (B, H_kv, R, D), float16 or bfloat16. lengths : (B, 2), tokens of both kinds; what
    is behind them is not read. key, value : Schemes. order : None, or a function that
    takes the number of pages and gives them their places in memory, a permutation.
    """
    D, lengths = k_exact.shape[-1], np.asarray(lengths, np.int32)
    numbers = NUMBERS[k_exact.dtype.name]
    layout, exact = PageLayout(key, value, D), PageLayout(numbers, numbers, D)
    sides = [
        _ready(side, scheme, lengths[:, 0], layout.tokens)
        for side, scheme in ((k, key), (v, value))
    ]
    full = [
        (_padded(x, lengths[:, 1], exact.tokens), None, None)
        for x in (k_exact, v_exact)
    ]
    pools, tables = [], []
    for pages in (layout.to_pages(*sides), exact.to_pages(*full)):
        pool, table = _pool(pages, order or np.arange)
        pools.append(pool)
        tables.append(table)
    largest = np.stack([_largest(side[1], *k_exact.shape[:2]) for side in sides], -1)
    return Paged(
        version,
        Policy(key, value),
        layout,
        exact,
        *pools,
        np.concatenate(tables, axis=1),
        lengths,
        largest,
    )


def _ready(side, scheme, lengths, page):
    """codes, scale and zero of whole pages, zeros where there is no token."""
    codes, *numbers = side
    tokens = scheme.group_shape(1, 1, codes.shape[-1])[1]
    used, groups = -(-lengths // tokens), page // tokens
    return _padded(codes, lengths, page), *(
        None if x is None else _padded(x.astype(np.float16), used, groups)
        for x in numbers
    )


def _padded(x, lengths, unit):
    """x (B, H, T, n) with zeros behind each row's length, T a multiple of unit."""
    B, H, _, n = x.shape
    longest = int(lengths.max(initial=0))
    out = np.zeros((B, H, -(-longest // unit) * unit, n), x.dtype)
    for b, length in enumerate(lengths):
        out[b, :, :length] = x[b, :, :length]
    return out


def _pool(pages, order):
    """(B, H, P, words) -> pool (B P, H, words), table (B, P)."""
    B, H, P, words = pages.shape
    place = np.asarray(order(B * P), np.int32)
    pool = np.empty((B * P, H, words), np.uint32)
    pool[place] = pages.swapaxes(1, 2).reshape(B * P, H, words)
    return pool, place.reshape(B, P)


def _largest(scale, B, H):
    """(B, H) float32: 0 where there is none."""
    if scale is None:
        return np.zeros((B, H), np.float32)
    return np.abs(scale).max(axis=(2, 3), initial=0).astype(np.float32)

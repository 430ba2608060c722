"""`pack` straight into pages, on the host: the Launches of `v3_pages.cu`.

    prompt    tokens of k and v become pages
    window    the oldest tokens of a window in full precision become a page
    append    tokens of k and v join a window

pages, exact_pages, table and largest are those of `decode/paged.py`, contiguous: a
launch writes them in place. layout, exact : their PageLayouts. A `column` of the table
is that of the first page meant.
"""

import numpy as np

from kvq.kernels.host import C_TYPES, flat_numbers
from kvq.kernels.launch import Launch

SOURCE = "pack/v3_pages"
THREADS = 128  # of a block


def prompt(layout, exact, k, v, tokens, pages, table, largest, column=0):
    """The tokens in `tokens`, a range, of k and v (B, H_kv, T, D)."""
    B, H_kv, T, _ = k.shape
    (x, X), (y, _) = flat_numbers(k), flat_numbers(v)
    P = -(-len(tokens) // layout.tokens)
    sizes = H_kv, T, tokens.start, tokens.stop, P, table.shape[1], column
    args = x, y, *_flat(pages, table, largest), *sizes
    constants = _constants(layout, exact, X)
    return Launch(SOURCE, "pack_v3", constants, B * H_kv * P, THREADS, args, (2, 4))


def window(layout, exact, sinks, exact_pages, pages, table, largest, columns):
    """The tokens of a page, behind fewer than 64 sinks, which move to their end.

    columns : of the new page, and of the first one of the window.
    """
    B, H_kv, _ = largest.shape
    arrays = _flat(exact_pages, pages, table, largest)
    args = *arrays, H_kv, sinks, table.shape[1], *columns
    constants = _constants(layout, exact, C_TYPES[exact.key.levels])
    return Launch(
        SOURCE, "pack_v3_window", constants, B * H_kv, THREADS, args, (0, 1, 3)
    )


def append(layout, exact, k, v, tokens, slot, exact_pages, table, column):
    """The tokens in `tokens`, a range, of k and v (B, H_kv, T, D), from `slot` on."""
    B, H_kv, T, D = k.shape
    (x, X), (y, _) = flat_numbers(k), flat_numbers(v)
    sizes = B, H_kv, T, tokens.start, tokens.stop, slot, table.shape[1], column
    args = x, y, *_flat(exact_pages, table), *sizes
    constants, grid = (
        _constants(layout, exact, X),
        -(-B * H_kv * len(tokens) * D // THREADS),
    )
    return Launch(SOURCE, "append_v3", constants, grid, THREADS, args, (2,))


def _constants(layout, exact, X):
    return {**layout.constants, "E": C_TYPES[exact.key.levels], "X": X}


def _flat(*pools):
    """Views; four zeros for a pool without pages, since a kernel takes no null."""
    return [a.reshape(-1) if a.size else np.zeros(4, a.dtype) for a in pools]

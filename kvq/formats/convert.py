"""From one system's format to the next, with the error that each step adds."""

import numpy as np

from kvq.formats import find_format
from kvq.metrics import nmse


def convert(x, names):
    """Store x in each format in turn, every one reading what the one before wrote.

    x : float (..., T, D). names : formats, in order; at least one.
    Returns (rows, data): one dict per step and the bytes of the last format. In a
    row: `format`, `bytes`, `bits` per number, `step_nmse` (against what the step was
    given) and `total_nmse` (against x).
    Raises ValueError for an unknown format or a shape that one cannot hold.
    """
    if not names:
        raise ValueError("no format to convert to")
    rows, data = [], b""
    original = current = np.asarray(x, np.float32)
    for name in names:
        kind = find_format(name)
        data = kind.encode(current)
        decoded = kind.decode(data, original.shape)
        rows.append(
            {
                "format": name,
                "bytes": len(data),
                "bits": 8 * len(data) / original.size,
                "step_nmse": nmse(current, decoded),
                "total_nmse": nmse(original, decoded),
            }
        )
        current = decoded
    return rows, data


def table():
    """What every format is: one dict of strings per format, in words.

    The same facts that the documentation prints; `bits per number` is that of a head
    of 128 channels and 128 tokens.
    """
    from kvq.formats import all_formats

    rows = []
    for name, kind in all_formats().items():
        facts = vars(kind.facts)
        rows.append(
            {
                "format": name,
                "version": kind.version,
                "bits per number": f"{kind.bits_per_element((1, 128, 128)):g}",
                **{k: str(v) for k, v in facts.items()},
            }
        )
    return rows

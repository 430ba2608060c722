"""From one system's format to the next, with the error that each step adds."""

import numpy as np

from kvq.formats import all_formats, find_format
from kvq.formats.base import Format
from kvq.metrics import nmse


def convert(k, v, names):
    """Store k and v in each format in turn, each reading what the one before wrote.

    k, v : float (H_kv, T, D) and (H_kv, T, D_v). names : formats, in order.
    Returns (rows, data): one dict per step, and what the last format stores (the
    bytes of k and of v, or of both in one piece). In a row: `format`, `bytes`, `bits`
    per number, `k_step` and `v_step`, squared error over signal against what the step
    was given, and `k_total` and `v_total`, against k and v.
    Raises ValueError for an unknown format or a shape that one cannot hold.
    """
    if not names:
        raise ValueError("no format to convert to")
    original = [np.asarray(x, np.float32) for x in (k, v)]
    given, rows, data = original, [], []
    for name in names:
        data, read = _through(find_format(name), *given)
        size = sum(map(len, data))
        row = {"format": name, "bytes": size}
        row["bits"] = 8 * size / sum(x.size for x in original)
        for side, first, before, after in zip("kv", original, given, read, strict=True):
            row[f"{side}_step"] = nmse(before, after)
            row[f"{side}_total"] = nmse(first, after)
        rows.append(row)
        given = read
    return rows, data


def _through(kind, k, v):
    """([bytes, ...], [k, v] as they are read back)."""
    if isinstance(kind, Format):
        data = [kind.encode(x) for x in (k, v)]
        return data, [
            kind.decode(d, x.shape) for d, x in zip(data, (k, v), strict=True)
        ]
    data = kind.encode(k, v)
    return [data], list(kind.decode(data, k.shape, v.shape[-1]))


def table():
    """What every format is: one dict of strings per format, in words.

    The same facts that the documentation prints; `bits per number` is that of 128
    tokens of a head of 128 channels.
    """
    rows = []
    for name, kind in all_formats().items():
        bits = kind.bits_per_element((1, 128, 128))
        facts = {k: str(v) for k, v in vars(kind.facts).items()}
        rows.append(
            {
                "format": name,
                "version": kind.version,
                "bits per number": f"{bits:g}",
                **facts,
            }
        )
    return rows


PAGE = """# Cache formats of other systems

{count} formats, byte for byte. `kvq formats --markdown` writes this page from the code;
a test compares them. What the columns mean:

- **bits**: stored bits per number, everything counted, for 128 tokens of a head of 128
  channels.
- **exact**: what "the same bytes" can mean, and what was compared.
- **version**: the upstream version whose bytes these are. Formats move: check it before
  you rely on a row.

No GPU kernel's output was compared here; rows marked "ties" may differ from a GPU in a
code where a number lies exactly between two levels.

{table}
"""
COLUMNS = (
    *("format", "bits", "scale shared by", "scale", "zero", "rounding"),
    *("full precision", "exact", "version"),
)
_SAME = {
    "bits": "bits per number",
    "scale shared by": "group",
    "full precision": "window",
}


def markdown():
    """The page kvq/formats/README.md."""
    rows = table()
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[row[_SAME.get(c, c)] for c in COLUMNS] for row in rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return PAGE.format(count=len(rows), table=text)

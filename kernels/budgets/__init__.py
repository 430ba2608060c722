"""What each kernel may cost on each architecture, as it was recorded: `sm_80.csv`, ...

    problems(rows)    rows of `kvq.kernels.report.rows` that cost more than recorded
    markdown()        a table of kernels/README.md; `tensor_cores.py` has the other

`python -m kvq.kernels.budgets` records again. The numbers belong to the version of
NVRTC in the header of a file; another version makes other machine code.
"""

import re
from pathlib import Path

from kvq.kernels.launch.nvrtc import ARCHITECTURES
from kvq.tables import read_table

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent / "README.md"
# 2 to 8 bits on the architecture with the fewest instructions to spare for a byte, and
# 4 bits on all of them.
BITS = dict.fromkeys(ARCHITECTURES, (4,)) | {90: (8, 4, 3, 2)}
# A row may have at most, or at least, what its budget says.
AT_MOST = ("registers", "spills", "shared_bytes", "loop_barriers")
AT_LEAST = ("wide_loads", "matrix")
ROUNDING = 1.01  # instructions per byte are recorded with two decimals


def budgets(arch):
    """({(kernel, bits): row}, version of NVRTC) of one architecture."""
    rows, header = read_table(FOLDER / f"sm_{arch}.csv")
    return {(row["kernel"], row["bits"]): row for row in rows}, header["nvrtc"]


def problems(rows):
    """One line for each number that is over its budget."""
    for row in rows:
        name = f"{row['kernel']}, {row['bits']} bits, sm_{row['arch']}"
        budget = budgets(row["arch"])[0].get((row["kernel"], row["bits"]))
        if budget is None:
            yield f"{name}: no budget"
            continue
        for field in (*AT_MOST, *AT_LEAST, "instructions_per_byte"):
            if _over(field, row[field], budget[field]):
                yield f"{name}: {field} is {row[field]:g}, the budget {budget[field]:g}"


def _over(field, value, budget):
    if field in AT_LEAST:
        return value < budget
    return value > budget * (ROUNDING if field == "instructions_per_byte" else 1)


# --- the table of README.md -----------------------------------------------------------
def markdown():
    """One row a kernel: 4 bits, the range over all architectures."""
    tables = {arch: budgets(arch)[0] for arch in ARCHITECTURES}
    titles = [
        *("kernel", "registers", "spills", "shared bytes", "16-byte loads"),
        *("instructions per byte", "sectors / ideal", "wavefronts / ideal"),
    ]
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1)]
    for kernel, bits in tables[90]:
        if bits == 4:
            lines.append(_cells(kernel, [t[kernel, bits] for t in tables.values()]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(kernel, rows):
    spans = ("registers", "spills", "shared_bytes", "wide_loads")
    return [
        f"`{kernel}`",
        *(_span(f"{row[field]:,}" for row in rows) for field in spans),
        _span(f"{row['instructions_per_byte']:.1f}" for row in rows),
        ratio(rows[0], "sectors"),
        ratio(rows[0], "wavefronts"),
    ]


def _span(values):
    """One value, or the smallest and the largest."""
    found = sorted(set(values), key=lambda v: float(v.replace(",", "")))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def ratio(row, what):
    """What was counted, over the ideal; "" where the kernel has no such access."""
    ideal = row[f"ideal_{what}"]
    return f"{row[what] / ideal:.2f}" if ideal else ""


def with_table(text):
    """README's text with both tables between their markers. Raises ValueError."""
    from kvq.kernels.budgets import tensor_cores

    tables = {"kernels": markdown(), "tensor cores": tensor_cores.markdown()}
    for name, table in tables.items():
        marker = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        new = lambda found, table=table: found[1] + table + found[2]  # noqa: E731
        text, count = re.subn(marker, new, text, flags=re.S)
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table {name!r}")
    return text

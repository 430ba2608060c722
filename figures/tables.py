"""Write the tables of README.md from the recorded data, between their markers.

python figures/tables.py            rewrite README.md
python figures/tables.py --check    exit with 1 if it differs
"""

import argparse
import re
import sys
from pathlib import Path

from kvq.kernels.cpu import goals
from kvq.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma-3-270m"}


def quality():
    """Perplexity against the unquantized cache, a row a policy, a column a model."""
    columns, header = {}, ["policy", "bits"]
    for name, title in MODELS.items():
        rows, _ = read_table(ROOT / f"figures/data/quality_{name}.csv")
        columns[name] = {row["policy"]: row for row in rows}
        header += [f"{title}: perplexity", "KL"]
    lines = [header, ["---"] * 2 + ["---:"] * 4]
    for policy, row in columns["smollm2"].items():
        cells = [f"`{policy}`", f"{row['bits_per_element']:.2f}"]
        for column in columns.values():
            cells += _cells(column.get(policy))
        lines.append(cells)
    return _markdown(lines)


def llama_cpp():
    """Cache types of llama.cpp: what they cost it, and what they cost our decoder."""
    rows, _ = read_table(ROOT / "figures/data/quality_llama_cpp.csv")
    titles = ["type", "bits", "rotated"]
    titles += ["llama.cpp: perplexity", "KL", "here: perplexity", "KL", "difference"]
    lines = [titles, ["---"] * 3 + ["---:"] * 5]
    for ours, theirs in zip(rows[0::2], rows[1::2], strict=True):
        apart = (
            f"{ours['difference_percent']:+.2f} ± {ours['difference_se_percent']:.2f}"
        )
        cells = [f"`{ours['type']}`", f"{ours['bits_per_element']:.1f}"]
        cells += [ours["rotated"], *_cells(theirs), *_cells(ours), apart]
        lines.append(cells)
    return _markdown(lines)


def hugging_face():
    """The caches of Transformers and ours in SmolLM2-135M, by KL."""
    rows, _ = read_table(ROOT / "figures/data/quality_hf.csv")
    lines = [["cache", "bits", "perplexity", "KL"], ["---"] * 2 + ["---:"] * 2]
    for row in sorted(rows, key=lambda row: row["kl"]):
        bits = f"{row['bits_per_element']:.2f}"
        lines.append([f"`{row['policy']}`", bits, *_cells(row)])
    return _markdown(lines)


def bench_cpu():
    """Decode on one CPU: every system at the longest context that all of them had."""
    rows, header = read_table(ROOT / "figures/data/bench_cpu.csv")
    main = goals.pick(rows, scene="main", op="decode")
    timed = [row for row in main if row["seconds"]]
    torch = goals.fastest_torch(main)["seconds"]
    titles = ["system", "stored", "ms", "times torch", "% of DRAM", "error"]
    lines = [titles, ["---"] * 2 + ["---:"] * 4]
    for row in sorted(timed, key=lambda row: row["seconds"]):
        low, middle, high = (
            f"{1e3 * row[f'seconds{end}']:.1f}" for end in ("_low", "", "_high")
        )
        cells = [f"{row['system']} {row['version']}", f"`{row['storage']}`"]
        cells += [f"{middle} ({low} .. {high})", f"{torch / row['seconds']:.2f}"]
        cells += [f"{row['dram_percent']:.0f}", f"{row['error']:.1e}"]
        lines.append(cells)
    return f"{_markdown(lines)}\n\n{_conditions(main[0], header)} {_held(rows)}"


def _conditions(row, header):
    return (
        f"{header['cpu']}, {row['threads']} threads, {header['date']}: one layer, "
        f"{row['T']:,} tokens, {row['H_kv']} KV heads, {row['H_q']} query heads, "
        f"D = {row['D']}; medians (quartiles) of calls in turns, memory cold."
    )


def _held(rows):
    """How many of the goals hold, in a sentence."""
    verdicts = [goal["verdict"] for goal in goals.verdicts(rows)]
    hold = verdicts.count("holds")
    unknown = sum(verdict.startswith("cannot be said") for verdict in verdicts)
    said = f", {unknown} cannot be said" if unknown else ""
    return f"Of {len(verdicts)} goals {hold} hold{said}: `kvq bench cpu` lists them."


def _markdown(lines):
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row):
    if row is None:
        return ["not measured", ""]
    change = f"{row['change_percent']:+.2f} % ± {row['se_percent']:.2f}"
    return [change, f"{row['kl']:.4f}"]


TABLES = {
    "quality": quality,
    "llama.cpp": llama_cpp,
    "bench_cpu": bench_cpu,
    "quality_hf": hugging_face,
}


def with_table(text, name, table):
    """`text` with what stands between the markers of `name` replaced."""
    marker = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
    new, count = re.subn(marker, lambda m: m[1] + table + m[2], text, flags=re.S)
    if count != 1:
        raise ValueError(f"README.md has {count} places for the table {name!r}, not 1")
    return new


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args(argv).check
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = old
    for name, table in TABLES.items():
        new = with_table(new, name, table())
    if check and new != old:
        print("README.md is not what the data says: run `make figures`")
        return 1
    if not check:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

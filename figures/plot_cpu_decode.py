"""Decode over codes of 4 bits beats float attention on a CPU by more than bytes alone.

Times that `kvq bench cpu` recorded (data/bench_cpu.csv): decode of one layer over the
context length, what of the memory's bandwidth each program uses, and what its answer
costs in error. Rows are selected here; nothing is timed.
"""

from math import isinf
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from kvq import plots
from kvq.kernels.cpu import goals
from kvq.tables import read_table

NAME = "cpu_decode"
RECORDED = Path(__file__).parent / "data" / "bench_cpu.csv"
COLUMNS = (
    *("scene", "op", "system", "version", "storage", "bits", "T", "threads"),
    *("seconds", "seconds_low", "seconds_high", "dram_percent", "error", "note"),
)
LOOKS = {  # system, version: marker, name
    ("kvq", "v4"): ("o", "v4"),
    ("kvq", "v4 two terms"): ("D", "v4, two terms"),
    ("kvq", "v3"): ("s", "v3"),
    ("torch", "sdpa"): ("^", "torch, its fastest form"),
    ("torch", "matmul"): ("^", "torch, its fastest form"),
    ("torch", "dequantize"): ("X", "torch, dequantize first"),
    ("numpy", "attention"): ("v", "NumPy"),
    ("ggml", "flash attention"): ("P", "ggml"),
}
GREY = "#6E6E6E"


def data():
    """Rows of the sweep and of the main scene; of torch its fastest form alone."""
    return list(_chosen())


def _chosen():
    rows, _ = read_table(RECORDED)
    for scene in ("sweep", "main"):
        timed = [r for r in goals.pick(rows, scene=scene, op="decode") if r["seconds"]]
        for T in sorted({row["T"] for row in timed}):
            for row in _fastest_torch_alone(goals.pick(timed, T=T)):
                yield {name: row[name] for name in COLUMNS}


def _is_torch(row):
    return row["system"] == "torch" and row["version"] in goals.TORCH


def _fastest_torch_alone(rows):
    """Without torch's slower forms of attention."""
    forms = filter(_is_torch, rows)
    fastest = min(forms, key=lambda row: row["seconds"], default=None)
    return [row for row in rows if row is fastest or not _is_torch(row)]


# --- what the picture says ------------------------------------------------------------
def finding(table):
    try:
        (ours,) = plots.pick(
            table, scene="main", system="kvq", version="v4", storage="int4"
        )
        torch = goals.fastest_torch(table, scene="main")
        first = goals.crossover(table)
    except (ValueError, goals.Unknown):  # this CPU lacks v4, or there was no torch
        return "Decode on a CPU, by this project and by others: time and error"
    when = "but not at every length" if isinf(first) else f"faster from {first:,} on"
    ratio = torch["seconds"] / ours["seconds"]
    return (
        f"4 bits by integer dot products: {ratio:.1f} times as fast as torch at "
        f"{ours['T']:,} tokens, {when}"
    )


def source():
    _, header = read_table(RECORDED)
    return (
        f"{header['cpu']}, {header['threads']} threads, {header['date']}. One layer: 8 "
        "KV heads, 32 query heads, D = 128. Medians; shaded: quartiles"
    )


# --- the picture ----------------------------------------------------------------------
@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplots(1, 3, figsize=(16, 6.2))
    main = plots.pick(table, scene="main")
    plot_times(axes[0], table)
    plot_bandwidth(axes[1], main)
    plot_errors(axes[2], main)
    plots.legend_below(fig, [axes[2]], 6)
    plots.headline(fig, finding(table), source())
    plots.save(fig, path_stem)


def _look(row):
    key = row["bits"] if row["bits"] < 16 else "fp16"
    marker, _ = LOOKS[row["system"], row["version"]]
    return {"color": plots.COLORS[key], "marker": marker}


def _name(row):
    _, name = LOOKS[row["system"], row["version"]]
    if row["bits"] < 16 and row["system"] != "ggml":
        return f"{name}, {row['bits']} bits"
    return f"{name}, {row['storage']}" if row["system"] == "ggml" else name


def lines(table):
    """Rows of the sweep by their names, the shortest context first."""
    found = {}
    for row in sorted(plots.pick(table, scene="sweep"), key=lambda row: row["T"]):
        found.setdefault(_name(row), []).append(row)
    return found


@plots.style()
def plot_times(ax, table):
    """Milliseconds over the context length; from the dotted line on, v4 is ahead."""
    for name, rows in lines(table).items():
        T = plots.column(rows, "T")
        low, middle, high = (
            1e3 * plots.column(rows, f"seconds{end}") for end in ("_low", "", "_high")
        )
        look = _look(rows[0])
        ax.plot(T, middle, **look, label=name)
        ax.fill_between(T, low, high, color=look["color"], alpha=0.15, lw=0)
    try:
        first = goals.crossover(table)
    except goals.Unknown:
        first = float("inf")
    if not isinf(first):
        ax.axvline(first, color=GREY, lw=1.2, ls=(0, (1, 2)))
        ax.set_title(f"dotted: {first:,} tokens, from there v4 is ahead of torch")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(_tokens))
    ax.set_xlabel("context T, tokens (warm)")
    ax.set_ylabel("milliseconds for one layer")
    ax.legend(loc="upper left", fontsize=9)


def _tokens(T, _):
    return f"{T:g}" if T < 1024 else f"{T / 1024:g}K"


@plots.style()
def plot_bandwidth(ax, rows):
    """Percent of the bandwidth of a read that each program uses."""
    rows = sorted(rows, key=lambda row: -row["dram_percent"])
    for y, row in enumerate(rows):
        ax.plot(row["dram_percent"], y, ls="none", ms=9, **_look(row))
    ax.set_yticks(range(len(rows)), [_name(row) for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.axvline(100, color=GREY, lw=1.5, ls=(0, (4, 2)))
    ax.set_title(_context(rows))
    ax.set_xlabel("bandwidth, % of what memory gives at best (cold)")


@plots.style()
def plot_errors(ax, rows):
    """Error of the result over time: good is below and to the left."""
    for row in rows:
        ax.plot(1e3 * row["seconds"], row["error"], ls="none", ms=9, **_look(row))
    for marker, name in dict.fromkeys(LOOKS.values()):
        ax.plot([], [], ls="none", ms=9, marker=marker, color=GREY, label=name)
    for key, name in ((2, "2 bits"), (4, "4"), (8, "8"), ("fp16", "16 or 32")):
        ax.plot([], [], lw=6, color=plots.COLORS[key], label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_title(_context(rows))
    ax.set_xlabel("milliseconds for one layer (cold)")
    ax.set_ylabel("relative error of the output, against float64")


def _context(rows):
    return f"T = {max(row['T'] for row in rows):,}" if rows else ""

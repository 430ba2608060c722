"""Decode at the speed of a copy needs 200 MB to move, and few instructions per byte.

Predicted (dashed, hollow) from instructions that were counted in machine code, and,
once `make bench-gpu` has run on a GPU, measured (solid, filled) beside it. A prediction
lets everything overlap; the range under it ends where nothing does.
"""

from pathlib import Path

from matplotlib import pyplot as plt

from kvq import plots
from kvq.kernels import predict
from kvq.kernels.budgets.tensor_cores import DEVICES
from kvq.tables import read_table

NAME = "gpu_decode"
MEASURED = Path(__file__).parent / "data"  # where decode_<device>.csv are
BITS = (16, 8, 4, 2)
TOKENS = [2**n for n in range(9, 21)]
B, T = 8, 32768  # of the ladder
LARGE = 200e6  # bytes: see the finding


def data():
    return [*predicted(), *measured()]


def predicted():
    for device in DEVICES:
        for bits in BITS:
            for tokens in TOKENS:
                found = predict.decode(device, "v5", bits, tokens)
                speedup = predict.speedup(device, bits, tokens)
                yield row("predicted", device, "v5", bits, 1, tokens, found, speedup)
        for bits in BITS[1:]:
            for version, found in predict.ladder(device, bits, T, batch=B).items():
                yield row("predicted", device, version, bits, B, T, found, None)
        full = predict.decode(device, "v5", 16, T, batch=B)
        yield row("predicted", device, "v5", 16, B, T, full, 1.0)


def row(kind, device, kernel, bits, B, T, found, speedup):
    return {
        "kind": kind,
        "device": device,
        "kernel": kernel,
        "bits": bits,
        "B": B,
        "T": T,
        "nbytes": found["bytes"],
        "seconds": found["seconds"],
        "copy_percent": found["copy_percent"],
        "copy_percent_apart": found["copy_percent_apart"],
        "speedup": speedup,
        "ceiling": found.get("ceiling"),
    }


def measured():
    """Rows of `make bench-gpu`: its times, and the speed-up over 16 bits by v5."""
    for path in sorted(MEASURED.glob("decode_*.csv")):
        rows, header = read_table(path)
        rows = [r for r in rows if r["op"] == "decode" and r["seconds"]]
        full = {(r["B"], r["T"]): r for r in plots.pick(rows, kernel="v5", bits=16)}
        for found in rows:
            base = full.get((found["B"], found["T"]))
            found |= {"bytes": found["nbytes"], "copy_percent_apart": None}
            found["ceiling"] = base and base["nbytes"] / found["nbytes"]
            speedup = base and base["seconds"] / found["seconds"]
            device = header["device"].partition(" (")[0]
            shape = found["bits"], found["B"], found["T"]
            yield row("measured", device, found["kernel"], *shape, found, speedup)


def shown(table):
    """(rows of the device that is shown, its name): the first that was measured."""
    devices = [r["device"] for r in plots.pick(table, kind="measured")]
    name = next(iter(devices), "H200")
    return [r for r in table if r["device"] in (name, *model(name))], name


def model(name):
    """The predicted device that a measured one is, if there is one."""
    words = name.upper().replace("-", " ").split()
    return [d for d in DEVICES if set(d.upper().split("-")) <= set(words)]


def finding(table):
    """What is reached at 200 MB. Predicted: from nothing overlapped to everything."""
    rows, name = shown(table)
    kind = "measured" if plots.pick(rows, kind="measured") else "predicted"
    rows = [r for r in plots.pick(rows, kind=kind, kernel="v5") if r["nbytes"] >= LARGE]
    percents = ", ".join(reached(plots.pick(rows, bits=bits)) for bits in BITS[1:])
    return (
        f"{kind.capitalize()} for {name}: {percents} % of a copy's bandwidth with "
        "8, 4, 2 bits and 200 MB"
    )


def reached(rows):
    """Of the smallest of some launches."""
    if not rows:
        return "no"
    least = min(rows, key=lambda row: row["nbytes"])
    low, high = least["copy_percent_apart"], least["copy_percent"]
    return f"{high:.0f}" if low is None else f"{low:.0f}\N{EN DASH}{high:.0f}"


def source(table):
    if plots.pick(table, kind="measured"):
        return "dashed, hollow: predicted; solid, filled: measured, L2 cold (medians)"
    return (
        "PREDICTED, NOT MEASURED: no GPU has run these kernels yet. From counted "
        "instructions, datasheets and 5 us a launch; shaded: if nothing overlapped"
    )


@plots.style()
def draw(table, path_stem):
    rows, name = shown(table)
    fig, axes = plt.subplots(2, 2, figsize=(12, 9))
    (left, right), (below, ladder) = axes
    plots.plot_gpu_bandwidth(left, rows)
    plots.plot_gpu_speedup(right, rows)
    plots.plot_gpu_crossover(below, table)
    plots.plot_gpu_ladder(ladder, rows, B, T)
    for ax in (left, right, ladder):
        ax.set_title(name)
    plots.legend_below(fig, [left], 4)
    plots.headline(fig, finding(table), source(table))
    plots.save(fig, path_stem)

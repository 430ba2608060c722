"""Pictures of the tables in `kvq.study`: pure `plot_*(ax, table)` functions.

Each draws one panel on a matplotlib axes and computes nothing. `figure(name, table)`
puts a study's panels together; `headline` says above them what they show; `save`
writes SVG and PNG that are the same bytes on every run.

Across the project a colour has one meaning (`COLORS`), and a marker or a dash says
the same again: measured is solid with markers, predicted is dashed without.
"""

import contextlib
import os
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

STYLE = str(Path(__file__).with_name("kvq.mplstyle"))

# Okabe and Ito's colours, and a ramp for the number of bits, which has an order.
COLORS = {
    "K": "#0072B2",
    "V": "#D55E00",
    "K before RoPE": "#56B4E9",
    "Gaussian": "#6E6E6E",
    "predicted": "#6E6E6E",
    "fp16": "#000000",
    "token": "#E69F00",
    "channel": "#009E73",
    2: "#DE9CBF",
    3: "#BE6495",
    4: "#8C3A6B",
    8: "#43123A",
}
MARKERS = {
    "K": "o",
    "V": "s",
    "K before RoPE": "D",
    "Gaussian": "^",
    "token": "o",
    "channel": "s",
    2: "v",
    3: "^",
    4: "o",
    8: "s",
}
NAMES = {"K": "keys", "V": "values", "K before RoPE": "keys before RoPE"}
AXES = {
    "token": "per token",
    "channel": "per channel",
    "head": "per head",
    "tensor": "per tensor",
}
NMSE = "squared error / signal (NMSE)"
BITS_PER_ELEMENT = "stored bits per number, all counted"
OUTPUT_ERROR = "attention output, relative error"


# --- figures --------------------------------------------------------------------------
def subplots(*args, **options):
    """`matplotlib.pyplot.subplots` in the project's style."""
    with plt.style.context(STYLE):
        return plt.subplots(*args, **options)


def headline(fig, text):
    """The finding, above everything, in bold."""
    fig.suptitle(text, x=0.01, ha="left")


def save(fig, stem):
    """Write `stem`.svg and `stem`.png, the same bytes on every run, and close `fig`.

    stem : a path without suffix. Returns the two paths.
    """
    paths = [Path(f"{stem}.svg"), Path(f"{stem}.png")]
    metadata = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
    with plt.style.context(STYLE):
        for path in paths:
            temporary = path.with_name(f".{os.getpid()}.{path.name}")
            try:
                fig.savefig(temporary, metadata=metadata[path.suffix])
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    plt.close(fig)
    return paths


# --- small helpers --------------------------------------------------------------------
def pick(table, **wanted):
    """The rows in which every named column has the wanted value."""
    return [r for r in table if all(r[key] == value for key, value in wanted.items())]


def column(table, name):
    """One column as an array."""
    return np.array([row[name] for row in table])


def values_of(table, name):
    """The distinct values of a column, in the order they first appear."""
    return list(dict.fromkeys(row[name] for row in table))


def _look(key, **more):
    return {"color": COLORS.get(key, "#000000"), "marker": MARKERS.get(key), **more}


_PREDICTED = {"color": COLORS["predicted"], "ls": (0, (4, 2)), "lw": 1.4, "zorder": 1.5}


def _plain(value, _=None):
    return f"{value:g}"


def _ticks(axis, values):
    """Ticks at these values alone, written as plain numbers."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_plain))


def _log2_axis(ax, values):
    ax.set_xscale("log", base=2)
    _ticks(ax.xaxis, sorted(set(values)))


def _end_label(ax, x, y, text, color, dx=8, dy=0, **options):
    """Text beside the last point of a line."""
    options = {"va": "center", "ha": "left", "fontsize": 10, **options}
    where = {"xytext": (dx, dy), "textcoords": "offset points"}
    ax.annotate(text, (x[-1], y[-1]), color=color, **where, **options)


# --- group size -----------------------------------------------------------------------
def plot_group_size(ax, table, tensor="K", bits=None, predicted="gaussian"):
    """Error against group size, one line per axis and number of bits.

    predicted : "gaussian" (dashed grey, one line per number of bits), "scales"
        (dashed, one per measured line) or None.
    """
    table = pick(table, tensor=tensor)
    bits = bits or values_of(table, "bits")
    for b in bits:
        rows = pick(table, bits=b)
        for per in values_of(rows, "per"):
            line = pick(rows, per=per)
            x, y = column(line, "group"), column(line, "nmse")
            ax.plot(x, y, **_look(per))
            label = f"{AXES[per]}, {b} bits"
            _end_label(ax, x, y, label, COLORS[per])
            if predicted == "scales":
                ax.plot(x, column(line, "predicted_scales"), **_PREDICTED)
        if predicted == "gaussian":
            line = max((pick(rows, per=p) for p in values_of(rows, "per")), key=len)
            x, y = column(line, "group"), column(line, "predicted_gaussian")
            ax.plot(x, y, **_PREDICTED)
    ax.set_yscale("log")
    _log2_axis(ax, column(table, "group"))
    ax.set_xlabel("group size G: numbers that share one scale and zero")
    ax.set_ylabel(NMSE)


def plot_pareto(ax, table, tensor="K", bits=None):
    """Error against stored bits per number: every group size of every width."""
    table = pick(table, tensor=tensor)
    for b in bits or values_of(table, "bits"):
        for per in values_of(table, "per"):
            line = pick(table, bits=b, per=per)
            ax.plot(
                column(line, "bits_per_element"), column(line, "nmse"), **_look(per)
            )
    ax.set_yscale("log")
    ax.set_xlabel(BITS_PER_ELEMENT)
    ax.set_ylabel(NMSE)

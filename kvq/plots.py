"""Pictures of the tables in `kvq.study`: pure `plot_*(ax, table)` functions.

Each draws one panel on a matplotlib axes and nothing else. `figure(name, table)`
puts a study's panels together; `headline` says above them what they show; `save`
writes SVG and PNG that are the same bytes on every run.

Across the project a colour has one meaning (`COLORS`), and a marker or a dash says
the same again: measured is solid with markers, predicted is dashed without.
"""

import os
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from kvq.study import pareto_front

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
    1: "#EBBBD4",
    2: "#DE9CBF",
    3: "#BE6495",
    4: "#8C3A6B",
    5: "#782D5C",
    6: "#66234F",
    7: "#541A44",
    8: "#43123A",
}
MARKERS = {
    "K": "o",
    "V": "s",
    "K before RoPE": "D",
    "Gaussian": "^",
    "token": "o",
    "channel": "s",
    1: "<",
    2: "v",
    3: "^",
    4: "o",
    5: "p",
    6: "h",
    7: ">",
    8: "s",
}
NAMES = {
    "K": "keys",
    "V": "values",
    "K before RoPE": "keys before RoPE",
    "Gaussian": "Gaussian numbers",
}
AXES = {
    "token": "per token",
    "channel": "per channel",
    "head": "per head",
    "tensor": "per tensor",
}
NMSE = "squared error / signal (NMSE)"
BITS_PER_ELEMENT = "stored bits per number: codes, scales, zeros, window"
LOGIT_CHANGE = "change of the logits, RMS"
OUTPUT_ERROR = "attention output, relative error"


# --- figures --------------------------------------------------------------------------
def style():
    """The project's look: a context, or a decorator for a function that draws."""
    return plt.style.context(STYLE)


@style()
def headline(fig, text, source=""):
    """The finding, above everything, in bold; what was measured, below everything."""
    fig.suptitle(text, x=0.01, ha="left")
    if source and fig.legends:  # both want the lower edge
        fig.legends[-1].set_title(source, {"size": 9})
        fig.legends[-1].get_title().set_color("#555555")
    elif source:
        fig.supxlabel(source, x=0.99, ha="right", fontsize=9, color="#555555")


@style()
def save(fig, stem):
    """Write `stem`.svg and `stem`.png, the same bytes on every run, and close `fig`.

    stem : a path without suffix. Each file appears complete or not at all.
    Returns the two paths.
    """
    metadata = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
    paths = [Path(f"{stem}{suffix}") for suffix in metadata]
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


def distinct(table, name):
    """The distinct values of a column, in the order they first appear."""
    return list(dict.fromkeys(row[name] for row in table))


def _look(key, **more):
    return {"color": COLORS[key], "marker": MARKERS[key], **more}


def _dot(tensor):
    """A large dot; an open one for the tensor that often lies on another."""
    face = "none" if tensor == "K before RoPE" else COLORS[tensor]
    look = _look(tensor, label=NAMES[tensor], markersize=9, mfc=face)
    return {**look, "mew": 1.8}


_PREDICTED = {"color": COLORS["predicted"], "ls": (0, (4, 2)), "lw": 1.5}


def _plain(value, _=None):
    return f"{value:g}".replace("e-0", "e-")


def _ticks(axis, values):
    """Ticks at these values alone, written as plain numbers."""
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_plain))


def _log2_axis(ax, values):
    ax.set_xscale("log", base=2)
    _ticks(ax.xaxis, values)


def _log_axis(ax, which):
    """A log axis, "x" or "y", with plain numbers: 1, 2, 5 where it is short."""
    if not getattr(ax.dataLim, f"interval{which}")[1] > 0:
        return  # all errors are zero or unknown: nothing for a log axis to show
    getattr(ax, f"set_{which}scale")("log")
    low, high = getattr(ax, f"get_{which}lim")()
    axis = getattr(ax, f"{which}axis")
    short = high / low < 60
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _label(ax, x, y, text, color, dx=8, dy=0, **options):
    """Text beside a point, `dx` and `dy` in typographic points away from it."""
    options = {"va": "center", "ha": "left", "fontsize": 10, **options}
    where = {"xytext": (dx, dy), "textcoords": "offset points"}
    ax.annotate(text, (x, y), color=color, **where, **options)


def _dots(ax, names, points):
    """Dots in rows, the first name on top. points : (row name, x, look)."""
    for name, x, look in points:
        ax.plot(x, names.index(name), ls="none", **look)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)


def _legend(ax, **options):
    """A legend in which each label appears once."""
    ax.legend(*_labelled(ax), **options)


def legend_below(fig, axes, columns=6):
    """One legend under all panels, in place of theirs."""
    for ax in axes:
        if ax.get_legend():
            ax.get_legend().remove()
    handles, labels = _labelled(axes[-1])
    columns = min(columns, len(labels))
    fig.legend(handles, labels, loc="outside lower center", ncols=columns)


def _labelled(ax):
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    return list(once.values()), list(once)


_BELOW = {"dx": 6, "dy": -24, "ha": "right"}


# --- group size -----------------------------------------------------------------------
@style()
def plot_group_size(ax, table, tensor="K", bits=(2, 4)):
    """Error against group size: per token and per channel, beside Gaussian numbers.

    table : rows of `study.group_size`.
    """
    table = pick(table, tensor=tensor)
    for b in bits:
        for per in distinct(table, "per"):
            line = pick(table, bits=b, per=per)
            x, y = column(line, "group"), column(line, "nmse")
            ax.plot(x, y, **_look(per))
            text = f"{AXES[per]}, {b} bits"
            # Beside a token's line, which ends early; below a channel's.
            place = {"dx": 8, "dy": 6} if per == "token" else _BELOW
            _label(ax, x[-1], y[-1], text, COLORS[per], **place)
        longest = max((pick(table, bits=b, per=p) for p in AXES), key=len)
        x, y = column(longest, "group"), column(longest, "predicted_gaussian")
        ax.plot(x, y, **_PREDICTED, label="predicted for Gaussian numbers")
    _finish_group_axes(ax, table)
    _legend(ax, loc="lower right")


@style()
def plot_group_size_bits(ax, table, tensor, per):
    """Error against group size, one line per number of bits, with both predictions.

    table : rows of `study.group_size`.
    """
    table = pick(table, tensor=tensor, per=per)
    for b in distinct(table, "bits"):
        line = pick(table, bits=b)
        x = column(line, "group")
        ax.plot(x, column(line, "nmse"), **_look(b))
        ax.plot(
            x,
            column(line, "predicted_scales"),
            color="black",
            ls=(0, (2, 2)),
            lw=1.2,
            label="predicted from the stored scales",
        )
        gaussian = column(line, "predicted_gaussian")
        ax.plot(x, gaussian, **_PREDICTED, label="predicted for Gaussian numbers")
        _label(ax, x[-1], line[-1]["nmse"], f"{b} bits", COLORS[b])
    _finish_group_axes(ax, table)
    ax.set_title(f"{NAMES[tensor]} {AXES[per]}", color=COLORS[tensor])


def _finish_group_axes(ax, table):
    _log_axis(ax, "y")
    _log2_axis(ax, column(table, "group"))
    ax.set_xlabel("group size G: numbers that share one scale and zero")
    ax.set_ylabel(NMSE)


@style()
def plot_pareto(ax, table, tensor="K"):
    """Error against stored bits per number: one line per width, one dot per group.

    table : rows of `study.group_size`.
    """
    table = pick(table, tensor=tensor)
    for per in distinct(table, "per"):
        look = _look(per, marker="", mfc="white" if per == "channel" else COLORS[per])
        ax.plot([], [], **look, label=AXES[per])
        for b in distinct(table, "bits"):
            line = pick(table, bits=b, per=per)
            x, y = column(line, "bits_per_element"), column(line, "nmse")
            ax.plot(x, y, **{**look, "marker": MARKERS[b], "lw": 1.5})
    for b in distinct(table, "bits"):
        ax.plot([], [], marker=MARKERS[b], ls="none", c="black", label=f"{b} bits")
    front = pareto_front(table)
    x, y = column(front, "bits_per_element"), column(front, "nmse")
    ax.plot(x, y, color="#D9D9D9", lw=9, zorder=1, label="nothing is better")
    _log_axis(ax, "y")
    ax.set_xlabel("stored bits per number: codes, scales and zeros")
    ax.set_ylabel(NMSE)
    _legend(ax, loc="lower left")


# --- bits -----------------------------------------------------------------------------
_LEVELS = {"symmetric": "v", "asymmetric": "o", "lloyd-max": "D"}


@style()
def plot_bits(ax, table, tensor="K"):
    """SQNR against bits, one line per kind of levels, beside what theory allows.

    table : rows of `study.bits`.
    """
    table = pick(table, tensor=tensor)
    for levels in distinct(table, "levels"):
        line = pick(table, levels=levels)
        look = {"color": COLORS[tensor], "marker": _LEVELS[levels], "lw": 1.5}
        ax.plot(column(line, "bits"), column(line, "sqnr_db"), label=levels, **look)
    line = pick(table, levels=distinct(table, "levels")[-1])
    x = column(line, "bits")
    for name, text, dash in (
        ("rate_distortion", "rate-distortion bound, 6.02 dB per bit", "-"),
        ("lloyd_max", "best scalar levels for Gaussian numbers", (0, (4, 2))),
    ):
        y = -10 * np.log10(column(line, name))
        ax.plot(x, y, color="black", lw=1.2, ls=dash, label=text)
    ax.set_xticks(distinct(table, "bits"))
    ax.set_xlabel("bits per code")
    ax.set_ylabel("signal to error (SQNR), dB")
    ax.set_title(NAMES[tensor], color=COLORS[tensor])
    _legend(ax, loc="upper left")


# --- axis -----------------------------------------------------------------------------
@style()
def plot_axis(ax, table, bits=4):
    """Error of each tensor for each set of numbers that shares a scale.

    table : rows of `study.axis`.
    """
    table = pick(table, bits=bits)
    names = {
        r["per"]: f"{AXES[r['per']]}\n{r['numbers_per_scale']:,} per scale"
        for r in table
    }
    points = [(names[r["per"]], r["nmse"], _dot(r["tensor"])) for r in table]
    _dots(ax, list(names.values()), points)
    _log_axis(ax, "x")
    ax.set_xlabel(NMSE)
    ax.set_title(f"{bits} bits per code")
    _legend(ax)


# --- keys versus values ---------------------------------------------------------------
@style()
def plot_key_vs_value(ax, table, y="output_error", tensors=("K", "V")):
    """One column against bits, for keys alone and values alone quantized.

    table : rows of `study.key_vs_value`. y : "output_error", "nmse", "logit_rms"
    (with its prediction, for keys) or another of its columns.
    """
    for tensor in tensors:
        for per in distinct(table, "per"):
            line = pick(table, tensor=tensor, per=per)
            x = column(line, "bits")
            look = {"color": COLORS[tensor], "marker": MARKERS[per]}
            face = "white" if per == "channel" else COLORS[tensor]
            text = f"{NAMES[tensor]} {AXES[per]}"
            ax.plot(x, column(line, y), **look, mfc=face, mew=1.5, label=text)
            if y == "logit_rms":
                predicted = column(line, "logit_rms_predicted")
                ax.plot(x, predicted, **_PREDICTED, label="predicted, from the scales")
    _log_axis(ax, "y")
    ax.set_xticks(distinct(table, "bits"))
    ax.set_xlabel("bits per code")
    labels = {"output_error": OUTPUT_ERROR, "nmse": NMSE, "logit_rms": LOGIT_CHANGE}
    ax.set_ylabel(labels.get(y, y))
    _legend(ax)


@style()
def plot_softmax_bounds(ax, table, measure="tv"):
    """Each query's total variation ("tv") or "kl" against omega, under its bound.

    table : rows of `study.softmax_bounds`.
    """
    for b in distinct(table, "bits"):
        rows = pick(table, bits=b)
        look = _look(b, ls="none", markersize=4, alpha=0.7)
        ax.plot(column(rows, "omega"), column(rows, measure), **look, label=f"{b} bits")
    rows = sorted(table, key=lambda row: row["omega"])
    text = {"tv": r"bound $\tanh(\omega/4)$", "kl": r"bound $\omega^2/8$"}[measure]
    bound = column(rows, f"{measure}_bound")
    ax.plot(column(rows, "omega"), bound, color="black", ls=(0, (4, 2)), label=text)
    _log_axis(ax, "x")
    _log_axis(ax, "y")
    ax.set_xlabel(r"$\omega$: largest minus smallest logit change of a query")
    names = {"tv": "total variation of the weights", "kl": "KL divergence, nats"}
    ax.set_ylabel(names[measure])
    _legend(ax, loc="lower right", markerscale=1.5)


# --- the residual window --------------------------------------------------------------
@style()
def plot_residual(ax, table, x="residual"):
    """Output error against the window R, or against "bits_per_element".

    table : rows of `study.residual`. A window that holds every token is marked apart.
    """
    for b in distinct(table, "bits"):
        for sinks in distinct(table, "sinks"):
            line = [r for r in pick(table, bits=b, sinks=sinks) if r["quantized"]]
            look = _look(b, mfc="white" if sinks else COLORS[b])
            text = f"{b} bits" + (f", {sinks} sink token kept" if sinks else "")
            ax.plot(column(line, x), column(line, "output_error"), **look, label=text)
    for r in pick(table, quantized=0)[:1]:
        end, color = (r[x], r["output_error"]), COLORS["fp16"]
        ax.plot(*end, "*", color=color, markersize=11, clip_on=False)
        _label(ax, *end, "nothing is quantized", color, dx=0, dy=22, ha="right")
    if x == "residual":
        ax.set_xscale("symlog", base=2, linthresh=16, linscale=0.5)
        _ticks(ax.xaxis, column(table, x))
    names = {"residual": "window R: newest tokens in full precision"}
    ax.set_xlabel(names.get(x, BITS_PER_ELEMENT))
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.1 * max(column(table, "output_error"))))
    ax.set_ylabel(OUTPUT_ERROR)
    _legend(ax)


# --- rotation and smoothing -----------------------------------------------------------
_TRANSFORMS = {
    "none": "keys as they are",
    "hadamard": "rotated",
    "signed-hadamard": "signs, rotated",
}


@style()
def plot_rotation(ax, table, x="nmse"):
    """One column for each transform of the keys, with and without smoothing.

    table : rows of `study.rotation`. x : "max_over_rms", "nmse" or "output_error".
    """
    points = [
        (
            _TRANSFORMS[r["transform"]] + (" (smoothed)" if r["smooth"] else ""),
            r[x],
            _look(
                r["per"],
                marker=MARKERS[r["bits"]],
                markersize=9,
                mfc="white" if r["per"] == "channel" else COLORS[r["per"]],
                mew=1.8,
                label=f"{AXES[r['per']]}, {r['bits']} bits",
            ),
        )
        for r in table
    ]
    _dots(ax, list(dict.fromkeys(name for name, _, _ in points)), points)
    if x != "max_over_rms":
        _log_axis(ax, "x")
    ratio = "largest number of a group / its RMS"
    labels = {"max_over_rms": ratio, "nmse": NMSE, "output_error": OUTPUT_ERROR}
    ax.set_xlabel(labels[x])


# --- codebooks ------------------------------------------------------------------------
@style()
def plot_codebook(ax, table, per="token"):
    """SQNR of each set of 16 levels, for keys, values and Gaussian numbers.

    table : rows of `study.codebook`.
    """
    table = pick(table, per=per)
    names = {
        r["codebook"]: f"{r['codebook']}, {r['bits_per_element']:.2f} bits"
        for r in table
    }
    points = [(names[r["codebook"]], r["sqnr_db"], _dot(r["tensor"])) for r in table]
    _dots(ax, list(names.values()), points)
    ax.set_xlabel("signal to error (SQNR), dB")
    ax.set_title(AXES[per])
    _legend(ax)


# --- channels -------------------------------------------------------------------------
@style()
def plot_outliers(ax, table, y="absmax"):
    """Channels by size, each head its own line, over the typical channel of its head.

    table : rows of `study.channels`. y : "absmax" or "median" of |x| over the tokens.
    """
    for tensor in distinct(table, "tensor"):
        rows = pick(table, tensor=tensor)
        for h in distinct(rows, "head"):
            sizes = np.sort(column(pick(rows, head=h), y))[::-1]
            typical = np.median(sizes)
            ax.plot(
                np.arange(1, len(sizes) + 1),
                sizes / typical if typical else sizes,
                **_look(tensor, markersize=3, lw=1.3),
                label=NAMES[tensor],
            )
    ax.set_xscale("log", base=2)
    _ticks(ax.xaxis, 2 ** np.arange(1 + int(np.log2(len(sizes)))))
    _log_axis(ax, "y")
    ax.set_xlabel("channel of a head, by rank")
    ax.set_ylabel({"absmax": "largest |x|", "median": "median |x|"}[y] + " / typical")
    _legend(ax)


@style()
def plot_channel_map(ax, table, tensor="K"):
    """|x| of one head as a picture: channels across, tokens down.

    table : rows of `study.channel_map`. Returns the image, for a colour bar.
    """
    rows = pick(table, tensor=tensor)
    tokens, channels = distinct(rows, "token"), distinct(rows, "channel")
    picture = column(rows, "mean").reshape(len(tokens), len(channels))
    step = tokens[1] - tokens[0] if len(tokens) > 1 else 1
    image = ax.imshow(
        picture,
        cmap="viridis",
        aspect="auto",
        vmin=0,
        extent=(-0.5, len(channels) - 0.5, tokens[-1] + step, 0),
    )
    ax.grid(False)
    ax.set_xlabel("channel")
    ax.set_ylabel("token")
    ax.set_title(NAMES[tensor], color=COLORS[tensor])
    return image


# --- a page ---------------------------------------------------------------------------
def _tint(color, share):
    """A colour mixed with white: 1 leaves it, 0 is white."""
    return tuple(1 - share * (1 - np.array(to_rgb(color))))


def _boxes(ax):
    """An axes that shows boxes alone."""
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _box(ax, x, y, width, text, face, size=9):
    """A box of height 1 with a text in it, dark on light or light on dark."""
    ax.add_patch(Rectangle((x, y), width, 1, facecolor=face, edgecolor="white", lw=1.5))
    dark = np.mean(to_rgb(face)) < 0.5
    color = "white" if dark else "#222222"
    middle = x + width / 2, y + 0.5
    ax.text(*middle, text, ha="center", va="center", fontsize=size, color=color)


def _whole_parts(table):
    return [row for row in table if row["lane"] is None]


@style()
def plot_page_parts(ax, table):
    """What follows what in a page, from its first byte on. Lengths are not to scale.

    table : rows of the figure `page`: parts have no lane, codes have one.
    """
    x = 0
    for row in _whole_parts(table):
        side, kind = row["part"].split()
        width = 3 if kind == "codes" else 1.6
        face = _tint(COLORS["K" if side == "key" else "V"], 0.8 if width == 3 else 0.3)
        _box(ax, x, 0, width, f"{row['part']}\n{row['nbytes']:,.0f} bytes", face, 10)
        x += width
    last = row["byte"] + row["nbytes"]
    _boxes(ax)
    ax.set(xlim=(0, x), ylim=(0, 1), xticks=(), yticks=())
    ax.set_title(f"a page of 64 tokens, one KV head: {last:,.0f} bytes, not to scale")


@style()
def plot_page_square(ax, table, lane):
    """Which lane holds which of the first 16 x 16 codes; `lane` stands out."""
    for row in table:
        if row["lane"] is None or row["channel"] >= 16:
            continue
        mine = row["lane"] == lane
        share = 1 if mine else 0.08 + 0.1 * (row["lane"] % 4)
        face = _tint(COLORS["K"], share)
        _box(ax, row["channel"], row["token"], 1, str(row["lane"]), face)
    _boxes(ax)
    middles = np.arange(0.5, 16)
    ax.set_xticks(middles, range(16))
    ax.set_yticks(middles, range(16))
    ax.set(xlim=(0, 16), ylim=(16, 0), xlabel="channel", ylabel="token")
    ax.set_title("a square of 16 x 16 codes: the lane that holds each")


@style()
def plot_page_lane(ax, table, lane):
    """The 16 bytes of one lane: token and channel of each code, low bits first."""
    mine = pick(table, lane=lane)
    for row in mine:
        word, bit = divmod(row["bit"], 32)
        face = _tint(COLORS["K"], 1 if word == 0 else 0.35)
        text = f"t {row['token']}\nc {row['channel']}"
        _box(ax, bit // 4, word, 1, text, face, 10)
    _boxes(ax)
    ax.set_xticks(np.arange(0.5, 8), [f"{4 * i}" for i in range(8)])
    words = [f"word {w}:\nchannels\n{16 * w} to {16 * w + 15}" for w in range(4)]
    ax.set_yticks(np.arange(0.5, 4), words)
    ax.set(xlim=(0, 8), ylim=(4, 0), xlabel="lowest bit of the code in its word")
    ax.set_title(f"what lane {lane} loads: 16 bytes (t token, c channel)")


# --- decode kernels on a GPU ----------------------------------------------------------
BITS_OF_CACHE = {16: "16 bits", 8: "8 bits", 4: "4 bits", 2: "2 bits"}
FASTER = 1.5  # times, for the context from which bits are worth having


def _kinds(table):
    """(rows of a kind, its look), the predicted ones first."""
    dashed, solid = {"ls": (0, (4, 2)), "marker": ""}, {"ls": "-"}
    for kind, look in (("predicted", dashed), ("measured", solid)):
        yield kind, pick(table, kind=kind), look


def _of_bits(bits):
    key = "fp16" if bits == 16 else bits
    return {"color": COLORS[key], "marker": MARKERS.get(key, "D")}


def _curve(rows, bits):
    """The newest kernel on one sequence, the shortest context first."""
    rows = pick(rows, kernel="v5", bits=bits, B=1)
    return sorted(rows, key=lambda row: row["T"])


@style()
def plot_gpu_bandwidth(ax, table):
    """Percent of a copy's bandwidth against bytes moved, one line for each bits.

    table : rows of the figure `gpu_decode`, of one device. Under a predicted line the
    range down to what it would be if nothing overlapped.
    """
    for kind, rows, look in _kinds(table):
        for bits, name in BITS_OF_CACHE.items():
            line = _curve(rows, bits)
            if not line:
                continue
            x, y = column(line, "nbytes") / 1e6, column(line, "copy_percent")
            lines = ax.plot(x, y, **_of_bits(bits) | look, label=f"{name}, {kind}")
            if kind == "predicted":
                low, color = column(line, "copy_percent_apart"), lines[0].get_color()
                ax.plot(x, low, color=color, lw=1, ls=(0, (1, 2)))
                ax.fill_between(x, low, y, color=color, alpha=0.08)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("MB that a launch must read")
    ax.set_ylabel("bandwidth, % of a copy")


@style()
def plot_gpu_speedup(ax, table):
    """Times faster than 16 bits against the context, under 16 / (stored bits)."""
    for _, rows, look in _kinds(table):
        for bits in (8, 4, 2):
            line = _curve(rows, bits)
            x, y = column(line, "T"), column(line, "speedup")
            ax.plot(x, y, **_of_bits(bits) | look)
    for bits in (8, 4, 2):
        for row in _curve(table, bits)[:1]:
            ceiling, color = row["ceiling"], COLORS[bits]
            ax.axhline(ceiling, color=color, lw=1, ls=(0, (1, 2)))
            text = f"{bits} bits: at most {ceiling:.2f}"
            _label(ax, row["T"], ceiling, text, color, dx=0, dy=7)
    ax.set_xscale("log", base=2)
    _ticks(ax.xaxis, 4 ** np.arange(5, 11))
    ax.xaxis.set_major_formatter(FuncFormatter(_tokens))
    ax.set_ylim(0.9, 1.1 * ax.get_ylim()[1])  # room for the uppermost ceiling
    ax.set_xlabel("context T, tokens; one sequence, 8 KV heads")
    ax.set_ylabel("times faster than 16 bits")


def _tokens(T, _=None):
    return f"{T / 2**20:g}M" if T >= 2**20 else f"{T / 1024:g}K"


def first_faster(line):
    """The context from which rows, ordered by T, are `FASTER`; None if none is."""
    for i, row in enumerate(line):
        if row["speedup"] < FASTER:
            continue
        x, y = (column(line[max(i - 1, 0) : i + 1], name) for name in ("T", "speedup"))
        return float(2 ** np.interp(FASTER, y, np.log2(x)))
    return None


@style()
def plot_gpu_crossover(ax, table):
    """The context from which fewer bits are `FASTER`, on each device."""
    points = []
    for kind, rows, _ in _kinds(table):
        for device in distinct(rows, "device"):
            for bits in (8, 4, 2):
                T = first_faster(_curve(pick(rows, device=device), bits))
                look = _of_bits(bits) | {"markersize": 9, "mew": 1.8}
                look["mfc"] = "white" if kind == "predicted" else look["color"]
                points += [(device, T, look)] if T else []
    names = list(dict.fromkeys(name for name, _, _ in points))
    _dots(ax, names, points)
    ax.set_xscale("log", base=2)
    low, high = ax.get_xlim()
    _ticks(ax.xaxis, [T for T in 2 ** np.arange(9, 21) if low <= T <= high])
    ax.xaxis.set_major_formatter(FuncFormatter(_tokens))
    ax.set_xlabel(f"context from which fewer bits are {FASTER} times as fast")


@style()
def plot_gpu_ladder(ax, table, B, T):
    """Percent of a copy's bandwidth for every kernel that ran on B sequences of T."""
    rows = [row for row in pick(table, B=B, T=T) if row["bits"] in BITS_OF_CACHE]
    points = []
    for kind, some, _ in _kinds(rows):
        for row in some:
            look = _of_bits(row["bits"]) | {"markersize": 9, "mew": 1.8}
            look["mfc"] = "white" if kind == "predicted" else look["color"]
            points.append((row["kernel"], row["copy_percent"], look))
    names = sorted(
        {name for name, _, _ in points}, key=lambda n: (not n[1:].isdigit(), n)
    )
    _dots(ax, names, points)
    ax.set_xscale("log")
    _ticks(ax.xaxis, (1, 2, 5, 10, 20, 50, 100))
    ax.set_xlabel(f"bandwidth, % of a copy; {B} sequences of {_tokens(T)} tokens")


# --- a study's picture ----------------------------------------------------------------
def _figure_group_size(table):
    tensors, axes_of = distinct(table, "tensor"), distinct(table, "per")
    n, m = len(tensors), len(axes_of) + 1
    fig, axes = plt.subplots(n, m, figsize=(5 * m, 4.2 * n), squeeze=False, sharey=True)
    for row, tensor in zip(axes, tensors, strict=True):
        for ax, per in zip(row, axes_of, strict=False):
            plot_group_size_bits(ax, table, tensor, per)
        plot_pareto(row[-1], table, tensor)
        row[-1].set_title(f"{NAMES[tensor]}: what a group costs", color=COLORS[tensor])
        for ax in row[1:]:
            ax.set_ylabel("")
    _legend(axes[0][0], loc="lower right")
    return fig


def _row(width, panels, height=4.4, **options):
    """A figure with `panels` axes side by side that share y, as a list."""
    options = {"sharey": True, "squeeze": False, **options}
    fig, axes = plt.subplots(1, panels, figsize=(width * panels, height), **options)
    return fig, list(axes[0])


def _figure_bits(table):
    tensors = distinct(table, "tensor")
    fig, axes = _row(4.6, len(tensors), 5)
    for ax, tensor in zip(axes, tensors, strict=True):
        plot_bits(ax, table, tensor)
        ax.label_outer()
    legend_below(fig, axes)
    return fig


def _figure_axis(table):
    bits = distinct(table, "bits")
    fig, axes = _row(4.6, len(bits))
    for ax, b in zip(axes, bits, strict=True):
        plot_axis(ax, table, b)
    legend_below(fig, axes)
    return fig


def _figure_key_vs_value(table):
    fig, (stored, logits, output) = plt.subplots(1, 3, figsize=(14, 4.6))
    plot_key_vs_value(stored, table, "nmse")
    plot_key_vs_value(logits, table, "logit_rms", ("K",))
    plot_key_vs_value(output, table, "output_error")
    titles = ("stored numbers", "logits, keys quantized", "attention output")
    for ax, title in zip((stored, logits, output), titles, strict=True):
        ax.set_title(title)
    return fig


def _figure_residual(table):
    fig, (left, right) = _row(5.5, 2, 4.8)
    plot_residual(left, table)
    plot_residual(right, table, "bits_per_element")
    right.set_ylabel("")
    legend_below(fig, [left, right])
    return fig


def _figure_rotation(table):
    fig, axes = _row(4.7, 3, 4.8)
    plot_rotation(axes[0], pick(table, bits=table[0]["bits"]), "max_over_rms")
    plot_rotation(axes[1], table, "nmse")
    plot_rotation(axes[2], table, "output_error")
    legend_below(fig, axes)
    return fig


def _figure_codebook(table):
    axes_of = distinct(table, "per")
    fig, axes = _row(5.5, len(axes_of), 4.8, sharex=True)
    for ax, per in zip(axes, axes_of, strict=True):
        plot_codebook(ax, table, per)
    legend_below(fig, axes)
    return fig


_FIGURES = {
    "group-size": _figure_group_size,
    "bits": _figure_bits,
    "axis": _figure_axis,
    "key-vs-value": _figure_key_vs_value,
    "residual": _figure_residual,
    "rotation": _figure_rotation,
    "codebook": _figure_codebook,
}


@style()
def figure(study, table, text="", source=""):
    """A study's picture: all of its panels, with the words of `headline`.

    study : a name in `study.STUDIES`. table : its rows. Returns a matplotlib figure,
    for `save`. Raises ValueError for another name.
    """
    if study not in _FIGURES:
        raise ValueError(f"study={study!r}; valid: {', '.join(_FIGURES)}")
    fig = _FIGURES[study](table)
    headline(fig, text, source)
    return fig

"""A sign sketch of the residual makes the attention output worse, not better.

Methods of papers on one layer, all tokens quantized. TurboQuant's product form gives
one of its bits to signs of the residual: its scores are unbiased, and so noisy that the
output is worse than without. Scales or codebooks per channel of K (KVQuant, KIVI) and a
rotation (QuaRot, TurboQuant) share the front; GEAR's low-rank part lowers the error of
KIVI's groups for 1.75 bits.
"""

from matplotlib import pyplot as plt

from kvq import plots
from kvq.formats.research import measure
from kvq.samples import real_kv

NAME = "research"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens, 9 x 64 queries; no full-precision window"
FAMILIES = {  # the first word of a method's name -> (marker, colour number)
    "kivi": ("o", 0),
    "gear": ("s", 1),
    "kvquant": ("D", 2),
    "turboquant": ("^", 3),
    "polarquant": ("v", 4),
    "qjl": ("X", 5),
    "quarot": ("P", 6),
    "atom": ("*", 7),
}


def data():
    return measure(real_kv())


def finding(table):
    error = {row["method"]: row["output_error"] for row in table}
    mse, product = (error[f"turboquant-3 {form}"] for form in ("mse", "product"))
    return (
        f"TurboQuant at 3 bits errs by {100 * mse:.0f} %, with a sign sketch of "
        f"the residual by {100 * product:.0f} %"
    )


def family(row):
    return row["method"].partition("-")[0].partition(" ")[0]


def mean_bits(row):
    return (row["bits_key"] + row["bits_value"]) / 2


def side(name):
    """Where the label of a point stands: KVQuant's below left, in a crowd."""
    if name in ("kvquant", "atom"):
        return {"xytext": (-6, -9), "ha": "right"}
    return {"xytext": (6, 4)}


@plots.style()
def draw(table, path_stem):
    fig, ax = plt.subplots(figsize=(10, 5.8))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for name, (marker, color) in FAMILIES.items():
        rows = [row for row in table if family(row) == name]
        x, y = [mean_bits(r) for r in rows], [r["output_error"] for r in rows]
        color = colors[color % len(colors)]
        label = "atom, and flexgen at D = 64" if name == "atom" else name
        ax.plot(x, y, marker, color=color, markersize=8, linestyle="", label=label)
        for row, at in zip(rows, zip(x, y, strict=True), strict=True):
            text = row["method"].removeprefix(name).strip("- ")
            ax.annotate(text, at, textcoords="offset points", fontsize=7, **side(name))
    ax.set_yscale("log")
    ax.set_xlabel("stored bits per number, mean of keys and values")
    ax.set_ylabel("relative error of the attention output")
    ax.legend(ncols=2, fontsize=8)
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

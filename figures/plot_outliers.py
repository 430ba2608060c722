"""Keys have outlier channels in all four layers; values exceed them in layer 0 alone.

Each line is one head: its channels by size, over the typical (median) channel of that
head. The lower row has the median over tokens instead of the maximum: a channel that
is high in both is large at most tokens, not once. By that measure some value heads
have one persistent channel too, below those of the same layer's keys.
"""

from matplotlib import pyplot as plt

from kvq import plots, study
from kvq.samples import LAYERS, real_kv

NAME = "outliers"
SOURCE = "SmolLM2-135M, layers 0, 7, 15 and 29 of 30, 3 KV heads each, 512 tokens"


def data():
    return [
        {"layer": layer, **row}
        for layer in LAYERS
        for row in study.channels(real_kv(layer))
    ]


def finding(table):
    keys = max(study.outlier_ratios(plots.pick(table, tensor="K")))
    values = {
        layer: max(study.outlier_ratios(plots.pick(table, tensor="V", layer=layer)))
        for layer in LAYERS
    }
    later = max(ratio for layer, ratio in values.items() if layer > 0)
    return (
        f"The largest key channel reaches {keys:.1f} times the typical one, the "
        f"largest value channel {later:.1f} times, but {values[0]:.1f} in layer 0"
    )


@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplots(2, len(LAYERS), figsize=(14, 7), sharex=True, sharey="row")
    for row, y in zip(axes, ("absmax", "median"), strict=True):
        for ax, layer in zip(row, LAYERS, strict=True):
            plots.plot_outliers(ax, plots.pick(table, layer=layer), y)
            ax.label_outer()
            if ax is not axes[0, 0]:
                ax.get_legend().remove()
    for ax, layer in zip(axes[0], LAYERS, strict=True):
        ax.set_title(f"layer {layer}")
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

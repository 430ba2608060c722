"""A window helps a layer that attends nearby; elsewhere one kept sink token does more.

In layer 15 more than a third of the weight lies on token 0, which no window of the
newest tokens holds. With that token kept, the window helps there too. Still, 4 bits
without a window beat 2 bits with half of the tokens in one, and store less.
"""

from matplotlib import pyplot as plt

from kvq import plots, study
from kvq.samples import real_kv

NAME = "residual"
LAYERS = (0, 15)
SOURCE = (
    "SmolLM2-135M, 512 tokens, 9 x 16 queries; keys per channel, values per token, G=32"
)


def data():
    return [
        {"layer": layer, **row}
        for layer in LAYERS
        for row in study.residual(real_kv(layer))
    ]


def saved(table, layer, **setting):
    """The part of the 2-bit output error that a setting removes."""
    rows = plots.pick(table, layer=layer, bits=2)
    bare = plots.pick(rows, residual=0, sinks=0)[0]["output_error"]
    return 1 - plots.pick(rows, **setting)[0]["output_error"] / bare


def finding(table):
    near, far = (saved(table, layer, residual=128, sinks=0) for layer in LAYERS)
    sink = saved(table, 15, residual=0, sinks=1)
    return (
        f"2 bits: a window of 128 removes {100 * near:.0f} % of the error in layer 0, "
        f"{100 * far:.0f} % in layer 15; there, one sink token removes "
        f"{100 * sink:.0f} %"
    )


@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.8), sharey=True)
    for ax, layer in zip(axes, LAYERS, strict=False):
        plots.plot_residual(ax, plots.pick(table, layer=layer))
        ax.set_title(f"layer {layer}")
    plots.plot_residual(axes[2], plots.pick(table, layer=15), "bits_per_element")
    axes[2].set_title("layer 15, what a window costs")
    for ax in axes[1:]:
        ax.label_outer()
        ax.get_legend().remove()
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

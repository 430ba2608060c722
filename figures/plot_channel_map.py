"""Large keys stand in the same few channels at every token; large values do not.

Each pixel is the mean |x| of one channel over 16 tokens, one head. Vertical stripes
are persistent channels: a scale per channel fits them, a scale per token cannot.
"""

import numpy as np

from kvq import plots, study
from kvq.samples import real_kv

NAME = "channel_map"
SOURCE = "SmolLM2-135M, layer 15, KV head 0, 512 tokens; mean |x| over 16 tokens"


def data():
    return study.channel_map(real_kv())


def brightest(table, tensor):
    """Of a channel's mean over all tokens: largest over typical channel."""
    rows = plots.pick(table, tensor=tensor)
    means = [
        np.mean(plots.column(plots.pick(rows, channel=c), "mean"))
        for c in plots.distinct(rows, "channel")
    ]
    return max(means) / np.median(means)


def finding(table):
    return (
        f"One key channel is {brightest(table, 'K'):.0f} times the typical one at every "
        f"token; the largest value channel is {brightest(table, 'V'):.1f} times"
    )


def draw(table, path_stem):
    fig, axes = plots.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for ax, tensor in zip(axes, "KV", strict=True):
        image = plots.plot_channel_map(ax, table, tensor)
        fig.colorbar(image, ax=ax, label="mean |x|")
        ax.label_outer()
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

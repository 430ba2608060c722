"""Large keys stand in the same few channels at every token; large values do not.

Each pixel is the mean |x| of one channel over 16 tokens, one head. Vertical stripes
are persistent channels: a scale per channel fits them, a scale per token cannot.
"""

import numpy as np
from matplotlib import pyplot as plt

from kvq import plots, study
from kvq.samples import real_kv

NAME = "channel_map"
SOURCE = "SmolLM2-135M, layer 15, KV head 0, 512 tokens; mean |x| over 16 tokens"


def data():
    return study.channel_map(real_kv())


def steadiest(table, tensor):
    """How many times the typical channel the steadiest channel always is.

    Of each block, a channel over the median channel; of each channel, its smallest.
    """
    rows = plots.pick(table, tensor=tensor)
    blocks = len(plots.distinct(rows, "token"))
    picture = plots.column(rows, "mean").reshape(blocks, -1)
    ratio = picture / np.median(picture, axis=1, keepdims=True)
    return ratio.min(axis=0).max()


def finding(table):
    return (
        f"One key channel stays above {steadiest(table, 'K'):.0f} times the typical "
        f"one; the steadiest value channel falls to {steadiest(table, 'V'):.1f} times"
    )


@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for ax, tensor in zip(axes, "KV", strict=True):
        image = plots.plot_channel_map(ax, table, tensor)
        fig.colorbar(image, ax=ax, label="mean |x|")
        ax.label_outer()
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

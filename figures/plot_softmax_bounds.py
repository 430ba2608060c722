"""No query exceeds the softmax bounds; a typical one stays well below them.

Keys per token, groups of 32. omega is how far apart the logits of one query move.
The bounds need nothing else, so they must hold for the worst weights; real queries
have several tokens whose logit errors average out.
"""

import numpy as np
from matplotlib import pyplot as plt

from kvq import plots, study
from kvq.samples import real_kv

NAME = "softmax_bounds"
SOURCE = (
    "SmolLM2-135M, layer 15, 512 tokens, 9 x 16 queries; keys per token, groups of 32"
)


def data():
    return study.softmax_bounds(real_kv())


def finding(table):
    tv, kl = (
        [r[name] / r[f"{name}_bound"] for r in plots.pick(table, bits=4)]
        for name in ("tv", "kl")
    )
    return (
        f"At 4 bits the median query has {100 * np.median(tv):.0f} % of the bound on "
        f"total variation, {100 * np.median(kl):.0f} % of that on KL"
    )


@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.8))
    for ax, measure in zip(axes, ("tv", "kl"), strict=True):
        plots.plot_softmax_bounds(ax, table, measure)
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

"""Spend on code bits first: groups under 32 numbers cost more than they save.

Of all settings with 2 to 8 bits, those that nothing beats have groups of 32 numbers
or more, until codes have 8 bits and only groups are left to shrink. Per channel wins
for values too, judged by the stored numbers; `plot_key_vs_value.py` shows that the
attention output says otherwise.
"""

from matplotlib import pyplot as plt

from kvq import plots, study
from kvq.samples import real_kv

NAME = "pareto"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens; asymmetric levels, float16 scale and zero"


def data():
    return study.group_size(real_kv(), bits=range(2, 9))


def smallest_group(table):
    """The smallest group on the front of K or V that has fewer than 8 bits."""
    fronts = [study.pareto_front(plots.pick(table, tensor=name)) for name in "KV"]
    return min(r["group"] for front in fronts for r in front if r["bits"] < 8)


def finding(table):
    return (
        "Spend on code bits first: below 8 bits, no group under "
        f"{smallest_group(table)} numbers is worth its scales"
    )


@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplots(1, 2, figsize=(12, 5.4), sharey=True)
    for ax, tensor in zip(axes, "KV", strict=True):
        plots.plot_pareto(ax, table, tensor)
        ax.set_title(plots.NAMES[tensor], color=plots.COLORS[tensor])
        ax.label_outer()
    plots.legend_below(fig, axes, 10)
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

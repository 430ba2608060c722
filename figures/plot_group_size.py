"""Real keys have several times less error with a scale per channel than per token.

At equal bits and equal group size both store the same bytes. Between the two lies
what theory expects of Gaussian numbers: outlier channels spoil a token's groups, and
within one channel the numbers are more alike than Gaussian ones.
"""

from matplotlib import pyplot as plt

from kvq import plots, study
from kvq.samples import real_kv

NAME = "group_size"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens; asymmetric levels, float16 scale and zero"


def data():
    return study.group_size(real_kv())


def finding(table):
    ratios = [
        token["nmse"] / channel["nmse"]
        for b in (2, 4)
        for token in plots.pick(table, tensor="K", per="token", bits=b)
        for channel in plots.pick(
            table, tensor="K", per="channel", bits=b, group=token["group"]
        )
    ]
    return (
        f"Keys: a scale per channel leaves {min(ratios):.0f} to {max(ratios):.0f} "
        "times less error than one per token, at equal size"
    )


@plots.style()
def draw(table, path_stem):
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.9))
    plots.plot_group_size(left, table, "K", (2, 4))
    plots.plot_pareto(right, table, "K")
    left.set_title("keys, error against group size")
    right.set_title("keys, what a group costs")
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

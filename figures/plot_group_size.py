"""tmp"""
from kvq import plots, study
from kvq.samples import real_kv

NAME = "group_size"


def data():
    return study.group_size(real_kv())


def draw(table, path_stem):
    fig, (left, right) = plots.subplots(1, 2, figsize=(11, 4.8))
    plots.plot_group_size(left, table, "K", (4, 2))
    plots.plot_pareto(right, table, "K")
    plots.headline(fig, "Same bits, same scales")
    plots.save(fig, path_stem)

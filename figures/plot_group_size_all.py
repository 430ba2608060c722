"""The stored scales predict the error of every setting; Gaussian numbers do not.

Keys and values, per token and per channel, at 2, 3, 4 and 8 bits. The error that the
stored scales explain, s^2 / 12, lies on the measured one. The same formula for
Gaussian numbers is too low for keys per token and too high for keys per channel.
"""

from kvq import plots, study
from kvq.samples import real_kv

NAME = "group_size_all"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens; asymmetric levels, float16 scale and zero"


def data():
    return study.group_size(real_kv())


def finding(table):
    off = max(abs(r["predicted_scales"] / r["nmse"] - 1) for r in table)
    gaussian = [r["predicted_gaussian"] / r["nmse"] for r in table]
    return (
        f"The stored scales predict every error within {100 * off:.0f} %; Gaussian "
        f"numbers are off by factors from {min(gaussian):.1f} to {max(gaussian):.1f}"
    )


def draw(table, path_stem):
    fig = plots.figure("group-size", table, finding(table), SOURCE)
    plots.save(fig, path_stem)

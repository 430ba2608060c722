"""Keys want a scale per channel, before RoPE still more than after; values hardly care.

One scale for a whole head or tensor costs no metadata and has the largest error.
"""

from kvq import plots, study
from kvq.samples import ROPE_BASE, real_kv

NAME = "axis"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens; asymmetric levels, float16 scale and zero"


def data():
    return study.axis(real_kv(), rope_base=ROPE_BASE)


def token_over_channel(table, tensor, bits=4):
    """How many times the error per channel the error per token is."""
    token, channel = (
        plots.pick(table, tensor=tensor, per=per, bits=bits)[0]["nmse"]
        for per in ("token", "channel")
    )
    return token / channel


def finding(table):
    keys, before, values = (
        token_over_channel(table, name) for name in ("K", "K before RoPE", "V")
    )
    return (
        f"4 bits: per token has {keys:.1f} times the error of per channel for keys, "
        f"{before:.1f} before RoPE, {values:.1f} for values"
    )


def draw(table, path_stem):
    plots.save(plots.figure("axis", table, finding(table), SOURCE), path_stem)

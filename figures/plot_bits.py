"""A bit buys 6 dB, but not with levels made for Gaussian numbers on keys per token.

Lloyd-Max levels, scaled by the RMS, are the best ones for Gaussian numbers and meet
their theory. On real keys an outlier lies beyond the last level, and more bits hardly
help. One asymmetric bit is worse than storing nothing: both of its levels are
extremes of the group.
"""

from kvq import plots, study
from kvq.samples import real_kv

NAME = "bits"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens; per token, groups of 64, float16 scales"


def data():
    return study.bits(real_kv())


def db_per_bit(table, tensor, levels):
    """SQNR gained per bit from 4 to 8 bits."""
    low, high = (
        plots.pick(table, tensor=tensor, levels=levels, bits=b)[0]["sqnr_db"]
        for b in (4, 8)
    )
    return (high - low) / 4


def finding(table):
    uniform, gaussian = (
        db_per_bit(table, "K", levels) for levels in ("asymmetric", "lloyd-max")
    )
    return (
        f"Keys per token gain {uniform:.1f} dB per bit with asymmetric levels, "
        f"{gaussian:.1f} dB with levels made for Gaussian numbers"
    )


def draw(table, path_stem):
    plots.save(plots.figure("bits", table, finding(table), SOURCE), path_stem)

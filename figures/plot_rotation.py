"""Rotating or smoothing keys tames a token's outliers; per channel needs neither.

Smoothing takes away each channel's mean, and with it most of the outliers. A rotation
spreads what is left. Both bring keys per token near keys per channel, and neither
gets below it. At 2 bits per channel the rotation raises the error of the keys a
little and lowers that of the output: the two need not agree.
"""

from kvq import plots, study
from kvq.samples import real_kv

NAME = "rotation"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens, 9 x 64 queries; asymmetric, groups of 64"


def data():
    return study.rotation(real_kv())


def gain(table, transform, smooth):
    """How many times less error a transform leaves, keys per token at 4 bits."""
    rows = plots.pick(table, per="token", bits=4)
    plain = plots.pick(rows, transform="none", smooth=0)[0]["nmse"]
    return plain / plots.pick(rows, transform=transform, smooth=smooth)[0]["nmse"]


def finding(table):
    rotated, smoothed = gain(table, "hadamard", 0), gain(table, "none", 1)
    return (
        f"4-bit keys per token: rotating leaves {rotated:.1f} times less error, "
        f"smoothing {smoothed:.1f}, both {gain(table, 'hadamard', 1):.1f}"
    )


def draw(table, path_stem):
    plots.save(plots.figure("rotation", table, finding(table), SOURCE), path_stem)

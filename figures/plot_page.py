"""A lane's 16 bytes are exactly its numbers of four 16 x 16 squares of a page.

Tensor cores take a matrix of 16 x 16 numbers from the registers of 32 lanes, 8 numbers
of each. A page stores the codes in this order: no number moves from lane to lane.
"""

import numpy as np
from matplotlib import pyplot as plt

from kvq import Scheme, plots
from kvq.kernels.pages import LANES, PageLayout, code_places

NAME = "page"
D, LANE = 128, 9  # the lane that the picture follows
LAYOUT = PageLayout(
    Scheme(4, "channel", 64, "asymmetric"), Scheme(4, "token", 64, "asymmetric"), D
)
PARTS = (
    *("key scales", "key zeros", "key codes"),
    *("value codes", "value scales", "value zeros"),
)
SOURCE = (
    "4 bits, D = 128, keys per channel, values per token, G = 64: kernels/pages.py. "
    "Squares: tokens 0 to 15, channels 0 to 63"
)


def data():
    """The parts of a page; then each code of the first 512 bytes of key codes."""
    words = np.array([*LAYOUT.head, *LAYOUT.step])
    starts = 4 * (np.cumsum(words) - words)
    parts = [
        _row(name, int(start), float(4 * n))
        for name, start, n in zip(PARTS, starts, words, strict=True)
    ]
    places = code_places(LAYOUT.tokens, D, 4)
    codes = [
        _row("key codes", int(starts[2] + p // 8), 0.5, p, int(token), int(channel))
        for (token, channel), p in np.ndenumerate(places)
        if p < 128 * LANES
    ]
    return parts + codes


def _row(part, byte, nbytes, place=None, token=None, channel=None):
    """A row; place : the lowest bit of a code among the codes of its side."""
    lane, bit = (None, None) if place is None else divmod(int(place), 128)
    return {
        **{"part": part, "byte": byte, "nbytes": nbytes},
        **{"lane": lane, "bit": bit, "token": token, "channel": channel},
    }


def finding(table):
    mine = plots.pick(table, lane=LANE)
    tokens = len(plots.distinct(mine, "token"))
    channels = len(plots.distinct(mine, "channel"))
    return (
        f"The 16 bytes of lane {LANE}: {len(mine)} codes, {tokens} tokens x {channels} "
        "channels, what this lane must hold of four products"
    )


@plots.style()
def draw(table, path_stem):
    fig, axes = plt.subplot_mosaic(
        [["parts", "parts"], ["square", "lane"]],
        figsize=(13, 7.4),
        height_ratios=(1, 5.2),
        width_ratios=(1, 1.25),
    )
    plots.plot_page_parts(axes["parts"], table)
    plots.plot_page_square(axes["square"], table, LANE)
    plots.plot_page_lane(axes["lane"], table, LANE)
    plots.headline(fig, finding(table), SOURCE)
    plots.save(fig, path_stem)

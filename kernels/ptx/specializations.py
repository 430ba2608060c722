"""Which compiled kernels come with the project: a short list, for lessons and laptops.

v1 takes everything at run time: one text serves every bit width, group and shape. v2
and v3 are compiled for one bit width, group, head dimension and more. Here are those
of two common kinds of model, for every bit width. Of the kernels that use tensor cores
there is one setting, and the pages that they read.
"""

from itertools import product

import numpy as np

from kvq.kernels.cases import (
    Case,
    launches,
    supported,
    tensor_core_versions,
    versions,
)
from kvq.kernels.decode.growing import GrowingCache

BITS = (8, 4, 3, 2)
# Llama 3 and Mistral: D = 128, 4 query heads a KV head. SmolLM2: D = 64, 3 of them.
SETTINGS = (
    {"per": "channel", "group": 32, "D": 128, "ratio": 4},
    {"per": "token", "group": 64, "D": 128, "ratio": 4},
    {"per": "channel", "group": 32, "D": 64, "ratio": 3},
)
# Tensor cores: Llama 3 again, and the same in full precision.
PAGES = {"per": "channel", "group": 64, "D": 128, "ratio": 4}
PAGE_BITS = (16, 8, 4, 2)


def cases():
    """Every Case whose kernels are compiled."""
    for op, version in versions():
        if version == "v1":
            for dtype in ("float16", "float32"):
                yield Case(op, version, T=32, dtype=dtype)
            continue
        for bits, settings in product(BITS, SETTINGS):
            case = Case(op, version, bits, T=64, **settings)
            if supported(case):
                yield case


def page_launches():
    """The Launches of all kernels that write or read pages."""
    for bits in PAGE_BITS:
        written = []
        for op, version in tensor_core_versions():
            case = Case(op, version, bits, T=128, **PAGES)
            yield from launches(case)
        cache = GrowingCache(case.policy, 1, 1, case.D, case.T, run=written.extend)
        x = np.zeros((1, 1, case.T, case.D), np.float16)
        cache.append(x, x)
        yield from written


def specializations():
    """[(source, kernel, constants)], each once, in order."""
    found = {}
    ladder = [launch for case in cases() for launch in launches(case)]
    for launch in [*ladder, *page_launches()]:
        settings = tuple(sorted(launch.constants.items()))
        found[launch.source, launch.kernel, settings] = launch.constants
    ladder = [(source, kernel, c) for (source, kernel, _), c in found.items()]
    return [*ladder, ("faults/six_faults", "reverse", {})]  # for a lesson

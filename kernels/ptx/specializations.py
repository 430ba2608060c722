"""Which compiled kernels come with the project: a short list, for lessons and laptops.

v1 takes everything at run time: one text serves every bit width, group and shape. v2
and v3 are compiled for one bit width, group, head dimension and more. Here are those
of two common kinds of model, for every bit width.
"""

from itertools import product

from kvq.kernels.cases import Case, launches, supported, versions

BITS = (8, 4, 3, 2)
# Llama 3 and Mistral: D = 128, 4 query heads a KV head. SmolLM2: D = 64, 3 of them.
SETTINGS = (
    {"per": "channel", "group": 32, "D": 128, "ratio": 4},
    {"per": "token", "group": 64, "D": 128, "ratio": 4},
    {"per": "channel", "group": 32, "D": 64, "ratio": 3},
)


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


def specializations():
    """[(source, kernel, constants)], each once, in order."""
    found = {}
    for case in cases():
        for launch in launches(case):
            settings = tuple(sorted(launch.constants.items()))
            found[launch.source, launch.kernel, settings] = launch.constants
    ladder = [(source, kernel, c) for (source, kernel, _), c in found.items()]
    return [*ladder, ("faults/six_faults", "reverse", {})]  # for a lesson

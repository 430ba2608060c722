"""`pack` on the host: x -> the arrays that the kernels take -> a QuantizedTensor.

code = clip(round((x - z) / s), lowest, highest) + offset, packed into 32-bit words
"""

import math
from types import SimpleNamespace

import numpy as np

from kvq.dtypes import as_float_array
from kvq.kernels.host import (
    C_TYPES,
    Version,
    first_invalid,
    flat,
    launch,
    narrow,
    no_reason,
    shaped,
    unwritten,
    version_of,
    versions,
)
from kvq.kernels.launch import Launch
from kvq.kernels.layouts import from_words, row_words
from kvq.kernels.pack import v2_one_pass
from kvq.packing import pack
from kvq.tensor import QuantizedTensor

VERSIONS = versions(
    Version("v1", "pack/v1_word_per_thread"),
    Version("v2", "pack/v2_one_pass", "paired", shuffles=True),
)
V1_LIMITS = {
    "levels": ("symmetric", "asymmetric"),
    "per": ("token", "channel", "head"),
    "transform": (None,),
    "rounding": ("half-even",),
    "scale_dtype": ("float16", "float32"),
}


def unsupported(scheme, version, D=None):
    """None, or why `version` cannot store heads of dimension D by `scheme`.

    D=None : of any dimension.
    """
    if version_of(VERSIONS, version).name == "v1":
        return first_invalid(scheme, V1_LIMITS)
    dims = v2_one_pass.HEAD_DIMS if D is None else (D,)
    return no_reason([v2_one_pass.unsupported(scheme, D) for D in dims])


def launches(x, scheme, version="v1"):
    """What `kvq.quantize(x, scheme)` does, as kernels.

    Returns (launches, collect): once the launches have run, collect() is the
    QuantizedTensor. Raises TypeError or ValueError as `kvq.quantize` does.
    """
    version, x = version_of(VERSIONS, version), as_float_array(x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., H, T, D) with D >= 1")
    shape = (1,) * (3 - x.ndim) + x.shape
    H, T, D = shape[-3:]
    N = math.prod(shape[:-2])
    groups = (N, *scheme.metadata_shape(H, T, D)[1:])
    rows = (N, T, row_words(D, scheme.bits, version.layout))
    scale, zero = (unwritten(groups, scheme.scale_dtype) for _ in range(2))
    words = unwritten(rows, np.uint32)
    arrays = flat(x, narrow(x.dtype.name)), scale, zero, words

    def collect():
        codes = from_words(shaped(words, rows), scheme.bits, D, version.layout)
        packed = pack(codes, scheme.bits).reshape(*shape[:-1], scheme.row_bytes(D))
        s, z = (shaped(a, (*shape[:-2], *groups[1:])) for a in (scale, zero))
        return QuantizedTensor(scheme, shape, packed, s, z if scheme.has_zero else None)

    prepare = {"v1": _v1, "v2": _v2}[version.name]
    todo = prepare(version, scheme, (N, T, D), groups, rows, arrays) if T and N else []
    return todo, collect


def _v1(version, scheme, shape, groups, rows, arrays):
    """One thread per group for its scale, then one thread per word."""
    x, scale, zero, words = arrays
    _, gt, gc = scheme.group_shape(*shape)
    constants = {"X": C_TYPES[x.dtype.name], "S": C_TYPES[scale.dtype.name]}
    numbers = (*shape, gt, gc, scheme.bits, scheme.has_zero)
    return [
        launch(
            version,
            "pack_v1_scales",
            constants,
            threads=math.prod(groups),
            args=(x, scale, zero, *numbers),
            outputs=(1, 2),
        ),
        launch(
            version,
            "pack_v1",
            constants,
            threads=math.prod(rows),
            args=(x, scale, zero, words, *numbers),
            outputs=(3,),
        ),
    ]


def _v2(version, scheme, shape, groups, rows, arrays):
    """One pass over x."""
    x, scale, _, _ = arrays
    N, T, D = shape
    types = C_TYPES[x.dtype.name], C_TYPES[scale.dtype.name]
    constants = v2_one_pass.constants(scheme, D, *types)
    grid, block = v2_one_pass.geometry(SimpleNamespace(**constants), N, T)
    args = (*arrays, N, T)
    return [Launch(version.source, "pack_v2", constants, grid, block, args, (1, 2, 3))]

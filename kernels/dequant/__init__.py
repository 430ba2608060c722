"""`dequant` on the host: a QuantizedTensor -> flat arrays -> x_hat, float32.

x_hat = s * (code - offset) + z
"""

import math
from types import SimpleNamespace

import numpy as np

from kvq.kernels.dequant import v2_magic_words
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
from kvq.kernels.layouts import to_words
from kvq.scheme import UNIFORM

VERSIONS = versions(
    Version("v1", "dequant/v1_value_per_thread"),
    Version("v2", "dequant/v2_magic_words", "paired", shuffles=True),
)
# Whatever the rounding that made the codes; scales of any type are read exactly.
LIMITS = {
    "levels": UNIFORM,
    "per": ("token", "channel", "head"),
    "transform": (None,),
}


def unsupported(scheme, version, D=None):
    """None, or why `version` cannot read heads of dimension D stored by `scheme`.

    D=None : of any dimension.
    """
    version = version_of(VERSIONS, version)
    reason = first_invalid(scheme, LIMITS)
    if reason or version.name == "v1":
        return reason
    dims = v2_magic_words.HEAD_DIMS if D is None else (D,)
    return no_reason([v2_magic_words.unsupported(scheme, D) for D in dims])


def launches(qt, version="v1"):
    """What `qt.dequantize()` does, as kernels.

    Returns (launches, collect): once the launches have run, collect() is x_hat,
    float32 of the shape of qt.
    """
    version, scheme = version_of(VERSIONS, version), qt.scheme
    T, D = qt.shape[-2:]
    N = math.prod(qt.shape[:-2])
    words = flat(to_words(qt.unpack(), scheme.bits, version.layout), np.uint32)
    number = narrow(qt.scale.dtype.name)
    scale, zero = flat(qt.scale, number), flat(qt.zero, number)
    y = unwritten(qt.shape, np.float32)
    arrays = words, scale, zero, y
    todo = of_words(version, scheme, (N, T, D), arrays) if N and T else []
    return todo, lambda: shaped(y, qt.shape)


def of_words(version, scheme, shape, arrays):
    """The Launches for what lies in words already.

    version : a Version. shape : (N, T, D). arrays : words, scale, zero and y, flat.
    """
    prepare = {"v1": _v1, "v2": _v2}[version.name]
    return prepare(version, scheme, shape, arrays)


def _v1(version, scheme, shape, arrays):
    """One thread per value."""
    _, gt, gc = scheme.group_shape(*shape)
    return [
        launch(
            version,
            "dequant_v1",
            {"S": C_TYPES[arrays[1].dtype.name]},
            threads=math.prod(shape),
            args=(*arrays, *shape, gt, gc, scheme.bits, scheme.has_zero),
            outputs=(3,),
        )
    ]


def _v2(version, scheme, shape, arrays):
    """One thread per word."""
    N, T, D = shape
    constants = v2_magic_words.constants(scheme, D, C_TYPES[arrays[1].dtype.name])
    grid, block = v2_magic_words.geometry(SimpleNamespace(**constants), N, T)
    args = (*arrays, N, T)
    return [Launch(version.source, "dequant_v2", constants, grid, block, args, (3,))]

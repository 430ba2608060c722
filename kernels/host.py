"""What the host sides of `pack`, `dequant` and `decode` share: versions, types, arrays.

A kernel takes flat arrays and numbers. Here NumPy arrays of any layout become such
arrays, and never change: what is not ready to be read as it is gets copied.
"""

import importlib
import math
from dataclasses import dataclass

import numpy as np

from kvq.kernels.launch import Launch

THREADS = 256  # of a block, where nothing speaks for another number
C_TYPES = {"float16": "__half", "float32": "float", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class Version:
    """One step of a ladder of kernels: the same operation, one more idea.

    name : "v2". source : its file without the suffix, in both languages.
    layout : of the words that it reads or writes, see `kernels/layouts.py`.
    shuffles : True where lanes of a warp exchange numbers.
    """

    name: str
    source: str
    layout: str = "canonical"
    shuffles: bool = False


def operation(op):
    """The host side of "pack", "dequant" or "decode": its package."""
    return importlib.import_module(f"kvq.kernels.{op}")


def versions(*ladder):
    """The versions of an operation by name, the oldest first."""
    return {version.name: version for version in ladder}


def version_of(known, name):
    """The Version called `name`. Raises ValueError."""
    if name not in known:
        raise ValueError(f"unknown version {name!r}; valid: {', '.join(known)}")
    return known[name]


def first_invalid(thing, limits):
    """None, or the first attribute of `thing` that is not among its valid values."""
    found = (invalid(name, getattr(thing, name), v) for name, v in limits.items())
    return next(filter(None, found), None)


def invalid(name, value, valid):
    """None, or that `value` is not among the valid ones."""
    if value in valid:
        return None
    return f"{name}={value!r}; valid: {', '.join(map(str, valid))}"


def whole_tokens(scheme, D):
    """Whether one scale serves all D channels of a token."""
    return scheme.per == "token" and (scheme.group is None or scheme.group >= D)


def group_constants(scheme, D):
    """What every kernel of groups in paired words is compiled for."""
    return {
        "BITS": scheme.bits,
        "HEAD_DIM": D,
        "GROUP": D if whole_tokens(scheme, D) else scheme.group,
        "PER_CHANNEL": int(scheme.per == "channel"),
        "ASYMMETRIC": int(scheme.has_zero),
    }


def no_reason(reasons):
    """None if one of these is None; else the first of them."""
    return None if None in reasons else reasons[0]


def launch(version, kernel, constants, threads, args, outputs, block=THREADS):
    """A Launch of at least `threads` threads."""
    grid = -(-threads // block)
    return Launch(version.source, kernel, constants, grid, block, args, outputs)


# --- arrays ---------------------------------------------------------------------------
def flat(array, dtype=None):
    """1-D, contiguous, native: a view where `array` is so already, or else a copy.

    No array, and an array without elements, become one zero: there are no null
    pointers in a kernel.
    """
    if array is None or array.size == 0:
        return np.zeros(1, dtype or array.dtype)
    return np.ascontiguousarray(array, dtype).reshape(-1)


def flat_numbers(x):
    """(`flat(x)`, its type in C) of floating-point numbers.

    bfloat16 stays what it is, an even number of them: two in a uint32, because no
    argument of a kernel has that dtype.
    """
    if x.dtype.name == "bfloat16":
        return flat(x).view(np.uint32), C_TYPES["bfloat16"]
    number = narrow(x.dtype.name)
    return flat(x, number), C_TYPES[number]


def unwritten(shape, dtype):
    """A flat output, all bits set (NaN): what a kernel leaves out is seen."""
    size = max(math.prod(shape), 1) * np.dtype(dtype).itemsize
    return np.full(size, 0xFF, np.uint8).view(dtype)


def shaped(output, shape):
    """A flat output as an array of `shape`."""
    return output[: math.prod(shape)].reshape(shape)


def narrow(*names):
    """The type that kernels read numbers of these dtypes in: "float16" or "float32".

    float16 if all of them are; else float32, into which bfloat16 and the 8-bit formats
    go exactly, and float64 is rounded, as by `kvq.quantize`.
    """
    return "float16" if set(names) == {"float16"} else "float32"

"""cvt: every conversion between integers, f16, bf16, f32 and f64."""

import numpy as np

from kvq.kernels.ptxsim.meaning import Meaning, opcode
from kvq.kernels.ptxsim.rounding import directed, narrow, saturate, widen
from kvq.kernels.ptxsim.types import FLOATS, INTEGERS, NUMPY, SIZE

f16, f32, f64 = np.float16, np.float32, np.float64
u16, u32, i64 = np.uint16, np.uint32, np.int64

BYTES = ("u8", "s8")
WHOLE = INTEGERS + BYTES
SMALL = ("f16", "bf16")
REAL = FLOATS + SMALL
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
NEAREST_OR_DIRECTED = ("rn", "rz", "rm", "rp")


@opcode("cvt")
def cvt(form):
    if form.flag("pack"):
        return _integer_pack(form)
    source = form.type(WHOLE + REAL)
    result = form.type((*WHOLE, *REAL, "f16x2", "bf16x2"))
    if result in ("f16x2", "bf16x2"):
        return _pair(form, result, source)
    if source in WHOLE and result in WHOLE:
        function = _between_integers(form, result)
    elif source in WHOLE:
        function = _from_integer(form, source, result)
    elif result in WHOLE:
        function = _to_integer(form, source, result)
    else:
        function = _between_floats(form, source, result)
    if source in SMALL:
        function = _of_bits(function, source)
    return Meaning(function, (result,), (source,))


def _of_bits(function, source):
    return lambda x: function(widen(x, source))


# ---- integers


def _between_integers(form, result):
    dtype = NUMPY[result]
    if not form.flag("sat"):
        return lambda x: x.astype(dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max

    def function(x):
        lower = max(low, np.iinfo(x.dtype).min)
        upper = min(high, np.iinfo(x.dtype).max)
        return np.clip(x, lower, upper).astype(dtype)

    return function


def _from_integer(form, source, result):
    mode = form.choice(*NEAREST_OR_DIRECTED)
    clamp = saturate if result != "bf16" and form.flag("sat") else lambda x: x
    if mode != "rn" and SIZE[source] == 8:
        raise form.unsupported(f"rounding .{mode} of a 64-bit integer")
    if result in SMALL:
        return lambda x: _round_to_bits(clamp(_wide(x)), result, mode)
    dtype = NUMPY[result]
    if mode == "rn":
        return lambda x: clamp(x.astype(dtype))
    return lambda x: clamp(directed(x.astype(f64), f64(0), dtype, mode))


def _wide(x):
    """An integer as float64. One that has too many bits is rounded to odd, so that a
    second rounding gives what one would give."""
    if x.dtype.itemsize < 8:
        return x.astype(f64)
    word = x.dtype.type
    low = word(2**11 - 1)
    sticky = ((x & low) != 0).astype(x.dtype) << word(11)
    small = (x < word(2**53)) & ((x > word(-(2**53))) if word is i64 else True)
    return np.where(small, x, (x & ~low) | sticky).astype(f64)


def _to_integer(form, source, result):
    """Clamped to the range of the result. NaN becomes 0 or, where one of the two types
    has 64 bits, the number whose top bit alone is set."""
    rounding = TO_INTEGER[form.choice(*TO_INTEGER)]
    form.flag("sat")  # always so
    dtype = NUMPY[result]
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    wide = source == "f64" or SIZE[result] == 8
    nan = (low or 2 ** (8 * SIZE[result] - 1)) if wide else 0

    def function(x):
        y = rounding(x.astype(f64))
        below, above = y <= low, y >= f64(high)
        inside = np.where(below | above | np.isnan(y), 0, y)
        whole = inside.astype(dtype)
        whole = np.where(below, dtype(low), np.where(above, dtype(high), whole))
        return np.where(np.isnan(x), dtype(nan), whole)

    return function


def _integer_pack(form):
    """a and b, clamped to 8 or 16 bits, side by side; two bytes push c up by 16."""
    third = bool(form.left) and form.left[-1] == "b32" and form.type(("b32",))
    form.type(("s32",))
    result = form.type(BYTES if third else ("u16", "s16"))
    form.choice("sat")
    low, high = np.iinfo(NUMPY[result]).min, np.iinfo(NUMPY[result]).max
    bits = 8 * SIZE[result]
    mask = u32(2**bits - 1)

    def function(a, b, c=None):
        a, b = (np.clip(x, low, high).view(u32) & mask for x in (a, b))
        both = (a << u32(bits)) | b
        return both if c is None else both | (c << u32(16))

    sources = ("s32", "s32", "b32") if third else ("s32", "s32")
    return Meaning(function, ("b32",), sources)


# ---- floats


def _between_floats(form, source, result):
    """To a whole number, to fewer bits, or to more bits (exact)."""
    whole = relu = None
    if source == result:
        whole = next((TO_INTEGER[n] for n in TO_INTEGER if form.flag(n)), None)
    if source == "f32" and result in SMALL:
        relu = form.flag("relu")
    narrows = SIZE[result] < SIZE[source] or {source, result} == set(SMALL)
    known = ("rn", "rz") if relu else NEAREST_OR_DIRECTED
    mode = form.choice(*known) if narrows else "rn"
    sat = not relu and "bf16" not in (source, result) and form.flag("sat")

    def function(x):
        x = whole(x) if whole else x
        x = saturate(x) if sat else x
        x = np.where(x <= 0, x.dtype.type(0), x) if relu else x
        return _round(x, result, mode)

    return function


def _round(x, result, mode):
    if result in SMALL:
        return _round_to_bits(x, result, mode)
    dtype = NUMPY[result]
    if mode == "rn":
        return x.astype(dtype)
    return directed(x.astype(f64), f64(0), dtype, mode)


def _round_to_bits(x, result, mode):
    """float32 or float64 -> f16 or bf16 bits."""
    if mode == "rn":
        return narrow(x, result)
    if result == "f16":
        return directed(x.astype(f64), f64(0), f16, mode).view(u16)
    return _directed_bf16(x.astype(f64), mode)


def _directed_bf16(x, mode):
    """Cut off the bits that bf16 has no room for; away from 0 is the next number."""
    cut = directed(x, f64(0), f32, "rz").view(u32) >> u32(16)
    inexact = (cut << u32(16)).view(f32).astype(f64) != x
    away = inexact & ((x < 0) if mode == "rm" else (x > 0)) & (mode != "rz")
    return np.where(np.isnan(x), u16(0x7FFF), (cut + away).astype(u16))


def _pair(form, result, source):
    """The first operand becomes the upper half, the second the lower."""
    if source != "f32":
        raise form.unsupported(f".{result} from .{source}")
    mode = form.choice("rn", "rz")
    relu = form.flag("relu")
    kind = result.removesuffix("x2")

    def function(high, low):
        if relu:
            high, low = (np.where(x <= 0, f32(0), x) for x in (high, low))
        high, low = (_round_to_bits(x, kind, mode).astype(u32) for x in (high, low))
        return (high << u32(16)) | low

    return Meaning(function, (result,), ("f32", "f32"))

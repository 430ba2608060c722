"""add, sub, mul, mad, fma, div, rem, min, max, neg, abs, dp4a and the functions of one
float: rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh."""

import operator

import numpy as np

from kvq.kernels.ptxsim.meaning import Meaning, opcode
from kvq.kernels.ptxsim.rounding import (
    directed,
    fma_f32,
    fma_f64,
    on_halves,
    rounded_sum,
    saturate,
    sum_to_round,
)
from kvq.kernels.ptxsim.types import FLOATS, HALVES, INTEGERS, NUMPY, SIGNED, SIZE

f32, f64 = np.float32, np.float64
u8, u32, u64, i64 = np.uint8, np.uint32, np.uint64, np.int64


def same(function, type_, sources):
    """A meaning whose operands and result have one type."""
    return Meaning(function, (type_,), (type_,) * sources)


def _saturating(form, function, type_):
    """`.sat`, which f64 and bf16 do not have, clamps the result to [0, 1]."""
    if type_ not in ("f32", "f16", "f16x2"):
        return function
    return (lambda *x: saturate(function(*x))) if form.flag("sat") else function


def _on_halves(form, function, type_):
    return on_halves(_saturating(form, function, type_), type_)


# ---- add, sub, mul


@opcode("add", "sub")
def add(form):
    type_ = form.type(INTEGERS + FLOATS + HALVES)
    function = {"add": operator.add, "sub": operator.sub}[form.opcode]
    if type_ in HALVES:
        form.flag("rn")
        return same(_on_halves(form, function, type_), type_, 2)
    if type_ in FLOATS:
        mode = _rounding(form, type_)
        if mode != "rn":
            sign = f64(1 if form.opcode == "add" else -1)
            function = lambda x, y: rounded_sum(x.astype(f64), sign * y, mode)  # noqa: E731
        return same(_saturating(form, function, type_), type_, 2)
    if type_ == "s32" and form.flag("sat"):
        exact = function
        function = lambda x, y: _clamp_s32(exact(x.astype(i64), y))  # noqa: E731
    return same(function, type_, 2)


def _rounding(form, type_):
    """The rounding of a float result: rn, and for f32 also rz, rm, rp."""
    known = ("rn", "rz", "rm", "rp") if type_ == "f32" else ("rn",)
    return form.choice(*known, default="rn")


def _clamp_s32(x):
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


@opcode("mul")
def mul(form):
    type_ = form.type(INTEGERS + FLOATS + HALVES)
    if type_ in HALVES:
        form.flag("rn")
        return same(_on_halves(form, operator.mul, type_), type_, 2)
    if type_ in FLOATS:
        mode = _rounding(form, type_)
        function = operator.mul
        if mode != "rn":
            function = lambda x, y: directed(x.astype(f64) * y, f64(0), f32, mode)  # noqa: E731
        return same(_saturating(form, function, type_), type_, 2)
    result, function = _product(form, type_)
    return Meaning(function, (result,), (type_, type_))


def _product(form, type_):
    """(result type, function) of an integer product: its low or high half, or all."""
    part = form.choice("lo", "hi", "wide")
    if part == "lo":
        return type_, operator.mul
    if part == "hi":
        return type_, high_product
    wide = f"{type_[0]}{16 * SIZE[type_]}"
    if wide not in INTEGERS:
        raise form.unsupported(f"there is no type .{wide}")
    dtype = NUMPY[wide]
    return wide, lambda x, y: x.astype(dtype) * y.astype(dtype)


def high_product(x, y):
    """The upper half of the bits of an integer product."""
    width = 8 * x.dtype.itemsize
    if width < 64:
        wide = np.dtype(f"{x.dtype.kind}8").type
        return ((x.astype(wide) * y.astype(wide)) >> wide(width)).astype(x.dtype)
    high = _high_u64(x.view(u64), y.view(u64))
    if x.dtype.kind == "i":  # a negative factor reads as 2^64 too much
        zero = u64(0)
        high = high - np.where(x < 0, y.view(u64), zero)
        high = high - np.where(y < 0, x.view(u64), zero)
    return high.view(x.dtype)


def _high_u64(x, y):
    """x * y >> 64 from four products of 32-bit halves."""
    half, low = u64(32), u64(2**32 - 1)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = x0 * y1 + (middle & low)
    return x1 * y1 + (middle >> half) + (other >> half)


@opcode("mul24", "mad24")
def mul24(form):
    type_ = form.type(("u32", "s32"))
    shift = i64(0 if form.choice("lo", "hi") == "lo" else 16)

    def product(x, y):
        return ((_low24(x) * _low24(y)) >> shift).astype(x.dtype)

    if form.opcode == "mul24":
        return same(product, type_, 2)
    return same(lambda x, y, z: product(x, y) + z, type_, 3)


def _low24(x):
    shift = x.dtype.type(8)
    return ((x << shift) >> shift).astype(i64)


# ---- multiply and add


@opcode("mad")
def mad(form):
    if form.left and form.left[-1] in FLOATS:
        return fma(form)
    type_ = form.type(INTEGERS)
    result, product = _product(form, type_)
    return Meaning(lambda x, y, z: product(x, y) + z, (result,), (type_, type_, result))


@opcode("fma")
def fma(form):
    type_ = form.type(FLOATS + HALVES)
    if type_ in HALVES:
        return _fma_halves(form, type_)
    mode = form.choice(*(("rn", "rz", "rm", "rp") if type_ == "f32" else ("rn",)))
    if type_ == "f64":
        return same(fma_f64, type_, 3)
    function = lambda x, y, z: fma_f32(x, y, z, mode)  # noqa: E731
    return same(_saturating(form, function, type_), type_, 3)


def _fma_halves(form, type_):
    form.choice("rn")
    kind = type_.removesuffix("x2")
    relu = form.flag("relu")

    def function(x, y, z):
        if kind == "f16":
            # The product is exact in float32. What the sum loses in float64 is too
            # small to matter, or belongs to a result that is infinite in f16.
            result = (x * y).astype(f64) + z
        else:
            result = sum_to_round(x.astype(f64) * y, z, kind)
        return np.where(result <= 0, f64(0), result) if relu else result

    return same(_on_halves(form, function, type_), type_, 3)


@opcode("dp4a")
def dp4a(form):
    """c + the four products of the bytes of a and b."""
    type_b = form.type(("u32", "s32"))
    type_a = form.type(("u32", "s32"))
    result = "u32" if type_a == type_b == "u32" else "s32"

    def function(a, b, c):
        total = c.astype(i64)
        for k in range(4):
            total = total + _byte(a, k) * _byte(b, k)
        return total.astype(NUMPY[result])

    return Meaning(function, (result,), (type_a, type_b, result))


def _byte(x, k):
    """Byte k of a 32-bit value, with its sign, as int64."""
    up, down = x.dtype.type(24 - 8 * k), x.dtype.type(24)
    return ((x << up) >> down).astype(i64)


@opcode("sad")
def sad(form):
    """|a - b| + c"""
    type_ = form.type(INTEGERS)
    return same(lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c, type_, 3)


# ---- division


@opcode("div")
def div(form):
    type_ = form.type(INTEGERS + FLOATS)
    if type_ in FLOATS:
        form.exact_or(*(("approx", "full") if type_ == "f32" else ()))
        return same(operator.truediv, type_, 2)
    return same(quotient, type_, 2)


def quotient(x, y):
    """Integer division toward zero; by zero, all bits are ones."""
    ones = x.dtype.type(-1 if x.dtype.kind == "i" else 2 ** (8 * x.dtype.itemsize) - 1)
    if x.dtype.kind == "i":
        size = magnitude(x) // magnitude(y)
        result = np.where((x < 0) != (y < 0), u64(0) - size, size).astype(x.dtype)
    else:
        result = x // y
    return np.where(y == 0, ones, result)


def magnitude(x):
    """|x| as uint64, also of the smallest negative number."""
    wide = x.astype(i64).view(u64)
    return np.where(x < 0, u64(0) - wide, wide)


@opcode("rem")
def rem(form):
    """The remainder, with the sign of x; by zero, x."""
    type_ = form.type(INTEGERS)
    return same(lambda x, y: np.where(y == 0, x, np.fmod(x, y)), type_, 2)


# ---- min, max, abs, neg


@opcode("min", "max")
def extremum(form):
    type_ = form.type(INTEGERS + FLOATS + HALVES)
    if type_ in INTEGERS:
        function = np.minimum if form.opcode == "min" else np.maximum
        if type_ == "s32" and form.flag("relu"):
            return same(lambda x, y: np.maximum(function(x, y), 0), type_, 2)
        return same(function, type_, 2)
    function = _float_extremum(form.opcode, type_ != "f64" and form.flag("NaN"))
    if type_ in HALVES:
        return same(on_halves(function, type_), type_, 2)
    return same(function, type_, 2)


def _float_extremum(name, nan_wins):
    """-0 < +0. A NaN loses against a number, or wins (.NaN)."""
    if name == "min":
        pick = np.minimum if nan_wins else np.fmin
        of_zeros = lambda x, y: -(-x - y)  # noqa: E731
    else:
        pick = np.maximum if nan_wins else np.fmax
        of_zeros = operator.add

    def function(x, y):
        result = pick(x, y)
        zero = result == 0
        if np.any(zero):
            result = np.where(zero & (x == y), of_zeros(x, y), result)
        return result

    return function


@opcode("neg")
def neg(form):
    type_ = form.type(SIGNED + FLOATS + HALVES)
    if type_ in HALVES:
        return _with_sign_bit(type_, operator.xor, 0x80008000)
    return same(operator.neg, type_, 1)


@opcode("abs")
def absolute(form):
    type_ = form.type(SIGNED + FLOATS + HALVES)
    if type_ in HALVES:
        return _with_sign_bit(type_, operator.and_, 0x7FFF7FFF)
    return same(np.abs, type_, 1)


def _with_sign_bit(type_, function, mask):
    mask = NUMPY[type_](mask & (2 ** (8 * SIZE[type_]) - 1))
    return same(lambda x: function(x, mask), type_, 1)


# ---- functions of one float


def _reciprocal(x):
    return x.dtype.type(1) / x


def _inverse_root(x):
    return x.dtype.type(1) / np.sqrt(x)


# opcode -> (function, types that `.rn` takes, types that `.approx` takes)
FUNCTIONS = {
    "rcp": (_reciprocal, FLOATS, ("f32",)),
    "sqrt": (np.sqrt, FLOATS, ("f32",)),
    "rsqrt": (_inverse_root, (), FLOATS),
    "ex2": (np.exp2, (), ("f32", *HALVES)),
    "tanh": (np.tanh, (), ("f32", *HALVES)),
    "lg2": (np.log2, (), ("f32",)),
    "sin": (np.sin, (), ("f32",)),
    "cos": (np.cos, (), ("f32",)),
}


@opcode(*FUNCTIONS)
def unary(form):
    """`.rn` is exact for rcp and sqrt; approximations are NumPy's float32 functions."""
    function, exact, approximate = FUNCTIONS[form.opcode]
    type_ = form.type(exact if "rn" in form.left else approximate)
    form.exact_or("approx")
    if type_ in HALVES:
        return same(on_halves(function, type_), type_, 1)
    return same(function, type_, 1)

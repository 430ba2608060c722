"""Bits: and, or, xor, not, shifts, fields, counts, prmt, lop3."""

import operator

import numpy as np

from kvq.kernels.ptxsim.meaning import Meaning, opcode
from kvq.kernels.ptxsim.opcodes.arithmetic import same
from kvq.kernels.ptxsim.types import BITS, SIGNED, SIZE, UNSIGNED

u8, u32, u64, i64 = np.uint8, np.uint32, np.uint64, np.int64
WORDS = ("b32", "b64")


@opcode("and", "or", "xor")
def logic(form):
    names = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
    return same(names[form.opcode], form.type(("pred", *BITS)), 2)


@opcode("not")
def invert(form):
    return same(operator.invert, form.type(("pred", *BITS)), 1)


@opcode("cnot")
def cnot(form):
    """1 where x is zero, else 0"""
    return same(lambda x: (x == 0).astype(x.dtype), form.type(BITS), 1)


# ---- shifts


@opcode("shl", "shr")
def shift(form):
    """Shifts by the width or more leave nothing, or the sign (shr.s)."""
    type_ = form.type(BITS + UNSIGNED + SIGNED if form.opcode == "shr" else BITS)
    function = shifted_left if form.opcode == "shl" else shifted_right
    return Meaning(function, (type_,), (type_, "u32"))


def shifted_left(x, n):
    width = 8 * x.dtype.itemsize
    if np.ndim(n) == 0:
        return x << x.dtype.type(n) if n < width else np.zeros_like(x)
    return np.where(n < width, x << np.minimum(n, width - 1).astype(x.dtype), 0).astype(
        x.dtype
    )


def shifted_right(x, n):
    width = 8 * x.dtype.itemsize
    if x.dtype.kind == "i" or (np.ndim(n) == 0 and n < width):
        return x >> np.minimum(n, width - 1).astype(x.dtype)
    return np.where(n < width, x >> np.minimum(n, width - 1).astype(x.dtype), 0).astype(
        x.dtype
    )


@opcode("shf")
def funnel_shift(form):
    """32 of the 64 bits b:a, shifted left or right by c (modulo 32, or at most 32)."""
    left = form.choice("l", "r") == "l"
    wrap = form.choice("wrap", "clamp") == "wrap"
    form.type(("b32",))

    def function(a, b, c):
        n = (c & u32(31) if wrap else np.minimum(c, u32(32))).astype(u64)
        both = (b.astype(u64) << u64(32)) | a.astype(u64)
        result = (both << n) >> u64(32) if left else both >> n
        return result.astype(u32)

    return same(function, "b32", 3)


# ---- bit fields


@opcode("bfe")
def extract_field(form):
    """`length` bits of x from bit `start`, extended by their top bit if signed."""
    type_ = form.type(("u32", "s32", "u64", "s64"))

    def function(x, start, length):
        start, length = start & u32(255), length & u32(255)
        bits = x.view(f"u{x.dtype.itemsize}")
        mask = low_bits(length, bits.dtype)
        field = shifted_right(x, start).view(bits.dtype) & mask
        if type_[0] == "s":
            top = np.minimum(start + length - u32(1), u32(8 * SIZE[type_] - 1))
            negative = (shifted_right(bits, top) & bits.dtype.type(1)) != 0
            field = np.where(negative & (length > 0), field | ~mask, field)
        return field.view(x.dtype)

    return Meaning(function, (type_,), (type_, "u32", "u32"))


@opcode("bfi")
def insert_field(form):
    """b, with `length` of its bits from bit `start` replaced by the low bits of a."""
    type_ = form.type(WORDS)

    def function(a, b, start, length):
        start, length = start & u32(255), length & u32(255)
        mask = shifted_left(low_bits(length, a.dtype), start)
        return (b & ~mask) | (shifted_left(a, start) & mask)

    return Meaning(function, (type_,), (type_, type_, "u32", "u32"))


def low_bits(count, dtype):
    """A mask of the lowest `count` bits."""
    ones = ~np.zeros_like(count, dtype)
    return ~shifted_left(ones, count)


@opcode("bmsk")
def bit_mask(form):
    """`length` ones from bit `start`"""
    form.choice("clamp")
    form.type(("b32",))
    function = lambda start, length: shifted_left(  # noqa: E731
        low_bits(np.minimum(length, u32(32)), np.dtype(u32)), start
    )
    return same(function, "b32", 2)


# ---- counts


@opcode("popc")
def population_count(form):
    type_ = form.type(WORDS)
    return Meaning(lambda x: np.bitwise_count(x).astype(u32), ("u32",), (type_,))


@opcode("clz")
def leading_zeros(form):
    type_ = form.type(WORDS)
    return Meaning(count_leading_zeros, ("u32",), (type_,))


def count_leading_zeros(x):
    """Fill all bits below the highest one, then count the rest."""
    width = 8 * x.dtype.itemsize
    for n in (1, 2, 4, 8, 16, 32)[: width.bit_length() - 1]:
        x = x | (x >> x.dtype.type(n))
    return (width - np.bitwise_count(x)).astype(u32)


@opcode("bfind")
def find_highest(form):
    """The position of the highest bit that differs from the sign; none: all ones."""
    type_ = form.type(("u32", "s32", "u64", "s64"))
    from_top = form.flag("shiftamt")
    last = u32(8 * SIZE[type_] - 1)

    def function(x):
        bits = (np.where(x < 0, ~x, x) if type_[0] == "s" else x).astype(x.dtype)
        bits = bits.view(f"u{SIZE[type_]}")
        zeros = count_leading_zeros(bits)
        return np.where(bits == 0, u32(2**32 - 1), zeros if from_top else last - zeros)

    return Meaning(function, ("u32",), (type_,))


@opcode("brev")
def bit_reverse(form):
    """Swap neighbours, then pairs, then fours, ..."""
    type_ = form.type(WORDS)
    width = 8 * SIZE[type_]

    def function(x):
        word = x.dtype.type
        for n in (1, 2, 4, 8, 16, 32)[: width.bit_length() - 1]:
            mask = word(sum(((1 << n) - 1) << k for k in range(0, width, 2 * n)))
            x = ((x & mask) << word(n)) | ((x >> word(n)) & mask)
        return x

    return same(function, type_, 1)


# ---- bytes and tables


@opcode("prmt")
def permute_bytes(form):
    """Four of the eight bytes b:a, chosen by the nibbles of c or by a named pattern."""
    mode = form.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="default")
    form.type(("b32",))

    def function(a, b, c):
        both = (b.astype(u64) << u64(32)) | a.astype(u64)
        result = u32(0)
        for k in range(4):
            choice = _selector(mode, c, k)
            byte = (both >> ((choice & u32(7)).astype(u64) * u64(8))).astype(u8)
            sign = np.where(byte >= 128, u8(255), u8(0))
            byte = np.where(choice & u32(8), sign, byte)
            result = result | (byte.astype(u32) << u32(8 * k))
        return result

    return same(function, "b32", 3)


def _selector(mode, c, k):
    """Which byte goes to place k (PTX ISA, table of `prmt`); 8 asks for its sign."""
    if mode == "default":
        return (c >> u32(4 * k)) & u32(15)
    n = (c & u32(3)).astype(i64)
    choice = {
        "f4e": n + k,
        "b4e": (n - k) % 8,
        "rc8": n,
        "ecl": np.maximum(n, k),
        "ecr": np.minimum(n, k),
        "rc16": 2 * (n % 2) + k % 2,
    }[mode]
    return choice.astype(u32)


@opcode("lop3")
def logic_of_three(form):
    """Bit i of the table is the result where the bits of a, b, c spell i."""
    form.type(("b32",))
    table = form.immediate(3)
    return same(_table_function(table), "b32", 3)


_COMMON = {
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0xEA: lambda a, b, c: (a & b) | c,
    0xF8: lambda a, b, c: a | (b & c),
    0xCA: lambda a, b, c: (a & b) | (~a & c),
    0xE8: lambda a, b, c: (a & b) | (c & (a | b)),
    0x6A: lambda a, b, c: (a & b) ^ c,
    0x78: lambda a, b, c: a ^ (b & c),
    0xA8: lambda a, b, c: (a | b) & c,
    0xE0: lambda a, b, c: a & (b | c),
}


def _table_function(table):
    """The common tables have a short formula; any other is a sum of its ones."""
    if table in _COMMON:
        return _COMMON[table]

    def function(a, b, c):
        result = a & ~a & b & c  # zeros, in the shape of the operands
        for i in range(8):
            if table >> i & 1:
                term = (a if i & 4 else ~a) & (b if i & 2 else ~b)
                result = result | (term & (c if i & 1 else ~c))
        return result

    return function

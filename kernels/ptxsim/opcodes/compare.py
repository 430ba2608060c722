"""setp, set, selp, slct, testp, copysign."""

import operator

import numpy as np

from kvq.kernels.ptxsim.meaning import Meaning, opcode
from kvq.kernels.ptxsim.opcodes.arithmetic import same
from kvq.kernels.ptxsim.rounding import widen
from kvq.kernels.ptxsim.types import (
    BITS,
    FLOATS,
    HALVES,
    INTEGERS,
    NUMPY,
    bits_of,
)

COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,  # of unsigned numbers
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
UNORDERED = {
    "equ": "eq",
    "neu": "ne",
    "ltu": "lt",
    "leu": "le",
    "gtu": "gt",
    "geu": "ge",
}
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
EVERYTHING = INTEGERS + BITS + FLOATS + HALVES


def _comparison(form, type_):
    """The function of two operands, given as their type asks, that a `.lt` names."""
    floats = type_ in FLOATS + HALVES
    known = ("eq", "ne", "lt", "le", "gt", "ge")
    if floats:
        name = form.choice(*known, *UNORDERED, "num", "nan")
        return _float_comparison(name)
    if type_[0] == "b":
        known = ("eq", "ne")
    return COMPARISONS[
        form.choice(*known, *(("lo", "ls", "hi", "hs") * (type_[0] == "u")))
    ]


def _float_comparison(name):
    """With a NaN the ordered comparisons are false, also `ne`; the unordered true."""
    either_nan = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
    if name == "nan":
        return either_nan
    if name == "num":
        return lambda x, y: ~either_nan(x, y)
    if name == "ne":
        return lambda x, y: (x != y) & ~either_nan(x, y)
    if name == "neu":
        return operator.ne
    if name in UNORDERED:
        ordered = COMPARISONS[UNORDERED[name]]
        return lambda x, y: ordered(x, y) | either_nan(x, y)
    return COMPARISONS[name]


def _halves_widened(function, type_):
    """A comparison of float32 values as one of f16 or bf16 bits."""
    return lambda x, y: function(widen(x, type_), widen(y, type_))


def _low(x):
    return (x & np.uint32(0xFFFF)).astype(np.uint16)


def _high(x):
    return (x >> np.uint32(16)).astype(np.uint16)


def _outcomes(form, type_):
    """A function of x, y that lists the outcomes: one, or of a pair one per half."""
    compare = _comparison(form, type_)
    if type_ in HALVES:
        compare = _halves_widened(compare, type_.removesuffix("x2"))
    if "x2" in type_:
        return lambda x, y: [compare(_low(x), _low(y)), compare(_high(x), _high(y))]
    return lambda x, y: [compare(x, y)]


def _combination(form):
    """How `.and`, `.or`, `.xor` combine an outcome with the operand c; and c's type."""
    combine = next((COMBINE[n] for n in COMBINE if form.flag(n)), None)
    if combine is None:
        return (lambda outcome: outcome), ()
    return combine, ("pred",)


@opcode("setp")
def setp(form):
    """p, q = (x ? y) and/or/xor c, not (x ? y) and/or/xor c; of pairs: one per half."""
    type_ = form.type(EVERYTHING)
    combine, more = _combination(form)
    outcomes = _outcomes(form, type_)
    wanted = len(form.destinations)

    def function(x, y, *c):
        p, *q = outcomes(x, y)
        if wanted == 1:
            return combine(p, *c)
        return combine(p, *c), combine(q[0] if q else ~p, *c)

    return Meaning(function, ("pred",) * wanted, (type_, type_, *more))


@opcode("set")
def set_(form):
    """A comparison as a number: all ones (integers) or 1.0 where it holds, else 0."""
    type_ = form.type(EVERYTHING)
    floats = (type_,) if type_ in HALVES else ("f32", "f16", "bf16")
    result = form.type(("u32", "s32", *floats))
    combine, more = _combination(form)
    outcomes, true = _outcomes(form, type_), _true(result, type_)

    def function(x, y, *c):
        numbers = [np.where(combine(o, *c), true, 0) for o in outcomes(x, y)]
        low, high = numbers if len(numbers) == 2 else (numbers[0], np.int64(0))
        return (low | (high << 16)).astype(bits_of(result)).view(NUMPY[result])

    return Meaning(function, (result,), (type_, type_, *more))


def _true(result, type_):
    """The bits that stand for true, of one half where pairs are compared."""
    ones = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}
    if result.removesuffix("x2") in ones:
        return ones[result.removesuffix("x2")]
    return 0xFFFF if "x2" in type_ else 0xFFFFFFFF


@opcode("selp")
def selp(form):
    """c ? a : b"""
    type_ = form.type(BITS + INTEGERS + FLOATS)
    function = lambda a, b, c: np.where(c, a, b)  # noqa: E731
    return Meaning(function, (type_,), (type_, type_, "pred"))


@opcode("slct")
def slct(form):
    """c >= 0 ? a : b; a NaN takes b"""
    by = form.type(("s32", "f32"))
    type_ = form.type(BITS + INTEGERS + FLOATS)
    function = lambda a, b, c: np.where(c >= 0, a, b)  # noqa: E731
    return Meaning(function, (type_,), (type_, type_, by))


@opcode("testp")
def testp(form):
    type_ = form.type(FLOATS)
    tiny = np.finfo(NUMPY[type_]).tiny
    subnormal = lambda x: (np.abs(x) < tiny) & (x != 0)  # noqa: E731
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ~subnormal(x),  # so is zero
        "subnormal": subnormal,
    }
    return Meaning(tests[form.choice(*tests)], ("pred",), (type_,))


@opcode("copysign")
def copysign(form):
    """b with the sign of a"""
    return same(lambda a, b: np.copysign(b, a), form.type(FLOATS), 2)

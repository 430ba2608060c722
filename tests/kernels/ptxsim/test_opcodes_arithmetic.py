"""Arithmetic against its definition in exact integers and exact fractions."""

import numpy as np
import pytest
from exact import FORMATS, bits_of, quotient, sum_of_products, to_type
from rows import (
    FLOATS,
    HALVES,
    INTEGERS,
    ROUNDINGS,
    SIGNED,
    Row,
    raises_at_its_line,
    refuses_made_up_modifiers,
    untested,
)
from snippets import run_snippet

WIDTH = {t: int(t[1:]) for t in INTEGERS}
DOUBLE = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}


def clamped(x, low, high):
    return np.minimum(np.maximum(x, low), high)


# ---- integers


def toward_zero(a, b):
    size = abs(a) // abs(b)
    return np.where((a < 0) != (b < 0), -size, size)


def without_zero(type_):
    width = WIDTH[type_]
    if type_[0] == "u":
        return [1, 2, 3, 7, 2**width - 1, 2 ** (width - 1)]
    return [1, -1, 2, -2, 7, -7, 2 ** (width - 1) - 1, -(2 ** (width - 1))]


def low24(x, signed):
    """The number in the low 24 bits."""
    x = x & 0xFFFFFF
    return np.where((x >= 2**23) & signed, x - 2**24, x)


def bytes_of(x, signed):
    for k in range(4):
        byte = (x >> (8 * k)) & 0xFF
        yield np.where((byte >= 128) & signed, byte - 256, byte)


def dot(a, b, c, types):
    pairs = zip(
        bytes_of(a, types[0] == "s32"), bytes_of(b, types[1] == "s32"), strict=True
    )
    return c + sum(x * y for x, y in pairs)


ROWS = []
for t in INTEGERS:
    w = WIDTH[t]
    nonzero = {"b": without_zero(t)}
    ROWS += [
        Row(f"add.{t} %d, %a, %b;", t, lambda a, b: a + b),
        Row(f"sub.{t} %d, %a, %b;", t, lambda a, b: a - b),
        Row(f"mul.lo.{t} %d, %a, %b;", t, lambda a, b: a * b),
        Row(f"mul.hi.{t} %d, %a, %b;", t, lambda a, b, w=w: (a * b) >> w),
        Row(f"mad.lo.{t} %d, %a, %b, %c;", t, lambda a, b, c: a * b + c),
        Row(f"mad.hi.{t} %d, %a, %b, %c;", t, lambda a, b, c, w=w: (a * b >> w) + c),
        Row(f"sad.{t} %d, %a, %b, %c;", t, lambda a, b, c: abs(a - b) + c),
        Row(f"min.{t} %d, %a, %b;", t, np.minimum),
        Row(f"max.{t} %d, %a, %b;", t, np.maximum),
        Row(f"div.{t} %d, %a, %b;", t, toward_zero, edges=nonzero),
        Row(f"rem.{t} %d, %a, %b;", t, lambda a, b: a - b * toward_zero(a, b),
            edges=nonzero),
    ]  # fmt: skip
for t, wide in DOUBLE.items():
    two, three = {"a": t, "b": t}, {"a": t, "b": t, "c": wide}
    ROWS += [
        Row(f"mul.wide.{t} %d, %a, %b;", wide, lambda a, b: a * b, two),
        Row(f"mad.wide.{t} %d, %a, %b, %c;", wide, lambda a, b, c: a * b + c, three),
    ]
for t in SIGNED:
    ROWS += [
        Row(f"neg.{t} %d, %a;", t, lambda a: -a),
        Row(f"abs.{t} %d, %a;", t, abs),
    ]
for t in ("u32", "s32"):
    for part, shift in (("lo", 0), ("hi", 16)):

        def product(a, b, c=0, shift=shift, signed=t == "s32"):
            return (low24(a, signed) * low24(b, signed) >> shift) + c

        ROWS.append(Row(f"mul24.{part}.{t} %d, %a, %b;", t, product))
        ROWS.append(Row(f"mad24.{part}.{t} %d, %a, %b, %c;", t, product))
for pair in (("u32", "u32"), ("u32", "s32"), ("s32", "u32"), ("s32", "s32")):
    result = "s32" if "s32" in pair else "u32"
    sources = {"a": pair[0], "b": pair[1], "c": result}
    ROWS.append(
        Row(f"dp4a.{'.'.join(pair)} %d, %a, %b, %c;", result,
            lambda a, b, c, pair=pair: dot(a, b, c, pair), sources)
    )  # fmt: skip
S32 = (-(2**31), 2**31 - 1)
ROWS += [
    Row("add.sat.s32 %d, %a, %b;", "s32", lambda a, b: clamped(a + b, *S32)),
    Row("sub.sat.s32 %d, %a, %b;", "s32", lambda a, b: clamped(a - b, *S32)),
    Row(
        "min.relu.s32 %d, %a, %b;", "s32", lambda a, b: clamped(a, 0, np.maximum(b, 0))
    ),
    Row(
        "max.relu.s32 %d, %a, %b;", "s32", lambda a, b: np.maximum(np.maximum(a, b), 0)
    ),
]

# ---- floats, rounded once


def saturated(x):
    """[0, 1]; NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, 1), 0.0)


def relu(x):
    """Not below +0; a NaN stays."""
    return np.where(x <= 0, 0.0, x)


def asis(x):
    return x


def arithmetic_rows(type_, mode, rounding, suffix="", after=asis):
    """add, sub, mul, fma of one type, rounding and saturation."""
    t, kind = f"{rounding}{suffix}.{type_}", type_.removesuffix("x2")

    def of(*terms):
        return after(sum_of_products(kind, mode, *terms))

    return [
        Row(f"add{t} %d, %a, %b;", type_, lambda a, b: of((a,), (b,))),
        Row(f"sub{t} %d, %a, %b;", type_, lambda a, b: of((a,), (-b,))),
        Row(f"mul{t} %d, %a, %b;", type_, lambda a, b: of((a, b))),
        Row(f"fma{t} %d, %a, %b, %c;", type_, lambda a, b, c: of((a, b), (c,))),
        Row(f"mad{t} %d, %a, %b, %c;", type_, lambda a, b, c: of((a, b), (c,))),
    ]


def some(rows, *opcodes):
    return [row for row in rows if row.ptx.partition(".")[0] in opcodes]


THREE = ("add", "sub", "mul")
FOUR = (*THREE, "fma")
for mode in ROUNDINGS:
    ROWS += arithmetic_rows("f32", mode, f".{mode}")
    ROWS += arithmetic_rows("f32", mode, f".{mode}", ".sat", saturated)
ROWS += arithmetic_rows("f64", "rn", ".rn")
ROWS += some(arithmetic_rows("f32", "rn", ""), *THREE)
ROWS += some(arithmetic_rows("f64", "rn", ""), *THREE)
for t in HALVES:
    ROWS += some(arithmetic_rows(t, "rn", ""), *THREE)
    ROWS += some(arithmetic_rows(t, "rn", ".rn"), *FOUR)
    ROWS += some(arithmetic_rows(t, "rn", ".rn", ".relu", relu), "fma")
for t in ("f16", "f16x2"):
    ROWS += some(arithmetic_rows(t, "rn", ".rn", ".sat", saturated), *FOUR)


def halfway(type_, mode, subnormal=False, close=None):
    """fma of factors whose product is halfway between two numbers: c decides.

    (2^k + 1) (2^n + 1) is odd and has one bit more than a type of k + n bits holds.
    Scaled down, the product has more bits than a subnormal number has room for; and
    1 - u^2 = (1 + u) (1 - u) is a little less than half of the smallest one.
    """
    kind = type_.removesuffix("x2")
    bits, lowest, _ = FORMATS[kind]
    last, u, k = 2.0 ** (lowest - bits + 1), 2.0 ** (1 - bits), bits // 2
    a, b = [2**k + 1], [2 ** (bits - k) + 1]
    c = [0.0, last, 4 * last, 2.0**-9, 1.0]
    if subnormal:
        scale = 2.0 ** (lowest // 2)
        down = [last / 2**j / scale for j in range(1, 5)]
        a = [scale * x for x in (*a, 1 + u)]
        b = [x * y for x in down for y in (*b, 1 - u)]
        c += [last * (2 ** (bits - 2) + n) for n in range(2)]
    lists = (a + [-x for x in a], b, c + [-x for x in c])
    edges = dict(zip("abc", (encoded(x, type_) for x in lists), strict=True))

    def want(a, b, c):
        return sum_of_products(kind, mode, (a, b), (c,))

    return Row(f"fma.{mode}.{type_} %d, %a, %b, %c;", type_, want, {}, edges, close)


def encoded(numbers, type_):
    if type_ in FLOATS:
        return np.array(numbers, type_.replace("f", "float"))
    if type_.endswith("x2"):
        numbers = np.stack([numbers, numbers[::-1]], axis=-1)
    return bits_of(np.array(numbers), type_)


ROWS += [halfway("f32", mode) for mode in ROUNDINGS]
ROWS += [halfway(t, "rn") for t in ("f64", *HALVES)]
ROWS += [halfway("f32", mode, subnormal=True) for mode in ("rz", "rm", "rp")]
ROWS += [halfway(t, "rn", subnormal=True) for t in ("f64", *HALVES)]
# README.md, "What it does not model": it may be rounded twice, one unit away.
ROWS += [halfway("f32", "rn", subnormal=True, close=(0.0, 2.0**-149))]


def extreme(a, b, smaller, nan_wins=False):
    """-0 < +0; a NaN loses against a number, or wins."""
    less = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
    result = np.where(less == smaller, a, b)
    result = np.where(np.isnan(a), b, np.where(np.isnan(b), a, result))
    return np.where(nan_wins & (np.isnan(a) | np.isnan(b)), np.nan, result)


for t in FLOATS + HALVES:
    for nan in ("", ".NaN") if t != "f64" else ("",):
        for name in ("min", "max"):

            def function(a, b, smaller=name == "min", wins=nan != ""):
                return extreme(a, b, smaller, wins)

            ROWS.append(Row(f"{name}{nan}.{t} %d, %a, %b;", t, function))
    ROWS += [
        Row(f"neg.{t} %d, %a;", t, lambda a: -a),
        Row(f"abs.{t} %d, %a;", t, np.abs),
    ]
for t in FLOATS:
    ROWS += [
        Row(f"div.rn.{t} %d, %a, %b;", t, lambda a, b, t=t: quotient(t, a, b)),
        Row(f"rcp.rn.{t} %d, %a;", t, lambda a, t=t: quotient(t, np.ones_like(a), a)),
    ]
# float64 has more than twice the bits of float32: rounding its root again is exact.
ROWS += [
    Row(
        "sqrt.rn.f32 %d, %a;", "f32", lambda a: to_type("f32", np.sqrt(a.astype(float)))
    ),
    Row("sqrt.rn.f64 %d, %a;", "f64", np.sqrt),
]

# ---- approximate functions, within the error that the PTX ISA allows


def in_float64(function, type_="f32"):
    """What leaves the range of the type becomes infinite."""
    dtype = {"f16": np.float16, "f64": np.float64}.get(type_[:3], np.float32)
    return lambda *x: function(*(v.astype(np.float64) for v in x)).astype(dtype)


TINY = 2.0**-149  # the last bit of a subnormal result
ANGLES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 0.5, -1.5, 3.1, -3.1])
LARGE_ENOUGH = np.array([2.0**-126, 2.0**-60, -0.7, 1.0, 3.0, -5.5, 2.0**100, 2.0**126])


def approximate(ptx, want, relative, absolute=TINY, type_="f32", edges=()):
    edges = {"a": edges} if len(edges) else {}
    return Row(
        ptx, type_, in_float64(want, type_), edges=edges, close=(relative, absolute)
    )


ROWS += [
    approximate("rcp.approx.f32 %d, %a;", lambda a: 1 / a, 2.0**-23),
    approximate("sqrt.approx.f32 %d, %a;", np.sqrt, 2.0**-23),
    approximate("rsqrt.approx.f32 %d, %a;", lambda a: 1 / np.sqrt(a), 2.0**-22.9),
    approximate("rsqrt.approx.f64 %d, %a;", lambda a: 1 / np.sqrt(a), 2.0**-22.9,
                type_="f64"),
    approximate("ex2.approx.f32 %d, %a;", np.exp2, 2.0**-22),
    approximate("lg2.approx.f32 %d, %a;", np.log2, 2.0**-22, 2.0**-22),
    approximate("tanh.approx.f32 %d, %a;", np.tanh, 2.0**-11),
    approximate("sin.approx.f32 %d, %a;", np.sin, 0, 2.0**-20.5, edges=ANGLES),
    approximate("cos.approx.f32 %d, %a;", np.cos, 0, 2.0**-20.5, edges=ANGLES),
    Row("div.full.f32 %d, %a, %b;", "f32", in_float64(np.divide),
        edges={"b": LARGE_ENOUGH}, close=(2.0**-22, TINY)),
    Row("div.approx.f32 %d, %a, %b;", "f32", in_float64(np.divide),
        edges={"b": LARGE_ENOUGH}, close=(2.0**-22, TINY)),
]  # fmt: skip
for kind, relative, absolute in (("f16", 2.0**-9.9, 2.0**-24), ("bf16", 2.0**-7, TINY)):
    for t in (kind, f"{kind}x2"):
        ex2 = "ex2.approx.ftz" if kind == "bf16" else "ex2.approx"
        ROWS += [
            approximate(f"{ex2}.{t} %d, %a;", np.exp2, relative, absolute, t),
            approximate(f"tanh.approx.{t} %d, %a;", np.tanh, relative, absolute, t),
        ]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_against_the_definition(row):
    row.check()


def test_every_variant_has_a_row():
    assert untested("arithmetic", [row.ptx for row in ROWS]) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers([row.ptx for row in ROWS])


def test_integer_division_by_zero_gives_ones_and_the_number():
    """PTX leaves it open; GPUs give this, and nothing may stop here."""
    for t in INTEGERS:
        a = np.array([0, 1, 5, 100], t.replace("s", "int").replace("u", "uint"))
        zero = np.zeros_like(a)
        ones = run_snippet(f"div.{t} %d, %a, %b;", a.dtype, a=a, b=zero)
        left = run_snippet(f"rem.{t} %d, %a, %b;", a.dtype, a=a, b=zero)
        assert np.array_equal(ones, ~zero), t
        assert np.array_equal(left, a), t


@pytest.mark.parametrize(
    "ptx",
    [
        "add.cc.u32 %r0, %r1, %r2;",
        "addc.u32 %r0, %r1, %r2;",
        "sub.cc.u32 %r0, %r1, %r2;",
        "subc.u32 %r0, %r1, %r2;",
        "mad.lo.cc.u32 %r0, %r1, %r2, %r3;",
        "madc.hi.u32 %r0, %r1, %r2, %r3;",
        "mad.hi.sat.s32 %r0, %r1, %r2, %r3;",
        "mad24.hi.sat.s32 %r0, %r1, %r2, %r3;",
        "add.u16x2 %r0, %r1, %r2;",
        "add.f32x2 %l0, %l1, %l2;",
        "add.rz.f64 %e0, %e1, %e2;",
        "add.sat.f64 %e0, %e1, %e2;",
        "mul.rn.sat.bf16 %h0, %h1, %h2;",
        "fma.f32 %f0, %f1, %f2, %f3;",
        "fma.rn.oob.f16 %h0, %h1, %h2, %h3;",
        "mul.wide.u64 %l0, %l1, %l2;",
        "mul.u32 %r0, %r1, %r2;",
        "min.s16x2 %r0, %r1, %r2;",
        "min.NaN.f64 %e0, %e1, %e2;",
        "max.xorsign.abs.f32 %f0, %f1, %f2;",
        "dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;",
        "div.f32 %f0, %f1, %f2;",
        "div.rz.f32 %f0, %f1, %f2;",
        "div.approx.f64 %e0, %e1, %e2;",
        "rcp.rm.f32 %f0, %f1;",
        "rcp.approx.ftz.f64 %e0, %e1;",
        "sqrt.f32 %f0, %f1;",
        "sqrt.rz.f64 %e0, %e1;",
        "sin.rn.f32 %f0, %f1;",
        "ex2.rn.approx.f32 %f0, %f1;",
        "tanh.approx.f64 %e0, %e1;",
        "neg.u32 %r0, %r1;",
        "abs.b32 %r0, %r1;",
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

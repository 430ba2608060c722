"""setp, set, selp, slct, testp and copysign against their definitions."""

import operator

import numpy as np
import pytest
from rows import (
    BITS,
    FLOATS,
    HALVES,
    INTEGERS,
    UNSIGNED,
    Row,
    raises_at_its_line,
    refuses_made_up_modifiers,
    untested,
)

ORDERED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
OF_UNSIGNED = {
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def with_nan(function, result):
    """A comparison that gives `result` where one of the numbers is a NaN."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), result, function(a, b))


def always(a, b):
    return np.ones(a.shape, bool)


OF_FLOATS = {name: with_nan(f, False) for name, f in ORDERED.items()}
OF_FLOATS |= {f"{name}u": with_nan(f, True) for name, f in ORDERED.items()}
OF_FLOATS |= {
    "num": with_nan(always, False),
    "nan": lambda a, b: ~with_nan(always, False)(a, b),
}


def comparisons(type_):
    if type_ in FLOATS + HALVES:
        return OF_FLOATS
    if type_ in BITS:
        return {name: ORDERED[name] for name in ("eq", "ne")}
    return ORDERED | (OF_UNSIGNED if type_ in UNSIGNED else {})


# ---- setp


def halves_apart(holds, type_):
    """What setp writes to p and q: of pairs, the low half's result and the high's."""
    return tuple(holds.T) if type_.endswith("x2") else (holds, ~holds)


def setp_row(type_):
    """Every comparison, and `ne` with every way to combine it with %c, in one row."""
    functions = comparisons(type_)
    letters = "p" if type_ in ("f16", "bf16") else "pq"  # these have one result
    of = {n: "|".join(f"%{k}_{n}" for k in letters) for n in (*functions, *COMBINE)}
    lines = [f"setp.{n}.{type_} {of[n]}, %a, %b;" for n in functions]
    lines += [f"setp.ne.{n}.{type_} {of[n]}, %a, %b, %c;" for n in COMBINE]

    def want(a, b, c):
        holds = {n: f(a, b).astype(bool) for n, f in functions.items()}
        both = {n: halves_apart(h, type_) for n, h in holds.items()}
        both |= {n: [f(h, c) for h in both["ne"]] for n, f in COMBINE.items()}
        return {f"{k}_{n}": both[n][i] for n in of for i, k in enumerate(letters)}

    outs = {f"{k}_{n}": "pred" for n in of for k in letters}
    sources = {"a": type_, "b": type_, "c": "pred"}
    return Row("".join(lines), outs, want, sources)


ROWS = [setp_row(t) for t in INTEGERS + BITS + FLOATS + HALVES]
ROWS += [
    Row("setp.lt.s32 %d, %a, %b;", "pred", operator.lt, {"a": "s32", "b": "s32"}),
    Row("setp.lt.s32 %d|_, %a, %b;", "pred", operator.lt, {"a": "s32", "b": "s32"}),
    Row("setp.gt.and.u16 %d, %a, %b, !%c;", "pred", lambda a, b, c: (a > b) & ~c,
        {"a": "u16", "b": "u16", "c": "pred"}),
]  # fmt: skip

# ---- set


def written(holds, result, type_):
    """All ones or 1.0 where it holds; an integer of a pair has 16 ones per half."""
    if result not in ("u32", "s32"):
        return np.where(holds, 1.0, 0.0)
    if type_.endswith("x2"):
        low, high = (np.where(h, 0xFFFF, 0) for h in holds.T)
        return low | (high << 16)
    return np.where(holds, 0xFFFFFFFF, 0)


def set_row(result, type_):
    functions = comparisons(type_)
    types = f"{result}.{type_}"
    lines = [f"set.{n}.{types} %d_{n}, %a, %b;" for n in functions]
    lines += [f"set.ne.{n}.{types} %d_{n}, %a, %b, %c;" for n in COMBINE]

    def want(a, b, c):
        holds = {n: f(a, b).astype(bool) for n, f in functions.items()}
        c = c[:, None] if type_.endswith("x2") else c
        holds |= {n: f(holds["ne"], c) for n, f in COMBINE.items()}
        return {f"d_{n}": written(h, result, type_) for n, h in holds.items()}

    names = [f"d_{n}" for n in (*functions, *COMBINE)]
    sources = {"a": type_, "b": type_, "c": "pred"}
    return Row("".join(lines), dict.fromkeys(names, result), want, sources)


ROWS += [
    set_row(result, t)
    for t in INTEGERS + BITS + FLOATS
    for result in ("u32", "s32", "f32", "f16", "bf16")
]
ROWS += [set_row(result, t) for t in HALVES for result in ("u32", "s32", t)]

# ---- choices and tests

for t in INTEGERS + BITS + FLOATS:
    ROWS.append(
        Row(f"selp.{t} %d, %a, %b, %c;", t, lambda a, b, c: np.where(c, a, b),
            {"a": t, "b": t, "c": "pred"})
    )  # fmt: skip
    for by in ("s32", "f32"):
        ROWS.append(
            Row(f"slct.{t}.{by} %d, %a, %b, %c;", t,
                lambda a, b, c: np.where(c >= 0, a, b), {"a": t, "b": t, "c": by})
        )  # fmt: skip
for t, tiny in (("f32", 2.0**-126), ("f64", 2.0**-1022)):
    TESTS = {
        "finite": lambda a: abs(a) < np.inf,
        "infinite": lambda a: abs(a) == np.inf,
        "number": lambda a: a == a,
        "notanumber": lambda a: a != a,
        # "positive and negative zero are considered normal numbers" (PTX ISA, testp)
        "normal": lambda a, tiny=tiny: (
            ((abs(a) >= tiny) & (abs(a) < np.inf)) | (a == 0)
        ),
        "subnormal": lambda a, tiny=tiny: (abs(a) < tiny) & (a != 0),
    }
    ROWS += [
        Row(f"testp.{n}.{t} %d, %a;", "pred", f, {"a": t}) for n, f in TESTS.items()
    ]
    ROWS.append(
        Row(f"copysign.{t} %d, %a, %b;", t,
            lambda a, b: np.where(np.signbit(a) == np.signbit(b), b, -b))
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_against_the_definition(row):
    row.check()


def test_every_variant_has_a_row():
    assert untested("compare", [row.ptx for row in ROWS]) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers([row.ptx for row in ROWS])


@pytest.mark.parametrize(
    "ptx",
    [
        "setp.lt.b32 %p0, %r0, %r1;",
        "setp.lo.s32 %p0, %r0, %r1;",
        "setp.ltu.s32 %p0, %r0, %r1;",
        "setp.s32 %p0, %r0, %r1;",
        "setp.lt.u8 %p0, %h0, %h1;",
        "set.lt.f64.f32 %e0, %f0, %f1;",
        "set.lt.f16x2.f32 %r0, %f0, %f1;",
        "set.lt.f32.f16x2 %f0, %r0, %r1;",
        "set.lt.f16x2.bf16x2 %r0, %r1, %r2;",
        "selp.pred %p0, %p1, %p2, %p0;",
        "selp.f16 %h0, %h1, %h2, %p0;",
        "slct.f32.u32 %f0, %f1, %f2, %r0;",
        "testp.finite.f16 %p0, %h0;",
        "testp.zero.f32 %p0, %f0;",
        "copysign.f16 %h0, %h1, %h2;",
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

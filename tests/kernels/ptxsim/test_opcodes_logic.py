"""Bits: every opcode against a loop over bits, bytes or table entries."""

import operator

import numpy as np
import pytest
from rows import (
    BITS,
    INTEGERS,
    Row,
    raises_at_its_line,
    refuses_made_up_modifiers,
    untested,
)
from snippets import run_snippet

WIDTH = {t: int(t[1:]) for t in (*BITS, *INTEGERS)}
ALL = 0xFFFFFFFF
AMOUNTS = [0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, ALL]


def each(function):
    """A function of Python integers as one of arrays of them."""
    fixed = function.__defaults__ or ()  # what a loop below has bound
    return np.frompyfunc(function, function.__code__.co_argcount - len(fixed), 1)


# ---- logic and shifts

ROWS = []
for t in ("pred", *BITS):
    full = 1 if t == "pred" else 2 ** WIDTH[t] - 1
    for name, function in (
        ("and", operator.and_),
        ("or", operator.or_),
        ("xor", operator.xor),
    ):
        ROWS.append(Row(f"{name}.{t} %d, %a, %b;", t, function))
    ROWS.append(Row(f"not.{t} %d, %a;", t, lambda a, full=full: a ^ full))
for t in BITS:
    ROWS.append(Row(f"cnot.{t} %d, %a;", t, each(lambda a: int(a == 0))))


def shift_rows(type_):
    """Amounts beyond the width are the width."""
    width, sources = WIDTH[type_], {"a": type_, "b": "u32"}
    edges = {"b": AMOUNTS}
    if type_ in BITS:
        left = each(lambda a, b: a << min(b, width))
        yield Row(f"shl.{type_} %d, %a, %b;", type_, left, sources, edges)
    right = each(lambda a, b: a >> min(b, width))
    yield Row(f"shr.{type_} %d, %a, %b;", type_, right, sources, edges)
    for n in (0, 3, width - 1, width, 200):
        right = each(lambda a, n=n: a >> n)
        yield Row(f"shr.{type_} %d, %a, {n};", type_, right, {"a": type_})


ROWS += [row for t in BITS + INTEGERS for row in shift_rows(t)]
ROWS += [
    Row(f"shl.b32 %d, %a, {n};", "b32", each(lambda a, n=n: a << n))
    for n in (4, 32, 77)
]


def funnel(a, b, n, left):
    both = (b << 32) | a
    return both << n >> 32 if left else both >> n


for name, left in (("l", True), ("r", False)):
    AMOUNT = {"wrap": lambda c: c & 31, "clamp": lambda c: min(c, 32)}
    for mode, amount in AMOUNT.items():

        def function(a, b, c, left=left, amount=amount):
            return funnel(a, b, amount(c), left)

        ptx = f"shf.{name}.{mode}.b32 %d, %a, %b, %c;"
        of_arrays = each(function)
        ROWS.append(Row(ptx, "b32", of_arrays, edges={"c": AMOUNTS}))

# ---- fields, bit by bit as the PTX ISA defines them


def extracted(a, b, c, width, signed):
    start, length = b & 255, c & 255
    sign = 0
    if signed and length:
        sign = a >> min(start + length - 1, width - 1) & 1
    bit = lambda i: (  # noqa: E731
        a >> (start + i) & 1 if i < length and start + i < width else sign
    )
    return sum(bit(i) << i for i in range(width))


def inserted(a, b, start, length, width):
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < width:
            b = b & ~(1 << (start + i)) | ((a >> i & 1) << (start + i))
    return b


for t in ("u32", "s32", "u64", "s64"):
    field = {"a": t, "b": "u32", "c": "u32"}

    def function(a, b, c, width=WIDTH[t], signed=t[0] == "s"):
        return extracted(a, b, c, width, signed)

    ROWS.append(
        Row(f"bfe.{t} %d, %a, %b, %c;", t, each(function), field,
            {"b": AMOUNTS, "c": AMOUNTS})
    )  # fmt: skip
for t in ("b32", "b64"):
    field = {"a": t, "b": t, "s": "u32", "n": "u32"}

    def function(a, b, s, n, width=WIDTH[t]):
        return inserted(a, b, s, n, width)

    ROWS.append(
        Row(f"bfi.{t} %d, %a, %b, %s, %n;", t, each(function), field,
            {"s": AMOUNTS, "n": AMOUNTS})
    )  # fmt: skip


def ones(a, b):
    """`b` ones from bit `a`; what lies beyond bit 31 is lost."""
    return sum(1 << i for i in range(32) if a <= i < a + b)


ROWS.append(
    Row(
        "bmsk.clamp.b32 %d, %a, %b;",
        "b32",
        each(ones),
        edges={"a": AMOUNTS, "b": AMOUNTS},
    )
)

# ---- counts


def highest(a, width):
    """The position of the highest bit that differs from the sign, or None."""
    a = ~a if a < 0 else a
    return a.bit_length() - 1 if a else None


for t in ("b32", "b64"):
    w = WIDTH[t]
    ROWS += [
        Row(f"popc.{t} %d, %a;", "u32", each(lambda a: a.bit_count()), {"a": t}),
        Row(
            f"clz.{t} %d, %a;", "u32", each(lambda a, w=w: w - a.bit_length()), {"a": t}
        ),
        Row(f"brev.{t} %d, %a;", t, each(lambda a, w=w: int(f"{a:0{w}b}"[::-1], 2))),
    ]
for t in ("u32", "s32", "u64", "s64"):
    w = WIDTH[t]

    def position(a, w=w):
        found = highest(a, w)
        return ALL if found is None else found

    def distance(a, w=w):
        found = highest(a, w)
        return ALL if found is None else w - 1 - found

    ROWS += [
        Row(f"bfind.{t} %d, %a;", "u32", each(position), {"a": t}),
        Row(
            f"bfind.shiftamt.{t} %d, %a;",
            "u32",
            each(distance),
            {"a": t},
        ),
    ]

# ---- bytes

# PTX ISA, prmt: the bytes of b:a that go to bytes 3, 2, 1, 0, for c modulo 4 = 0 .. 3
PATTERNS = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def joined(a, b, choices):
    """Byte k is the byte of b:a that choice k names; with 8 its sign, eight times."""
    source = (a | b << 32).to_bytes(8, "little")
    picked = []
    for choice in choices:
        byte = source[choice & 7]
        picked.append((255 if byte & 128 else 0) if choice & 8 else byte)
    return int.from_bytes(picked, "little")


def permuted(a, b, c):
    return joined(a, b, [c >> 4 * k & 15 for k in range(4)])


ROWS.append(
    Row("prmt.b32 %d, %a, %b, %c;", "b32", each(permuted),
        edges={"c": [0x3210, 0x7654, 0x8421, 0xFEDC, 0x19B4, 0x5410, 0xABCD9876]})
)  # fmt: skip
for mode, pattern in PATTERNS.items():

    def function(a, b, c, pattern=pattern):
        return joined(a, b, [int(x) for x in reversed(pattern[c & 3])])

    ptx = f"prmt.b32.{mode} %d, %a, %b, %c;"
    of_arrays = each(function)
    ROWS.append(Row(ptx, "b32", of_arrays, edges={"c": [0, 1, 2, 3, 6, ALL]}))
ROWS.append(
    Row("lop3.b32 %d, %a, %b, %c, 0xCA;", "b32", lambda a, b, c: (a & b) | (~a & c))
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_against_the_definition(row):
    row.check()


def test_lop3_with_every_table():
    """Bit i of the result is bit 4a + 2b + c of the table; 16 tables per kernel."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (3, 128), np.uint32)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    index = 4 * bits[0] + 2 * bits[1] + bits[2]
    a, b, c = words
    for first in range(0, 256, 16):
        tables = range(first, first + 16)
        ptx = "".join(f"lop3.b32 %d{n}, %a, %b, %c, {n};" for n in tables)
        out = {f"d{n}": np.uint32 for n in tables}
        got = run_snippet(ptx, out, a=a, b=b, c=c)
        for n in tables:
            want = (n >> index & 1) << np.arange(32, dtype=np.uint32)
            assert np.array_equal(got[f"d{n}"], want.sum(axis=1)), hex(n)


def test_every_variant_has_a_row():
    assert untested("logic", [row.ptx for row in ROWS]) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers([row.ptx for row in ROWS])


@pytest.mark.parametrize(
    "ptx",
    [
        "and.u32 %r0, %r1, %r2;",
        "not.b8 %h0, %h1;",
        "cnot.pred %p0, %p1;",
        "shl.u32 %r0, %r1, 3;",
        "shf.l.b32 %r0, %r1, %r2, %r3;",
        "shf.l.wrap.b64 %l0, %l1, %l2, %r3;",
        "bfe.b32 %r0, %r1, 0, 8;",
        "bfi.u32 %r0, %r1, %r2, 0, 8;",
        "bmsk.wrap.b32 %r0, %r1, %r2;",
        "szext.wrap.u32 %r0, %r1, %r2;",
        "popc.u32 %r0, %r1;",
        "clz.b16 %r0, %h1;",
        "fns.b32 %r0, %r1, 0, 1;",
        "prmt.b32.f4a %r0, %r1, %r2, %r3;",
        "lop3.or.b32 %r0|%p0, %r1, %r2, %r3, 1, %p1;",
        "lop3.b64 %l0, %l1, %l2, %l3, 1;",
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

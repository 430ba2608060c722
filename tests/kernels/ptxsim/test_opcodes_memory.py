"""mov, loads and stores, atomics, copies and addresses, against plain NumPy."""

import numpy as np
import pytest
from exact import bits_of, to_type, values_of
from rows import (
    BITS,
    FLOATS,
    HALVES,
    INTEGERS,
    Row,
    raises_at_its_line,
    random_values,
    refuses_made_up_modifiers,
    untested,
)
from snippets import HEADER, run_snippet

from kvq.kernels import ptxsim
from kvq.kernels.ptxsim.types import NUMPY

ACCESSED = ("b8", "u8", "s8", *BITS, *INTEGERS, *FLOATS)
SIZE = {t: int(t[1:]) // 8 for t in ACCESSED}
LINES = []  # all that the tests of this file run


def lines(*texts):
    """The texts as one, noted down."""
    text = "\n".join(texts)
    LINES.append(text)
    return text


# ---- mov

ROWS = [Row(f"mov.{t} %d, %a;", t, lambda a: a) for t in (*BITS, *INTEGERS, *FLOATS)]
ROWS += [
    Row("mov.pred %d, %a;", "pred", lambda a: a),
    Row("mov.b32 %d, {%a, %b};", "b32", lambda a, b: a | b << 16,
        {"a": "b16", "b": "b16"}),
    Row("mov.b64 %d, {%a, %b};", "b64", lambda a, b: a | b << 32,
        {"a": "b32", "b": "b32"}),
    Row("mov.b64 %d, {%a, %b, %c, %a};", "b64",
        lambda a, b, c: a | b << 16 | c << 32 | a << 48, dict.fromkeys("abc", "b16")),
    Row("mov.b32 {%d, %e}, %a;", {"d": "b16", "e": "b16"},
        lambda a: {"d": a, "e": a >> 16}, {"a": "b32"}),
    Row("mov.b64 {_, %e}, %a;", {"e": "b32"}, lambda a: {"e": a >> 32}, {"a": "b64"}),
    Row("mov.b64 {%d, %e}, %a;", {"d": "u32", "e": "s32"},
        lambda a: {"d": a, "e": a >> 32}, {"a": "b64"}),
    Row("mov.b64 {%d, %e, %f, %g}, %a;", dict.fromkeys("defg", "u16"),
        lambda a: {n: a >> 16 * k for k, n in enumerate("defg")}, {"a": "b64"}),
    Row("mov.b32 %d, 0f3FC00000;", "f32", lambda a: 1.5, {"a": "b32"}),
]  # fmt: skip
LINES += [row.ptx for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_mov(row):
    row.check()


# ---- loads and stores

ACCESSES = [(t, n) for t in ACCESSED for n in (1, 2, 4) if n * SIZE[t] <= 16]


def vector(names):
    return f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]


def access(type_, count):
    """Every thread has `count` neighbours, and moves them through every space.

    %d: read from global memory; %s, %l: written one by one to shared and local memory
    and read as a vector; %t, %m: written there as a vector, in reverse, and read one by
    one; %g, %h: read through generic addresses.
    """
    size, v = SIZE[type_], f".v{count}" if count > 1 else ""
    shared = "shared::cta" if count == 2 else "shared"
    names = {x: [f"%{x}{k}" for k in range(count)] for x in "dstlmgh"}
    places = [k * size for k in range(count)]
    text = [
        f".local .align 16 .b8 box[{16 + count * size}];",
        f"mul.wide.u32 %x, %i, {count * size}; add.s64 %q, %in, %x;"
        f"add.s64 %y, %out, %x; mul.lo.u32 %w, %i, {count * size};"
        "add.u32 %w, %w, %shared; mov.u64 %b, box;",
        f"ld.global{v}.{type_} {vector(names['d'])}, [%q];",
        f"ld{v}.{type_} {vector(names['g'])}, [%q];",
        f"st.global{v}.{type_} [%y], {vector(names['d'][::-1])};",
    ]
    for space, at, one, back in (
        (shared, "%w", "s", "t"),
        ("local", "%b+16", "l", "m"),
    ):
        at_k = [f"{at}+{k}" if "+" not in at else f"%b+{16 + k}" for k in places]
        put = zip(at_k, names["d"], strict=True)
        got = zip(at_k, names[back], strict=True)
        text += [f"st.{space}.{type_} [{a}], {x};" for a, x in put]
        text.append(f"ld.{space}{v}.{type_} {vector(names[one])}, [{at}];")
        text.append(f"st.{space}{v}.{type_} [{at}], {vector(names['d'][::-1])};")
        text += [f"ld.{space}.{type_} {x}, [{a}];" for a, x in got]
    text.append(
        "cvt.u64.u32 %z, %w; cvta.shared.u64 %z, %z;"
        f"st{v}.{type_} [%z], {vector(names['d'])};"
        f"ld{v}.{type_} {vector(names['h'])}, [%z];"
    )
    return lines(*text)


CASES = {(t, n): access(t, n) for t, n in ACCESSES}


@pytest.mark.parametrize(("type_", "count"), ACCESSES)
def test_loads_and_stores(type_, count):
    data = random_values(type_, np.random.default_rng(count), 32 * count)
    out = np.zeros_like(data)
    results = run_snippet(
        CASES[type_, count],
        {f"{x}{k}": NUMPY[type_] for x in "dstlmgh" for k in range(count)},
        threads=32,
        shared=32 * data.itemsize * count,
        buffers={"in": data.copy(), "out": out},
        declare=".reg .b64 %q, %x, %y, %z, %b; .reg .b32 %w;",
    )
    columns = data.reshape(32, count)
    assert same(out.reshape(32, count), columns[:, ::-1])
    for k in range(count):
        for name in "dslgh":
            assert same(results[f"{name}{k}"], columns[:, k]), name
        for name in "tm":
            assert same(results[f"{name}{k}"], columns[:, count - 1 - k]), name


def same(x, y):
    return np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()


def constants(type_, count):
    """From a parameter and from constant memory to the buffer, one after the other."""
    v, names = f".v{count}" if count > 1 else "", [f"%x{k}" for k in range(count)]
    space = "param::entry" if count == 2 else "param"
    return lines(
        f"ld.{space}{v}.{type_} {vector(names)}, [struct+16];",
        f"st.global{v}.{type_} [%o], {vector(names)};",
        f"ld.const{v}.{type_} {vector(names)}, [table+16];",
        f"st.global{v}.{type_} [%o+16], {vector(names)};",
    )


CONSTANTS = {(t, n): constants(t, n) for t, n in ACCESSES}


@pytest.mark.parametrize(("type_", "count"), ACCESSES)
def test_loads_of_parameters_and_constants(type_, count):
    size = SIZE[type_] * count
    struct, table = (
        np.arange(1, 33, dtype=np.uint8),
        np.arange(101, 133, dtype=np.uint8),
    )
    width = max(16, 8 * SIZE[type_])
    register = type_ if type_ in FLOATS else f"b{width}"
    values = ", ".join(map(str, table))
    text = (
        f"{HEADER}.const .align 16 .b8 table[32] = {{{values}}};\n"
        ".entry k(.param .align 16 .b8 struct[32], .param .u64 out) {\n"
        f".reg .{register} %x<4>; .reg .b64 %o; ld.param.u64 %o, [out];\n"
        f"{CONSTANTS[type_, count]}\nret; }}"
    )
    out = np.zeros(32, np.uint8)
    ptxsim.Module(text).kernel().launch(1, 1, (struct.tobytes(), out))
    assert np.array_equal(out[:size], struct[16 : 16 + size])
    assert np.array_equal(out[16 : 16 + size], table[16 : 16 + size])


# ---- atomics

WORDS = ("u32", "s32", "u64", "s64")
ATOMICS = {
    "add": ("u32", "s32", "u64", *FLOATS, *HALVES),
    "min": WORDS,
    "max": WORDS,
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}
NEXT = {  # PTX ISA, atom: the new value
    "min": lambda old, b, c: min(old, b),
    "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b,
    "xor": lambda old, b, c: old ^ b,
    "inc": lambda old, b, c: 0 if old >= b else old + 1,
    "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
    "exch": lambda old, b, c: b,
    "cas": lambda old, b, c: c if old == b else old,
}
CELLS = 5
ATOM = [(op, t) for op, types in ATOMICS.items() for t in types]
PLACES = ("global", "shared", "generic")


def sum_of(type_, old, b):
    """One addition in the type, on the values that memory holds."""
    if type_ in HALVES:
        values = values_of(np.array([old, b]), type_)
        total = to_type(type_.removesuffix("x2"), values.sum(axis=0))
        return bits_of(total[None] if type_.endswith("x2") else total, type_).flat[0]
    with np.errstate(over="ignore"):
        return old + b


def one_by_one(op, type_, cells, index, b, c):
    """(old values, cells afterwards): the threads take turns."""
    cells, old = cells.copy(), np.zeros_like(b)
    for lane, cell in enumerate(index):
        old[lane] = cells[cell]
        if op == "add":
            cells[cell] = sum_of(type_, cells[cell], b[lane])
        else:
            cells[cell] = NEXT[op](cells[cell], b[lane], c[lane])
    return old, cells


def atomic(op, type_):
    """Threads that share 5 cells, in three buffers by `atom` and three by `red`."""
    size = np.dtype(NUMPY[type_]).itemsize
    word = type_ if type_ in FLOATS else f"b{8 * size}"
    what = f"{op}{'.noftz' * (type_ in HALVES)}.{type_}"
    values = "%b, %c" if op == "cas" else "%b"
    text = [
        ".reg .b64 %x, %z, %own; .reg .b32 %r, %mine; .reg .pred %p;"
        f".reg .{word} %v; mul.wide.u32 %x, %k, {size}; cvt.u32.u64 %r, %x;"
        f"add.u32 %r, %shared, %r; mad.lo.u32 %mine, %i, {size}, %shared;"
        f"setp.lt.u32 %p, %i, {CELLS};"
    ]
    for opcode in opcodes_of(op):
        for place in PLACES:
            space = "" if place == "generic" else f".{place}"
            at = "[%r]" if place == "shared" else "[%z]"
            result = f"%old_{place}, " * (opcode == "atom")
            buffer = f"%{opcode}_{place}"
            run = f"{opcode}{space}.{what} {result}{at}, {values};"
            if place == "shared":
                run = _in_shared(buffer, word, size, run)
            text.append(f"add.s64 %z, {buffer}, %x; {run}")
    if "red" in opcodes_of(op):  # a result that nobody wants
        text.append(f"add.s64 %z, %sink, %x; atom.global.{what} _, [%z], %b;")
    return lines(*text)


def opcodes_of(op):
    return ("atom",) if op in ("exch", "cas") else ("atom", "red")


def _in_shared(buffer, word, size, run):
    """Between copies of the cells to shared memory and back."""
    return (
        f"mul.wide.u32 %own, %i, {size}; add.s64 %own, {buffer}, %own;"
        f"@%p ld.global.{word} %v, [%own]; @%p st.shared.{word} [%mine], %v;"
        f"bar.sync 0; {run} bar.sync 0;"
        f"@%p ld.shared.{word} %v, [%mine]; @%p st.global.{word} [%own], %v;"
        "bar.sync 0;"
    )


ATOM_LINES = {(op, t): atomic(op, t) for op, t in ATOM}


@pytest.mark.parametrize(("op", "type_"), ATOM)
def test_atomics(op, type_):
    rng = np.random.default_rng(7)
    index = rng.integers(0, CELLS, 64).astype(np.int32)
    b, c, cells = (atomic_values(op, type_, rng, n) for n in (64, 64, CELLS))
    names = [f"{o}_{p}" for o in opcodes_of(op) for p in PLACES]
    names += ["sink"] * ("red" in opcodes_of(op))
    buffers = {name: cells.copy() for name in names}
    got = run_snippet(
        ATOM_LINES[op, type_],
        {f"old_{p}": NUMPY[type_] for p in PLACES},
        **{"buffers": buffers, "shared": 64, "block": 64, "k": index, "b": b, "c": c},
    )
    old, after = one_by_one(op, type_, cells, index, b, c)
    assert not np.array_equal(after, cells)
    for name, array in buffers.items():
        assert same(array, after), name
    for name, array in got.items():
        assert same(array, old), name


def atomic_values(op, type_, rng, count):
    if op in ("inc", "dec", "cas"):
        return rng.integers(0, 4, count).astype(NUMPY[type_])
    if type_ in HALVES:
        values = rng.standard_normal((count, 2)[: 1 + type_.endswith("x2")])
        return bits_of(to_type(type_.removesuffix("x2"), values), type_)
    if type_ in FLOATS:
        return rng.standard_normal(count).astype(NUMPY[type_])
    return random_values(type_, rng, count)


# ---- asynchronous copies

COPIES = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]


def copy(cache, size, space, valid):
    return lines(
        f".reg .b64 %q; .reg .b32 %w; mul.wide.u32 %q, %i, {size};"
        f"add.s64 %q, %q, %m; mad.lo.u32 %w, %i, {size}, %shared;",
        f"cp.async.{cache}.{space}.global [%w], [%q], {size}{', %n' * valid};",
        "cp.async.commit_group; cp.async.wait_group 0;"
        if valid
        else "cp.async.wait_all;",
        *(f"ld.shared.u8 %d{k}, [%w+{k}];" for k in range(size)),
    )


COPY_LINES = {
    (*case, valid): copy(*case, "shared::cta" if valid else "shared", valid)
    for case in COPIES
    for valid in (False, True)
}


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize(("cache", "size"), COPIES)
def test_asynchronous_copies(cache, size, valid):
    """With a fourth operand that many bytes are read; the others become zero."""
    data = np.random.default_rng(size).integers(1, 256, 32 * size, np.uint8)
    n = 4 * (np.arange(32, dtype=np.uint32) % (size // 4 + 1))
    inputs = {"n": n} if valid else {}
    got = run_snippet(
        COPY_LINES[cache, size, valid],
        {f"d{k}": np.uint8 for k in range(size)},
        threads=32,
        shared=32 * size,
        buffers={"m": data},
        **inputs,
    )
    want = data.reshape(32, size)
    if valid:
        want = np.where(np.arange(size) < n[:, None], want, 0)
    assert np.array_equal(np.stack(list(got.values()), axis=1), want)


def test_a_copy_that_a_predicate_switches_off_raises():
    with pytest.raises(ptxsim.UnsupportedPTX, match=r"line \d+: cp.* %p is \.pred"):
        run_snippet(
            ".reg .pred %p; cp.async.ca.shared.global [%shared], [%m], 4, %p;",
            np.int32,
            threads=1,
            shared=4,
            buffers={"m": np.zeros(1, np.int32)},
        )


def test_a_copy_of_a_part_of_a_word_is_a_fault():
    body = (
        "cp.async.ca.shared.global [%shared], [%m], 8, 6; cp.async.wait_all;"
        "mov.u32 %d, 0;"
    )
    buffers = {"m": np.zeros(2, np.int32)}
    with pytest.raises(ptxsim.KernelFault, match="a part of a word is copied"):
        run_snippet(body, np.int32, threads=1, shared=8, buffers=buffers)


# ---- addresses

SPACES = ("global", "shared", "local")
THERE_AND_BACK = lines(
    ".local .align 8 .b8 box[8]; .reg .b64 %g, %b, %own_shared, %own_local;",
    ".reg .b64 %own_global; mov.u64 %own_global, %m; mov.u64 %own_local, box;",
    "cvt.u64.u32 %own_shared, %shared;",
    *(
        f"cvta.{s}.u64 %g, %own_{s}; cvta.to.{s}.u64 %b, %g;"
        f"setp.eq.u64 %back_{s}, %b, %own_{s};"
        + "".join(f"isspacep.{other} %{s}_{other}, %g;" for other in SPACES)
        for s in SPACES
    ),
)


def test_generic_addresses():
    """Each space is found again in its generic address, and the address goes back."""
    names = [f"back_{s}" for s in SPACES]
    names += [f"{s}_{other}" for s in SPACES for other in SPACES]
    outs, buffers = dict.fromkeys(names, bool), {"m": np.zeros(4)}
    got = run_snippet(THERE_AND_BACK, outs, threads=32, shared=8, buffers=buffers)
    for space in SPACES:
        assert got[f"back_{space}"].all(), space
        for other in SPACES:
            assert (got[f"{space}_{other}"] == (space == other)).all(), (space, other)


NO_WINDOW = {
    s: lines(f"cvta.{s}.u64 %d, %a; cvta.to.{s}.u64 %d, %d;")
    for s in ("const", "param")
}


@pytest.mark.parametrize("space", NO_WINDOW)
def test_constants_and_parameters_need_no_window(space):
    a = np.arange(5, dtype=np.uint64)
    assert np.array_equal(run_snippet(NO_WINDOW[space], np.uint64, a=a), a)


OWN_BLOCK = lines(
    ".reg .b64 %g; cvt.u64.u32 %g, %shared; cvta.shared::cta.u64 %g, %g;",
    "st.shared::cta.u32 [smem], 0; bar.sync 0; isspacep.shared::cta %p, %g;",
    "red.shared::cta.add.u32 [smem], %a; bar.sync 0;",
    "atom.shared::cta.add.u32 %d, [smem], 0;",
)


def test_shared_memory_is_that_of_the_own_block():
    """`.shared::cta` says what `.shared` means; loads and copies above use it too."""
    a = np.arange(64, dtype=np.uint32)
    got = run_snippet(OWN_BLOCK, {"d": np.uint32, "p": bool}, a=a, block=32, shared=4)
    assert got["p"].all()
    assert np.array_equal(got["d"], a.reshape(2, 32).sum(axis=1).repeat(32))


# ---- what only orders memory, or hints

ORDER = [
    "membar.cta; membar.gl; membar.sys;",
    "fence.acq_rel.gpu; fence.sc.cta; fence.release.sys; fence.acquire.cluster;",
    "prefetch.global.L2 [%m]; prefetch.global.L1 [%m]; prefetch.local.L1 [box];",
]
LINES += [*ORDER, "trap;"]


@pytest.mark.parametrize("text", ORDER)
def test_fences_and_prefetches_change_nothing(text):
    a, m = np.arange(32, dtype=np.int32), np.arange(3, dtype=np.float32)
    body = f"{text} add.s32 %d, %a, 1;"
    got = run_snippet(
        body, np.int32, a=a, buffers={"m": m}, declare=".local .b32 box[4];"
    )
    assert np.array_equal(got, a + 1)
    assert m.tolist() == [0, 1, 2]


def test_a_trap_stops_the_kernel():
    with pytest.raises(ptxsim.KernelFault, match="trap"):
        run_snippet("trap; mov.u32 %d, 0;", np.int32, threads=32)


# ---- completeness


def test_every_variant_has_a_row():
    assert untested("memory", LINES) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers(LINES)


@pytest.mark.parametrize(
    "ptx",
    [
        "mov.b128 %l0, {%l1, %l2};",
        "mov.f16 %h0, %h1;",
        "ld.global.pred %p0, [%l0];",
        "ld.global.f16 %h0, [%l0];",
        "ld.global.b128 %l0, [%l0];",
        "ld.global.v8.f32 {%f0,%f1,%f2,%f3,%f0,%f1,%f2,%f3}, [%l0];",
        "ld.global.v4.f64 {%e0, %e1, %e2, %e3}, [%l0];",
        "ld.shared::cluster.u32 %r0, [%r1];",
        "ld.global.mmio.relaxed.sys.u32 %r0, [%l0];",
        "ldu.global.u32 %r0, [%l0];",
        "st.const.u32 [%l0], %r0;",
        "st.async.shared::cluster.u32 [%r0], %r1, [%r2];",
        "atom.global.add.s64 %l0, [%l1], %l2;",
        "atom.global.max.f32 %f0, [%l0], %f1;",
        "atom.global.and.u32 %r0, [%l0], %r1;",
        "atom.global.exch.b128 %l0, [%l1], %l2;",
        "atom.global.v2.f32.add {%f0, %f1}, [%l0], {%f0, %f1};",
        "atom.local.add.u32 %r0, [%l0], %r1;",
        "red.global.cas.b32 [%l0], %r0, %r1;",
        "red.async.shared::cluster.add.u32 [%r0], %r1, [%r2];",
        "cp.async.ca.shared.global [%r0], [%l0], 12;",
        "cp.async.ca.shared::cluster.global [%r0], [%l0], 16;",
        "cp.async.mbarrier.arrive.b64 [%r0];",
        "cp.async.bulk.commit_group;",
        "cp.reduce.async.bulk.global.shared::cta.add.u32 [%l0], [%r0], 16;",
        "cvta.u64 %l0, %l1;",
        "cvta.shared.u32 %r0, %r1;",
        "cvta.shared::cluster.u64 %l0, %l1;",
        "isspacep.const %p0, %l0;",
        "isspacep.shared::cluster %p0, %l0;",
        "fence.proxy.async;",
        "prefetchu.L1 [%l0];",
        "prefetch.global.L3 [%l0];",
        "mbarrier.init.shared.b64 [%r0], 32;",
        "createpolicy.fractional.L2::evict_last.b64 %l0, 1.0;",
        "nanosleep.u32 100;",
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

"""Exchanges between the lanes of a warp, and barriers, against loops over lanes."""

import numpy as np
import pytest
from rows import raises_at_its_line, refuses_made_up_modifiers, untested
from snippets import HEADER, run_snippet

from kvq.kernels import ptxsim

FULL = 0xFFFFFFFF
LINES = []  # all that the tests of this file run


def lines(*texts):
    LINES.append("\n".join(texts))
    return LINES[-1]


def numbers(low, high, seed=0):
    """Two warps."""
    return np.random.default_rng(seed).integers(low, high, 64).astype(np.int32)


def by_warp(function, *arrays):
    """function(lane, rows) for every lane, where rows are the lists of its warp."""
    warps = zip(*(a.reshape(-1, 32).tolist() for a in arrays), strict=True)
    return [function(lane, *rows) for rows in warps for lane in range(32)]


# ---- shfl

SHUFFLE = {
    mode: lines(
        f"shfl.sync.{mode}.b32 %d|%p, %a, %b, %c, -1;",
        f"shfl.sync.{mode}.b32 %e, %a, %b, %c, -1;",
    )
    for mode in ("idx", "up", "down", "bfly")
}


def source_lane(mode, lane, b, c):
    """(lane, is it in range?) as the PTX ISA writes it in `shfl`."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    low = lane & segment
    high = low | (clamp & ~segment)
    j = {
        "idx": low | (b & ~segment),
        "up": lane - b,
        "down": lane + b,
        "bfly": lane ^ b,
    }[mode]
    in_range = j >= high if mode == "up" else j <= high
    return (j if in_range else lane), in_range


@pytest.mark.parametrize("mode", SHUFFLE)
@pytest.mark.parametrize("segment", [0, 16, 24, 28, 31, 5])
def test_shuffles(mode, segment):
    """Segments of 32, 16, 8, 4, 1 lanes and of lanes that are not neighbours."""
    a, b = numbers(-1000, 1000), numbers(0, 70, 1)
    for clamp in (0, 31, 6):
        c = np.full(64, segment << 8 | clamp, np.int32)
        outs = {"d": np.int32, "e": np.int32, "p": bool}
        got = run_snippet(SHUFFLE[mode], outs, a=a, b=b, c=c)
        found = by_warp(lambda k, b, c: source_lane(mode, k, b[k], c[k]), b, c)
        lane = np.array([lane for lane, _ in found])
        want = a[lane + np.arange(64) // 32 * 32]
        assert np.array_equal(got["d"], want)
        assert np.array_equal(got["e"], want)
        assert np.array_equal(got["p"], [in_range for _, in_range in found])


# ---- vote, match, redux

VOTES = lines(
    "vote.sync.all.pred %all, %a, %m; vote.sync.any.pred %any, %a, %m;",
    "vote.sync.uni.pred %uni, %a, %m; vote.sync.ballot.b32 %ballot, %a, %m;",
)
VALUES = lines(
    "match.any.sync.b32 %any, %a, %m; match.any.sync.b64 %any_wide, %b, %m;",
    "match.all.sync.b32 %all|%p, %a, %m; match.all.sync.b64 %all_wide|%q, %b, %m;",
    "match.all.sync.b32 %alone, %a, %m;",
)
REDUCTIONS = {
    (op, t): lines(f"redux.sync.{op}.{t} %d, %a, %m;")
    for t in ("u32", "s32", "b32")
    for op in (("and", "or", "xor") if t == "b32" else ("add", "min", "max"))
}
GROUPS = (0x0F0F00FF, 0xF0F0FF00)
MASKS = np.array([GROUPS[0] if GROUPS[0] >> k & 1 else GROUPS[1] for k in range(32)])
MASKS = np.tile(MASKS, 2).astype(np.uint32)
IN_FIRST = GROUPS[0] == MASKS


def in_groups(text):
    """The lines run by one group of lanes while the other is elsewhere."""
    parts = [
        f"setp.eq.u32 %mine, %m, {mask}; @!%mine bra SKIP{k}; {text} SKIP{k}:"
        for k, mask in enumerate(GROUPS)
    ]
    return ".reg .pred %mine;" + "".join(parts)


def members(lane, mask):
    return [k for k in range(32) if mask[lane] >> k & 1]


@pytest.mark.parametrize("parted", [False, True])
def test_votes(parted):
    mask = MASKS if parted else np.full(64, FULL, np.uint32)
    text = in_groups(VOTES) if parted else VOTES
    for a in (numbers(0, 2) > 0, np.arange(64) > 31, IN_FIRST):
        outs = {"all": bool, "any": bool, "uni": bool, "ballot": np.uint32}
        got = run_snippet(text, outs, a=a, m=mask)

        def yes(lane, a, m):
            return [a[k] for k in members(lane, m)]

        votes = by_warp(yes, a, mask)
        assert np.array_equal(got["all"], [all(v) for v in votes])
        assert np.array_equal(got["any"], [any(v) for v in votes])
        assert np.array_equal(got["uni"], [all(v) or not any(v) for v in votes])
        ballot = by_warp(
            lambda k, a, m: sum(1 << n for n in members(k, m) if a[n]), a, mask
        )
        assert np.array_equal(got["ballot"], ballot)


@pytest.mark.parametrize("parted", [False, True])
def test_matches(parted):
    mask = MASKS if parted else np.full(64, FULL, np.uint32)
    text = in_groups(VALUES) if parted else VALUES
    for a in (numbers(-2, 2), np.arange(64) // 32, IN_FIRST * 9):
        a = a.astype(np.int32)
        b = (a.astype(np.int64) << 32) + 7
        outs = dict.fromkeys(("any", "any_wide", "all", "all_wide", "alone"), np.uint32)
        got = run_snippet(text, outs | {"p": bool, "q": bool}, a=a, b=b, m=mask)

        def equal(lane, a, m):
            return sum(1 << k for k in members(lane, m) if a[k] == a[lane])

        same = np.array(by_warp(equal, a, mask), np.uint32)
        for name in ("any", "any_wide"):
            assert np.array_equal(got[name], same), name
        for name in ("all", "all_wide", "alone"):
            assert np.array_equal(got[name], np.where(same == mask, mask, 0)), name
        for name in "pq":
            assert np.array_equal(got[name], same == mask), name


def test_only_match_all_has_a_predicate():
    with pytest.raises(ptxsim.UnsupportedPTX, match=r"line \d+: match.*1 results"):
        run_snippet(
            "match.any.sync.b32 %d|%p, %d, -1;", {"d": np.uint32, "p": bool}, threads=32
        )


REDUCE = {
    "add": sum,
    "min": min,
    "max": max,
    "and": lambda v: int(np.bitwise_and.reduce(v)),
    "or": lambda v: int(np.bitwise_or.reduce(v)),
    "xor": lambda v: int(np.bitwise_xor.reduce(v)),
}


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize(("op", "type_"), REDUCTIONS)
def test_reductions(op, type_, parted):
    """Large numbers: sums wrap around, and signs count; then only one of the signs."""
    mask = MASKS if parted else np.full(64, FULL, np.uint32)
    text = in_groups(REDUCTIONS[op, type_]) if parted else REDUCTIONS[op, type_]
    large = numbers(-(2**31), 2**31)
    for a in (large, large | -(2**31), large & (2**31 - 1)):
        a = a.view(np.int32 if type_ == "s32" else np.uint32)
        got = run_snippet(text, a.dtype, a=a, m=mask)

        def value(lane, a, m):
            return REDUCE[op]([a[k] for k in members(lane, m)]) % 2**32

        want = np.array(by_warp(value, a, mask), np.uint32)
        assert np.array_equal(got.view(np.uint32), want)


ACTIVE = lines("activemask.b32 %d;")


def test_activemask():
    assert (run_snippet(ACTIVE, np.uint32, threads=64, block=64) == FULL).all()
    got = run_snippet(in_groups(ACTIVE), np.uint32, m=MASKS)
    assert np.array_equal(got, MASKS)
    assert (run_snippet(ACTIVE, np.uint32, threads=5, block=5) == 31).all()


# ---- barriers

WARP_BARRIERS = lines("bar.warp.sync -1; bar.warp.sync %m;")
BARRIERS = [
    "bar.sync 0;",
    "bar.sync 3;",
    "bar.cta.sync 0;",
    "barrier.sync 0;",
    "barrier.sync.aligned 1;",
    "barrier.cta.sync.aligned 0;",
]
EXCHANGE = (  # every thread reads what its mirror image in the block wrote
    ".reg .b32 %t, %w; mov.u32 %t, %tid.x; mad.lo.u32 %w, %t, 4, %shared;"
    "st.shared.u32 [%w], %a; {barrier} mul.lo.u32 %w, %t, -4;"
    "add.u32 %w, %w, %shared; ld.shared.u32 %d, [%w+380];"
)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_barrier_orders_shared_memory(barrier):
    a = np.arange(192, dtype=np.int32)
    body = EXCHANGE.format(barrier=barrier)
    got = run_snippet(body, np.int32, a=a, block=96, shared=384)
    assert np.array_equal(got, a.reshape(2, 96)[:, ::-1].reshape(-1))
    with pytest.raises(ptxsim.KernelFault, match="race on shared memory"):
        run_snippet(EXCHANGE.format(barrier=""), np.int32, a=a, block=96, shared=384)


def test_a_barrier_of_the_warp():
    body = WARP_BARRIERS + "mov.u32 %d, %a;"
    a, mask = numbers(0, 9), np.full(64, FULL, np.uint32)
    assert np.array_equal(run_snippet(body, np.int32, a=a, m=mask), a)
    with pytest.raises(ptxsim.KernelFault, match="are not here"):
        run_snippet(in_groups(WARP_BARRIERS) + "mov.u32 %d, 0;", np.int32, m=MASKS)


@pytest.mark.parametrize("barrier", [*BARRIERS, "bra.uni L;", "ret;", "exit;"])
def test_made_up_modifiers_of_control_flow_raise(barrier):
    opcode, rest = barrier[:-1].split(" ", 1) if " " in barrier else (barrier[:-1], "")
    text = f"{HEADER}.entry k() {{\n{opcode}.strange {rest};\nL: ret; }}"
    with pytest.raises(ptxsim.UnsupportedPTX, match=r"^line 5: .*\.strange"):
        ptxsim.Module(text).kernel()


def test_every_variant_has_a_row():
    assert untested("warp", LINES) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers(LINES)


@pytest.mark.parametrize(
    "ptx",
    [
        "shfl.idx.b32 %r0, %r1, 0, 31;",
        "shfl.sync.idx.b64 %l0, %l1, 0, 31, -1;",
        "shfl.sync.rotate.b32 %r0, %r1, 0, 31, -1;",
        "vote.all.pred %p0, %p1;",
        "vote.sync.ballot.pred %p0, %p1, -1;",
        "vote.sync.any.b32 %r0, %p1, -1;",
        "activemask.b64 %l0;",
        "match.any.b32 %r0, %r1, -1;",
        "match.some.sync.b32 %r0, %r1, -1;",
        "redux.sync.add.b32 %r0, %r1, -1;",
        "redux.sync.and.u32 %r0, %r1, -1;",
        "redux.sync.min.abs.f32 %f0, %f1, -1;",
        "elect.sync %r0|%p0, -1;",
        "bar.sync 0, 64;",
        "bar.sync %r0;",
        "bar.arrive 0, 64;",
        "bar.red.popc.u32 %r0, 0, %p0;",
        "barrier.warp.sync -1;",
        "barrier.cluster.arrive;",
        "barrier.cluster.wait;",
        "call.uni somewhere;",
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

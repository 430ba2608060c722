"""Lanes, divergence, barriers, shared memory, warps and asynchronous copies."""

import numpy as np
import pytest
from snippets import HEADER, launch_snippet, run_snippet

from kvq.kernels import ptxsim

LANES = np.arange(32, dtype=np.int32)
MASK = "0xffffffff"


def some(n, seed=0, low=-1000, high=1000):
    return np.random.default_rng(seed).integers(low, high, n).astype(np.int32)


# ---- control flow


def test_a_loop_that_every_lane_leaves_at_its_own_time():
    start = some(300, low=1, high=200)
    body = (
        ".reg .pred %p; .reg .b32 %h; mov.u32 %d, 0;"
        "LOOP: setp.eq.s32 %p, %a, 1; @%p bra DONE; add.u32 %d, %d, 1;"
        "and.b32 %h, %a, 1; setp.ne.s32 %p, %h, 0; @%p bra ODD;"
        "shr.u32 %a, %a, 1; bra LOOP; ODD: mad.lo.s32 %a, %a, 3, 1; bra LOOP; DONE:"
    )

    def steps(x):
        count = 0
        while x != 1:
            x, count = (3 * x + 1 if x % 2 else x // 2), count + 1
        return count

    got = run_snippet(body, np.int32, a=start)
    assert got.tolist() == [steps(x) for x in start]


def test_lanes_meet_again_after_a_branch():
    """The add after the branch is one instruction of a whole warp, not of two parts."""
    body = (
        ".reg .pred %p; setp.lt.s32 %p, %a, 0; @%p bra NEG; mov.u32 %d, 1; bra OUT;"
        "NEG: mov.u32 %d, 2; OUT: add.u32 %d, %d, 10;"
    )
    a = some(32)
    got, report = launch_snippet(body, np.int32, a=a)
    _, together = launch_snippet(body, np.int32, a=np.abs(a))
    assert np.array_equal(got, np.where(a < 0, 12, 11))
    assert (report.divergent, together.divergent) == (1, 0)
    assert report.mix["mov"] == together.mix["mov"] + 1  # both sides ran
    assert report.mix["add"] == together.mix["add"]  # once for the whole warp
    assert report.threads == together.threads - (a < 0).sum()  # one side has no `bra`


def test_a_guard_leaves_the_other_lanes_as_they_were():
    a = some(64)
    body = ".reg .pred %p; setp.gt.s32 %p, %a, 0; mov.u32 %d, %a; @!%p neg.s32 %d, %a;"
    assert np.array_equal(run_snippet(body, np.int32, a=a), np.abs(a))


def test_a_copy_keeps_its_value_when_some_lanes_change_the_original():
    body = (
        ".reg .pred %p; setp.gt.s32 %p, %a, 0; bra NEXT; NEXT: mov.u32 %d, %a;"
        "@%p mov.u32 %a, 0; add.u32 %d, %d, %a;"
    )
    a = some(64)
    got = run_snippet(body, np.int32, a=a)
    assert np.array_equal(got, np.where(a > 0, a, 2 * a))


def test_a_jump_table():
    body = (
        ".reg .b32 %k; and.b32 %k, %a, 3; mov.u32 %d, -1;"
        "T: .branchtargets L0, L1, L2, L0; brx.idx %k, T;"
        "L0: mov.u32 %d, 100; bra OUT; L1: add.u32 %d, %a, 5;"
        "L2: add.u32 %d, %d, 7; OUT:"
    )
    a = some(64, low=0)
    k = a & 3
    want = np.select([k == 1, k == 2], [a + 12, 6], 100)
    assert np.array_equal(run_snippet(body, np.int32, a=a), want)


def test_a_jump_beyond_the_table_is_a_fault():
    body = "T: .branchtargets L0; brx.idx %a, T; L0: mov.u32 %d, 1;"
    with pytest.raises(ptxsim.KernelFault, match=r"beyond its list.*thread 2"):
        run_snippet(body, np.int32, a=np.array([0, 0, 1, 0], np.int32))


def test_trap():
    body = ".reg .pred %p; setp.eq.s32 %p, %a, 7; @%p trap; mov.u32 %d, 0;"
    with pytest.raises(ptxsim.KernelFault, match="trap, block 1 thread 3"):
        run_snippet(body, np.int32, block=32, a=np.where(np.arange(64) == 35, 7, 0))


# ---- where a thread is


def test_special_registers_of_a_grid_in_three_dimensions():
    names = ("%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z")
    others = ("%ntid.y", "%nctaid.z", "%laneid", "%warpid", "%lanemask_lt")
    stores = "".join(
        f"mov.u32 %v, {name}; st.global.u32 [%o+{4 * k}], %v;"
        for k, name in enumerate((*names, *others))
    )
    text = (
        f"{HEADER}.entry k(.param .u64 out) {{ .reg .b64 %o, %w; .reg .b32 %<9>, %v;"
        "mov.u32 %0, %tid.x; mov.u32 %1, %tid.y; mov.u32 %2, %tid.z;"
        "mad.lo.u32 %1, %2, 3, %1; mad.lo.u32 %0, %1, 5, %0;"
        "mov.u32 %3, %ctaid.x; mov.u32 %4, %ctaid.y; mov.u32 %5, %ctaid.z;"
        "mad.lo.u32 %4, %5, 7, %4; mad.lo.u32 %3, %4, 2, %3;"
        "mad.lo.u32 %0, %3, 60, %0; ld.param.u64 %o, [out];"
        f"mul.wide.u32 %w, %0, 44; add.s64 %o, %o, %w; {stores} ret; }}"
    )
    out = np.zeros((3, 7, 2, 4, 3, 5, 11), np.uint32)
    ptxsim.Module(text).kernel().launch((2, 7, 3), (5, 3, 4), (out,))
    cz, cy, cx, tz, ty, tx = np.indices(out.shape[:-1])
    thread = tx + 5 * (ty + 3 * tz)
    want = [tx, ty, tz, cx, cy, cz, 0 * tx + 3, 0 * tx + 3, thread % 32, thread // 32]
    want.append((1 << thread % 32) - 1)
    for k, column in enumerate(want):
        assert np.array_equal(out[..., k], column), k


def test_more_blocks_than_run_at_once():
    a = some(32 * 1000)
    got, report = launch_snippet("add.s32 %d, %a, %i;", np.int32, block=32, a=a)
    assert np.array_equal(got, a + np.arange(a.size))
    assert report.warps == 1000


# ---- memory


@pytest.mark.parametrize("count", [2, 4])
def test_vectors(count):
    x = np.arange(64 * count, dtype=np.float32)
    names = [f"%v{k}" for k in range(count)]
    body = (
        f".reg .f32 %v<4>; .reg .b64 %q; mul.wide.u32 %q, %i, {4 * count};"
        f"add.s64 %q, %q, %m; ld.global.v{count}.f32 {{{', '.join(names)}}}, [%q];"
        f"st.global.v{count}.f32 [%q], {{{', '.join(names[::-1])}}}; mov.u32 %d, 0;"
    )
    run_snippet(body, np.int32, threads=64, buffers={"m": x})
    want = np.arange(64 * count).reshape(64, count)[:, ::-1]
    assert np.array_equal(x.reshape(64, count), want)


def test_narrow_accesses_extend_by_their_sign():
    bytes_ = np.array([1, 200, 127, 128], np.uint8)
    body = (
        ".reg .b64 %q; cvt.u64.u32 %q, %i; add.s64 %q, %q, %m; ld.global.s8 %d, [%q];"
        "ld.global.u8 %e, [%q]; st.global.u8 [%q], -2;"
    )
    out = {"d": np.int32, "e": np.int32}
    got = run_snippet(body, out, threads=4, buffers={"m": bytes_})
    assert got["d"].tolist() == [1, -56, 127, -128]
    assert got["e"].tolist() == [1, 200, 127, 128]
    assert bytes_.tolist() == [254] * 4


def test_generic_addresses_reach_shared_and_local_memory():
    body = (
        ".reg .b64 %q, %l; .local .align 8 .b8 box[24]; .reg .b32 %t;"
        "cvta.shared.u64 %q, smem; mul.wide.u32 %l, %i, 4; add.s64 %q, %q, %l;"
        "st.u32 [%q], %a; ld.shared.u32 %t, [smem]; mov.u64 %l, box;"
        "st.local.u32 [%l+8], %t; cvta.local.u64 %l, %l; ld.u32 %d, [%l+8];"
        "ld.u32 %t, [%q]; add.u32 %d, %d, %t;"
        ".reg .pred %p, %r; isspacep.shared %p, %q; isspacep.local %r, %l;"
        "and.pred %p, %p, %r; isspacep.global %r, %m; and.pred %p, %p, %r;"
        "@!%p mov.u32 %d, 0;"
    )
    a = some(32, low=1)
    got = run_snippet(body, np.int32, a=a, shared=128, buffers={"m": some(4)})
    assert np.array_equal(got, a + a[0])


def test_every_thread_has_its_own_local_memory():
    body = (
        ".local .align 4 .b8 box[12]; .reg .b64 %l; mov.u64 %l, box;"
        "st.local.u32 [%l+8], %a; ld.local.u32 %d, [%l+8]; ld.local.u32 %e, [%l+4];"
    )
    a = some(96)
    got = run_snippet(body, {"d": np.int32, "e": np.int32}, a=a, block=32)
    assert np.array_equal(got["d"], a)
    assert not got["e"].any()


def test_an_array_given_twice_is_one_buffer():
    x = some(32)
    body = (
        ".reg .b64 %q; .reg .b32 %t; mul.wide.u32 %q, %i, 4; add.s64 %q, %q, %m;"
        "st.global.u32 [%q], %i; mul.wide.u32 %q, %i, 4; add.s64 %q, %q, %n;"
        "ld.global.u32 %d, [%q];"
    )
    got = run_snippet(body, np.int32, threads=32, buffers={"m": x, "n": x})
    assert np.array_equal(got, LANES)


def test_inputs_are_left_alone_and_read_only_arrays_may_be_read():
    x = some(32)
    x.flags.writeable = False
    read = ".reg .b64 %q; mul.wide.u32 %q, %i, 4; add.s64 %q, %q, %m;"
    load = read + "ld.global.u32 %d, [%q];"
    assert np.array_equal(run_snippet(load, np.int32, threads=32, buffers={"m": x}), x)
    store = read + "st.global.u32 [%q], %i; mov.u32 %d, 0;"
    with pytest.raises(ptxsim.KernelFault, match=r"wrote to argument 1, .*read-only"):
        run_snippet(store, np.int32, threads=32, buffers={"m": x})


# ---- blocks

REVERSE = (
    ".reg .b32 %t, %w; mov.u32 %t, %tid.x; shl.b32 %w, %t, 2; add.u32 %w, %w, %shared;"
    "st.shared.u32 [%w], %a; bar.sync 0; shl.b32 %w, %t, 2; sub.u32 %w, %size, %w;"
    "add.u32 %w, %w, %shared; ld.shared.u32 %d, [%w];"
)


@pytest.mark.parametrize("block", [48, 128])
def test_a_block_exchanges_values_through_shared_memory(block):
    a = some(block * 70)
    size = f".reg .b32 %size; mov.u32 %size, {4 * (block - 1)};"
    got = run_snippet(size + REVERSE, np.int32, a=a, block=block, shared=4 * block)
    assert np.array_equal(got, a.reshape(-1, block)[:, ::-1].reshape(-1))


def test_dynamic_shared_memory_follows_the_static():
    text = (
        f"{HEADER}.extern .shared .align 16 .b8 dyn[];\n.entry k(.param .u64 out) {{"
        ".shared .align 4 .b8 fixed[20]; .reg .b64 %o; .reg .b32 %a, %b;"
        "ld.param.u64 %o, [out]; mov.u32 %a, fixed; mov.u32 %b, dyn;"
        "st.shared.u32 [%a+16], 5; st.shared.u32 [%b], 6; ld.shared.u32 %a, [%a+16];"
        "st.global.u32 [%o], %a; mov.u32 %a, %dynamic_smem_size;"
        "st.global.u32 [%o+4], %a; st.global.u32 [%o+8], %b; ret; }"
    )
    kernel, out = ptxsim.Module(text).kernel(), np.zeros(3, np.uint32)
    kernel.launch(1, 1, (out,), shared=4)
    assert out.tolist() == [5, 4, 32]
    with pytest.raises(ptxsim.KernelFault, match="shared access of 4 bytes out of bou"):
        kernel.launch(1, 1, (out,))


# ---- warps


def test_a_butterfly_adds_up_a_warp():
    a = some(96)
    body = ".reg .b32 %o; mov.u32 %d, %a;" + "".join(
        f"shfl.sync.bfly.b32 %o, %d, {k}, 31, {MASK}; add.s32 %d, %d, %o;"
        for k in (16, 8, 4, 2, 1)
    )
    got = run_snippet(body, np.int32, a=a)
    assert np.array_equal(got, a.reshape(3, 32).sum(1).repeat(32))


@pytest.mark.parametrize("width", [4, 32])
@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
def test_shuffles_stay_in_their_segment(mode, width):
    a, b = some(64), some(64, 1, 0, width)
    clamp = ((32 - width) << 8) | (0 if mode == "up" else 31)
    body = f"shfl.sync.{mode}.b32 %d|%p, %a, %b, {clamp}, {MASK};"
    got = run_snippet(body, {"d": np.int32, "p": bool}, a=a, b=b)
    lane = np.arange(64)
    first = lane - lane % width
    other = {"idx": first + b, "up": lane - b, "down": lane + b, "bfly": lane ^ b}[mode]
    inside = (other >= first) & (other < first + width)
    assert np.array_equal(got["p"], inside)
    assert np.array_equal(got["d"], a[np.where(inside, other, lane)])


def test_votes_of_half_a_warp():
    """Odd lanes vote among themselves while the even ones are elsewhere."""
    a = some(64)
    body = (
        ".reg .pred %p, %q, %odd; .reg .b32 %t; and.b32 %t, %i, 1; mov.u32 %d, 0;"
        "setp.eq.s32 %odd, %t, 0; @%odd bra OUT; setp.gt.s32 %p, %a, 0;"
        "vote.sync.ballot.b32 %d, %p, 0xaaaaaaaa;"
        "vote.sync.any.pred %q, %p, 0xaaaaaaaa;"
        "activemask.b32 %t; setp.eq.and.u32 %q, %t, 0xaaaaaaaa, %q;"
        "@!%q mov.u32 %d, 7; OUT:"
    )
    got = run_snippet(body, np.uint32, a=a)
    rows = (a.reshape(2, 32) > 0) & (np.arange(32) % 2 == 1)
    ballots = (rows * (1 << np.arange(32, dtype=np.uint64))).sum(1)
    want = np.where(np.arange(64) % 2, ballots.repeat(32), 0)
    assert np.array_equal(got, want)


def test_two_halves_of_a_warp_each_with_its_own_mask():
    """They run the same instruction at once and must not see each other."""
    a = some(64, low=0, high=3)
    body = (
        ".reg .pred %p, %h; .reg .b32 %m; and.b32 %m, %i, 16; setp.eq.u32 %h, %m, 0;"
        "selp.u32 %m, 0x0000ffff, 0xffff0000, %h; setp.eq.s32 %p, %a, 1;"
        "vote.sync.ballot.b32 %b, %p, %m; vote.sync.all.pred %all, %p, %m;"
        "match.any.sync.b32 %same, %a, %m; redux.sync.max.u32 %top, %i, %m;"
    )
    a[:16] = 1
    out = {"b": np.uint32, "all": bool, "same": np.uint32, "top": np.uint32}
    got = run_snippet(body, out, a=a)
    bit = 1 << np.arange(32, dtype=np.int64)
    for half in range(4):
        mine = slice(16 * half, 16 * half + 16)
        values, bits = a[mine], bit[mine.start % 32 :][:16]
        assert (got["b"][mine] == bits[values == 1].sum()).all()
        assert (got["all"][mine] == (half == 0)).all()
        same = [bits[values == v].sum() for v in values]
        assert got["same"][mine].tolist() == same
        assert (got["top"][mine] == mine.stop - 1).all()


def test_match_and_redux():
    a = some(64, low=-2, high=2)
    body = (
        f"match.any.sync.b32 %m, %a, {MASK}; redux.sync.add.s32 %s, %a, {MASK};"
        f"redux.sync.min.s32 %l, %a, {MASK}; match.all.sync.b32 %d|%p, %i, {MASK};"
    )
    out = {"m": np.uint32, "s": np.int32, "l": np.int32, "d": np.uint32, "p": bool}
    got = run_snippet(body, out, a=a)
    rows = a.reshape(2, 32)
    equal = rows[:, :, None] == rows[:, None, :]
    want = (equal * (1 << np.arange(32, dtype=np.uint64))).sum(2).reshape(-1)
    assert np.array_equal(got["m"], want)
    assert np.array_equal(got["s"], rows.sum(1).repeat(32))
    assert np.array_equal(got["l"], rows.min(1).repeat(32))
    assert not got["d"].any()
    assert not got["p"].any()


# ---- atomics


def test_atomics_count_each_lane_once():
    a = some(96, low=0, high=5)
    counts, order = np.zeros(5, np.int32), np.zeros(1, np.uint32)
    body = (
        ".reg .b64 %q; mul.wide.u32 %q, %a, 4; add.s64 %q, %q, %h;"
        "red.global.add.u32 [%q], 1; atom.global.inc.u32 %d, [%o], 9;"
    )
    buffers = {"h": counts, "o": order}
    got = run_snippet(body, np.int32, a=a, block=32, buffers=buffers)
    assert np.array_equal(counts, np.bincount(a, minlength=5))
    assert np.array_equal(got, np.arange(96) % 10)
    assert order[0] == 96 % 10


# ---- asynchronous copies

COPY = (
    ".reg .b64 %q; .reg .b32 %w; mul.wide.u32 %q, %i, 4; add.s64 %q, %q, %m;"
    "shl.b32 %w, %i, 2; add.u32 %w, %w, %shared; st.shared.u32 [%w], -1;"
    "cp.async.ca.shared.global.L2::128B [%w], [%q], 4; cp.async.commit_group;"
    "cp.async.ca.shared.global [%w+128], [%q+128], 4; cp.async.commit_group;"
)


@pytest.mark.parametrize(
    ("wait", "first", "second"),
    [
        ("cp.async.wait_group 2;", False, False),
        ("cp.async.wait_group 1;", True, False),
        ("cp.async.wait_group 0;", True, True),
        ("cp.async.wait_all;", True, True),
    ],
)
def test_copies_land_when_their_group_is_waited_for(wait, first, second):
    x = some(64)
    body = COPY + wait + "ld.shared.u32 %d, [%w]; ld.shared.u32 %e, [%w+128];"
    out = {"d": np.int32, "e": np.int32}
    got = run_snippet(body, out, threads=32, shared=256, buffers={"m": x})
    assert np.array_equal(got["d"], x[:32] if first else np.full(32, -1))
    assert np.array_equal(got["e"], x[32:] if second else np.zeros(32))


def test_lanes_may_wait_at_different_times():
    x = some(64)
    body = COPY + (
        ".reg .pred %p; setp.lt.u32 %p, %i, 9; @%p cp.async.wait_group 0;"
        "ld.shared.u32 %d, [%w]; cp.async.wait_group 0; ld.shared.u32 %e, [%w];"
    )
    out = {"d": np.int32, "e": np.int32}
    got = run_snippet(body, out, threads=32, shared=256, buffers={"m": x})
    assert np.array_equal(got["d"], np.where(LANES < 9, x[:32], -1))
    assert np.array_equal(got["e"], x[:32])


def test_a_copy_of_no_bytes_reads_nothing():
    """The size operand guards the tail: 8 of 16 bytes, and none beyond the end."""
    x = np.arange(1, 7, dtype=np.int32)
    body = (
        ".reg .b64 %q; .reg .b32 %w; mul.wide.u32 %q, %i, 16; add.s64 %q, %q, %m;"
        "shl.b32 %w, %i, 4; add.u32 %w, %w, %shared;"
        "cp.async.cg.shared.global [%w], [%q], 16, %n; cp.async.wait_all;"
        "bar.warp.sync -1; shl.b32 %w, %i, 2; add.u32 %w, %w, %shared;"
        "ld.shared.u32 %d, [%w];"
    )
    valid = np.array([16, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.int32)
    got = run_snippet(body, np.int32, n=valid, shared=192, buffers={"m": x})
    assert got.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]


# ---- matrices


def halves(shape, seed):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float16)


def test_a_tensor_core_product_of_matrices_in_shared_memory():
    """D = A B by ldmatrix and mma; small integers make the sums exact."""
    a, b = halves((16, 16), 1), halves((8, 16), 2)  # b is stored by columns
    body = (
        ".reg .b64 %q; .reg .b32 %w, %r<6>, %l; mul.wide.u32 %q, %i, 24;"
        "add.s64 %q, %q, %m; mad.lo.u32 %w, %i, 24, %shared;"
        "cp.async.ca.shared.global [%w], [%q], 8;"
        "cp.async.ca.shared.global [%w+8], [%q+8], 8;"
        "cp.async.ca.shared.global [%w+16], [%q+16], 8; cp.async.wait_all;"
        "bar.sync 0; and.b32 %l, %i, 15; shr.u32 %w, %i, 4; shl.b32 %w, %w, 4;"
        "mad.lo.u32 %w, %l, 32, %w; add.u32 %w, %w, %shared;"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%w];"
        "and.b32 %l, %i, 7; shr.u32 %w, %i, 3; and.b32 %w, %w, 1; shl.b32 %w, %w, 4;"
        "mad.lo.u32 %w, %l, 32, %w; add.u32 %w, %w, %shared; add.u32 %w, %w, 512;"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%w];"
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%c0, %c1, %c2, %c3},"
        "{%r0, %r1, %r2, %r3}, {%r4, %r5}, {1.0, 0.0, 0.0, 0.0};"
    )
    both = np.concatenate([a.reshape(-1), b.reshape(-1)])
    out = {f"c{k}": np.float32 for k in range(4)}
    got = run_snippet(body, out, threads=32, shared=768, buffers={"m": both})
    want = a.astype(np.float64) @ b.astype(np.float64).T
    g, t = LANES // 4, LANES % 4
    assert np.array_equal(got["c0"], want[g, 2 * t] + 1)
    assert np.array_equal(got["c1"], want[g, 2 * t + 1])
    assert np.array_equal(got["c2"], want[g + 8, 2 * t])
    assert np.array_equal(got["c3"], want[g + 8, 2 * t + 1])

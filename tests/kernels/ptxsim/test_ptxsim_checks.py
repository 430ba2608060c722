"""What a kernel does wrong is named: what, which buffer, block, thread, source line."""

import numpy as np
import pytest
from snippets import launch_snippet, run_snippet

from kvq.kernels import ptxsim

AT = ".reg .b64 %q; mul.wide.s32 %q, %a, 4; add.s64 %q, %q, %m;"
SHARED_AT = "shl.b32 %w, %t, 2; add.u32 %w, %w, %shared;"
THREAD = ".reg .b32 %t, %w; .reg .pred %p; mov.u32 %t, %tid.x;"


def fault(body, n=64, **options):
    options.setdefault("a", np.arange(n, dtype=np.int32))
    with pytest.raises(ptxsim.KernelFault) as caught:
        run_snippet(body, np.int32, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- bounds and alignment


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("index", "byte"),
    [(40, 160), (-1, -4), (167, 668), (2**28, 2**30), (-(2**29), -(2**31))],
)
def test_a_load_outside_its_buffer(index, byte, check):
    """Beside it, in the next red zone, and far away; one lane of many."""
    a = np.arange(64, dtype=np.int32) % 40
    a[37] = index
    m = np.zeros(40, np.float32)
    body = AT + "ld.global.u32 %d, [%q];"
    message = fault(body, a=a, block=32, buffers={"m": m}, check=check)
    assert "out of bounds" in message
    assert "block 1 thread 5" in message
    assert "PTX line" in message
    if abs(byte) < 300:
        buffer = "argument 2 (float32, 40 elements), which has 160 bytes"
        assert f"access of 4 bytes out of bounds: at byte {byte} of {buffer}" in message


def test_a_store_that_reaches_over_the_end():
    a = np.full(32, 9, np.int32)
    body = AT + "st.global.v2.u32 [%q+-4], {%a, %a}; mov.u32 %d, 0;"
    run_snippet(body, np.int32, a=a, buffers={"m": np.zeros(10, np.int32)})
    message = fault(body, a=a, buffers={"m": np.zeros(9, np.int32)})
    assert "access of 8 bytes out of bounds: at byte 32 of argument 2" in message
    assert "and 31 more threads" in message


def test_an_access_just_before_the_next_buffer_names_it():
    m, n = np.zeros(200, np.int32), np.zeros(50, np.int32)
    a = np.full(32, -2, np.int32)
    body = AT.replace("%m", "%n") + "ld.global.u32 %d, [%q];"
    assert "at byte -8 of argument 3" in fault(body, a=a, buffers={"m": m, "n": n})


def test_an_empty_buffer_has_no_bytes():
    body = AT + "ld.global.u32 %d, [%q];"
    message = fault(body, a=np.zeros(3, np.int32), buffers={"m": np.zeros(0, np.int32)})
    assert "at byte 0 of argument 2 (int32, 0 elements), which has 0 bytes" in message


@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_a_misaligned_access(space):
    body = (
        ".local .align 16 .b8 box[256]; .reg .b32 %w; .reg .f32 %v<4>; .reg .b64 %q;"
        "cvt.u64.u32 %q, %a; add.s64 %q, %q, %m; add.u32 %w, %a, %shared;"
        ".reg .b64 %l; mov.u64 %l, box; cvt.u64.u32 %l, %a; mov.u32 %d, 0;"
    )
    address = {"global": "%q", "shared": "%w", "local": "%l"}[space]
    body += f"ld.{space}.v4.f32 {{%v0, %v1, %v2, %v3}}, [{address}];"
    a = np.array([0, 16, 40, 32], np.int32)
    options = {"buffers": {"m": np.zeros(64, np.float32)}, "shared": 256}
    message = fault(body, a=a, **options)
    assert "misaligned access of 16 bytes, block 0 thread 2" in message
    run_snippet(body, np.int32, a=a - a % 16, **options)


def test_beyond_shared_memory():
    body = THREAD + SHARED_AT + "st.shared.u32 [%w+64], %a; mov.u32 %d, 0;"
    message = fault(body, shared=128)
    assert "shared access of 4 bytes out of bounds: at byte 128 of 128" in message
    assert "block 0 thread 16" in message


def test_beyond_local_memory():
    body = ".local .align 4 .b8 box[16]; .reg .b64 %l; mov.u64 %l, box; mov.u32 %d, 0;"
    assert "local access" in fault(body + "st.local.u32 [%l+16], %a;")


# ---- source lines


def test_a_fault_names_the_line_of_the_source():
    text = (
        '.file 1 "/home/somebody/k.cu"\n.file 2 "/usr/include/h.cuh"\n'
        ".visible .entry k(.param .u64 x)\n{\n.reg .b64 %q; .reg .b32 %v;\n"
        ".loc 1 5 1\nld.param.u64 %q, [x];\n.loc 1 12 3\n"
        ".loc 2 88 7, function_name $f, inlined_at 1 12 3\n"
        "ld.global.u32 %v, [%q+400];\nret;\n}"
    )
    kernel = ptxsim.Module(text).kernel("k")
    with pytest.raises(ptxsim.KernelFault) as caught:
        kernel.launch(1, 1, (np.zeros(100, np.int32),), names=["x"])
    assert str(caught.value) == (
        "k: access of 4 bytes out of bounds: at byte 400 of argument 0 (x) "
        "(int32, 100 elements), which has 400 bytes, block 0 thread 0, at h.cuh line "
        "88 (from line 12), PTX line 10: ld.global.u32 %v, [%q+400]"
    )


# ---- races


def exchange(
    between, first="st.shared.u32 [%w], %a;", second="ld.shared.u32 %d, [%w];"
):
    """Each thread does `first` at its place and `second` at that of 32 further."""
    return (
        THREAD
        + "mov.u32 %d, 0;"
        + SHARED_AT
        + first
        + between
        + "xor.b32 %t, %t, 32;"
        + SHARED_AT
        + second
    )


WRITE = "st.shared.u32 [%w], %a;"
READ = "ld.shared.u32 %d, [%w];"
ATOMIC = "red.shared.add.u32 [%w], %a;"


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (WRITE, READ, "a read"),
        (READ, WRITE, "a write"),
        (WRITE, WRITE, "a write"),
        (ATOMIC, READ, "a read"),
        (WRITE, ATOMIC, "an atomic"),
    ],
)
def test_two_warps_at_one_place_need_a_barrier(first, second, kind):
    options = {"shared": 256, "block": 64}
    message = fault(exchange("", first, second), **options)
    assert f"race on shared memory: {kind}" in message
    a = np.arange(64, dtype=np.int32)
    run_snippet(exchange("bar.sync 0;", first, second), np.int32, a=a, **options)
    run_snippet(exchange("", first, second), np.int32, a=a, check=False, **options)


@pytest.mark.parametrize(("first", "second"), [(READ, READ), (ATOMIC, ATOMIC)])
def test_reads_and_atomics_do_not_race_among_themselves(first, second):
    a = np.arange(64, dtype=np.int32)
    run_snippet(exchange("", first, second), np.int32, a=a, shared=256, block=64)


def test_two_warps_that_write_one_place_in_one_instruction():
    body = THREAD + "st.shared.u32 [%shared], %a; mov.u32 %d, 0;"
    assert "a write at byte 0, which another warp" in fault(body, shared=4, block=64)
    a = np.arange(64, dtype=np.int32)
    run_snippet(body, np.int32, a=a, shared=4, block=32)
    run_snippet(
        body.replace("st", "red").replace(".u32 [", ".add.u32 ["),
        np.int32,
        a=a,
        shared=4,
        block=64,
    )


@pytest.mark.parametrize(
    "reads",
    [
        "ld.shared.u32 %d, [%shared];",
        "@%p ld.shared.u32 %d, [%shared]; @!%p ld.shared.u32 %d, [%shared];",
    ],
)
def test_a_write_after_the_reads_of_several_warps(reads):
    """The last reader writes: the other one's read is what it races with."""
    body = (
        f"{THREAD} setp.lt.u32 %p, %t, 32; {reads}"
        "@%p bra OUT; st.shared.u32 [%shared], 1; OUT:"
    )
    assert "a write at byte 0, which another warp" in fault(body, shared=4, block=64)
    a = np.arange(32, dtype=np.int32)
    run_snippet(body, np.int32, a=a, shared=4, block=32)


def test_neighbouring_bytes_are_different_places():
    body = (
        THREAD + "shr.u32 %w, %t, 5; mad.lo.u32 %w, %t, 2, %w; and.b32 %w, %w, 63;"
        "add.u32 %w, %w, %shared; st.shared.u8 [%w], %a; mov.u32 %d, 0;"
    )
    a = np.arange(64, dtype=np.int32)
    run_snippet(body, np.int32, a=a, shared=64, block=64)


def test_a_second_pass_needs_a_second_barrier():
    """The write of the next round may meet the read of this one."""
    one = exchange("bar.sync 0;")
    a = np.arange(64, dtype=np.int32)
    back = "xor.b32 %t, %t, 32;" + SHARED_AT + WRITE
    options = {"shared": 256, "block": 64}
    assert "race on shared memory: a write" in fault(one + back, **options)
    run_snippet(one + "bar.sync 0;" + back, np.int32, a=a, **options)


# ---- barriers


def test_a_barrier_that_some_threads_leave_out():
    body = THREAD + "setp.ge.u32 %p, %t, 40; @!%p bar.sync 0; mov.u32 %d, 0;"
    message = fault(body, block=64)
    assert "divergent barrier: 24 threads of the block are not here" in message
    assert "block 0 thread 0" in message


def test_a_barrier_after_some_threads_have_gone():
    body = THREAD + "setp.ge.u32 %p, %t, 60; @%p exit; bar.sync 0; mov.u32 %d, 0;"
    assert "divergent barrier: 4 threads" in fault(body, block=64)
    a = np.arange(64, dtype=np.int32)
    run_snippet(body, np.int32, a=a, block=64, check=False)


def test_threads_at_two_different_barriers():
    body = (
        THREAD
        + "setp.ge.u32 %p, %t, 32; mov.u32 %d, 0; @%p bra B; bar.sync 0; bra OUT;"
        "B: bar.sync 0; OUT:"
    )
    message = fault(body, block=64, n=128)
    assert "divergent barrier: 32 threads" in message


def test_blocks_may_be_at_different_barriers():
    body = (
        ".reg .pred %p; .reg .b32 %c; mov.u32 %c, %ctaid.x; setp.eq.u32 %p, %c, 0;"
        "mov.u32 %d, 0; @%p bra B; bar.sync 0; bra OUT; B: bar.sync 0; OUT:"
    )
    a = np.arange(128, dtype=np.int32)
    run_snippet(body, np.int32, a=a, block=64)


# ---- collectives


def test_a_shuffle_after_a_lane_has_gone():
    body = (
        THREAD + "setp.eq.u32 %p, %t, 31; @%p exit;"
        "shfl.sync.bfly.b32 %d, %a, 1, 31, 0xffffffff;"
    )
    message = fault(body, block=32)
    assert (
        "lanes named in the mask 0xffffffff are not here (here: 0x7fffffff)" in message
    )
    a = np.arange(64, dtype=np.int32)
    run_snippet(body, np.int32, a=a, block=32, check=False)


def test_a_shuffle_in_one_branch():
    body = (
        THREAD + "setp.lt.u32 %p, %t, 8; mov.u32 %d, 0;"
        "@%p shfl.sync.idx.b32 %d, %a, 9, 31, 0xff;"
    )
    assert "a value is read from a lane that is not here" in fault(body, block=32)
    ok = body.replace("%a, 9,", "%a, 7,")
    a = np.arange(32, dtype=np.int32)
    assert run_snippet(ok, np.int32, a=a).tolist() == [7] * 8 + [0] * 24


def test_a_lane_outside_its_own_mask():
    body = "vote.sync.ballot.b32 %d, 1, 0xffff;"
    assert "a lane that the mask does not name is here" in fault(body, block=32)


@pytest.mark.parametrize("check", [True, False])
def test_a_matrix_instruction_needs_the_whole_warp(check):
    body = (
        THREAD + "setp.lt.u32 %p, %t, 24; mov.u32 %d, 0;"
        "@%p movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;"
    )
    assert "not all 32 lanes" in fault(body, block=32, check=check)


def test_a_fault_leaves_the_arguments_alone():
    m = np.zeros(4, np.int32)
    body = AT + "st.global.u32 [%q], 1; mov.u32 %d, 0;"
    with pytest.raises(ptxsim.KernelFault):
        launch_snippet(body, np.int32, a=np.arange(5, dtype=np.int32), buffers={"m": m})
    assert not m.any()

"""Sectors, wavefronts, instructions and divergence, against counts made by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snippets import HEADER, launch_snippet

from kvq.kernels import ptxsim
from kvq.kernels.ptxsim.count import INACTIVE, sectors_of, wavefronts_of

LANE = np.arange(32)


def sectors(offsets, size):
    return sectors_of(np.atleast_2d(offsets), size)


# ---- global memory


@pytest.mark.parametrize(
    ("offsets", "size", "touched", "ideal"),
    [
        (LANE * 4, 4, 4, 4),  # neighbours
        (LANE[::-1] * 4, 4, 4, 4),  # in any order
        (LANE * 4 + 4, 4, 5, 4),  # not at the start of a sector
        (LANE * 8, 4, 8, 4),  # every second
        (LANE * 128, 4, 32, 4),  # a column
        (LANE * 0, 4, 1, 1),  # one number for all
        (LANE // 4 * 64, 4, 8, 1),  # eight numbers, four lanes each
        (LANE * 2, 2, 2, 2),
        (LANE, 1, 1, 1),
        (LANE * 16, 16, 16, 16),
        (LANE * 32, 16, 32, 16),
        (LANE % 8 * 4, 4, 1, 1),
    ],
)
def test_sectors_of_a_warp(offsets, size, touched, ideal):
    assert sectors(offsets, size) == (1, touched, ideal)


def test_lanes_that_do_not_run_touch_nothing():
    some = np.where(LANE < 5, LANE * 64, INACTIVE)
    none = np.full(32, INACTIVE)
    assert sectors(some, 4) == (1, 5, 1)
    assert sectors(np.stack([some, none, LANE * 4]), 4) == (2, 9, 5)


@settings(max_examples=50)
@given(st.data())
def test_sectors_against_a_count_lane_by_lane(data):
    size = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    lanes = st.integers(-1, 60).map(lambda x: x * size if x >= 0 else INACTIVE)
    rows = data.draw(
        st.lists(st.lists(lanes, min_size=32, max_size=32), min_size=1, max_size=3)
    )
    requests = touched = ideal = 0
    for row in rows:
        places = {x for x in row if x != INACTIVE}
        requests += bool(places)
        touched += len({x // 32 for x in places})
        ideal += -(-len(places) * size // 32)
    assert sectors(rows, size) == (requests, touched, ideal)


def test_counts_of_a_launch_per_line():
    text = (
        f'{HEADER}.file 1 "k.cu"\n.entry k(.param .u64 x)\n{{\n'
        ".reg .b64 %q, %w; .reg .b32 %t, %v; .reg .pred %p;\n"
        ".loc 1 3 1\nmov.u32 %t, %tid.x; ld.param.u64 %q, [x];\n"
        ".loc 1 4 1\nmul.wide.u32 %w, %t, 8; add.s64 %q, %q, %w;\n"
        ".loc 1 5 1\nld.global.u32 %v, [%q];\n"
        ".loc 1 6 1\nsetp.lt.u32 %p, %t, 40; @%p st.global.u32 [%q+4], %v;\n"
        ".loc 1 7 1\nret;\n}"
    )
    x = np.zeros(2 * 64, np.int32)
    report = ptxsim.Module(text).kernel().launch(3, 64, (np.tile(x, 3),))
    assert report.warps == 6
    assert sorted(report.lines) == [3, 4, 5, 6, 7]
    load, store = report.lines[5], report.lines[6]
    assert (load.instructions, load.threads, load.requests) == (6, 192, 6)
    assert (load.sectors, load.ideal_sectors) == (6 * 8, 6 * 4)
    # Of each block's second warp 8 lanes store; setp and the store, no hidden jump.
    assert (store.instructions, store.threads) == (12, 3 * (64 + 40))
    assert (store.sectors, store.ideal_sectors) == (3 * (8 + 2), 3 * (4 + 1))
    assert store.mix == {"setp": 6, "st.global": 6}
    assert report.sectors == load.sectors + store.sectors
    assert report.ideal_sectors == load.ideal_sectors + store.ideal_sectors
    assert report.instructions == sum(n.instructions for n in report.lines.values())
    assert report.instructions == sum(report.mix.values())
    assert report.divergent == 0


# ---- shared memory


@pytest.mark.parametrize(
    ("offsets", "size", "passes", "ideal"),
    [
        (LANE * 4, 4, 1, 1),
        (LANE[::-1] * 4, 4, 1, 1),
        (LANE * 0 + 8, 4, 1, 1),  # one word for all lanes
        (LANE * 8, 4, 2, 1),  # every second word: two words per bank
        (LANE * 128, 4, 32, 1),  # a column of a row of 32 words: one bank
        (LANE * 132, 4, 1, 1),  # the same, rows padded by a word
        (LANE // 2 * 128, 4, 16, 1),  # 16 words in one bank, two lanes each
        (LANE * 2, 2, 1, 1),  # two halves of a word go together
        (LANE * 8, 8, 2, 2),  # 8 bytes: two halves of the warp
        (LANE * 16, 8, 4, 2),
        (LANE * 16, 16, 4, 4),  # 16 bytes: four quarters
        (LANE * 32, 16, 8, 4),
        (LANE * 0, 16, 4, 4),
        (np.where(LANE < 8, LANE * 16, INACTIVE), 16, 1, 1),
    ],
)
def test_wavefronts_of_a_warp(offsets, size, passes, ideal):
    assert wavefronts_of(np.atleast_2d(offsets), size) == (passes, ideal)


@settings(max_examples=50)
@given(st.data())
def test_wavefronts_against_a_count_bank_by_bank(data):
    size = data.draw(st.sampled_from([2, 4, 8, 16]))
    lanes = st.integers(-1, 200).map(lambda x: x * size if x >= 0 else INACTIVE)
    row = data.draw(st.lists(lanes, min_size=32, max_size=32))
    together = {8: 16, 16: 8}.get(size, 32)
    passes = ideal = 0
    for start in range(0, 32, together):
        part = {x for x in row[start : start + together] if x != INACTIVE}
        words = {w for x in part for w in range(x // 4, -(-(x + size) // 4))}
        banks = [w % 32 for w in words]
        passes += max((banks.count(b) for b in banks), default=0)
        ideal += bool(part)
    assert wavefronts_of(np.array([row]), size) == (passes, ideal)


def test_a_matrix_load_takes_one_pass_per_matrix_without_conflicts():
    """Rows of 16 bytes side by side fill the banks; 128 bytes apart they clash."""
    body = (
        ".reg .b32 %w, %r<4>; and.b32 %w, %i, 31;"
        "mad.lo.u32 %w, %w, {stride}, %shared;"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r0, %r1, %r2, %r3}}, [%w];"
        "mov.u32 %d, %r0;"
    )
    for stride, passes in ((16, 4), (128, 32), (144, 4)):
        text = body.format(stride=stride)
        _, report = launch_snippet(text, np.int32, threads=64, block=32, shared=4608)
        assert (report.wavefronts, report.ideal_wavefronts) == (2 * passes, 2 * 4)


# ---- divergence


def test_a_branch_counts_the_warps_that_part():
    a = np.zeros(128, np.int32)
    a[32:64] = 1  # a warp that goes the other way as a whole
    a[70] = a[100] = 1  # two warps that part
    body = (
        ".reg .pred %p; mov.u32 %d, 0; setp.eq.s32 %p, %a, 1; @%p bra L;"
        "mov.u32 %d, 1; L:"
    )
    got, report = launch_snippet(body, np.int32, a=a, block=64)
    assert np.array_equal(got, 1 - a)
    assert report.divergent == 2

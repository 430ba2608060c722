"""The tensor-core kernels stay below their instructions per byte, and never wait."""

from dataclasses import replace

import pytest

from kvq.kernels import static
from kvq.kernels.budgets import tensor_cores as budgets
from kvq.kernels.launch import nvrtc

ROWS, RECORDED = budgets.recorded()
IDENTITY = budgets.KEY
FIRST = dict(zip(IDENTITY[2:7], budgets.SETTINGS[0], strict=True))
reason = nvrtc.unavailable() or static.unavailable()
if reason is None and nvrtc.version() != RECORDED:
    reason = f"budgets are of NVRTC {RECORDED}, here is {nvrtc.version()}"
needs_compiler = pytest.mark.skipif(reason is not None, reason=str(reason))


def named(row):
    return " ".join(str(row[name]) for name in IDENTITY)


def test_every_version_bits_and_architecture_is_recorded():
    found = {tuple(row[name] for name in IDENTITY) for row in ROWS}
    for kernel in budgets.KERNELS.values():
        for bits in budgets.BITS:
            for arch in budgets.ARCHITECTURES:
                assert (kernel, bits, *budgets.SETTINGS[0], "float16", arch) in found
        for exact in ("float16", "bfloat16"):
            for arch in budgets.ARCHITECTURES:
                assert (kernel, 16, *budgets.BASELINE, exact, arch) in found
    assert len(found) == len(ROWS) > 70


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_nothing_spills_waits_or_loads_less_than_16_bytes(row):
    assert row["loop_spills"] == 0
    assert row["spills"] == 0 or (row["kernel"], row["D"]) == ("decode_v5", 256)
    assert row["loop_barriers"] == 0
    assert row["loop_other_loads"] <= 1  # the number of a page
    steps = 4 if row["bits"] == 16 else 1  # of 64 tokens
    assert row["loop_wide_loads"] >= row["step_bytes"] // 512 // steps
    assert row["registers"] <= 255
    assert row["shared_bytes"] <= 48 * 1024 + 1024  # of which sm_90 reserves 1 KB


@pytest.mark.parametrize(
    "row", [r for r in ROWS if FIRST.items() <= r.items()], ids=named
)
def test_instructions_per_byte_are_below_the_limit(row):
    assert 0 < row["instructions_per_byte"] <= budgets.LIMITS[row["bits"]]
    assert row["step_bytes"] == 64 * 2 * 128 * row["bits"] // 8 + 4 * 2 * 128
    for name in budgets.DEVICES:
        assert budgets.issue_share(row["instructions_per_byte"], name) < 0.7


@pytest.mark.parametrize("row", [r for r in ROWS if r["bits"] < 16], ids=named)
def test_other_settings_stay_below_four_thirds_of_the_limit(row):
    assert row["instructions_per_byte"] <= 4 / 3 * budgets.LIMITS[row["bits"]]
    assert budgets.issue_share(row["instructions_per_byte"], "H200") < 0.86


@pytest.mark.parametrize("row", [r for r in ROWS if r["bits"] == 16], ids=named)
def test_the_baseline_is_nowhere_near_the_limit_of_instructions(row):
    """So what it reaches on a device is what its memory gives."""
    assert row["step_bytes"] == 64 * 2 * 128 * 2
    for name in budgets.DEVICES:
        assert budgets.issue_share(row["instructions_per_byte"], name) < 0.15


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["kernel"] == "decode_v5"], ids=named
)
def test_enough_bytes_are_under_way_for_the_registers_that_a_warp_takes(row):
    for name in budgets.DEVICES:
        assert budgets.bytes_under_way(row) >= 1.3 * budgets.bytes_to_cover(name)


@needs_compiler
@pytest.mark.parametrize("version", budgets.KERNELS)
def test_the_machine_code_is_what_was_recorded(version):
    recorded = {named(row): row for row in ROWS}
    fresh = budgets.rows(settings=budgets.SETTINGS[:1], versions=(version,))
    fresh += budgets.baselines((version,))
    assert len(fresh) == (len(budgets.BITS) + 2) * len(budgets.ARCHITECTURES)
    for row in fresh:
        assert row == recorded[named(row)]


def test_the_table_names_every_kernel_and_device():
    titles, _, *lines = budgets.markdown().splitlines()
    assert all(f"| {name} " in titles for name in budgets.DEVICES)
    assert len(lines) == len(budgets.KERNELS) * (len(budgets.BITS) + 1) * 2
    name = "decode_v5 4 channel 64 64 128 4 float16 90"
    (row,) = (r for r in ROWS if named(r) == name)
    (line,) = (x for x in lines if x.startswith("| `decode_v5` | 4 | 90 |"))
    assert f" | {row['instructions_per_byte']:.2f} |" in line
    share = row["instructions_per_byte"] / budgets.device("H200").instructions_per_byte
    assert line.split(" | ")[7] == f"{share:.0%} memory"


def test_what_binds_is_what_a_byte_needs_most_of():
    """A device with 1 byte/s, and 5 instructions or 80 products in that time."""
    one = replace(
        budgets.device("H200"), bandwidth=1, copy_bandwidth=None, sms=1, clock=5 / 128,
        fp16_flops=80,
    )  # fmt: skip
    cost = {"instructions_per_byte": 4, "flops_per_byte": 60}
    assert budgets.shares(cost, one) == pytest.approx(
        {"memory": 1, "instructions": 0.8, "tensor cores": 0.75}
    )
    assert budgets.limit(cost, one) == "memory"
    assert budgets.limit(cost | {"instructions_per_byte": 6}, one) == "instructions"
    assert budgets.limit(cost | {"flops_per_byte": 99}, one) == "tensor cores"


def test_the_main_loop_is_the_longest_that_holds_no_other():
    mma, add, load = "HMMA.16816.F32", "FADD", "LDG.E.128.CONSTANT"
    code = (add, mma, load, add, add, mma, "LDG.E", "BRA", add, "BRA", mma, "BRA")
    facts = static.Facts(1, 0, 0, code, (), ((0, 10), (1, 8), (3, 6), (10, 12), (4, 5)))
    assert budgets.main_loop(facts) == code[3:6]
    assert budgets.wide_loads(code) == 1
    assert budgets.wide_loads(("LDGSTS.E.BYPASS.128", "LDS.128", "LDG.E.64")) == 1

"""No kernel costs more than its budget, and no budget is empty."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvq.kernels import budgets, report, static
from kvq.kernels.cases import launches, supported, versions
from kvq.kernels.launch import nvrtc

RECORDED = budgets.budgets(80)[1]
reason = nvrtc.unavailable() or static.unavailable()
if reason is None and nvrtc.version() != RECORDED:
    reason = f"budgets are of NVRTC {RECORDED}, here is {nvrtc.version()}"
needs_compiler = pytest.mark.skipif(reason is not None, reason=str(reason))


def bits_of(version, archs=nvrtc.ARCHITECTURES):
    """{bits: the architectures that have a budget for it}."""
    if version == "v1":  # the number of bits is an argument
        return {4: archs}
    every = sorted({b for arch in archs for b in budgets.BITS[arch]})
    return {b: [a for a in archs if b in budgets.BITS[a]] for b in every}


@needs_compiler
@pytest.mark.parametrize(("op", "version"), list(versions()))
def test_no_kernel_costs_more_than_its_budget(op, version):
    found = []
    for bits, archs in bits_of(version).items():
        case = report.case_of(op, version, bits)
        if not supported(case):
            continue
        with ThreadPoolExecutor() as pool:  # the compiler lets other threads run
            for launch in launches(case)[:1]:
                work = [(launch.source, launch.constants, arch) for arch in archs]
                list(pool.map(lambda args: nvrtc.compile_cubin(*args), work))
        found += report.rows(archs, cases=[case])
    assert list(budgets.problems(found)) == []
    assert {(row["kernel"], row["bits"], row["arch"]) for row in found} <= {
        (*key, arch) for arch in nvrtc.ARCHITECTURES for key in budgets.budgets(arch)[0]
    }


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_nothing_spills_and_memory_is_used_well(arch):
    """v2 and v3: no spills, K/V at most 1.05 of the ideal sectors, 1.1 wavefronts."""
    rows, _ = budgets.budgets(arch)
    for (kernel, bits), row in rows.items():
        name = f"{kernel}, {bits} bits"
        assert row["spills"] == 0, name
        if "_v1" not in kernel:
            assert row["sectors"] <= 1.05 * row["ideal_sectors"], name
            assert row["wavefronts"] <= 1.1 * row["ideal_wavefronts"], name


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_each_version_costs_less_for_a_byte_than_the_one_before(arch):
    rows, _ = budgets.budgets(arch)
    cost = {
        kernel: row["instructions_per_byte"]
        for (kernel, b), row in rows.items()
        if b == 4
    }
    assert cost["pack_v2"] < cost["pack_v1"]
    assert cost["dequant_v2"] < cost["dequant_v1"]
    assert cost["decode_v3"] < cost["decode_v2"] < cost["decode_v1"]


def row(**changes):
    """The recorded row of decode_v3 on sm_90, with 4 bits."""
    return budgets.budgets(90)[0]["decode_v3", 4] | {"arch": 90} | changes


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("registers", 1),
        ("spills", 1),
        ("shared_bytes", 4),
        ("loop_barriers", 1),
        ("wide_loads", -1),
        ("matrix", -1),
        ("instructions_per_byte", 2),
    ],
)
def test_a_number_over_its_budget_is_named(field, change):
    budget = row()[field]
    assert list(budgets.problems([row()])) == []
    assert list(budgets.problems([row(**{field: budget - change})])) == []
    (problem,) = budgets.problems([row(**{field: budget + change})])
    what = f"{field} is {budget + change:g}, the budget {budget:g}"
    assert problem == f"decode_v3, 4 bits, sm_90: {what}"


def test_a_kernel_without_a_budget_is_named():
    assert list(budgets.problems([row(kernel="decode_v9")])) == [
        "decode_v9, 4 bits, sm_90: no budget"
    ]


# --- the table of kernels/README.md ---------------------------------------------------
def test_the_table_has_every_kernel_once():
    lines = budgets.markdown().splitlines()
    kernels = [line.split("`")[1] for line in lines[2:]]
    assert kernels == [kernel for kernel, bits in budgets.budgets(90)[0] if bits == 4]
    assert len(set(kernels)) == len(kernels)
    registers = [budgets.budgets(a)[0]["decode_v3", 4]["registers"] for a in (75, 120)]
    (line,) = (line for line in lines if "`decode_v3`" in line)
    low, _, high = line.split("|")[2].strip().partition(" to ")
    assert int(low) <= min(registers) <= max(registers) <= int(high or low)


def test_readme_is_what_the_budgets_say():
    text = budgets.README.read_text(encoding="utf-8")
    assert budgets.with_table(text) == text
    with pytest.raises(ValueError, match="0 places for the table 'kernels'"):
        budgets.with_table("no markers")

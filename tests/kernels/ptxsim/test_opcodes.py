"""Every opcode has a file of tests, and a variant without a test is noticed."""

from pathlib import Path

import test_opcodes_logic as logic
from rows import untested

from kvq.kernels.ptxsim.kernel import opcodes
from kvq.kernels.ptxsim.meaning import OPCODES


def test_every_module_of_opcodes_has_a_test_file():
    files = {p.stem.removeprefix("test_opcodes_") for p in _here("test_opcodes_*.py")}
    modules = {f.__module__.rpartition(".")[2] for f in OPCODES.values()}
    assert modules == set(opcodes.__all__) == files


def _here(pattern):
    return Path(__file__).parent.glob(pattern)


def test_variants_without_a_row_are_named():
    texts = [row.ptx for row in logic.ROWS]
    rest = [t for t in texts if not t.startswith(("xor", "prmt.b32.ecl", "shr.s16"))]
    rest = [t for t in rest if ".shiftamt.u64" not in t]
    left = untested("logic", rest)
    assert left[0] == "xor: no row"
    assert sorted(left[1:]) == ["bfind.shiftamt.u64", "prmt.ecl.b32", "shr.s16"]

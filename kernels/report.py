"""What the kernels cost: counted in the simulator, and read from their machine code.

    run(case)    the kernels of a case in the simulator, with their counters
    rows()       a row for each kernel and architecture: `kvq kernels report`

Nothing here is a time. Counters are those of `ptxsim`; registers and instructions of
the machine are those of `static`.
"""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from pathlib import Path

from kvq.kernels import ptxsim, static
from kvq.kernels.cases import Case, launches, supported, versions
from kvq.kernels.launch import cache, nvrtc
from kvq.kernels.launch.ptxsim import ptx_text

COUNTS = (
    *("instructions", "sectors", "ideal_sectors"),
    *("wavefronts", "ideal_wavefronts", "divergent"),
)


def case_of(op, version, bits=4):
    """What the tables are about: keys per channel, everything quantized."""
    return Case(op, version, bits, per="channel", residual=0, T=512)


@dataclasses.dataclass(frozen=True)
class Run:
    """One launch of a case in the simulator."""

    launch: object
    kernel: ptxsim.Kernel
    report: ptxsim.Report

    @property
    def nbytes(self):
        """Bytes that must move between memory and chip: every array, once."""
        return sum(a.nbytes for a in self.launch.args if getattr(a, "ndim", 0))


def run(case, language="c"):
    """The Runs of a case, in the order of its launches."""
    runs = []
    for launch in launches(case):
        ptx = ptx_text(launch.source, launch.kernel, launch.constants, language)
        kernel = _module(ptx).kernel(launch.kernel)
        args = ptxsim.numba_args(launch.args) if language == "numba" else launch.args
        report = kernel.launch(launch.grid, launch.block, args, check=False)
        runs.append(Run(launch, kernel, report))
    return runs


@functools.lru_cache(maxsize=8)
def _module(ptx):
    """Parsed once for all kernels of a text."""
    return ptxsim.Module(ptx)


# --- the table of kernels -------------------------------------------------------------
def rows(architectures=nvrtc.ARCHITECTURES, bits=4, cases=None):
    """A dict for each kernel and architecture. Raises ValueError without a compiler."""
    if reason := nvrtc.unavailable() or static.unavailable():
        raise ValueError(reason)
    cases = cases or [case_of(op, version, bits) for op, version in versions()]
    cases = [case for case in cases if supported(case)]
    return [
        {"kernel": r.launch.kernel, "bits": case.bits, "arch": arch, **_row(r, arch)}
        for case in cases
        for r in run(case)
        for arch in architectures
    ]


def _row(r, arch):
    facts = facts_of(r.launch.source, r.launch.constants, arch)[r.launch.kernel]
    return {
        "registers": facts.registers,
        "spills": facts.spills,
        "shared_bytes": facts.shared,
        "wide_loads": facts.wide_loads,
        "matrix": facts.matrix,
        "loop_instructions": len(facts.main_loop),
        "loop_barriers": facts.barriers,
        "instructions_per_byte": 32 * machine_instructions(r, facts) / r.nbytes,
        **{name: getattr(r.report, name) for name in COUNTS[1:]},
    }


def facts_of(source, constants, arch):
    """{kernel: static.Facts}, kept like what the compiler gives."""
    cubin = nvrtc.compile_cubin(source, constants, arch)

    def read():
        found = static.facts(cubin).items()
        return json.dumps({k: dataclasses.astuple(f) for k, f in found}).encode()

    digest = hashlib.sha256(cubin).hexdigest()
    kept = json.loads(cache.kept("static", [static.__file__], [digest], read))
    return {kernel: static.Facts(*values) for kernel, values in kept.items()}


#     machine instructions = sum over lines of  SASS of the line * times that it ran
#     times that it ran    = PTX instructions executed there / PTX instructions there
def machine_instructions(r, facts):
    """An estimate of the SASS instructions that the warps of a Run execute.

    The simulator runs PTX. The compiler turns the PTX of a source line into more or
    fewer machine instructions, which run as often as the line does. What comes after
    the last EXIT is left out: slow paths, and subroutines such as a 64-bit division,
    which some architectures have there and others in the line. Of two branches in one
    line both count.
    """
    here = Counter(_place(i.source) for i in r.kernel.code.instructions if i.counted)
    executed = Counter()
    for source, counts in r.report.places.items():
        executed[_place(source)] += counts.instructions
    total = times = 0
    for place in facts.places[: _end(facts.code)]:
        if tuple(place) in here:  # else: a line without PTX runs as often as the last
            times = executed[tuple(place)] / here[tuple(place)]
        total += times
    return total


def _place(source):
    file, line = source
    return Path(file or "").name, line


def _end(code):
    return len(code) - list(reversed(code)).index("EXIT")

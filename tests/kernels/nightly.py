"""Every kernel by the NVRTC of this environment: compiled, and run in the simulator.

python tests/kernels/nightly.py    minutes; exit code 1 where something fails

The committed PTX is not used. `make nightly` runs this with an older NVRTC as well.
"""

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from agree import check_decode, check_dequant, check_pack

from kvq.kernels import backend, ptx
from kvq.kernels.cases import inputs
from kvq.kernels.launch import nvrtc
from kvq.kernels.ptx.specializations import cases, specializations

CHECKS = {"pack": check_pack, "dequant": check_dequant, "decode": check_decode}


class Runner:
    """One operation by one version, called as the operation is."""

    def __init__(self, op, version):
        self.op, self.version = op, version

    def __call__(self, *values, **options):
        operation = getattr(backend("ptxsim-c"), self.op)
        return operation(*values, version=self.version, **options)


def compile_all():
    """The number of CUBINs: every source and its constants, every architecture."""
    done = {
        (source, tuple(c.items())): (source, c) for source, _, c in specializations()
    }
    for source, constants in done.values():
        for arch in nvrtc.ARCHITECTURES:
            nvrtc.compile_cubin(source, constants, arch)
    return len(done) * len(nvrtc.ARCHITECTURES)


def run_all():
    """The cases that fail, one line each."""
    for case in cases():
        try:
            CHECKS[case.op](Runner(case.op, case.version), *inputs(case))
        except Exception as error:  # all of them are of interest
            yield f"{case}: {type(error).__name__}: {error}"


def main():
    ptx.find = lambda *args: None
    start = time.perf_counter()
    print(f"NVRTC {nvrtc.version()}: {compile_all()} CUBINs", flush=True)
    failed = list(run_all())
    print(*failed, sep="\n")
    print(f"{len(failed)} cases failed, {time.perf_counter() - start:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Executor: the compiled kernels of either language, run by `kvq.kernels.ptxsim`.

The PTX comes from the committed folder `kernels/ptx/` where it holds this
specialization, and else from the compiler of the language.
"""

import functools

from kvq.kernels import ptx
from kvq.kernels.launch.compilers import COMPILERS, compile_ptx


def unavailable():
    """None: NumPy and the committed PTX are enough."""
    return None


def missing(launches, language="c"):
    """None, or why the PTX of one of these kernels cannot be had here."""
    for launch in launches:
        if ptx.find(launch.source, launch.constants, language, launch.kernel) is None:
            reason = COMPILERS[language].unavailable()
            if reason:
                return (
                    f"no committed PTX of {launch.kernel} for {launch.constants}, and "
                    f"no compiler ({reason})"
                )
    return None


def run(launches, language="c", check=True):
    """Run them; outputs are written back in place. Returns the report of each.

    check : look for accesses out of bounds, races and divergent barriers as well.
    Raises ptxsim.KernelFault for what it finds, ptxsim.UnsupportedPTX for an
    instruction that the machine does not model.
    """
    from kvq.kernels import ptxsim

    reports = []
    for launch in launches:
        constants = tuple(sorted(launch.constants.items()))
        kernel = _kernel(launch.source, launch.kernel, constants, language)
        args = ptxsim.numba_args(launch.args) if language == "numba" else launch.args
        reports.append(kernel.launch(launch.grid, launch.block, args, check=check))
    return reports


@functools.lru_cache(maxsize=256)
def _kernel(source, kernel, constants, language):
    from kvq.kernels import ptxsim

    text = ptx_text(source, kernel, dict(constants), language)
    return ptxsim.Module(text).kernel(kernel)


def ptx_text(source, kernel, constants, language="c"):
    """The PTX of a kernel: the committed text, or else compiled here."""
    text = ptx.find(source, constants, language, kernel)
    return compile_ptx(language, source, kernel, constants) if text is None else text

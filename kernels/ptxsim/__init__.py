"""A PTX machine in NumPy: runs compiled CUDA kernels on any CPU, counts and checks.

    module = ptxsim.Module(ptx_text)
    kernel = module.kernel("pack_v1")
    report = kernel.launch(grid, block, args)      # arrays are changed in place
    report.sectors, report.ideal_sectors, report.lines

Read it in this order: `parse` (text -> instructions), `inline` and `blocks` (calls and
basic blocks), `meaning` and `opcodes/` (what each instruction does), `translate`
(blocks -> Python functions), `execute` (lanes, divergence, barriers), `memory`, `count`
(sectors, wavefronts), `check` (faults), `kernel` (the launch).
"""

from kvq.kernels.ptxsim.count import LineCounts, Report
from kvq.kernels.ptxsim.errors import KernelFault, PTXError, UnsupportedPTX
from kvq.kernels.ptxsim.kernel import Kernel, Module, numba_args

__all__ = [
    "Kernel",
    "KernelFault",
    "LineCounts",
    "Module",
    "PTXError",
    "Report",
    "UnsupportedPTX",
    "numba_args",
]

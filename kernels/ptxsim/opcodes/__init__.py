"""The table of instruction meanings; importing this fills `meaning.OPCODES`."""

from kvq.kernels.ptxsim.opcodes import (
    arithmetic,
    compare,
    convert,
    logic,
    matrix,
    memory,
    warp,
)

__all__ = [
    "arithmetic",
    "compare",
    "convert",
    "logic",
    "matrix",
    "memory",
    "warp",
]

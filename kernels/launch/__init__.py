"""From a kernel's source to its results: one launch, compilers and executors.

A `Launch` is one grid of one kernel over flat NumPy arrays. The modules `nvrtc` and
`numba_ptx` compile a kernel. An executor is a module with

    unavailable()       None, or in one line why it cannot run on this machine
    run(launches)       one after the other; outputs are written back in place. The
                        same array object in two launches is one device buffer
    missing(launches)   where it can happen: None, or what it would need to run these

`ptxsim` (both languages, NumPy alone), `gxx` (C), `numba_sim` (Python), `numba_cuda`
(Python, on a GPU) and `cupy` (C, on a GPU).
"""

from dataclasses import dataclass, field

import numpy as np

MAX_GRID = 2**31 - 1  # blocks along x: everything is flattened into x
MAX_BLOCK = 1024  # threads
ARRAY_DTYPES = ("float16", "float32", "uint32", "int32")
SCALAR_DTYPES = ("int32", "int64", "float32")


@dataclass(frozen=True, eq=False)
class Launch:
    """One grid of one kernel.

    source : the kernel's file without its suffix, "pack/v1_word_per_thread".
    kernel : the function in it, "pack_v1".
    constants : {name: int or str} known at compile time, {"X": "__half", "BITS": 4}.
    grid, block : blocks, and threads of a block, both along x.
    args : 1-D contiguous NumPy arrays, and scalars. A Python int or bool becomes int32
        and a float float32: a kernel reads the bytes that it is given.
    outputs : indices of the arrays in `args` that the kernel writes.
    Raises TypeError or ValueError that names the argument.
    """

    source: str
    kernel: str
    constants: dict
    grid: int
    block: int
    args: tuple = field(repr=False)
    outputs: tuple[int, ...]

    def __post_init__(self):
        self._check_size("grid", self.grid, MAX_GRID)
        self._check_size("block", self.block, MAX_BLOCK)
        args = tuple(
            _checked_array(a, f"{self.kernel}: argument {i}")
            if isinstance(a, np.ndarray)
            else scalar(a, f"{self.kernel}: argument {i}")
            for i, a in enumerate(self.args)
        )
        object.__setattr__(self, "args", args)
        for i in self.outputs:
            self._check_output(i)

    def _check_size(self, name, value, most):
        if not 1 <= value <= most:
            raise ValueError(f"{self.kernel}: {name}={value!r}; valid: 1..{most}")

    def _check_output(self, i):
        array = self.args[i]
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise ValueError(
                f"{self.kernel}: output {i} is {type(array).__name__}; expected a "
                "writeable array"
            )


def _checked_array(a, what):
    if a.dtype.name not in ARRAY_DTYPES or not a.dtype.isnative:
        raise TypeError(
            f"{what} has dtype {a.dtype}; expected {', '.join(ARRAY_DTYPES)}, native"
        )
    if a.ndim != 1 or not a.flags.c_contiguous or not a.flags.aligned:
        raise ValueError(
            f"{what} has shape {a.shape} and strides {a.strides}; expected 1-D, "
            "contiguous and aligned"
        )
    if a.size == 0:
        raise ValueError(f"{what} is empty; expected at least one element")
    return a


def scalar(value, what="scalar"):
    """`value` as a NumPy scalar of the type that a kernel takes.

    int and bool -> int32, float -> float32; int32, int64 and float32 stay as they are.
    Raises TypeError for anything else, ValueError for an int beyond int32.
    """
    if isinstance(value, np.generic) and value.dtype.name in SCALAR_DTYPES:
        return value
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        if not -(2**31) <= int(value) < 2**31:
            raise ValueError(f"{what} is {value}, beyond int32; give np.int64")
        return np.int32(value)
    if isinstance(value, (float, np.floating)):
        return np.float32(value)
    raise TypeError(
        f"{what} is {type(value).__name__}; expected a NumPy array, an int or a float"
    )

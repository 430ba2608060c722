"""`Module` and `Kernel`: from PTX text to a launch."""

from functools import cached_property

import numpy as np

from kvq.kernels.ptxsim import opcodes  # noqa: F401  fills the table of meanings
from kvq.kernels.ptxsim.blocks import JUMPS
from kvq.kernels.ptxsim.check import short_name
from kvq.kernels.ptxsim.count import Counters
from kvq.kernels.ptxsim.errors import KernelFault, UnsupportedPTX
from kvq.kernels.ptxsim.execute import LANES, Machine
from kvq.kernels.ptxsim.inline import inline
from kvq.kernels.ptxsim.layout import WARP, Layout
from kvq.kernels.ptxsim.memory import Arena, place
from kvq.kernels.ptxsim.parse import Address, Symbol, Vector, parse
from kvq.kernels.ptxsim.translate import translate
from kvq.kernels.ptxsim.types import NUMPY, SIZE

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
SHARED_ALIGNMENT = 16
SHARED_BYTES = 2**23  # of shared memory at once, about
ACCESSES = ("ld", "st", "atom", "red")
# Those that name no state space have a generic address.
MAY_REACH_SHARED = {*ACCESSES, *(f"{name}.shared" for name in ACCESSES)}


class Module:
    """The kernels of a PTX text, as NVRTC, nvcc or numba-cuda write it.

    Raises PTXError, with the line, for text that it cannot parse.
    """

    def __init__(self, ptx):
        self.program = parse(ptx)
        self._kernels = {}

    @property
    def names(self):
        return tuple(self.program.kernels)

    def kernel(self, name=None):
        """The kernel `name`, translated; without a name the only one. Of a mangled
        Numba name the function's own name will do.

        Raises ValueError for an unknown name and UnsupportedPTX, with the line, for an
        instruction that the machine does not model.
        """
        fits = [n for n in self.names if name in (None, n, short_name(n))]
        if len(fits) != 1:
            raise ValueError(f"kernel {name!r}: not one of {', '.join(self.names)}")
        (found,) = fits
        if found not in self._kernels:
            self._kernels[found] = Kernel(self.program, found)
        return self._kernels[found]


class Kernel:
    """A translated kernel; `launch` runs it."""

    def __init__(self, program, name):
        function = program.kernels[name]
        items, variables, targets = inline(function, program.functions)
        self.name, self.parameters = name, function.parameters
        self.code = translate(name, items, targets)
        own = {v.name for v in variables}
        used = (
            _symbols(self.code.instructions) - {p.name for p in self.parameters} - own
        )
        unknown = sorted(used - set(program.variables))
        if unknown:
            raise UnsupportedPTX(f"{name}: {unknown[0]} is not in the text")
        self.variables = list(variables)
        self.variables += [v for n, v in program.variables.items() if n in used]

    def launch(self, grid, block, args, check=True, *, shared=0, names=None):
        """Run the kernel; arrays in `args` are changed in place. Returns a `Report`.

        grid, block   int or up to three of them
        args          one per parameter: C-contiguous NumPy arrays (pointers), NumPy
                      scalars of the parameter's size, or bytes (structs). One array
                      given twice is one buffer
        check         also find misaligned accesses of shared memory, races, divergent
                      barriers and shuffles. Out of bounds is always found
        shared        bytes of dynamic shared memory
        names         names of the arguments, for messages

        Raises ValueError or TypeError for arguments that do not fit and KernelFault for
        what the kernel does wrong.
        """
        return Launch(self, grid, block, args, check, shared, names).run()


def _symbols(instructions):
    """The names of the variables that the instructions mention."""
    operands = [o for i in instructions if i.opcode not in JUMPS for o in i.operands]
    parts = [p for o in operands for p in (o.parts if isinstance(o, Vector) else [o])]
    bases = [p.base if isinstance(p, Address) else p for p in parts]
    return {b.name for b in bases if isinstance(b, Symbol)}


class Launch:
    """One launch: memory, arguments and the batches of blocks."""

    def __init__(self, kernel, grid, block, args, check, shared, names):
        self.kernel, self.code, self.check = kernel, kernel.code, check
        self.grid = _dimensions("grid", grid, MAX_GRID)
        self.block = _dimensions("block", block, (MAX_THREADS, MAX_THREADS, 64))
        if np.prod(self.block) > MAX_THREADS:
            raise ValueError(f"block {self.block}: more than {MAX_THREADS} threads")
        self.dynamic_shared = int(shared)
        self.counters = Counters(self.code)
        self.layouts = {}
        self.arena, self.symbols = Arena(), {}
        self._place_variables()
        self.arrays = {}  # buffer index -> array
        self.parameters = self._pack(args, names)
        self.arena.build()

    def _place_variables(self):
        spaces = {s: [] for s in ("shared", "local", "global", "const")}
        dynamic = []
        for v in self.kernel.variables:
            (dynamic if v.dynamic else spaces[v.space]).append(v)
        offsets, self.static_shared = place(spaces["shared"])
        local, local_size = place(spaces["local"])
        self.symbols |= offsets | local
        size = -(-self.static_shared // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        self.symbols |= {v.name: size for v in dynamic}
        size += -(-self.dynamic_shared // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        self.shared_size, self.local_size = size, -(-local_size // 16) * 16
        for v in spaces["global"] + spaces["const"]:
            data = np.frombuffer((v.data or b"").ljust(v.size, b"\0"), np.uint8)
            self.symbols[v.name] = self.arena.add(data, f"variable {v.name}")

    def _pack(self, args, names):
        """{parameter: its bytes}"""
        parameters = self.kernel.parameters
        if len(args) != len(parameters):
            counts = f"{len(args)} arguments, {len(parameters)} are wanted"
            raise ValueError(f"{short_name(self.kernel.name)}: {counts}")
        packed, addresses = {}, {}
        for k, (parameter, arg) in enumerate(zip(parameters, args, strict=True)):
            name = f"argument {k}" + (f" ({names[k]})" if names else "")
            if isinstance(arg, np.ndarray) and arg.ndim:
                if id(arg) not in addresses:
                    addresses[id(arg)] = self._buffer(name, arg)
                arg = np.uint64(addresses[id(arg)])
            packed[parameter.name] = _argument_bytes(name, parameter, arg)
        return packed

    def _buffer(self, name, array):
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: the array is not C-contiguous")
        data = array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
        self.arrays[len(self.arena.starts)] = (name, array)
        return self.arena.add(data, f"{name} ({array.dtype}, {array.size} elements)")

    @cached_property
    def granule(self):
        """Bytes that a race is told apart by: the smallest access of shared memory."""
        sizes = [4]
        for i in self.code.instructions:
            if i.kind in MAY_REACH_SHARED:
                sizes += [SIZE[m] for m in i.modifiers if m in NUMPY]
        return min(sizes)

    def layout(self, count):
        """The lanes of `count` blocks, the same for all batches but the last."""
        if count not in self.layouts:
            scalars = {
                "%dynamic_smem_size": self.dynamic_shared,
                "%total_smem_size": self.shared_size,
            }
            self.layouts[count] = Layout(self.block, self.grid, count, scalars)
        return self.layouts[count]

    def run(self):
        per_block = -(-int(np.prod(self.block)) // WARP) * WARP
        blocks = int(np.prod(self.grid))
        batch = LANES // per_block
        if self.shared_size:
            batch = min(batch, SHARED_BYTES // self.shared_size)
        batch = max(1, batch)
        with np.errstate(all="ignore"):
            for first in range(0, blocks, batch):
                Machine(self, first, min(batch, blocks - first)).run()
        self._copy_back()
        return self.counters.report(blocks * per_block // WARP)

    def _copy_back(self):
        for index, (name, array) in self.arrays.items():
            if not self.arena.written[index]:
                continue
            if not array.flags.writeable:
                raise KernelFault(
                    f"{self.kernel.name}: wrote to {name}, which is read-only"
                )
            array.reshape(-1).view(np.uint8)[:] = self.arena.read_back(index)


def _dimensions(name, value, limits):
    """(x, y, z) of a grid or a block."""
    given = tuple(int(v) for v in np.atleast_1d(value))
    result = (*given, 1, 1, 1)[:3]
    if len(given) > 3 or any(
        not 1 <= v <= m for v, m in zip(result, limits, strict=True)
    ):
        raise ValueError(f"{name} {value}: 1 to 3 numbers in 1..{limits} are wanted")
    return result


def _argument_bytes(name, parameter, arg):
    """The bytes of one argument, after a check of its kind and size."""
    if isinstance(arg, bytes):
        data = arg
    elif isinstance(arg, np.generic) or (isinstance(arg, np.ndarray) and not arg.ndim):
        known = parameter.type in ("u32", "s32", "u64", "s64", "f32", "f64")
        if known and (parameter.type[0] == "f") != (arg.dtype.kind == "f"):
            raise TypeError(f"{name}: {arg.dtype} given for a .{parameter.type}")
        data = arg.tobytes()
    else:
        kind = type(arg).__name__
        raise TypeError(f"{name}: {kind} given; arrays, NumPy scalars, bytes are known")
    if len(data) != parameter.size:
        raise TypeError(f"{name}: {len(data)} bytes given, {parameter.size} are wanted")
    return data


def numba_args(args):
    """The arguments of a kernel that numba-cuda compiled: an array becomes
    0, 0, size, itemsize, pointer, shape..., strides... (bytes)."""
    result = []
    for arg in args:
        if isinstance(arg, np.ndarray) and arg.ndim:
            result += [np.uint64(0), np.uint64(0)]
            result += [np.int64(arg.size), np.int64(arg.itemsize), arg]
            result += [np.int64(n) for n in (*arg.shape, *arg.strides)]
        else:
            result.append(arg)
    return result


__all__ = ["Kernel", "Module", "numba_args"]

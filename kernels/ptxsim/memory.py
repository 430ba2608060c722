"""Memory of the machine: one arena of global memory, and shared and local memory.

Global memory is one array of bytes. Every buffer lies in it between red zones, bytes
that belong to nobody, so that an access beside a buffer is noticed. A 64-bit address
tells its space by its size: shared and local memory are windows far above the arena.
"""

from bisect import bisect_right

import numpy as np

u8, u32, i64 = np.uint8, np.uint32, np.int64

GLOBAL_BASE = 0x1_0000_0000
LOCAL_BASE = 0x7E00_0000_0000
SHARED_BASE = 0x7F00_0000_0000
WINDOWS = {"shared": SHARED_BASE, "local": LOCAL_BASE}
NUMBER = {"global": 0, "const": 0, "local": 1, "shared": 2}
NAME = ("global", "local", "shared")
WORD = 4
RED_ZONE = 512
ALIGNMENT = 512  # of every buffer, at least; cudaMalloc gives 256


def space_of(addresses):
    """0 global, 1 local, 2 shared: the space of generic addresses (int64)."""
    return (addresses >= LOCAL_BASE).astype(u8) + (addresses >= SHARED_BASE).astype(u8)


class Arena:
    """Global memory. Buffers are added before the launch and do not move."""

    def __init__(self):
        self.starts, self.ends, self.names = [], [], []
        self.written = []  # per buffer: did the kernel write to it?
        self.contents = []
        self.top = RED_ZONE
        self.bytes = None

    def add(self, data, name):
        """The address of a new buffer with the bytes `data`; `name` is for messages."""
        start = self.top
        self.starts.append(start)
        self.ends.append(start + data.size)
        self.names.append(name)
        self.written.append(False)
        self.contents.append(data)
        self.top = -(-(start + data.size + RED_ZONE) // ALIGNMENT) * ALIGNMENT
        return GLOBAL_BASE + start

    def build(self):
        """Allocate the arena and copy the buffers in."""
        self.bytes = np.zeros(self.top, u8)
        for start, data in zip(self.starts, self.contents, strict=True):
            self.bytes[start : start + data.size] = data
        self.contents = None

    def mark_written(self, buffer):
        """One buffer, or an array of them, changed."""
        for k in (buffer,) if np.ndim(buffer) == 0 else np.unique(buffer):
            self.written[k] = True

    def read_back(self, index):
        """The bytes of buffer `index`."""
        return self.bytes[self.starts[index] : self.ends[index]]

    def buffers(self, offsets, size):
        """The buffer of every access, and whether the access lies inside it.

        Usually all lie in one buffer, and its lowest and highest offset tell.
        """
        low, high = int(offsets.min()), int(offsets.max())
        one = bisect_right(self.starts, low) - 1
        if one >= 0 and high + size <= self.ends[one]:
            return one, None
        each = np.searchsorted(self.starts, offsets, "right") - 1
        inside = (each >= 0) & (offsets + size <= np.take(self.ends, each))
        return each, inside


def place(variables):
    """{name: offset} of variables laid one after the other, and the bytes in all."""
    offsets, top = {}, 0
    for variable in variables:
        top = -(-top // variable.align) * variable.align
        offsets[variable.name] = top
        top += variable.size
    return offsets, top


def elements(memory, dtype):
    """The bytes seen as elements of a type (a rest too short for one is left out)."""
    size = np.dtype(dtype).itemsize
    return memory[: memory.size // size * size].view(dtype)


class Copies:
    """Copies in flight (`cp.async`), which land when their group is waited for."""

    def __init__(self, lanes):
        self.committed = np.zeros(lanes, i64)  # groups that each lane has committed
        self.flying = []  # (lanes, their groups, site, address, values)

    def start(self, machine, site, to, source, size, valid):
        """Read `size` bytes now; of them `valid` are data and the rest zeros."""
        lanes = machine.lanes()
        if valid is None:
            values = machine.load(site, "global", source, u32, size // WORD)
        else:
            values = self._partly(machine, site, source, size, valid)
        self.flying.append((lanes, self.committed[lanes], site, to, values))

    def _partly(self, machine, site, source, size, valid):
        """Copies of which only `valid` bytes are read: all, none or whole words."""
        valid, source = machine.per_lane(valid), machine.per_lane(source)
        lanes = machine.lanes()
        values = [np.zeros(len(lanes), u32) for _ in range(size // WORD)]
        whole = valid >= size
        if whole.any():
            with machine.only(lanes[whole]):
                loaded = machine.load(site, "global", source[whole], u32, len(values))
            for value, part in zip(values, loaded, strict=True):
                value[whole] = part
        for k, value in enumerate(values):
            some = ~whole & (valid >= WORD * (k + 1))
            if some.any():
                with machine.only(lanes[some]):
                    at = source[some] + source.dtype.type(WORD * k)
                    (value[some],) = machine.load(site, "global", at, u32, 1)
        if (~whole & (valid % WORD != 0)).any():
            machine.fault(site, "a part of a word is copied, which is not modelled")
        return values

    def commit(self, machine):
        self.committed[machine.lanes()] += 1

    def wait(self, machine, keep):
        """All but the last `keep` groups land (None: all copies, committed or not)."""
        here = np.zeros(len(self.committed), bool)
        here[machine.lanes()] = True
        flying, self.flying = self.flying, []
        for lanes, group, site, to, values in flying:
            lands = here[lanes]
            if keep is not None:
                lands &= group < self.committed[lanes] - keep
            if lands.any():
                with machine.only(lanes[lands]):
                    parts = [v if np.ndim(v) == 0 else v[lands] for v in values]
                    address = to if np.ndim(to) == 0 else to[lands]
                    machine.store(site, "shared", address, parts, u32)
            if not lands.all():
                stay = ~lands
                left = [v if np.ndim(v) == 0 else v[stay] for v in values]
                rest = to if np.ndim(to) == 0 else to[stay]
                self.flying.append((lanes[stay], group[stay], site, rest, left))

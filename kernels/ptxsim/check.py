"""What a kernel may do wrong, and how it is noticed.

    bounds       an access outside every buffer, or beyond shared or local memory
    alignment    an address that is not a multiple of the size of the access
    race         two warps at one place of shared memory between two barriers, one of
                 them writing
    barrier      threads of a block at different barriers, or gone before one
    collective   a shuffle, a vote or an mma without all the lanes that it names

The messages are made here; the machine calls the checks.
"""

import re
from pathlib import PurePath

import numpy as np

from kvq.kernels.ptxsim.errors import KernelFault

i32 = np.int32
NOBODY, SEVERAL = -1, -2


def fault(code, site, what, block=None, thread=None, more=0):
    """The KernelFault of instruction `site`, with the place where it happened."""
    text = f"{short_name(code.name)}: {what}"
    if thread is not None:
        text += f", block {_point(block)} thread {_point(thread)}"
    if more:
        text += f" and {more} more threads"
    if site is not None:
        instruction = code.instructions[site]
        text += source_of(instruction)
        text += f", PTX line {instruction.line}: {instruction.text}"
    return KernelFault(text)


def source_of(instruction):
    """`, at kernel.cu line 44`, and the line of the kernel that led into a header."""
    file, line = instruction.source
    if not line:
        return ""
    text = f", at {PurePath(file).name} line {line}" if file else f", at line {line}"
    outer = instruction.kernel_line
    return text + (f" (from line {outer})" if outer not in (0, line) else "")


def short_name(name):
    """The function's own name in one that Numba mangled: _ZN<n><module><n><name>B..."""
    parts, rest = [], name.removeprefix("_ZN")
    while rest != name and (match := re.match(r"\d+", rest)):
        end = match.end() + int(match[0])
        parts.append(rest[match.end() : end])
        rest = rest[end:]
    return parts[-1] if parts else name


def _point(xyz):
    """(x, y, z) as short as possible: x alone when y and z are 0."""
    x, y, z = (int(v) for v in xyz)
    return str((x, y, z)) if y or z else str(x)


def outside_arena(arena, offset, size):
    """Words for an access that hits a red zone."""
    k = max(int(np.searchsorted(arena.starts, offset, "right")) - 1, 0)
    if (
        k + 1 < len(arena.starts)
        and arena.starts[k + 1] - offset < offset - arena.ends[k]
    ):
        k += 1
    at = int(offset) - arena.starts[k]
    length = arena.ends[k] - arena.starts[k]
    return (
        f"access of {size} bytes out of bounds: at byte {at} of {arena.names[k]}, "
        f"which has {length} bytes"
    )


def race(kind, at):
    """Words for an access (read, write or atomic) that races at a byte."""
    name = f"an {kind}" if kind == "atomic" else f"a {kind}"
    return (
        f"race on shared memory: {name} at byte {at}, which another warp accessed, "
        "with no barrier between them"
    )


class Races:
    """Who wrote and read each granule of shared memory since the block's last barrier.

    Atomics do not race with each other. Accesses of one warp are never reported.
    """

    def __init__(self, blocks, size, granule):
        self.granule = granule
        cells = blocks * size // granule
        self.epoch = np.zeros(blocks, i32)
        self.write_epoch = np.full(cells, -1, i32)
        self.writer = np.full(cells, NOBODY, i32)
        self.atomic = np.zeros(cells, bool)
        self.read_epoch = np.full(cells, -1, i32)
        self.reader = np.full(cells, NOBODY, i32)

    def barrier(self, blocks):
        """The blocks passed a barrier: what was before it cannot race any more."""
        self.epoch[blocks] += 1

    def access(self, block, warp, offset, size, kind):
        """Note accesses (kind read, write or atomic); the lanes that race, or None.

        All lanes of the call run one instruction, so several warps may meet in it.
        """
        epoch = self.epoch[block]
        racing = np.zeros(len(offset), bool)
        first = offset // self.granule
        for k in range(max(1, size // self.granule)):
            cell = first + k
            written = (self.write_epoch[cell] == epoch) & (self.writer[cell] != warp)
            if kind == "atomic":
                written &= ~self.atomic[cell]
            racing |= written
            if kind == "read":
                self._note_read(cell, epoch, warp)
            else:
                read = self.read_epoch[cell] == epoch
                racing |= read & (self.reader[cell] != warp)
                self._note_write(cell, epoch, warp, kind)
                if kind == "write":
                    racing |= self.writer[cell] != warp
        return racing if racing.any() else None

    def _note_write(self, cell, epoch, warp, kind):
        self.write_epoch[cell], self.writer[cell] = epoch, warp
        self.atomic[cell] = kind == "atomic"

    def _note_read(self, cell, epoch, warp):
        again = (self.read_epoch[cell] == epoch) & (self.reader[cell] != warp)
        self.reader[cell] = np.where(again, SEVERAL, warp)
        self.reader[cell[self.reader[cell] != warp]] = SEVERAL
        self.read_epoch[cell] = epoch

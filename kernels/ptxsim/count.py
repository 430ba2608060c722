"""Counters: what the hardware would have to do, by the documented model.

    sectors        32-byte pieces of global memory that a warp's access touches
    ideal_sectors  as many as the distinct bytes it asks for would fill
    wavefronts     passes over the 32 banks of shared memory, 4 bytes wide each, that a
                   warp's access takes; wide accesses go in 2 or 4 parts
    ideal          one pass per part
    instructions   PTX instructions executed, per warp
    divergent      times that the lanes of a warp parted at a branch

Not a model of time: caches, latency and occupancy are left out.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

i64 = np.int64
SECTOR, BANKS, BANK = 32, 32, 4  # bytes, banks, bytes
INACTIVE = -1


@dataclass
class LineCounts:
    """Counters of one source line; also those of a whole kernel."""

    instructions: int = 0
    threads: int = 0  # instructions executed, per thread
    requests: int = 0  # warps that accessed global memory
    sectors: int = 0
    ideal_sectors: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    divergent: int = 0
    mix: Counter = field(default_factory=Counter)


SUMMED = tuple(LineCounts.__dataclass_fields__)[:-1]  # all but `mix`


@dataclass
class Report(LineCounts):
    """What one launch did.

    `warps` were launched; `mix` counts the instructions of the warps by kind ("fma",
    "ld.global");
    `lines` maps a line of the kernel's source (0: unknown) to its LineCounts; inlined
    functions count where they are called. `places` maps (file, line) to the LineCounts
    of what stands there, inlined or not.
    """

    warps: int = 0
    lines: dict = field(default_factory=dict)
    places: dict = field(default_factory=dict)


class Counters:
    """Counts per instruction while a kernel runs."""

    def __init__(self, code):
        self.code = code
        for name in SUMMED:
            setattr(self, name, np.zeros(len(code.instructions), i64))

    def block(self, sites, warps, threads):
        """A run of instructions was executed by so many warps and threads."""
        self.instructions[sites] += warps
        self.threads[sites] += threads

    def global_access(self, site, rows, size):
        """rows: (warps, 32) byte offsets, INACTIVE where no lane runs."""
        requests, sectors, ideal = sectors_of(rows, size)
        self.requests[site] += requests
        self.sectors[site] += sectors
        self.ideal_sectors[site] += ideal

    def shared_access(self, site, rows, size):
        wavefronts, ideal = wavefronts_of(rows, size)
        self.wavefronts[site] += wavefronts
        self.ideal_wavefronts[site] += ideal

    def report(self, launched_warps):
        """The sums over the kernel and over each line of its source."""
        counted = np.array([i.counted for i in self.code.instructions])
        arrays = {name: np.where(counted, getattr(self, name), 0) for name in SUMMED}
        line_of = np.array([i.kernel_line for i in self.code.instructions])
        total = Report(warps=launched_warps, **_sums(arrays, slice(None)))
        for line in np.unique(line_of[arrays["instructions"] > 0]):
            sums = _sums(arrays, line_of == line)
            total.lines[int(line)] = LineCounts(**sums)
        sources = [i.source for i in self.code.instructions]
        for place in dict.fromkeys(sources):
            sums = _sums(arrays, np.array([source == place for source in sources]))
            total.places[place] = LineCounts(**sums)
        for site, instruction in enumerate(self.code.instructions):
            if count := int(arrays["instructions"][site]):
                total.mix[instruction.kind] += count
                total.lines[instruction.kernel_line].mix[instruction.kind] += count
        return total


def _sums(arrays, sites):
    return {name: int(array[sites].sum()) for name, array in arrays.items()}


def sectors_of(rows, size):
    """(requests, sectors, ideal sectors) of a warp access; offsets as in Counters."""
    lanes = np.ascontiguousarray(rows.T)  # (32, warps): whole rows compare faster
    if not (lanes[1:] >= lanes[:-1]).all():
        lanes = np.sort(lanes, axis=0)
    idle = lanes[0] == INACTIVE
    sector = lanes // SECTOR
    sectors = len(rows) + np.count_nonzero(sector[1:] != sector[:-1])
    elements = 1 + (lanes[1:] != lanes[:-1]).sum(axis=0) - idle
    ideal = -(-(elements * size) // SECTOR)
    requests = np.count_nonzero(lanes[-1] != INACTIVE)
    return requests, sectors - np.count_nonzero(idle), int(ideal.sum())


def wavefronts_of(rows, size):
    """(wavefronts, ideal) of a warp access to shared memory.

    Up to 4 bytes the 32 lanes go together, 8 bytes in two halves, 16 in four quarters.
    Lanes that ask for the same place share it. A place of 8 or 16 bytes takes 2 or 4
    neighbouring banks, so a wavefront has room for 128 / size places.
    """
    unit = max(BANK, size)
    together = room = BANKS * BANK // unit
    places = np.sort(rows.reshape(-1, together) // unit, axis=1)
    new = np.ones(places.shape, bool)
    new[:, 1:] = places[:, 1:] != places[:, :-1]
    new &= places >= 0  # INACTIVE // unit is negative
    part = np.broadcast_to(np.arange(len(places))[:, None], places.shape)
    bank = part * room + places % room
    count = np.bincount(bank[new], minlength=len(places) * room)
    worst = count.reshape(-1, room).max(axis=1)
    return int(worst.sum()), int(np.count_nonzero(worst))

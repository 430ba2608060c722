"""The machine: runs a kernel over all lanes of many thread blocks at once.

A lane is one thread; lanes k*32 .. k*32 + 31 are a warp. Registers hold an array with
one element per lane, or a scalar where all agree. When lanes part at a branch, the
group with the smallest block number runs first: structured code meets again by itself.
"""

from collections import defaultdict
from contextlib import contextmanager

import numpy as np

from kvq.kernels.ptxsim import check, memory
from kvq.kernels.ptxsim.count import INACTIVE
from kvq.kernels.ptxsim.layout import WARP
from kvq.kernels.ptxsim.types import NUMPY

u8, u16, u32, u64, i64 = np.uint8, np.uint16, np.uint32, np.uint64, np.int64
FULL_MASK = u32(2**32 - 1)
LANES = 8192  # run at once, about: arrays of this size stay in a CPU's cache


class Machine:
    """Runs the thread blocks first .. first + count - 1 of a launch."""

    def __init__(self, launch, first, count):
        self.launch, self.code = launch, launch.code
        self.check, self.counters = launch.check, launch.counters
        self.first, self.blocks = first, count
        self.lay = launch.layout(count)
        self.size = self.lay.size
        self.warp_of, self.block_of = self.lay.warp_of, self.lay.block_of
        self.exited = ~self.lay.exists
        self.registers = [NUMPY[r.type](0) for r in self.code.registers]
        self.shared = np.zeros(count * launch.shared_size, u8)
        self.local = np.zeros(self.size * launch.local_size, u8)
        self.copies = memory.Copies(self.size)
        self.races = None
        if self.check and launch.shared_size:
            self.races = check.Races(count, launch.shared_size, launch.granule)
        self._full = {}
        self._select(None)

    # ---- which lanes run

    def _select(self, lanes):
        """Run these lanes (ascending), or all (None)."""
        self.active = lanes
        self._cache = {}
        if lanes is None:
            self.count, self.warps = self.size, self.size // WARP
            return
        self.count = len(lanes)
        warp = self.warp_of[lanes]
        self.warps = 1 + int(np.count_nonzero(warp[1:] != warp[:-1]))

    @contextmanager
    def only(self, lanes):
        before = self.active
        self._select(lanes)
        yield
        self._select(before)

    def lanes(self):
        return np.arange(self.size) if self.active is None else self.active

    def of_active(self, full):
        """The elements of the lanes that run, of an array over all lanes."""
        return full if self.active is None else full[self.active]

    # ---- values

    def read(self, number):
        value = self.registers[number]
        if self.active is None or np.ndim(value) == 0:
            return value
        return value[self.active]

    def write(self, number, value):
        if self.active is None:
            self.registers[number] = value
            return
        old = self.registers[number]
        new = np.full(self.size, old) if np.ndim(old) == 0 else old.copy()
        new[self.active] = value
        self.registers[number] = new

    def special(self, name):
        """A special register such as %tid.x of the lanes that run, uint32."""
        if name not in self._cache:
            value = self.full(name)
            self._cache[name] = value if np.ndim(value) == 0 else self.of_active(value)
        return self._cache[name]

    def full(self, name):
        """A special register of all lanes, or the number that all share."""
        if not name.startswith("%ctaid"):
            return self.lay.special(name)
        if name not in self._full:
            x, y, _ = self.launch.grid
            number = u32(self.first) + self.block_of.astype(u32)
            below, extent = {"x": (1, x), "y": (x, y), "z": (x * y, 2**31)}[name[-1]]
            self._full[name] = number // u32(below) % u32(extent)
        return self._full[name]

    def symbol(self, name, offset):
        """The address of a variable, in its own space."""
        return u64(self.launch.symbols[name] + offset)

    def parameter(self, name, offset, dtype, count):
        data = self.launch.parameters[name]
        return np.frombuffer(data, dtype, count, offset)

    def per_lane(self, value):
        """A scalar that all lanes share as an array."""
        return np.full(self.count, value) if np.ndim(value) == 0 else value

    def everywhere(self, value, fill=0):
        """An array over all lanes, `fill` where no lane runs."""
        value = self.per_lane(value)
        if self.active is None:
            return value
        result = np.full(self.size, fill, value.dtype)
        result[self.active] = value
        return result

    def by_warp(self, value, fill=0):
        """(warps, 32)"""
        return self.everywhere(value, fill).reshape(-1, WARP)

    def from_warps(self, rows):
        """The inverse of `by_warp`, for the lanes that run."""
        return self.of_active(np.ascontiguousarray(rows).reshape(-1))

    def warp_rows(self, value):
        """(lanes that run, 32): the values of all lanes of the lane's warp."""
        return self.by_warp(value)[self.of_active(self.warp_of)]

    # ---- memory

    def load(self, site, space, address, dtype, count):
        """`count` neighbouring elements of every lane."""
        size = np.dtype(dtype).itemsize
        bytes_, offset = self._locate(site, space, address, size * count, "read")
        cells = memory.elements(bytes_, dtype)
        index = offset >> (size.bit_length() - 1)
        return [cells.take(index + k if k else index) for k in range(count)]

    def store(self, site, space, address, values, dtype):
        size = np.dtype(dtype).itemsize
        bytes_, offset = self._locate(site, space, address, size * len(values), "write")
        cells = memory.elements(bytes_, dtype)
        index = offset >> (size.bit_length() - 1)
        for k, value in enumerate(values):
            cells[index + k] = value

    def atomic(self, site, space, address, values, dtype, step, at_once, wants_old):
        """new = step(old, *values), lane after lane; the old values."""
        size = np.dtype(dtype).itemsize
        bytes_, offset = self._locate(site, space, address, size, "atomic")
        cells = memory.elements(bytes_, dtype)
        index = offset >> (size.bit_length() - 1)
        values = [self.per_lane(v) for v in values]
        if at_once is not None and not wants_old:
            at_once.at(cells, index, values[0])
            return None
        old = np.empty(self.count, dtype)
        for lane, cell in enumerate(index):
            old[lane] = cells[cell]
            cells[cell] = step(cells[cell], *(v[lane] for v in values))
        return old

    def _locate(self, site, space, address, size, kind):
        """(bytes, offsets into them) of an access, after its checks and counts."""
        address = self.per_lane(address)
        address = address.view(i64) if address.itemsize == 8 else address.astype(i64)
        if space is None:
            space, address = self._generic(site, address)
        if np.bitwise_or.reduce(address) & (size - 1):
            wrong = address & (size - 1) != 0
            self.fault(site, f"misaligned access of {size} bytes", wrong)
        if space in ("global", "const"):
            return self._global(site, address - memory.GLOBAL_BASE, size, kind)
        if space == "shared":
            return self._shared(site, address, size, kind)
        return self._local(site, address, size)

    def _generic(self, site, address):
        """All lanes must mean one space here."""
        spaces = memory.space_of(address)
        if (spaces != spaces[0]).any():
            self.fault(site, "lanes access different spaces in one instruction", spaces)
        name = memory.NAME[spaces[0]]
        return name, address - memory.WINDOWS.get(name, 0)

    def _global(self, site, offset, size, kind):
        arena = self.launch.arena
        buffer, inside = arena.buffers(offset, size)
        if inside is not None and not inside.all():
            where = offset[np.argmin(inside)]
            self.fault(site, check.outside_arena(arena, where, size), ~inside)
        if kind != "read":
            arena.mark_written(buffer)
        self.counters.global_access(site, self.by_warp(offset, INACTIVE), size)
        return arena.bytes, offset

    def _shared(self, site, offset, size, kind):
        have = self.launch.shared_size
        outside = (offset < 0) | (offset + size > have)
        if outside.any():
            at = offset[np.argmax(outside)]
            what = (
                f"shared access of {size} bytes out of bounds: at byte {at} of {have}"
            )
            self.fault(site, what, outside)
        self.counters.shared_access(site, self.by_warp(offset, INACTIVE), size)
        block = self.of_active(self.block_of)
        offset = offset + block * have
        if self.races:
            warp = self.of_active(self.warp_of)
            racing = self.races.access(block, warp, offset, size, kind)
            if racing is not None:
                at = offset[np.argmax(racing)] % have
                self.fault(site, check.race(kind, at), racing)
        return self.shared, offset

    def _local(self, site, offset, size):
        have = self.launch.local_size
        outside = (offset < 0) | (offset + size > have)
        if outside.any():
            self.fault(site, f"local access of {size} bytes out of bounds", outside)
        return self.local, offset + self.lanes() * have

    def matrix_rows(self, site, address, count):
        """(warps, count, 8, 8) halves of ldmatrix: lane k points to row k, 16 bytes."""
        address = self.per_lane(address).astype(i64)
        used = self.of_active(self.full("%laneid")) < 8 * count
        with self.only(self.lanes()[used]):
            bytes_, offset = self._locate(site, "shared", address[used], 16, "read")
        rows = memory.elements(bytes_, u16)[(offset // 2)[:, None] + np.arange(8)]
        full = np.zeros((self.size // WARP, count, 8, 8), u16)
        warps = np.unique(self.of_active(self.warp_of))
        full[warps] = rows.reshape(-1, count, 8, 8)
        return full

    # ---- warps

    def ballot(self, p):
        """The mask of the warp's lanes that run and hold p, per lane."""
        rows = self.by_warp(p, False)
        bits = (rows.astype(u32) << np.arange(WARP, dtype=u32)).sum(1, dtype=u32)
        return bits[self.of_active(self.warp_of)]

    def members(self, site, mask):
        """Every lane named in a mask must be here, and the lane itself be named."""
        if not self.check or (self.active is None and np.all(mask == FULL_MASK)):
            return
        here = self.here()
        missing = mask & self.of_active(self.lay.existing) & ~here
        if np.any(missing):
            mask, k = self.per_lane(mask), np.argmax(missing != 0)
            what = f"lanes named in the mask {int(mask[k]):#x} are not here"
            self.fault(site, f"{what} (here: {int(here[k]):#x})", missing != 0)
        own = self.per_lane(mask & self.special("%lanemask_eq"))
        if not own.all():
            self.fault(site, "a lane that the mask does not name is here", own == 0)

    def here(self):
        """Per lane that runs: the mask of the lanes of its warp that run."""
        if "here" not in self._cache:
            self._cache["here"] = self.ballot(np.bool_(True))
        return self._cache["here"]

    def whole_warps(self, site):
        """An instruction that is `.aligned` needs all 32 lanes."""
        if self.active is not None and self.count != self.warps * WARP:
            missing = self.here() != FULL_MASK
            self.fault(site, "not all 32 lanes of the warp are here", missing)

    def from_lane(self, site, value, lane):
        """The value of lane `lane` of the same warp."""
        if np.ndim(value) == 0 and self.active is None:
            return value
        source = lane + self.of_active(self.warp_of) * WARP
        if self.check and self.active is not None:
            here = np.zeros(self.size, bool)
            here[self.active] = True
            if not here[source].all():
                self.fault(
                    site, "a value is read from a lane that is not here", ~here[source]
                )
        return self.everywhere(value)[source]

    # ---- the run

    def fault(self, site, what, lanes=None):
        """Raise a KernelFault; `lanes` marks the running lanes at fault."""
        at = np.flatnonzero(lanes) if lanes is not None else np.arange(1)
        first = self.lanes()[at[0]]
        block, thread = (
            [np.broadcast_to(self.full(f"%{n}.{d}"), self.size)[first] for d in "xyz"]
            for n in ("ctaid", "tid")
        )
        raise check.fault(self.code, site, what, block, thread, len(at) - 1)

    def run(self):
        """Until all lanes have exited."""
        ready, waiting = defaultdict(list), []
        alive = np.flatnonzero(~self.exited)
        self._push(ready, 0, None if len(alive) == self.size else alive)
        while ready:
            while ready:
                number = min(ready)
                groups = ready.pop(number)
                self._step(number, self._joined(groups), ready, waiting)
            waiting = self._barrier(waiting, ready)

    def _joined(self, groups):
        if len(groups) == 1:
            return groups[0]
        lanes = np.sort(np.concatenate(groups))
        return None if len(lanes) == self.size else lanes

    def _push(self, ready, number, lanes):
        if number >= len(self.code.functions):
            self.exited[slice(None) if lanes is None else lanes] = True
        elif lanes is None or len(lanes):
            ready[number].append(lanes)

    def _step(self, number, lanes, ready, waiting):
        """Run one block of code and send its lanes on."""
        if lanes is not self.active or lanes is None:
            self._select(lanes)
        condition = self.code.functions[number](self)
        sites = self.code.ranges[number]
        self.counters.block(sites, self.warps, self.count)
        end = self.code.ends[number]
        if end.kind == "next":
            self._push(ready, number + 1, lanes)
        elif end.kind == "barrier":
            waiting.append((number, self.lanes()))
        elif end.kind == "switch":
            self._switch(condition, end.target, sites.stop - 1, ready)
        else:
            target = end.target if end.kind == "branch" else len(self.code.functions)
            self._branch(condition, target, number, sites.stop - 1, lanes, ready)

    def _branch(self, condition, target, number, site, lanes, ready):
        if condition is None or np.all(condition):
            self._push(ready, target, lanes)
        elif not np.any(condition):
            self._push(ready, number + 1, lanes)
        else:
            self._count_divergence(site, condition)
            all_ = self.lanes()
            self._push(ready, target, all_[condition])
            self._push(ready, number + 1, all_[~condition])

    def _switch(self, index, targets, site, ready):
        index = self.per_lane(index)
        if index.max() >= len(targets):
            self.fault(
                site, "brx.idx beyond its list of targets", index >= len(targets)
            )
        self._count_divergence(site, index)
        for k in np.unique(index):
            self._push(ready, targets[k], self.lanes()[index == k])

    def _count_divergence(self, site, value):
        """Warps whose running lanes do not agree."""
        warp = self.of_active(self.warp_of)
        differs = (value[1:] != value[:-1]) & (warp[1:] == warp[:-1])
        self.counters.divergent[site] += len(np.unique(warp[1:][differs]))

    def _barrier(self, waiting, ready):
        """Blocks that wait with all their threads go on."""
        if not waiting:
            return []
        if self.check:
            self._check_barrier(waiting)
        for number, lanes in waiting:
            self._push(ready, number + 1, None if len(lanes) == self.size else lanes)
        if self.races:
            lanes = np.concatenate([lanes for _, lanes in waiting])
            self.races.barrier(np.unique(self.block_of[lanes]))
        return []

    def _check_barrier(self, waiting):
        """All threads of a block must wait, and at one barrier."""
        at = np.full(self.size, -1)
        for number, lanes in waiting:
            at[lanes] = number
        rows = at.reshape(self.blocks, -1)
        existing = self.lay.exists.reshape(self.blocks, -1)
        first = np.where(existing, rows, -1).max(axis=1)
        wrong = (existing & (rows != first[:, None]) & (first >= 0)[:, None]).any(
            axis=1
        )
        if wrong.any():
            block = np.argmax(wrong)
            number = first[block]
            missing = int((existing[block] & (rows[block] != number)).sum())
            here = existing[block] & (rows[block] == number)
            lane = block * self.lay.per_block + np.argmax(here)
            self._select(np.array([lane]))
            site = self.code.ranges[number].stop - 1
            what = f"divergent barrier: {missing} threads of the block are not here"
            self.fault(site, what)

"""Which thread each lane of the machine is: the same for every batch of blocks."""

from functools import cached_property

import numpy as np

u32 = np.uint32
WARP = 32


class Layout:
    """`count` blocks of `block` = (x, y, z) threads side by side.

    The lanes of a block are filled up to whole warps with lanes that do not exist.
    """

    def __init__(self, block, grid, count, scalars):
        threads = int(np.prod(block))
        self.per_block = -(-threads // WARP) * WARP
        self.size = count * self.per_block
        self.warp_of = np.arange(self.size) // WARP
        self.block_of = np.repeat(np.arange(count), self.per_block)
        self.thread = np.tile(np.arange(self.per_block, dtype=u32), count)
        self.exists = self.thread < threads
        self.x, self.y, _ = block
        names = ("%ntid.x", "%ntid.y", "%ntid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
        self.known = dict(zip(names, (*block, *grid), strict=True)) | scalars
        self.known |= {"WARP_SZ": WARP, "%nwarpid": self.per_block // WARP}
        self.known = {name: u32(value) for name, value in self.known.items()}

    @cached_property
    def existing(self):
        """Per lane, the mask of the lanes of its warp that exist."""
        bits = self.exists.reshape(-1, WARP) * (u32(1) << np.arange(WARP, dtype=u32))
        return bits.sum(axis=1, dtype=u32)[self.warp_of]

    def special(self, name):
        """A special register, uint32: one number or one per lane."""
        if name not in self.known:
            self.known[name] = self._per_lane(name)
        return self.known[name]

    def _per_lane(self, name):
        lane = self.thread % u32(WARP)
        bit = u32(1) << lane
        return {
            "%tid.x": lambda: self.thread % u32(self.x),
            "%tid.y": lambda: self.thread // u32(self.x) % u32(self.y),
            "%tid.z": lambda: self.thread // u32(self.x * self.y),
            "%laneid": lambda: lane,
            "%warpid": lambda: self.thread // u32(WARP),
            "%lanemask_eq": lambda: bit,
            "%lanemask_lt": lambda: bit - u32(1),
            "%lanemask_le": lambda: bit | (bit - u32(1)),
            "%lanemask_gt": lambda: ~(bit | (bit - u32(1))),
            "%lanemask_ge": lambda: ~(bit - u32(1)),
        }[name]()

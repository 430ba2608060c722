r"""Paged, shared and tenant-safe blocks of quantized keys and values.

    BlockPool    fixed-size blocks in preallocated arrays, counted references
    BlockTable   one sequence: [ sinks | block ids | residual window ]
    PrefixIndex  which blocks hold which tokens, of which tenant, in which format

Sinks and window are full precision and belong to their sequence; what leaves the
window goes to blocks of the pool. A table lays its tokens out as `KVCache` does
(`Policy.split`), and its blocks hold the same bytes, so attention over a table equals
attention over the contiguous cache bit for bit.

A block that more than one holder refers to is never written: a writer copies it first.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from kvq.attention import decode
from kvq.cache import Stream
from kvq.dtypes import as_float_array, numpy_dtype
from kvq.scheme import policy
from kvq.tensor import QuantizedTensor, quantize


class PoolFull(MemoryError):
    """No block is free, and none that could be evicted."""


@dataclass(frozen=True)
class Layout:
    """What one block holds: `block` tokens of every layer and KV head."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block: int

    def width(self, side):
        """D of the keys (side 0) or of the values (side 1)."""
        return (self.head_dim, self.value_dim)[side]


# --- blocks ---------------------------------------------------------------------------
class BlockPool:
    """`blocks` blocks of `block` tokens, stored by `policy_or_name`.

    layers, kv_heads, head_dim, value_dim : the shape of the model's cache.
    allocate : makes the arrays, as `np.zeros(shape, dtype)` does; any strides will do.

    Raises ValueError for a latent policy, or a block that is not whole quantization
    blocks (`Policy.block`).
    """

    def __init__(
        self,
        policy_or_name,
        blocks,
        *,
        block=32,
        layers=1,
        kv_heads,
        head_dim,
        value_dim=None,
        allocate=np.zeros,
    ):
        self.policy = policy(policy_or_name)
        self.layout = Layout(layers, kv_heads, head_dim, value_dim or head_dim, block)
        self._check(blocks)
        self.arrays = [
            self._side_arrays(blocks, side, scheme, allocate)
            for side, scheme in enumerate(self.policy.schemes)
        ]
        self.refs = [0] * blocks
        self.owner = [None] * blocks  # the tenant whose tokens a block holds
        self.free = list(range(blocks))[::-1]

    def _check(self, blocks):
        if self.policy.value is None:
            raise ValueError("a latent policy (value=None) cannot be paged")
        for name, n in (("blocks", blocks), *vars(self.layout).items()):
            if type(n) is not int or n < 1:
                raise ValueError(f"{name}={n!r}; valid: an integer >= 1")
        if self.layout.block % self.policy.block:
            raise ValueError(
                f"block={self.layout.block} tokens; valid: multiples of "
                f"{self.policy.block}, the tokens this policy quantizes together"
            )
        for side, scheme in enumerate(self.policy.schemes):
            scheme.check_head_dim(self.layout.width(side))

    def _side_arrays(self, blocks, side, scheme, allocate):
        """The arrays of one side, (blocks, layers, H, ...): all a block consists of."""
        L, H, T, D = (
            self.layout.layers,
            self.layout.kv_heads,
            self.layout.block,
            self.layout.width(side),
        )
        if scheme.full_precision:
            shape = (blocks, L, H, T, D)
            return {"codes": allocate(shape, numpy_dtype(scheme.levels))}
        arrays = {"codes": allocate((blocks, L, H, T, scheme.row_bytes(D)), np.uint8)}
        shape = (blocks, L, *scheme.metadata_shape(H, T, D))
        dtype = numpy_dtype(scheme.scale_dtype)
        arrays["scale"] = allocate(shape, dtype)
        if scheme.has_zero:
            arrays["zero"] = allocate(shape, dtype)
        return arrays

    @property
    def block_bytes(self):
        """Bytes of one block: codes, scales and zeros of keys and values."""
        return sum(
            a[0].size * a.itemsize for side in self.arrays for a in side.values()
        )

    def used(self, tenant=None):
        """Blocks in use, of one tenant or of all."""
        return sum(
            r > 0 and tenant in (None, owner)
            for r, owner in zip(self.refs, self.owner, strict=True)
        )

    # --- references ---
    def allocate(self, tenant):
        """The id of a free block, referred to once. Raises PoolFull."""
        if not self.free:
            raise PoolFull(f"all {len(self.refs)} blocks are in use")
        i = self.free.pop()
        self.refs[i], self.owner[i] = 1, tenant
        return i

    def share(self, i, tenant):
        """One more reference to block i, which must be the tenant's own."""
        self._check_live(i)
        if self.owner[i] != tenant:
            raise ValueError(f"block {i} belongs to another tenant than {tenant!r}")
        self.refs[i] += 1

    def release(self, i):
        """One reference less; the last one frees the block."""
        self._check_live(i)
        self.refs[i] -= 1
        if self.refs[i] == 0:
            self.owner[i] = None
            self.free.append(i)

    def _check_live(self, i):
        if not 0 <= i < len(self.refs) or self.refs[i] < 1:
            raise ValueError(f"block {i!r} is not in use")

    # --- contents ---
    def write(self, i, start, tensors, first, count):
        """Tokens first..first+count-1 of `tensors` become tokens start.. of block i.

        tensors : keys and values, QuantizedTensors (layers, H, T, D). The tokens are
            whole groups on both sides.
        """
        self._check_live(i)
        if self.refs[i] != 1:
            raise ValueError(f"block {i} is shared; copy it before writing")
        for arrays, tensor in zip(self.arrays, tensors, strict=True):
            for name, array in arrays.items():
                size = 1 if name == "codes" else _tokens_per_group(tensor.scheme)
                source = getattr(tensor, name)
                a, b, n = start // size, first // size, -(-count // size)
                array[i, ..., a : a + n, :] = source[..., b : b + n, :]

    def view(self, i, side, layer, tokens):
        """The first `tokens` tokens of block i, without a copy: (H, tokens, D)."""
        scheme = self.policy.schemes[side]
        parts = {}
        for name, array in self.arrays[side].items():
            size = 1 if name == "codes" else _tokens_per_group(scheme)
            parts[name] = array[i, layer, :, : -(-tokens // size)]
        H, D = self.layout.kv_heads, self.layout.width(side)
        return QuantizedTensor(scheme, (H, tokens, D), **parts)

    def copy(self, source, target):
        """Everything in block `source` into block `target`."""
        for side in self.arrays:
            for array in side.values():
                array[target] = array[source]

    def save(self, i):
        """Copies of everything in block i, to be kept elsewhere."""
        self._check_live(i)
        return [{n: a[i].copy() for n, a in side.items()} for side in self.arrays]

    def restore(self, i, saved):
        """What `save` returned, into block i."""
        if self.refs[i] != 1:
            raise ValueError(f"block {i} is not held by one owner alone")
        for side, parts in zip(self.arrays, saved, strict=True):
            for name, array in side.items():
                array[i] = parts[name]


def _tokens_per_group(scheme):
    return 1 if scheme.per == "token" else scheme.group


# --- prefixes -------------------------------------------------------------------------
def encode_key(*parts):
    """Bytes that differ for any two different tuples of None, int, str and bytes.

    Each part is its type, its length and its content, so that neither ("ab", "c") and
    ("a", "bc") nor 1 and "1" and True meet. Raises TypeError for other types.
    """
    out = []
    for part in parts:
        kind = {type(None): b"n", bool: b"b", int: b"i", str: b"s", bytes: b"y"}.get(
            type(part)
        )
        if kind is None:
            raise TypeError(
                f"{part!r} cannot be part of a key; valid: None, bool, int, str, bytes"
            )
        data = part if kind == b"y" else str(part).encode()
        out.append(kind + len(data).to_bytes(8, "little") + data)
    return b"".join(out)


def digest(data):
    """sha256: two different keys do not meet by chance, nor by intent."""
    return hashlib.sha256(data).digest()


@dataclass(eq=False)
class Entry:
    """A block that can be found again. `tokens` are the ids it holds.

    parent is the entry before it; the first one of a sequence has a root, an entry
    without a block, which keeps the sinks.
    """

    key: bytes
    parent: "Entry | None"
    identity: tuple
    tokens: tuple
    block: int | None
    sinks: list | None = None
    children: int = 0
    used: int = 0


class PrefixIndex:
    """Finds the blocks of a prefix that some sequence of the same tenant has stored.

    A key covers the parent's key, the tokens, the tenant, the model, the policy and
    the block layout; what is found is compared field by field as well, so that not
    even equal digests share. The index holds a reference to each of its blocks and
    gives up the least recently used leaf that nobody else holds.

    model : a name for the weights (and whatever else decides a key or a value).
    """

    def __init__(self, pool, model=""):
        self.pool = pool
        self.model = model
        self.entries = {}  # key -> entries with that key: one, unless digests collide
        self._clock = 0

    def identity(self, tenant, adapter=None):
        """What must be equal for two sequences to share, besides their tokens."""
        return (
            ("tenant", tenant),
            ("adapter", adapter),
            ("model", self.model),
            ("policy", repr((self.pool.policy.schemes, self.pool.policy.sinks))),
            ("layout", repr(self.pool.layout)),
        )

    def find(self, parent, identity, tokens):
        """The entry with this parent, identity and tokens, or None."""
        for entry in self.entries.get(self._key(parent, identity, tokens), ()):
            same = (entry.parent, entry.identity, entry.tokens)
            if same[0] is parent and same[1:] == (identity, tokens):
                self._clock += 1
                entry.used = self._clock
                return entry
        return None

    def _key(self, parent, identity, tokens):
        fields = [x for field in identity for x in field]
        above = None if parent is None else parent.key
        return digest(encode_key(above, len(fields), *fields, *tokens))

    def add(self, parent, identity, tokens, block, sinks=None):
        """Remember a block (or, with block=None, a root); it gains a reference."""
        found = self.find(parent, identity, tokens)
        if found is not None:
            return found
        key = self._key(parent, identity, tokens)
        entry = Entry(key, parent, identity, tokens, block, sinks)
        if block is not None:
            self.pool.share(block, dict(identity)["tenant"])
        if parent is not None:
            parent.children += 1
        self._clock += 1
        entry.used = self._clock
        self.entries.setdefault(key, []).append(entry)
        return entry

    def lookup(self, tokens, tenant, adapter=None):
        """(root, blocks): the entries that hold a prefix of these tokens.

        As many as a new sequence of these tokens would have quantized by itself, and
        never all tokens: the last one must be computed for its logits.
        """
        sinks, quantized, _ = self.pool.policy.split(len(tokens))
        usable = min(quantized, len(tokens) - 1 - sinks)
        identity = self.identity(tenant, adapter)
        root = self.find(None, identity, tuple(tokens[:sinks]))
        blocks, parent, size = [], root, self.pool.layout.block
        for start in range(sinks, sinks + usable // size * size, size):
            parent = parent and self.find(
                parent, identity, tuple(tokens[start : start + size])
            )
            if parent is None:
                break
            blocks.append(parent)
        return root, blocks

    def evict(self):
        """Give up the least recently used leaf that only the index holds.

        Returns whether there was one.
        """
        leaves = [
            e
            for same in self.entries.values()
            for e in same
            if e.children == 0 and (e.block is None or self.pool.refs[e.block] == 1)
        ]
        blocks = [e for e in leaves if e.block is not None]
        if not blocks:
            return False
        self._remove(min(blocks, key=lambda e: e.used))
        return True

    def _remove(self, entry):
        """Forget an entry, and its root with its last block."""
        self.entries[entry.key].remove(entry)
        if not self.entries[entry.key]:
            del self.entries[entry.key]
        if entry.block is not None:
            self.pool.release(entry.block)
        if entry.parent is not None:
            entry.parent.children -= 1
            if entry.parent.block is None and entry.parent.children == 0:
                self._remove(entry.parent)


# --- sequences ------------------------------------------------------------------------
class BlockTable:
    """One sequence of one tenant: sinks, block ids, residual window.

    Made by `open_sequence`. tokens : the ids of every token so far. blocks : ids in
    the pool, in order; `quantized` tokens are in them.
    """

    def __init__(self, pool, index, tenant, adapter=None):
        self.pool, self.index = pool, index
        self.tenant, self.adapter = tenant, adapter
        self.tokens, self.blocks, self.quantized = [], [], 0
        self.sinks = self.window = None  # per side: (layers, H, n, D)
        self.entry = None  # the last of our blocks that the index knows
        self.indexed = 0  # how many of our blocks those are
        self.exact = True  # False once dequantized tokens went back to the window
        self.saved = None  # the blocks' contents while swapped out

    def __len__(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        """Bytes of the blocks, sinks and window that this table refers to."""
        private = sum(x.nbytes for x in (*(self.sinks or ()), *(self.window or ())))
        return len(self.blocks) * self.pool.block_bytes + private

    # --- growing ---
    def append(self, tokens, k, v):
        """Add tokens: their ids, keys (layers, H, t, D) and values (layers, H, t, D_v).

        Raises TypeError or ValueError for wrong input and PoolFull; nothing changes.
        """
        self._check_here()
        tokens, parts = self._check_input(tokens, k, v)
        empty = [x[..., :0, :] for x in parts]
        sinks, window = self.sinks or empty, self.window or empty
        for x, w in zip(parts, window, strict=True):
            if x.dtype != w.dtype:
                raise TypeError(f"dtype {x.dtype}; this sequence holds {w.dtype}")
        window = [
            np.concatenate([w, x], axis=-2) for w, x in zip(window, parts, strict=True)
        ]
        T = len(self.tokens) + len(tokens)
        want_sinks, want_quantized, _ = self.pool.policy.split(T)
        fill = want_sinks - sinks[0].shape[-2]
        flush = max(want_quantized - self.quantized, 0)
        tensors = [
            quantize(w[..., fill : fill + flush, :], scheme)
            for w, scheme in zip(window, self.pool.policy.schemes, strict=True)
        ]
        self._make_room(flush)
        self._write(tensors, flush)
        self.sinks = [
            np.concatenate([s, w[..., :fill, :]], axis=-2)
            for s, w in zip(sinks, window, strict=True)
        ]
        self.window = [w[..., fill + flush :, :].copy() for w in window]
        self.tokens += tokens
        self._remember()

    def _check_here(self):
        if self.saved is not None:
            raise ValueError("this sequence is swapped out; swap it in first")

    def _check_input(self, tokens, k, v):
        layout = self.pool.layout
        parts = [as_float_array(k, "k"), as_float_array(v, "v")]
        parts = [x.astype(np.float32) if x.dtype == np.float64 else x for x in parts]
        tokens = [int(t) for t in tokens]
        for side, x in enumerate(parts):
            expected = (
                layout.layers,
                layout.kv_heads,
                len(tokens),
                layout.width(side),
            )
            if x.shape != expected:
                raise ValueError(
                    f"{'kv'[side]} has shape {x.shape}; expected (layers, H_kv, t, D) "
                    f"= {expected}"
                )
        return tokens, parts

    def _make_room(self, flush):
        """Own every block that the next `flush` tokens go to. All or nothing."""
        size = self.pool.layout.block
        missing = -(-(self.quantized + flush) // size) - len(self.blocks)
        partial = flush > 0 and self.quantized % size > 0
        shared = partial and self.pool.refs[self.blocks[-1]] > 1
        new = self._allocate(missing + shared)
        if shared:  # copy on write
            own = new.pop()
            self.pool.copy(self.blocks[-1], own)
            self.pool.release(self.blocks[-1])
            self.blocks[-1] = own
        self.blocks += new

    def _allocate(self, count):
        new = []
        try:
            while len(new) < count:
                if not self.pool.free:
                    self.index.evict()
                new.append(self.pool.allocate(self.tenant))
        except PoolFull:
            for i in new:
                self.pool.release(i)
            raise
        return new

    def _write(self, tensors, flush):
        done, size = 0, self.pool.layout.block
        while done < flush:
            slot, start = divmod(self.quantized, size)
            count = min(size - start, flush - done)
            self.pool.write(self.blocks[slot], start, tensors, done, count)
            self.quantized += count
            done += count

    def _remember(self):
        """Tell the index of our full blocks that hold what a fresh run would store."""
        if not self.exact:
            return
        size, sinks = self.pool.layout.block, self.sinks[0].shape[-2]
        identity = self.index.identity(self.tenant, self.adapter)
        for n in range(self.indexed, self.quantized // size):
            if self.entry is None:
                root = tuple(self.tokens[:sinks])
                kept = [s.copy() for s in self.sinks]
                self.entry = self.index.add(None, identity, root, None, kept)
            start = sinks + n * size
            held = tuple(self.tokens[start : start + size])
            self.entry = self.index.add(self.entry, identity, held, self.blocks[n])
            self.indexed = n + 1

    # --- sharing, shrinking, leaving ---
    def fork(self):
        """A second sequence with the same history; blocks are shared, not copied."""
        self._check_here()
        child = BlockTable(self.pool, self.index, self.tenant, self.adapter)
        child.__dict__.update(self.__dict__)
        child.tokens, child.blocks = self.tokens.copy(), self.blocks.copy()
        for i in self.blocks:
            self.pool.share(i, self.tenant)
        return child

    def crop(self, tokens):
        """Keep the first `tokens` tokens; a quantization block that is cut goes back
        to the window as the values it was stored as (`KVCache.crop`)."""
        self._check_here()
        if type(tokens) is not int or not 0 <= tokens <= len(self):
            raise ValueError(
                f"cannot crop {len(self)} tokens to {tokens!r}; valid: 0..{len(self)}"
            )
        if not self.tokens:
            return
        sinks, step = self.sinks[0].shape[-2], self.pool.policy.block
        whole = min(max(tokens - sinks, 0), self.quantized) // step * step
        start = sinks + whole
        self.exact &= not start < tokens or whole == self.quantized
        self.window = [
            np.stack(
                [
                    self.stream(layer, side).read(start, max(tokens, start), w.dtype)
                    for layer in range(self.pool.layout.layers)
                ]
            )
            for side, w in enumerate(self.window)
        ]
        self.sinks = [s[..., :tokens, :].copy() for s in self.sinks]
        self.tokens, self.quantized = self.tokens[:tokens], whole
        keep = -(-whole // self.pool.layout.block)
        for i in self.blocks[keep:]:
            self.pool.release(i)
        del self.blocks[keep:]
        self._forget(whole // self.pool.layout.block)

    def _forget(self, full):
        """Step back to the entry of our last block that is still full."""
        while self.indexed > full:
            self.entry = self.entry.parent
            self.indexed -= 1
        if self.indexed == 0:
            self.entry = None

    def close(self):
        """Give up every block. What the index knows stays until it is evicted."""
        for i in self.blocks:
            self.pool.release(i)
        self.__init__(self.pool, self.index, self.tenant, self.adapter)

    def swap_out(self):
        """Move the blocks' contents out of the pool, with every scale and zero."""
        self._check_here()
        self.saved = [self.pool.save(i) for i in self.blocks]
        for i in self.blocks:
            self.pool.release(i)
        self.blocks, self.entry, self.indexed = [], None, 0

    def swap_in(self):
        """Bring them back, into blocks of our own. Raises PoolFull; nothing changes."""
        if self.saved is None:
            raise ValueError("this sequence is not swapped out")
        self.blocks = self._allocate(len(self.saved))
        for i, contents in zip(self.blocks, self.saved, strict=True):
            self.pool.restore(i, contents)
        self.saved = None

    # --- reading ---
    def stream(self, layer, side):
        """The keys (side 0) or values (side 1) of a layer as a `cache.Stream`.

        Its chunks are views of the pool: nothing is copied.
        """
        self._check_here()
        size = self.pool.layout.block
        chunks = tuple(
            self.pool.view(i, side, layer, min(size, self.quantized - n * size))
            for n, i in enumerate(self.blocks)
        )
        scheme = self.pool.policy.schemes[side]
        return Stream(scheme, self.sinks[side][layer], chunks, self.window[side][layer])

    def tiles(self, layer, tile=256):
        """(k, v) of consecutive tokens, float32, `tile` at a time."""
        streams = [self.stream(layer, side) for side in (0, 1)]
        for start in range(0, len(self), tile):
            stop = min(start + tile, len(self))
            yield [s.read(start, stop, np.float32) for s in streams]

    def attend(self, layer, q, *, tile=256, **options):
        """Attention of q (H_q, T_q, D) over a layer: float64 (H_q, T_q, D_v).

        The options are those of `attention.decode`. The same tiles give the same bits
        as `KVCache.attend`.
        """
        q = as_float_array(q, "q")
        tiles = self.tiles(layer, tile) if self.tokens else ()
        D_v = self.pool.layout.value_dim
        return decode(q, tiles, len(self), D_v, **options).out


def open_sequence(pool, index, tokens, tenant, adapter=None):
    """A new BlockTable that already holds the longest stored prefix of `tokens`.

    Returns (table, matched): append the tokens from `matched` on. What then is in the
    table is, bit for bit, what appending all of them would have stored.
    """
    tokens = [int(t) for t in tokens]
    root, entries = index.lookup(tokens, tenant, adapter)
    table = BlockTable(pool, index, tenant, adapter)
    if not entries:
        return table, 0
    for entry in entries:
        pool.share(entry.block, tenant)
    size, sinks = pool.layout.block, root.sinks[0].shape[-2]
    table.blocks = [entry.block for entry in entries]
    table.quantized = len(entries) * size
    table.sinks = [s.copy() for s in root.sinks]
    table.window = [s[..., :0, :] for s in table.sinks]
    table.tokens = tokens[: sinks + table.quantized]
    table.entry, table.indexed = entries[-1], len(entries)
    return table, len(table.tokens)

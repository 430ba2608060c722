r"""Paged, shared and tenant-safe blocks of quantized keys and values.

    BlockPool    fixed-size blocks in preallocated arrays, counted references
    BlockTable   one sequence: [ sinks | block ids | residual window ]
    PrefixIndex  which blocks hold which tokens, of which tenant, in which format

Sinks and window are full precision and belong to their sequence; what leaves the
window goes to blocks of the pool. A table lays its tokens out as `KVCache` does
(`Policy.split`), and its blocks hold the same bytes, so attention over a table equals
attention over the contiguous cache bit for bit.

A block that more than one holder refers to is never written: a writer copies it first.
The index is such a holder, so what it knows never changes.
"""

import copy
import hashlib
import operator
from dataclasses import dataclass

import numpy as np

from kvq.attention import decode
from kvq.cache import Stream
from kvq.dtypes import as_float_array, numpy_dtype
from kvq.scheme import FLOATS, policy
from kvq.tensor import QuantizedTensor, quantize


class PoolFull(MemoryError):
    """No block is free, and none that could be evicted."""


@dataclass(frozen=True)
class Layout:
    """What one block holds: `block` tokens of every layer and KV head.

    window_dtype : of the numbers that blocks are made from, and of sinks and windows.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block: int
    window_dtype: str

    def __post_init__(self):
        for name, n in vars(self).items():
            if name != "window_dtype" and (type(n) is not int or n < 1):
                raise ValueError(f"{name}={n!r}; valid: an integer >= 1")
        if self.window_dtype not in FLOATS:
            raise ValueError(
                f"window_dtype={self.window_dtype!r}; valid: {', '.join(FLOATS)}"
            )

    def width(self, side):
        """D of the keys (side 0) or of the values (side 1)."""
        return (self.head_dim, self.value_dim)[side]

    def rows(self, side, tokens):
        """Shape of the full-precision keys or values of so many tokens."""
        return self.layers, self.kv_heads, tokens, self.width(side)


# --- blocks ---------------------------------------------------------------------------
class BlockPool:
    """`blocks` blocks of `block` tokens, stored by `policy_or_name`.

    layers, kv_heads, head_dim, value_dim : the shape of the model's cache.
    window_dtype : the dtype in which keys and values come and are kept until they
        are quantized. (float64 counts as float32.)
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
        window_dtype="float16",
        allocate=np.zeros,
    ):
        self.policy = policy(policy_or_name)
        value_dim = head_dim if value_dim is None else value_dim
        self.layout = Layout(layers, kv_heads, head_dim, value_dim, block, window_dtype)
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
        if type(blocks) is not int or blocks < 1:
            raise ValueError(f"blocks={blocks!r}; valid: an integer >= 1")
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

    @property
    def used(self):
        """Blocks in use."""
        return len(self.refs) - len(self.free)

    def used_by(self, tenant):
        """Blocks in use for one tenant's tokens; shared ones count once."""
        pairs = zip(self.refs, self.owner, strict=True)
        return sum(refs > 0 and owner == tenant for refs, owner in pairs)

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

    def _check_writable(self, i):
        self._check_live(i)
        if self.refs[i] > 1:
            raise ValueError(f"block {i} is shared; copy it before writing")

    # --- contents ---
    def write(self, i, start, tensors, first, count):
        """Tokens first..first+count-1 of `tensors` become tokens start.. of block i.

        tensors : keys and values, QuantizedTensors (layers, H, T, D). The tokens are
            whole groups on both sides.
        """
        self._check_writable(i)
        for arrays, tensor in zip(self.arrays, tensors, strict=True):
            for name, array in arrays.items():
                size = 1 if name == "codes" else tensor.scheme.token_block
                source = getattr(tensor, name)
                a, b, n = start // size, first // size, -(-count // size)
                array[i, ..., a : a + n, :] = source[..., b : b + n, :]

    def view(self, i, side, layer, tokens):
        """The first `tokens` tokens of block i, without a copy: (H, tokens, D)."""
        self._check_live(i)
        if not 0 <= tokens <= self.layout.block:
            raise ValueError(f"tokens={tokens!r}; valid: 0..{self.layout.block}")
        scheme = self.policy.schemes[side]
        parts = {}
        for name, array in self.arrays[side].items():
            size = 1 if name == "codes" else scheme.token_block
            parts[name] = array[i, layer, :, : -(-tokens // size)]
        H, D = self.layout.kv_heads, self.layout.width(side)
        return QuantizedTensor(scheme, (H, tokens, D), **parts)

    def copy(self, source, target):
        """Everything in block `source` into block `target`."""
        self._check_live(source)
        self._check_writable(target)
        for side in self.arrays:
            for array in side.values():
                array[target] = array[source]

    def save(self, i):
        """Copies of everything in block i, to be kept elsewhere."""
        self._check_live(i)
        return [{n: a[i].copy() for n, a in side.items()} for side in self.arrays]

    def restore(self, i, saved):
        """What `save` returned, into block i."""
        self._check_writable(i)
        for side, parts in zip(self.arrays, saved, strict=True):
            for name, array in side.items():
                array[i] = parts[name]

    def same(self, i, j):
        """Whether two blocks hold the same bytes."""
        arrays = [a for side in self.arrays for a in side.values()]
        return i == j or all(a[i].tobytes() == a[j].tobytes() for a in arrays)


# --- prefixes -------------------------------------------------------------------------
_KINDS = {type(None): b"n", bool: b"b", int: b"i", str: b"s", bytes: b"y"}


def encode_key(*parts):
    """Bytes that differ for any two different tuples of None, bool, int, str and bytes.

    Each part is its type, its length and its content, so that neither ("ab", "c") and
    ("a", "bc") nor 1 and "1" and True meet. Raises TypeError for other types.
    """
    out = []
    for part in parts:
        kind = _KINDS.get(type(part))
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
    """A block that can be found again, by its content and what came before it.

    content : encoded tokens, tenant and formats. parent : the entry of the block before
    it; None for the first of a sequence, which keeps the sinks (keys and values) too.
    """

    key: bytes
    parent: "Entry | None"
    content: bytes
    block: int
    sinks: list | None
    children: int = 0
    used: int = 0


class PrefixIndex:
    """Finds the blocks of a prefix that some sequence of the same tenant has stored.

    A key covers the parent's key, the tokens, the tenant, the model, the policy and
    the block layout; what is found is compared as well, so that not even equal digests
    share. The index holds a reference to each of its blocks, and gives up the least
    recently used leaf that nobody else holds when a sequence needs room.

    model : a name for the weights, and for whatever else decides a key or a value.
    """

    def __init__(self, pool, model=""):
        self.pool, self.model = pool, model
        self.entries = {}  # key -> entries with that key: one, unless digests collide
        self._clock = 0

    def __iter__(self):
        """Every entry."""
        return (entry for same in self.entries.values() for entry in same)

    @property
    def nbytes(self):
        """Bytes of the sinks that the index keeps; its blocks are the pool's."""
        return sum(s.nbytes for entry in self for s in entry.sinks or ())

    def content(self, tokens, tenant, adapter=None):
        """What two blocks must have in common, besides what came before them."""
        stored_by = self.pool.policy
        formats = (stored_by.schemes, stored_by.residual, stored_by.sinks)
        model = (self.model, repr(formats), repr(self.pool.layout))
        return encode_key(tenant, adapter, *model, *tokens)

    def key(self, parent, content):
        """The digest of everything up to here."""
        return digest(encode_key(None if parent is None else parent.key, content))

    def find(self, parent, content):
        """The entry with this parent and content, or None."""
        for entry in self.entries.get(self.key(parent, content), ()):
            if entry.parent is parent and entry.content == content:
                self._touch(entry)
                return entry
        return None

    def _touch(self, entry):
        self._clock += 1
        entry.used = self._clock

    def add(self, parent, content, block, sinks=None):
        """The entry with this parent and content; a new one refers to `block`."""
        entry = self.find(parent, content)
        if entry is None:
            entry = Entry(self.key(parent, content), parent, content, block, sinks)
            self.pool.share(block, self.pool.owner[block])
            if parent is not None:
                parent.children += 1
            self._touch(entry)
            self.entries.setdefault(entry.key, []).append(entry)
        return entry

    def lookup(self, tokens, tenant, adapter=None):
        """The entries of the longest stored prefix of these tokens, a list.

        As many as a new sequence of these tokens would have quantized by itself, and
        never all tokens: the last one must be computed for its logits.
        """
        sinks, quantized, _ = self.pool.policy.split(len(tokens))
        last = min(sinks + quantized, len(tokens) - 1)
        size, start, entry, found = self.pool.layout.block, 0, None, []
        for stop in range(sinks + size, last + 1, size):
            content = self.content(tokens[start:stop], tenant, adapter)
            entry = self.find(entry, content)
            if entry is None:
                break
            found.append(entry)
            start = stop
        return found

    # --- eviction ---
    @property
    def evictable(self):
        """How many blocks only the index holds.

        Who holds a block holds those before it, so all of these can be given up.
        """
        return sum(self.pool.refs[entry.block] == 1 for entry in self)

    def evict(self):
        """Give up the least recently used leaf that only the index holds.

        Returns whether there was one.
        """
        leaves = [
            entry
            for entry in self
            if entry.children == 0 and self.pool.refs[entry.block] == 1
        ]
        if leaves:
            self._remove(min(leaves, key=lambda entry: entry.used))
        return bool(leaves)

    def _remove(self, leaf):
        self.entries[leaf.key].remove(leaf)
        if not self.entries[leaf.key]:
            del self.entries[leaf.key]
        if leaf.parent is not None:
            leaf.parent.children -= 1
        self.pool.release(leaf.block)


# --- sequences ------------------------------------------------------------------------
class BlockTable:
    """One sequence of one tenant: sinks, block ids, residual window.

    Made by `open_sequence`. tokens : the ids of every token so far. blocks : ids in
    the pool, in order; `quantized` tokens are in them. sinks, window : keys and
    values, (layers, H, n, D) each; replaced, never changed in place.

    tenant, adapter : str or None. Raises TypeError otherwise.
    """

    def __init__(self, index, tenant, adapter=None):
        for name, value in (("tenant", tenant), ("adapter", adapter)):
            if value is not None and type(value) is not str:
                raise TypeError(f"{name}={value!r}; valid: a str or None")
        self.pool, self.index = index.pool, index
        self.tenant, self.adapter = tenant, adapter
        self.tokens, self.blocks, self.quantized = [], [], 0
        layout = self.pool.layout
        dtype = numpy_dtype(layout.window_dtype)
        self.sinks = [np.empty(layout.rows(side, 0), dtype) for side in (0, 1)]
        self.window = self.sinks
        self.entry = None  # of the last of our blocks that the index has
        self.indexed = 0  # how many of our blocks those are, from the first one
        self.exact = (
            True  # False once a fresh run of our tokens would store other bytes
        )
        self.saved = None  # the blocks' contents while swapped out

    def __len__(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        """Bytes of the blocks, sinks and window that this table refers to."""
        private = sum(x.nbytes for x in (*self.sinks, *self.window))
        return len(self.blocks) * self.pool.block_bytes + private

    # --- growing ---
    def append(self, tokens, k, v):
        """Add tokens: their ids, keys (layers, H, t, D) and values (layers, H, t, D_v).

        Raises TypeError or ValueError for wrong input and PoolFull; nothing changes.
        """
        self._check_here()
        tokens = token_ids(tokens)
        parts = self._check_tensors(len(tokens), k, v)
        window = [
            np.concatenate(pair, axis=-2)
            for pair in zip(self.window, parts, strict=True)
        ]
        sinks, quantized, _ = self.pool.policy.split(len(self) + len(tokens))
        # A crop may have left fewer sinks, or more quantized tokens, than split says.
        fill = sinks - self.sinks[0].shape[-2]
        flush = max(quantized - self.quantized, 0)
        tensors = [
            quantize(w[..., fill : fill + flush, :], scheme)
            for w, scheme in zip(window, self.pool.policy.schemes, strict=True)
        ]
        self._make_room(flush)
        self._write(tensors, flush)
        self.sinks = [
            np.concatenate([s, w[..., :fill, :]], axis=-2)
            for s, w in zip(self.sinks, window, strict=True)
        ]
        self.window = [w[..., fill + flush :, :].copy() for w in window]
        self.tokens += tokens
        self._remember()

    def _check_here(self):
        if self.saved is not None:
            raise ValueError("this sequence is swapped out; swap it in first")

    def _check_tensors(self, t, k, v):
        """Keys and values of t tokens in the window's dtype. Raises otherwise."""
        parts, layout = [], self.pool.layout
        for side, x in enumerate((k, v)):
            name, shape = "kv"[side], layout.rows(side, t)
            x = as_float_array(x, name)
            x = x.astype(np.float32) if x.dtype == np.float64 else x
            if x.shape != shape:
                raise ValueError(
                    f"{name} has shape {x.shape}; expected (layers, H_kv, t, D) {shape}"
                )
            if x.dtype != self.window[side].dtype:
                raise TypeError(
                    f"{name} has dtype {x.dtype}; this pool takes {layout.window_dtype}"
                )
            parts.append(x)
        return parts

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
        """`count` new blocks, evicting what must go. Raises PoolFull before that."""
        free = len(self.pool.free)
        if count > free and count > free + self.index.evictable:
            raise PoolFull(
                f"{count} blocks needed; {free} are free and "
                f"{self.index.evictable} can be evicted"
            )
        for _ in range(count - free):
            self.index.evict()
        return [self.pool.allocate(self.tenant) for _ in range(count)]

    def _write(self, tensors, flush):
        done, size = 0, self.pool.layout.block
        while done < flush:
            slot, start = divmod(self.quantized, size)
            count = min(size - start, flush - done)
            self.pool.write(self.blocks[slot], start, tensors, done, count)
            self.quantized += count
            done += count

    def _remember(self):
        """Give our full blocks to the index; where it has the same one, use that.

        Ends for good where the index has other bytes for the same tokens: what follows
        them there was computed from those.
        """
        size, sinks = self.pool.layout.block, self.sinks[0].shape[-2]
        while self.exact and self.indexed < self.quantized // size:
            n = self.indexed
            start, stop = sinks + n * size if n else 0, sinks + (n + 1) * size
            part = self.tokens[start:stop]
            content = self.index.content(part, self.tenant, self.adapter)
            kept = None if n else self.sinks
            entry = self.index.add(self.entry, content, self.blocks[n], kept)
            self.exact = self._holds(entry, n)
            if self.exact:
                self._adopt(entry, n)

    def _holds(self, entry, n):
        """Whether our block n (and our sinks) are the entry's, byte for byte."""
        pairs = [] if n else zip(self.sinks, entry.sinks, strict=True)
        same = all(a.tobytes() == b.tobytes() for a, b in pairs)
        return same and self.pool.same(entry.block, self.blocks[n])

    def _adopt(self, entry, n):
        """Use the index's block n in place of our own, which holds the same bytes."""
        if entry.block != self.blocks[n]:
            self.pool.share(entry.block, self.tenant)
            self.pool.release(self.blocks[n])
            self.blocks[n] = entry.block
        self.entry, self.indexed = entry, n + 1

    # --- sharing, shrinking, leaving ---
    def fork(self):
        """A second sequence with the same history; blocks are shared, not copied."""
        self._check_here()
        child = copy.copy(self)
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
        sinks, step = self.sinks[0].shape[-2], self.pool.policy.block
        whole = min(max(tokens - sinks, 0), self.quantized) // step * step
        start = sinks + whole
        self.exact &= start >= tokens or whole == self.quantized
        self.window = [
            np.stack([s.read(start, max(tokens, start), w.dtype) for s in streams])
            for w, streams in zip(self.window, self._streams(), strict=True)
        ]
        self.sinks = [s[..., :tokens, :].copy() for s in self.sinks]
        self.tokens, self.quantized = self.tokens[:tokens], whole
        self._drop_blocks(-(-whole // self.pool.layout.block))
        while self.indexed > whole // self.pool.layout.block:
            self.entry, self.indexed = self.entry.parent, self.indexed - 1

    def _streams(self):
        """Per side, the stream of every layer."""
        layers = range(self.pool.layout.layers)
        return [[self.stream(layer, side) for layer in layers] for side in (0, 1)]

    def _drop_blocks(self, keep):
        for i in self.blocks[keep:]:
            self.pool.release(i)
        self.blocks = self.blocks[:keep]

    def close(self):
        """Give up every block. What the index has stays until it is evicted."""
        self._drop_blocks(0)
        self.__init__(self.index, self.tenant, self.adapter)

    def swap_out(self):
        """Move the blocks' contents out of the pool, with every scale and zero."""
        self._check_here()
        self.saved = [self.pool.save(i) for i in self.blocks]
        self._drop_blocks(0)
        self.entry, self.indexed = None, 0

    def swap_in(self):
        """Bring them back, into blocks of our own. Raises PoolFull; nothing changes."""
        if self.saved is None:
            raise ValueError("this sequence is not swapped out")
        self.blocks = self._allocate(len(self.saved))
        for i, contents in zip(self.blocks, self.saved, strict=True):
            self.pool.restore(i, contents)
        self.saved = None
        self._remember()

    # --- reading ---
    def stream(self, layer, side):
        """The keys (side 0) or values (side 1) of a layer as a `cache.Stream`.

        Its chunks are views of the pool: nothing is copied.
        """
        self._check_here()
        if layer not in range(self.pool.layout.layers):
            raise ValueError(
                f"layer={layer!r}; valid: 0..{self.pool.layout.layers - 1}"
            )
        size = self.pool.layout.block
        chunks = tuple(
            self.pool.view(i, side, layer, min(size, self.quantized - n * size))
            for n, i in enumerate(self.blocks)
        )
        scheme = self.pool.policy.schemes[side]
        return Stream(scheme, self.sinks[side][layer], chunks, self.window[side][layer])

    def tiles(self, layer, tile=256):
        """(k, v) of consecutive tokens, float32, `tile` at a time.

        tile=None : everything at once.
        """
        streams, T = [self.stream(layer, side) for side in (0, 1)], len(self)
        for start in range(0, T, tile or max(T, 1)):
            stop = min(start + (tile or T), T)
            yield [s.read(start, stop, np.float32) for s in streams]

    def attend(self, layer, q, *, tile=256, **options):
        """Attention of q (H_q, T_q, D) over a layer: float64 (H_q, T_q, D_v).

        The options are those of `attention.decode`. The same tiles give the same bits
        as `KVCache.attend`.
        """
        if tile is not None and (type(tile) is not int or tile < 1):
            raise ValueError(f"tile={tile!r}; valid: an integer >= 1 or None")
        q, D_v = as_float_array(q, "q"), self.pool.layout.value_dim
        return decode(q, self.tiles(layer, tile), len(self), D_v, **options).out


def token_ids(tokens):
    """`tokens` as a list of int. Raises TypeError for anything but integers."""
    return [int(operator.index(t)) for t in tokens]


def open_sequence(index, tokens, tenant, adapter=None):
    """A new BlockTable that already holds the longest stored prefix of `tokens`.

    tenant, adapter : str or None; blocks are shared within a tenant and adapter only.
    Returns (table, matched): append the tokens from `matched` on. What then is in the
    table is, bit for bit, what appending all of them would have stored.
    """
    table, tokens = BlockTable(index, tenant, adapter), token_ids(tokens)
    found = index.lookup(tokens, tenant, adapter)
    for entry in found:
        index.pool.share(entry.block, tenant)
        table.blocks.append(entry.block)
        table.entry = entry
    if found:
        table.sinks, table.indexed = found[0].sinks, len(found)
        table.quantized = len(found) * index.pool.layout.block
        table.tokens = tokens[: table.sinks[0].shape[-2] + table.quantized]
    return table, len(table.tokens)


def reorder(tables, order):
    """The sequences that `order` picks, as beam search does; an index may repeat.

    The tables that were passed in are closed. Raises ValueError; nothing changes.
    """
    for i in order:
        if i not in range(len(tables)):
            raise ValueError(f"no sequence {i!r}; valid: 0..{len(tables) - 1}")
        tables[i]._check_here()
    picked = [tables[i].fork() for i in order]
    for table in tables:
        table.close()
    return picked

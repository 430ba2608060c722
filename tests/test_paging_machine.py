"""Random operations on many sequences, each beside a contiguous cache of its own.

`World` holds the pool, the live sequences and their twins, and checks after every
operation what must always hold. Two drivers use it: 10,000 seeded random operations,
and hypothesis, which looks for a short sequence of operations that breaks something.
"""

import copy
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvq.cache import KVCache
from kvq.paging import BlockPool, PoolFull, PrefixIndex, open_sequence, reorder
from kvq.scheme import Policy, Scheme

LAYERS, HEADS, D, D_V, BLOCK = 2, 1, 8, 4, 8
LONGEST, MOST = 40, 8  # tokens of a sequence, sequences
POLICIES = {
    "channel": Policy(
        Scheme(4, "channel", 4, "asymmetric"),
        Scheme(2, "token", 4),
        residual=3,
        sinks=2,
    ),
    "token": Policy(Scheme(4, "token", 8), Scheme(4, "token", 4, "asymmetric")),
    "half": Policy(*[Scheme(16, levels="float16")] * 2, residual=5),
    "rotated": Policy(
        Scheme(2, "channel", 8, "asymmetric", transform="hadamard"),
        Scheme(8, "head", 2),
        sinks=1,
    ),
}
# What the random operations must reach.
EVENTS = ("hit", "miss", "fork", "copy on write", "lossy crop", "swapped in")
EVENTS += ("evicted", "pool full")
TENANTS = ("a", "b", None)
# Prompts are beginnings of these: two have the first 20 tokens in common.
STORIES = [[1, 2] * 30, [1, 2] * 10 + [3] * 40, [4, 5, 6] * 20]
NUMBERS = np.random.default_rng(0).standard_normal(
    (997, LAYERS, HEADS, D + D_V), dtype=np.float32
)
QUERIES = np.random.default_rng(1).standard_normal((2, 2, D), dtype=np.float32)


def keys_and_values(tenant, tokens, start):
    """(layers, H, t, D) and (layers, H, t, D_v) of the tokens from `start` on.

    They depend on every token before, as in a model, and on the tenant, so that a
    block in the wrong hands shows.
    """
    state, rows = 17 * TENANTS.index(tenant) + 5, []
    for token in tokens:
        state = (state * 31 + token) % len(NUMBERS)
        rows.append(state)
    x = np.moveaxis(NUMBERS[rows[start:]], 0, 2)
    return x[..., :D], x[..., D:]


class Sequence:
    """A table and its twin, a contiguous cache of its second layer."""

    def __init__(self, policy, table):
        self.table, self.twin = table, KVCache(policy)

    def feed_twin(self, k, v):
        self.twin.append(k[1], v[1])

    def fork(self, table):
        child = copy.copy(self)
        child.table, child.twin = table, copy.copy(self.twin)
        return child

    def check(self, tile):
        """The same layout, and the same output bit for bit."""
        assert len(self.table) == len(self.twin)
        assert self.table.stream(1, 1).lengths == self.twin.rows[0][1].lengths
        out = self.table.attend(1, QUERIES, tile=tile)
        assert out.tobytes() == self.twin.attend(QUERIES, tile=tile).tobytes()


class World:
    """A pool, its index, the live sequences, and how often each thing happened."""

    def __init__(self, policy, blocks):
        shape = {"kv_heads": HEADS, "head_dim": D, "value_dim": D_V}
        shape |= {"block": BLOCK, "layers": LAYERS, "window_dtype": "float32"}
        self.policy, self.sequences, self.happened = policy, [], Counter()
        self.index = PrefixIndex(BlockPool(policy, blocks, **shape))
        self.pool = self.index.pool
        self.arrays = [a for side in self.pool.arrays for a in side.values()]
        self.checksums = {}  # entry -> checksum of its block when it was first seen
        self.free = set()
        self.count_copies()

    def count_copies(self):
        copy_block = self.pool.copy

        def counted(source, target):
            self.happened["copy on write"] += 1
            copy_block(source, target)

        self.pool.copy = counted

    # --- operations: `pick` chooses a sequence ---
    def pick(self, n, here=True):
        found = [s for s in self.sequences if (s.table.saved is None) == here]
        return found[n % len(found)] if found else None

    def attempt(self, operation):
        """Whether the operation had room; if not, nothing may have changed."""
        before = self.state()
        try:
            operation()
        except PoolFull:
            self.happened["pool full"] += 1
            assert self.state() == before
            return False
        return True

    def state(self):
        tables = [s.table for s in self.sequences]
        return (
            self.pool.refs.copy(),
            self.pool.free.copy(),
            [(t.tokens.copy(), t.blocks.copy(), t.quantized, t.saved) for t in tables],
            list(self.index),
        )

    def open(self, tenant, story, length):
        if len(self.sequences) == MOST:
            return
        tokens = STORIES[story % 3][: length % LONGEST]
        tenant = TENANTS[tenant % 3]
        table, matched = open_sequence(self.index, tokens, tenant)
        self.happened["hit" if matched else "miss"] += 1
        sequence = Sequence(self.policy, table)
        self.sequences.append(sequence)
        k, v = keys_and_values(tenant, tokens, 0)
        late = k[:, :, matched:], v[:, :, matched:]
        if self.attempt(lambda: table.append(tokens[matched:], *late)):
            sequence.feed_twin(k, v)
            sequence.check(tile=17)
        else:
            self.sequences.remove(sequence)
            table.close()

    def append(self, n, tokens):
        sequence = self.pick(n)
        if sequence is None or len(sequence.table) + len(tokens) > LONGEST:
            return
        table, start = sequence.table, len(sequence.table)
        k, v = keys_and_values(table.tenant, table.tokens + tokens, start)
        if self.attempt(lambda: table.append(tokens, k, v)):
            sequence.feed_twin(k, v)
            sequence.check(tile=13)

    def fork(self, n):
        sequence = self.pick(n)
        if sequence is not None and len(self.sequences) < MOST:
            self.sequences.append(sequence.fork(sequence.table.fork()))
            self.happened["fork"] += 1

    def crop(self, n, length):
        sequence = self.pick(n)
        if sequence is not None:
            length %= len(sequence.table) + 1
            exact = sequence.table.exact
            sequence.table.crop(length)
            sequence.twin.crop(length)
            sequence.check(tile=19)
            self.happened["lossy crop"] += exact and not sequence.table.exact

    def close(self, n):
        if self.sequences:
            self.sequences.pop(n % len(self.sequences)).table.close()

    def swap_out(self, n):
        sequence = self.pick(n)
        if sequence is not None:
            sequence.table.swap_out()

    def swap_in(self, n):
        sequence = self.pick(n, here=False)
        if sequence is not None and self.attempt(sequence.table.swap_in):
            sequence.check(tile=None)
            self.happened["swapped in"] += 1

    def evict(self):
        self.happened["evicted"] += self.index.evict()

    def beam(self, n, m):
        """Two beams: the first one goes on twice, or they change places."""
        if self.pick(n) in (None, self.pick(m)):
            return
        pair, order = [self.pick(n), self.pick(m)], [(0, 0), (1, 0)][n % 2]
        tables = reorder([s.table for s in pair], order)
        for s in pair:
            self.sequences.remove(s)
        picked = [pair[i].fork(t) for i, t in zip(order, tables, strict=True)]
        self.sequences += picked
        for s in picked:
            s.check(tile=9)

    # --- what always holds ---
    def check(self, n=0):
        tables = [s.table for s in self.sequences]
        self.check_references(tables)
        for table in tables:
            assert all(self.pool.owner[i] == table.tenant for i in table.blocks)
        self.check_index()
        self.poison_what_was_freed()
        sequence = self.pick(n // 4)
        if sequence is not None and n % 4 == 0:
            sequence.check(tile=None)

    def check_references(self, tables):
        """Every reference has a holder; free blocks have none and are free once."""
        refs = [0] * len(self.pool.refs)
        for i in [i for t in tables for i in t.blocks] + [e.block for e in self.index]:
            refs[i] += 1
        assert self.pool.refs == refs
        assert sorted(self.pool.free) == [i for i, r in enumerate(refs) if r == 0]

    def check_index(self):
        """A block never changes as long as the index has it, and can be reached."""
        children = Counter(e.parent for e in self.index)
        now = {}
        for entry in self.index:
            assert entry.children == children[entry]
            assert entry.parent is None or entry.parent in self.index
            assert self.pool.owner[entry.block] in TENANTS
            now[entry] = zlib.crc32(
                b"".join(a[entry.block].tobytes() for a in self.arrays)
            )
        assert all(now[e] == self.checksums.get(e, now[e]) for e in now)
        self.checksums = now

    def poison_what_was_freed(self):
        """0xFF everywhere: NaN scales, for whoever still reads the block."""
        for i in set(self.pool.free) - self.free:
            for a in self.arrays:
                a[i] = np.full(a.itemsize, 0xFF, np.uint8).view(a.dtype)
        self.free = set(self.pool.free)

    def end(self):
        """Nothing leaks: all is free once everybody has left."""
        for sequence in self.sequences:
            sequence.table.close()
        self.sequences = []
        while self.index.evict():
            pass
        self.check()
        assert self.pool.used == 0
        assert self.index.entries == {}
        assert self.index.nbytes == 0


# --- 10,000 random operations ---------------------------------------------------------
@pytest.mark.parametrize("name", POLICIES)
def test_2500_random_operations_hold_every_invariant(name):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    world = World(POLICIES[name], blocks=22)

    def number():
        return int(rng.integers(10**6))

    operations = {
        "open": (3, lambda: world.open(number(), number(), number())),
        "append": (8, lambda: world.append(number(), rng.integers(1, 3, 5).tolist())),
        "go on": (6, lambda: world.append(number(), [3] * int(rng.integers(4)))),
        "fork": (2, lambda: world.fork(number())),
        "crop": (2, lambda: world.crop(number(), number())),
        "close": (3, lambda: world.close(number())),
        "swap out": (1, lambda: world.swap_out(number())),
        "swap in": (2, lambda: world.swap_in(number())),
        "evict": (1, world.evict),
        "beam": (1, lambda: world.beam(number(), number())),
    }
    weights = np.array([weight for weight, _ in operations.values()])
    todo = rng.choice(len(weights), 2500, p=weights / weights.sum())
    for n in todo:
        list(operations.values())[n][1]()
        world.check(number())
    never = {1: {"lossy crop"}, BLOCK: {"copy on write"}}.get(world.policy.block, set())
    assert {e for e in EVENTS if world.happened[e] == 0} == never
    world.end()


# --- hypothesis -----------------------------------------------------------------------
numbers = st.integers(0, 100)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(POLICIES["channel"], blocks=9)

    @rule(tenant=numbers, story=numbers, length=numbers)
    def open(self, tenant, story, length):
        self.world.open(tenant, story, length)

    @rule(n=numbers, tokens=st.lists(st.integers(1, 3), max_size=12))
    def append(self, n, tokens):
        self.world.append(n, tokens)

    @rule(n=numbers)
    def fork(self, n):
        self.world.fork(n)

    @rule(n=numbers, length=numbers)
    def crop(self, n, length):
        self.world.crop(n, length)

    @rule(n=numbers)
    def close(self, n):
        self.world.close(n)

    @rule(n=numbers)
    def swap_out(self, n):
        self.world.swap_out(n)

    @rule(n=numbers)
    def swap_in(self, n):
        self.world.swap_in(n)

    @rule()
    def evict(self):
        self.world.evict()

    @rule(n=numbers, m=numbers)
    def beam(self, n, m):
        self.world.beam(n, m)

    @invariant()
    def holds(self):
        self.world.check()

    def teardown(self):
        self.world.end()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=30)

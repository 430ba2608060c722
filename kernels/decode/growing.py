"""A cache that lives in pages: a prompt at once, then one token after the other.

    table of a sequence    [ pages of codes | pages in full precision ]
    tokens in the latter   [ sinks | window ]

A prompt goes straight into pages: its codes by `pack_v3`, sinks and window by
`append_v3`. New tokens join the window. When it holds a page more than the policy's
residual, its oldest tokens become a page of codes (`pack_v3_window`), and what they lay
in goes to the end of the table, to be written again. So where a token is depends on the
number of tokens alone, as in `KVCache`: one that quantizes blocks of a page holds the
same codes.
"""

import numpy as np

from kvq.dtypes import as_float_array
from kvq.kernels.decode.paged import NUMBERS, Paged
from kvq.kernels.decode.tensor_cores import unsupported
from kvq.kernels.launch import ptxsim
from kvq.kernels.pack import pages as pack
from kvq.kernels.pages import STEP, PageLayout
from kvq.scheme import policy as find_policy


class GrowingCache:
    """Keys and values of B sequences of the same length, stored by a policy.

    policy : a Policy, or the name of a preset; its schemes must fit a `PageLayout`.
    capacity : tokens that there is room for. dtype : of keys, values and the window,
    "float16" or "bfloat16". run : of an executor in `kernels/launch/`.

    `paged(version)` is what the decode kernels take. Raises ValueError.
    """

    def __init__(self, policy, B, H_kv, D, capacity, dtype="float16", run=ptxsim.run):
        self.policy, self.run, self.tokens = find_policy(policy), run, 0
        if reason := unsupported(self.policy, "v4", D):
            raise ValueError(reason)
        if dtype not in NUMBERS:
            raise ValueError(f"dtype={dtype!r}; valid: {', '.join(NUMBERS)}")
        numbers = NUMBERS[dtype]
        self.exact = PageLayout(numbers, numbers, D)
        self.layout = PageLayout(self.policy.key, self.policy.value, D)
        self.coded = not self.policy.key.full_precision
        if not self.coded and self.policy.key != numbers:
            raise ValueError(f"dtype={dtype!r}; valid: {self.policy.key.levels}")
        self.capacity, (pages, exact_pages) = capacity, self._room(capacity)
        self.pages = np.zeros((B * pages, H_kv, self.layout.words), np.uint32)
        self.exact_pages = np.zeros(
            (B * exact_pages, H_kv, self.exact.words), np.uint32
        )
        columns = [np.arange(B * n).reshape(B, n) for n in (pages, exact_pages)]
        self.table = np.concatenate(columns, axis=1).astype(np.int32)
        self.largest = np.zeros((B, H_kv, 2), np.float32)

    def _room(self, capacity):
        """Pages of a sequence: of codes, and in full precision."""
        if not self.coded:
            return 0, -(-capacity // STEP)
        window = self.policy.sinks + self.policy.residual + self.layout.tokens
        return self.split(capacity)[0] // self.layout.tokens, -(-window // STEP)

    def split(self, T):
        """(tokens with codes, in full precision) of T."""
        page, policy = self.layout.tokens, self.policy
        coded = max(T - policy.sinks - policy.residual, 0) // page * page * self.coded
        return coded, T - coded

    def __len__(self):
        return self.tokens

    # --- growing ----------------------------------------------------------------------
    def append(self, k, v):
        """Add tokens: k and v (B, H_kv, t, D) in the dtype of the cache.

        Raises TypeError or ValueError and changes nothing.
        """
        k, v = self._checked(k, "k"), self._checked(v, "v")
        t = k.shape[-2]
        if v.shape != k.shape:
            raise ValueError(f"v {v.shape}; expected {k.shape}, as k")
        if self.tokens + t > self.capacity:
            raise ValueError(
                f"{self.tokens + t} tokens; valid: up to the capacity, {self.capacity}"
            )
        if self.tokens == 0:
            self._prompt(k, v)
            return
        begin = 0
        while begin < t:
            room = self._until_full() if self.coded else t
            end = min(t, begin + room)
            self._append(k, v, begin, end, self.split(self.tokens)[1])
            self.tokens += end - begin
            if room == end - begin and self.coded:
                self._pack_oldest()
            begin = end

    def _until_full(self):
        """Tokens until the window gives up a page."""
        window = self.policy.sinks + self.policy.residual + self.layout.tokens
        return window - self.split(self.tokens)[1]

    def _checked(self, x, name):
        x, (B, H_kv, _), D = as_float_array(x, name), self.largest.shape, self.layout.D
        if x.dtype.name != self.exact.key.levels:
            raise TypeError(f"{name} is {x.dtype}; valid: {self.exact.key.levels}")
        if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != (B, H_kv, D):
            raise ValueError(f"{name} {x.shape}; expected ({B}, {H_kv}, t, {D})")
        return x

    def _prompt(self, k, v):
        """[ sinks | codes | window ] of the first tokens."""
        self.tokens = T = k.shape[-2]
        coded, _ = self.split(T)
        sinks = min(T, self.policy.sinks)
        self._append(k, v, 0, sinks, 0)
        self._append(k, v, sinks + coded, T, sinks)
        if coded:
            self._pack(k, v, sinks, sinks + coded)

    # --- launches ---------------------------------------------------------------------
    def _append(self, k, v, begin, end, slot):
        """Tokens begin .. end - 1 of k and v, at `slot` of the exact pages."""
        if begin == end:
            return
        where = slot, self.exact_pages, self.table, self._exact_column
        what = self.layout, self.exact, k, v, range(begin, end)
        self.run([pack.append(*what, *where)])

    def _pack(self, k, v, begin, end):
        """Tokens begin .. end - 1 of k and v, as the first pages of codes."""
        where = self.pages, self.table, self.largest
        what = self.layout, self.exact, k, v, range(begin, end)
        self.run([pack.prompt(*what, *where)])

    def _pack_oldest(self):
        """The oldest tokens of the window become a page: the last one of codes."""
        page = self.layout.tokens
        stay, sinks = divmod(self.policy.sinks, STEP)  # pages that hold only sinks stay
        first = self._exact_column + stay
        columns = self.split(self.tokens)[0] // page - 1, first
        pools = self.exact_pages, self.pages, self.table, self.largest
        self.run([pack.window(self.layout, self.exact, sinks, *pools, columns)])
        free = self.table[:, first:]
        free[:] = np.roll(free, -(page // STEP), axis=1)

    @property
    def _exact_column(self):
        """Where in a row of the table the pages in full precision begin."""
        return self.table.shape[1] - len(self.exact_pages) // len(self.table)

    # --- reading ----------------------------------------------------------------------
    def paged(self, version):
        """The Paged of all tokens, for a Version of `decode`. It shares the arrays."""
        lengths = np.array([self.split(self.tokens)] * len(self.table), np.int32)
        return Paged(
            version,
            self.policy,
            self.layout,
            self.exact,
            self.pages,
            self.exact_pages,
            self.table,
            lengths,
            self.largest,
        )

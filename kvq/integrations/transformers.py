"""`KVQCache`: a cache for Hugging Face Transformers that stores packed codes.

    cache = KVQCache("kivi-4", model.config)
    model.generate(**inputs, cache=cache)       # past_key_values=cache before 5.24

Every layer of the model gets a `kvq.KVCache`. New keys and values enter it in the dtype
that the model computes in; back come all of them, as they are stored now, and that is
what the model attends to. A prompt that comes in one piece is read by all of its tokens
as it is stored at its end. With `generate(..., prefill_chunk_size=1)` every token reads
what was stored when it was the newest, as in `kvq.model`.

Codes, scales and windows are NumPy arrays on the host, whatever device the model runs
on, and are dequantized again at every step: this shows what a policy does to a model,
not how fast it could be. What is quantized is never quantized again (but for a block
that `crop` cuts).

Needs the extra `hf`: torch and transformers; tested with 4.57, 5.12 and 5.24. (5.0 gets
prompts in chunks wrong where layers slide, with its own cache as well.)
"""

from functools import partial
from pathlib import Path

import numpy as np

from kvq.cache import KVCache
from kvq.dtypes import numpy_dtype
from kvq.layers import LayerPolicies
from kvq.scheme import policy as find_policy

try:
    import torch
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        "kvq.integrations.transformers needs torch and transformers >= 4.57, the "
        f"extra hf (in a checkout: pip install '.[hf]'): {error}"
    ) from error

FULL, SLIDING = "full_attention", "sliding_attention"


def to_numpy(tensor):
    """A tensor as an array on the host, of the same dtype (bfloat16 included)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy itself has no such dtype
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def load_gguf(path):
    """The model in a GGUF file, in float32, as Transformers itself reads it."""
    from transformers import AutoModelForCausalLM

    path = Path(path)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


# --- one layer ------------------------------------------------------------------------
class KVQLayer(CacheLayerMixin):
    """The keys and values of one layer; `KVQCache` makes one for each.

    store : the `kvq.KVCache`. Its sequences are the rows of the batch without their
        padding: no group and no sink is a token that is not there.
    length : columns of the batch so far, padding included.
    mask : bool (B, n), False where one of the first n columns is padding; None: no
        padding. Later columns are tokens.
    window : W; a query sees the newest W columns, itself included. None: all.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, policy, window=None, mask=None):
        super().__init__()
        self.policy, self.window, self.prompt_mask = find_policy(policy), window, mask
        self.is_sliding = window is not None
        self.reset()

    def reset(self):
        """Forget all tokens."""
        # A residual window that holds all a query sees leaves nothing to give up.
        slides = self.is_sliding and self.window > self.policy.residual
        self.store = KVCache(
            self.policy, sliding_window=self.window if slides else None
        )
        self.length, self.mask = 0, self.prompt_mask
        self.is_initialized = False

    def lazy_initialization(self, key_states, value_states=None):
        """Give each row of the batch its mask: the beams of a prompt have the same."""
        B = len(key_states)
        if self.mask is None:
            self._check_unpadded(B)
        elif B % len(self.mask):
            raise ValueError(f"attention_mask has {len(self.mask)} rows, the batch {B}")
        else:
            self.mask = self.mask.repeat(B // len(self.mask), axis=0)
        self.is_initialized = True

    def _check_unpadded(self, B):
        block, sinks = self.policy.block, self.policy.sinks
        if B > 1 and (block > 1 or sinks):
            raise ValueError(
                f"a batch of {B} with groups of {block} tokens and {sinks} sinks: no "
                "padding may be among them; give KVQCache the prompt's attention_mask "
                "(all ones if nothing is padded)"
            )

    # --- what the model calls ---------------------------------------------------------
    def update(self, key_states, value_states, *args, **kwargs):
        """Store k (B, H_kv, t, D) and v; returns what the new queries attend to.

        Those are the keys and values of all columns; in a sliding layer, of those that
        the first new query sees and later ones. Padding reads as zeros.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        B, old = len(key_states), self.length
        start, stop = self._first_seen(), old + key_states.shape[-2]
        k, v = to_numpy(key_states), to_numpy(value_states)
        self.store.append(k, v, mask=self._tokens(B, old, stop))
        self.length = stop
        read = self._read(self._tokens(B, start, stop), k.shape, v.shape)
        return tuple(
            torch.from_numpy(x).to(like.device, like.dtype)
            for x, like in zip(read, (key_states, value_states), strict=True)
        )

    def _first_seen(self):
        """The first column that the next query sees."""
        return max(self.length - self.window + 1, 0) if self.is_sliding else 0

    def _tokens(self, B, start, stop):
        """bool (B, stop - start): which of these columns are tokens, not padding."""
        tokens = np.ones((B, stop - start), bool)
        if self.mask is not None:
            given = self.mask[:, start:stop]
            tokens[:, : given.shape[1]] = given
        return tokens

    def _read(self, tokens, *shapes):
        """Keys and values of the newest columns, float32 (B, H_kv, columns, D).

        tokens : bool (B, columns). A row's are the newest that it has stored; what a
        sliding cache has given up is older. shapes : (B, H_kv, any, D) of both.
        """
        columns = tokens.shape[1]
        read = [np.zeros((B, H, columns, D), np.float32) for B, H, _, D in shapes]
        for row, here in enumerate(tokens):
            n = np.count_nonzero(here)
            for stored in self.store.tiles(row, tile=None):  # one; none if it is empty
                for x, y in zip(read, stored, strict=True):
                    x[row][:, here] = y[:, y.shape[1] - n :]
        return read

    def get_mask_sizes(self, query_length):
        """(how many columns `update` will return, the first of them)."""
        if not isinstance(query_length, int):  # transformers 5.0 passes positions
            query_length = len(query_length)
        start = self._first_seen()
        return self.length - start + query_length, start

    def get_seq_length(self, *args):
        """Columns so far, padding included."""
        return self.length

    def get_max_length(self):
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # transformers 5.0

    @property
    def batch_size(self):
        """Rows of the batch; -1 before the first update."""
        return len(self.store.rows) or -1

    # --- rows and columns -------------------------------------------------------------
    def crop(self, tokens):
        """Remove the newest -tokens columns; a number > 0 is how many to keep.

        (Assisted decoding removes what it tried in vain; transformers 5.0 says what to
        keep.) A block that is cut goes back to the window as the values it was stored
        as. Raises ValueError where columns are gone that the next query would see.
        """
        keep = min(tokens, self.length) if tokens > 0 else self.length + tokens
        if keep < 0:
            raise ValueError(f"cannot remove {-tokens} of {self.length} columns")
        rows = self.store.rows
        counts = self._tokens(len(rows), 0, keep).sum(axis=1)
        held = [self._held(row, n) for row, n in zip(rows, counts, strict=True)]
        self.store.crop(held)
        self.length = keep
        self.mask = None if self.mask is None else self.mask[:, :keep]

    def _held(self, row, count):
        """How many of a row's first `count` tokens are stored: but for a gap, all."""
        sinks, dropped = row[0].lengths[0], row[0].dropped
        if dropped and count - self.window + 1 < sinks + dropped:
            raise ValueError(
                f"cannot go back to {count} tokens: the sliding layer has given up "
                f"tokens {sinks}..{sinks + dropped - 1}"
            )
        return count - dropped

    def _select(self, rows):
        if self.is_initialized:
            self.store.select(rows)
            self.mask = None if self.mask is None else self.mask[rows]

    def reorder_cache(self, beam_idx):
        """Keep these rows, in this order; they share what they have in common."""
        self._select(to_numpy(beam_idx))

    def batch_select_indices(self, indices):
        """Keep these rows: indices, or a mask."""
        self._select(np.arange(len(self.store.rows))[to_numpy(indices)])

    def batch_repeat_interleave(self, repeats):
        """Every row `repeats` times."""
        self._select(np.arange(len(self.store.rows)).repeat(repeats))


# --- all layers -----------------------------------------------------------------------
class KVQCache(Cache):
    """The cache of a model, stored by a policy.

    policy : a `kvq.Policy` or the name of a preset; with `config`, also a list of one
        for each layer, or `kvq.layers.LayerPolicies`.
    config : the model's. Its sliding layers then give up the blocks that no later query
        sees. None: every layer keeps all tokens.
    attention_mask : the prompt's, (B, columns), 0 for padding. Needed for a batch if
        groups or sinks of the policy are tokens: padding is then not stored. Beams of a
        prompt share its row.

    Raises ValueError for an unknown policy, a mask of another shape, or a model with
    layers that are not full or sliding attention; it names them.
    """

    def __init__(self, policy, config=None, attention_mask=None):
        mask = None if attention_mask is None else _as_mask(attention_mask)
        if config is not None:
            policies = zip(*_policies_and_windows(policy, config), strict=True)
            super().__init__(layers=[KVQLayer(p, W, mask) for p, W in policies])
        elif isinstance(policy, LayerPolicies | list | tuple):
            raise ValueError("policies of layers need config, the model's")
        else:
            layer = partial(KVQLayer, find_policy(policy), mask=mask)
            layer()  # a policy that cannot grow is an error here, not in the model
            super().__init__(layer_class_to_replicate=layer)

    @property
    def nbytes(self):
        """Bytes of every array that is stored; what beams share counts once."""
        return sum(layer.store.nbytes for layer in self.layers)


def _as_mask(attention_mask):
    mask = np.asarray(torch.as_tensor(attention_mask).cpu())
    if mask.ndim != 2 or not np.isin(mask, (0, 1)).all():
        raise ValueError(
            f"attention_mask has shape {mask.shape}; expected (B, columns) of 0 and 1"
        )
    return mask.astype(bool)


def _policies_and_windows(policy, config):
    """One policy and one window (or None) for each layer of a model."""
    config = config.get_text_config(decoder=True)
    L, W = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [SLIDING if W else FULL] * L
    unknown = [i for i, kind in enumerate(kinds) if kind not in (FULL, SLIDING)]
    if unknown:
        which = ", ".join(map(str, unknown))
        raise ValueError(
            f"layers {which} are {kinds[unknown[0]]!r}; valid: {FULL!r} and {SLIDING!r}"
        )
    shared = getattr(config, "num_kv_shared_layers", 0)
    if shared:
        raise ValueError(f"layers {L - shared}..{L - 1} read those of others")
    if isinstance(policy, LayerPolicies):
        policy = policy.all(L)
    policies = list(policy) if isinstance(policy, list | tuple) else [policy] * L
    if len(policies) != L:
        raise ValueError(f"{len(policies)} policies; valid: one, or {L} (layers)")
    return policies, [W if kind == SLIDING else None for kind in kinds]

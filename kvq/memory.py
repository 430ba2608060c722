"""Exact bytes of a KV cache, and what fits into a memory budget.

`ModelShape` says what a model caches; `cache_bytes` is what `KVCache` really stores,
scales, zeros and full-precision rows included; `max_tokens` and `max_batch` invert it.

Symbols: `L` layers, `B` batch, `T` tokens, `H` KV heads, `D` and `D_v` the widths of
keys and values, `b` bits, `W` sliding window, `R` residual window, `S` sinks.
"""

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from numbers import Integral

from kvq.dtypes import itemsize
from kvq.hardware import MIB
from kvq.hardware import device as find_device
from kvq.scheme import FLOATS
from kvq.scheme import policy as find_policy

PARTS = ("codes", "scales", "zeros", "window", "sinks", "padding")


def checked_integer(name, value, low):
    """`value` as an int (NumPy integers welcome). Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ValueError(f"{name}={value!r}; valid: an integer >= {low}")
    return int(value)


@dataclass(frozen=True)
class ModelShape:
    """What one model caches per token, and which of its layers forget.

    layers : L, layers that keep keys and values, the sliding ones included.
    kv_heads, head_dim : H and D.
    value_dim : D_v; None is D.
    q_heads : H_q, a multiple of H; None is H.
    sliding_window, sliding_layers : this many of the layers keep only the newest W
        tokens. Both or neither.
    latent : True for MLA (DeepSeek-V2, arXiv 2405.04434): one head of width D per
        token; the values are its first D_v columns and are not stored again.
    weight_params : parameters of the model, if known.
    max_positions : longest context the model was made for, if known.

    Raises ValueError at construction, naming the value and the valid ones.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    q_heads: int | None = None
    sliding_window: int | None = None
    sliding_layers: int = 0
    latent: bool = False
    weight_params: int | None = None
    max_positions: int | None = None

    def __post_init__(self):
        for name in ("layers", "kv_heads", "head_dim"):
            checked_integer(name, getattr(self, name), 1)
        for name in (
            "value_dim",
            "q_heads",
            "sliding_window",
            "weight_params",
            "max_positions",
        ):
            if getattr(self, name) is not None:
                checked_integer(name, getattr(self, name), 1)
        self._check_sliding()
        if (self.q_heads or self.kv_heads) % self.kv_heads:
            raise ValueError(
                f"q_heads={self.q_heads}; valid: multiples of kv_heads={self.kv_heads}"
            )
        if self.latent and self.value_width > self.head_dim:
            raise ValueError(
                f"value_dim={self.value_dim} of a latent; valid: 1..{self.head_dim}"
            )

    def _check_sliding(self):
        checked_integer("sliding_layers", self.sliding_layers, 0)
        if self.sliding_layers > self.layers:
            raise ValueError(
                f"sliding_layers={self.sliding_layers}; valid: 0..{self.layers}"
            )
        if (self.sliding_layers > 0) != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window={self.sliding_window} with "
                f"sliding_layers={self.sliding_layers}; valid: both or neither"
            )

    @classmethod
    def from_config(cls, config):
        """The shape that a Hugging Face config.json describes.

        config : a path, or the JSON object as a dict. Nothing but JSON is read, and
            no number is guessed: a field that is needed and missing is an error.
        Raises ValueError naming the field, OSError if the file cannot be read.
        """
        return cls(**_from_config(config))

    @property
    def value_width(self):
        """D_v."""
        return self.value_dim or self.head_dim

    @property
    def widths(self):
        """Widths of the stored tensors: (D, D_v), or (D,) for a latent."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_width)

    @property
    def growing_layers(self):
        """Layers whose cache grows with every token."""
        return self.layers - self.sliding_layers

    def held(self, tokens):
        """[(layers, tokens each of them holds)]: all T, or at most W."""
        groups = [(self.growing_layers, tokens)]
        if self.sliding_layers:
            groups.append((self.sliding_layers, min(tokens, self.sliding_window)))
        return groups

    # numbers(T) = L * T * H * (D + D_v)
    def numbers(self, tokens):
        """How many numbers are cached for one sequence of `tokens` tokens."""
        return (
            sum(L * T for L, T in self.held(tokens)) * self.kv_heads * sum(self.widths)
        )

    def shard(self, ranks):
        """What one of `ranks` tensor-parallel ranks holds.

        KV heads are split evenly; where there are more ranks than heads, each head
        is held by ranks / H of them. So a latent, one head, is whole on every rank.
        How the weights split is not modelled: `weight_params` becomes None.
        """
        ranks = checked_integer("tensor_parallel", ranks, 1)
        even = self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        if not even or (self.q_heads or ranks) % ranks:
            raise ValueError(
                f"tensor_parallel={ranks} with kv_heads={self.kv_heads}, "
                f"q_heads={self.q_heads}; valid: what divides q_heads and divides "
                "kv_heads or is a multiple of it"
            )
        return replace(
            self,
            kv_heads=max(self.kv_heads // ranks, 1),
            q_heads=self.q_heads and self.q_heads // ranks,
            weight_params=self.weight_params if ranks == 1 else None,
        )


# --- the formula everybody quotes -----------------------------------------------------
# M = L * T * H * (D + D_v) * b / 8, which is 2 * L * T * H * D * b / 8 for D_v = D
def ideal_bytes(shape, bits, tokens, batch=1):
    """Bytes at exactly `bits` per number: no scales, no window, no padding."""
    return batch * shape.numbers(tokens) * bits / 8


# --- what is really stored ------------------------------------------------------------
def cache_bytes(policy, shape=None, *, tokens, **options):
    """Bytes of a cache: `cache_parts(...)["total"]`.

    shape : a ModelShape; without it, its fields as keywords:
        cache_bytes("kivi-2", layers=32, kv_heads=8, head_dim=128, tokens=8192)
    options : batch, window_dtype, tensor_parallel, page, as `cache_parts`.
    """
    if shape is None:
        dims = {
            k: v for k, v in options.items() if k in ModelShape.__dataclass_fields__
        }
        options = {k: v for k, v in options.items() if k not in dims}
        shape = ModelShape(**dims)
    return cache_parts(policy, shape, tokens, **options)["total"]


# bytes(T) = B * sum over layers and tensors of
#            nbytes(H, quantized, D) + (window + sinks) * H * D * itemsize
# with (sinks, quantized, window) = policy.split(T), T at most W in a sliding layer
def cache_parts(
    policy,
    shape,
    tokens,
    batch=1,
    *,
    window_dtype="float16",
    tensor_parallel=1,
    page=1,
):
    """Bytes of a cache by what they are: a dict of `PARTS` and "total", integers.

    policy : a Policy or a preset's name. For a latent its values are left out.
    tokens : T of every one of the `batch` sequences.
    window_dtype : how full-precision rows (window and sinks) are stored.
    tensor_parallel : bytes of one of so many ranks, see `ModelShape.shard`.
    page : quantized tokens are stored in pages of so many; the room left in the last
        page is "padding". A multiple of the policy's block.

    Raises ValueError, naming the value and the valid ones.
    """
    policy = stored_policy(policy, shape)
    tokens, batch = (
        checked_integer("tokens", tokens, 0),
        checked_integer("batch", batch, 1),
    )
    if window_dtype not in FLOATS:
        raise ValueError(f"window_dtype={window_dtype!r}; valid: {', '.join(FLOATS)}")
    if checked_integer("page", page, 1) > 1 and page % policy.block:
        raise ValueError(
            f"page={page}; valid: multiples of the policy's block of {policy.block}"
        )
    shape = shape.shard(tensor_parallel)
    parts = dict.fromkeys(PARTS, 0)
    for layers, held in shape.held(tokens):
        split = policy.split(held)
        for scheme, D in zip(policy.schemes, shape.widths, strict=True):
            rows = itemsize(window_dtype)
            tensor = _tensor_parts(scheme, split, shape.kv_heads, D, rows, page)
            for name, nbytes in tensor.items():
                parts[name] += batch * layers * nbytes
    return {**parts, "total": sum(parts.values())}


def stored_policy(policy, shape):
    """The policy a cache of this shape uses: a latent stores no values."""
    policy = find_policy(policy)
    if shape.latent:
        policy = replace(policy, value=None)
    elif policy.value is None:
        raise ValueError("value=None; valid: a Scheme, for a shape that is not latent")
    for scheme, D in zip(policy.schemes, shape.widths, strict=True):
        scheme.check_head_dim(D)
    return policy


def _tensor_parts(scheme, split, H, D, row_itemsize, page):
    """Bytes of one tensor of one layer: a dict of `PARTS`."""
    sinks, quantized, window = split
    stored = scheme.nbytes(H, quantized, D)
    codes = H * quantized * scheme.row_bytes(D)
    zeros = (stored - codes) // 2 if scheme.has_zero else 0
    paged = scheme.nbytes(H, math.ceil(quantized / page) * page, D)
    return {
        "codes": codes,
        "scales": stored - codes - zeros,
        "zeros": zeros,
        "window": window * H * D * row_itemsize,
        "sinks": sinks * H * D * row_itemsize,
        "padding": paged - stored,
    }


# shared(T, P) = bytes of the quantized tokens of T that are in whole pages of P
def shared_bytes(policy, shape, tokens, prefix, page=1):
    """Bytes of a sequence of `tokens` tokens that others with its prefix can share.

    prefix : tokens that the sequences have in common. Only whole pages of quantized
        tokens are shared (`kvq.paging`): not the sinks, and not the window, which
        each sequence keeps for itself. Layers that slide have moved on.
    """
    policy = stored_policy(policy, shape)
    prefix = min(checked_integer("prefix", prefix, 0), tokens)
    step = math.lcm(checked_integer("page", page, 1), policy.block)
    inside = min(policy.split(tokens)[1], max(prefix - policy.sinks, 0)) // step * step
    return shape.growing_layers * sum(
        scheme.nbytes(shape.kv_heads, inside, D)
        for scheme, D in zip(policy.schemes, shape.widths, strict=True)
    )


# --- the long run ---------------------------------------------------------------------
def _block(policy, shape):
    """(tokens, bytes) of one quantized block of one layer."""
    policy = stored_policy(policy, shape)
    return policy.block, sum(
        scheme.nbytes(shape.kv_heads, policy.block, D)
        for scheme, D in zip(policy.schemes, shape.widths, strict=True)
    )


# b = 8 * bytes of a block / (tokens of a block * H * (D + D_v))
def bits_per_element(policy, shape):
    """Bits per cached number, scales and zeros counted, for T much larger than R."""
    tokens, nbytes = _block(policy, shape)
    return 8 * nbytes / (tokens * shape.kv_heads * sum(shape.widths))


# slope = growing layers * bytes of a block / tokens of a block
def bytes_per_token(policy, shape, tokens=None):
    """Bytes that one more token costs, averaged over a block.

    tokens : the context length so far. None is a long one: sliding windows are full.
        Below the sliding window, every layer grows.
    """
    short = tokens is not None and tokens < (shape.sliding_window or 0)
    block, nbytes = _block(policy, shape)
    return (shape.layers if short else shape.growing_layers) * nbytes / block


def page_bytes(policy, shape, page):
    """Bytes of a page of `page` quantized tokens in every layer that grows.

    0 for page=1: no pages. A page is a multiple of the policy's block.
    """
    tokens, nbytes = _block(policy, shape)
    if page == 1:
        return 0
    return shape.growing_layers * nbytes * page // tokens


# --- the inverse ----------------------------------------------------------------------
# peak(T) = max bytes(T'), T' <= T
def peak_bytes(policy, shape, tokens, batch=1, **options):
    """The most bytes a cache takes on its way from 0 to `tokens` tokens.

    bytes(T) falls where a block leaves the full-precision window, and never between
    those lengths; the falls of a layer start higher and higher until it slides. So the
    maximum is at T or just before the last fall, of the layers that grow or of those
    that slide.
    """
    tokens = checked_integer("tokens", tokens, 0)
    stored = stored_policy(policy, shape)
    ends = {held for _, held in shape.held(tokens)}
    lengths = ends | {_before_last_flush(stored, end) for end in ends}
    return max(
        cache_parts(policy, shape, T, batch, **options)["total"] for T in lengths
    )


def _before_last_flush(policy, T):
    """The length just before the last block was flushed; T if none was."""
    start = policy.sinks + policy.residual
    blocks = (T - start) // policy.block
    return start + blocks * policy.block - 1 if blocks > 0 else T


def max_tokens(policy, budget_bytes, shape, batch=1, **options):
    """The largest T with bytes(T') <= budget_bytes for every T' <= T.

    A cache that grows to T tokens therefore never overruns the budget on its way.
    batch, options : as `cache_parts`. Returns an int, or None if no length is too
    long because every layer slides.
    Raises ValueError for a budget that is negative or not finite.
    """
    _check_budget(budget_bytes)
    limit = None if shape.growing_layers else shape.sliding_window
    too_long = first(
        lambda T: peak_bytes(policy, shape, T, batch, **options) > budget_bytes, limit
    )
    return None if too_long is None else too_long - 1


# n * (peak(T) - shared) + shared <= budget
def max_batch(policy, budget_bytes, shape, tokens, prefix=0, **options):
    """The most sequences that can all grow to `tokens` tokens within the budget.

    prefix : tokens that they have in common, stored once (`shared_bytes`).
    """
    _check_budget(budget_bytes)
    checked_integer("tokens", tokens, 1)
    shared = shared_bytes(policy, shape, tokens, prefix, options.get("page", 1))
    own = peak_bytes(policy, shape, tokens, **options) - shared
    return max(int((budget_bytes - shared) // own), 0)


def first(condition, limit=None):
    """The smallest n >= 1 that meets a condition which, once met, stays met.

    limit : nothing changes beyond it. None is returned if it is not met there.
    """
    high = 1
    while not condition(high):
        if limit is not None and high >= limit:
            return None
        high *= 2
    return bisect_left(range(high), True, lo=1, key=condition)


def _check_budget(budget_bytes):
    if not 0 <= budget_bytes < math.inf:
        raise ValueError(f"budget_bytes={budget_bytes!r}; valid: 0 or more, finite")


# weights + cache + reserve <= memory
def fits(device, weight_bytes, cache_bytes, reserve=0):
    """True if weights, cache and a reserve fit in a device's usable memory.

    device : a Device or its name. reserve : bytes for activations, workspaces and
        whatever else shares the device.
    """
    for name, value in {
        "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
        "reserve": reserve,
    }.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r}; valid: 0 or more")
    return weight_bytes + cache_bytes + reserve <= find_device(device).usable


def format_bytes(n, decimal=False):
    """`n` bytes for people, with the unit: "26.56 GiB", or "28.52 GB" in decimal."""
    base = 1000 if decimal else 1024
    units = (
        ("B", "kB", "MB", "GB", "TB") if decimal else ("B", "KiB", "MiB", "GiB", "TiB")
    )
    power = 0
    while abs(n) >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.2f} {units[power]}" if power else f"{n:g} B"


# --- reading a config.json ------------------------------------------------------------
MAX_CONFIG_BYTES = MIB
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Gemma: every n-th layer attends to all tokens, the others slide.
_SLIDING_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}

# Each of these means a cache that plain keys and values per layer do not describe.
_NOT_MODELLED = (
    "attention_chunk_size",
    "attn_layer_period",
    "hybrid_override_pattern",
    "index_head_dim",
    "num_kv_shared_layers",
)


def _from_config(config):
    """The fields of a `ModelShape`, from a config.json."""
    config = _text_config(config)
    for name in _NOT_MODELLED:
        if config.get(name):
            raise ValueError(f"{name}={config[name]!r} in the config is not modelled")
    layers = _required(config, "num_hidden_layers", "n_layer", "n_layers")
    kinds = _layer_kinds(config, layers)
    sliding = kinds.count(SLIDING)
    return {
        # Linear attention keeps a state of fixed size and no keys and values.
        "layers": layers - kinds.count(LINEAR),
        **_heads(config),
        "sliding_layers": sliding,
        "sliding_window": _required(config, "sliding_window") if sliding else None,
        "weight_params": _llama_params(config),
        "max_positions": _optional(config, "max_position_embeddings", "n_positions"),
    }


def _text_config(config):
    """The language model's part of a config, which may be nested."""
    if not isinstance(config, dict):
        config = _read_json(config)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _read_json(path):
    with open(path, "rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is larger than {format_bytes(MAX_CONFIG_BYTES)}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; expected an object")
    return config


def _optional(config, *names):
    """The first of `names` that the config has, as an integer >= 1, or None."""
    for name in names:
        if config.get(name) is not None:
            return checked_integer(name, config[name], 1)
    return None


def _required(config, *names):
    value = _optional(config, *names)
    if value is None:
        raise ValueError(f"the config has no {names[0]}; valid: an integer >= 1")
    return value


def _heads(config):
    """Heads and widths."""
    q_heads = _required(config, "num_attention_heads", "n_head", "n_heads")
    rank = _optional(config, "kv_lora_rank")
    if rank:  # MLA: the latent, and beside it the key's rotary part
        return {
            "q_heads": q_heads,
            "kv_heads": 1,
            "head_dim": rank + _required(config, "qk_rope_head_dim"),
            "value_dim": rank,
            "latent": True,
        }
    head_dim = _optional(config, "head_dim")
    if head_dim is None:
        hidden = _required(config, "hidden_size", "n_embd", "d_model")
        head_dim, rest = divmod(hidden, q_heads)
        if rest:
            raise ValueError(
                f"hidden_size={hidden} is not a multiple of "
                f"num_attention_heads={q_heads}, and the config has no head_dim"
            )
    kv_heads = _optional(config, "num_key_value_heads", "num_kv_heads") or q_heads
    # Falcon and GPT-BigCode: one KV head, whatever num_kv_heads says.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    return {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}


def _layer_kinds(config, layers):
    """What every layer is: a list of FULL, SLIDING and LINEAR."""
    kinds = config.get("layer_types")
    if kinds is None:
        return _older_layer_kinds(config, layers)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types={kinds!r}; valid: a list of {layers} names")
    for kind in kinds:
        if kind not in (FULL, SLIDING, LINEAR):
            raise ValueError(
                f"layer_types has {kind!r}; valid: {FULL}, {SLIDING}, {LINEAR}"
            )
    return kinds


def _older_layer_kinds(config, layers):
    """The same for a config from before `layer_types`."""
    every = _optional(config, "full_attention_interval")  # Qwen3-Next
    if every:
        return [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [FULL] * layers
    if "max_window_layers" in config:  # Qwen2: the first so many layers do not slide
        whole = min(
            checked_integer("max_window_layers", config["max_window_layers"], 0), layers
        )
        return [FULL] * whole + [SLIDING] * (layers - whole)
    every = _optional(config, "sliding_window_pattern")
    every = every or _SLIDING_PATTERNS.get(config.get("model_type"))
    if every:
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return [SLIDING] * layers  # Mistral


# P = V h (embedding, and again for the output unless tied)
#     + L (2 h H_q D + 2 h H D + 3 h f + 2 h) + h
def _llama_params(config):
    """Parameters of a model of the Llama layout, None for any other."""
    sizes = [
        _optional(config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size")
    ]
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if config.get("model_type") not in ("llama", "mistral") or None in sizes or biased:
        return None
    V, h, f = sizes
    heads = _heads(config)
    attention = 2 * h * (heads["q_heads"] + heads["kv_heads"]) * heads["head_dim"]
    layer = attention + 3 * h * f + 2 * h
    embeddings = V * h * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + _required(config, "num_hidden_layers") * layer + h

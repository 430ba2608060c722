"""Tiny random models of Transformers, and the same weights in our decoder."""

import inspect

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvq.model.decoder import Config, Decoder

# transformers 5.24 renamed the argument of `forward` and `generate`.
RENAMED = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if RENAMED else "past_key_values"

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 40  # of the sliding layers
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA = NAMES | {"ffn_norm": "post_attention_layernorm"}
GEMMA = NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def llama():
    """Three layers that see everything."""
    return randomize(LlamaForCausalLM(LlamaConfig(**SHAPE)))


def gemma():
    """The layers 0 and 2 slide by WINDOW."""
    config = Gemma3TextConfig(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=KINDS,
        query_pre_attn_scalar=SHAPE["head_dim"],
    )
    return randomize(Gemma3ForCausalLM(config))


def randomize(model):
    """Weights whose products are of order 1; key channel 1 of each head is large."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(torch.randn(x.shape, generator=generator))
            x.mul_(x.shape[-1] ** -0.5 if x.ndim == 2 else 0.3)
            if x.ndim == 1 and "Gemma" not in type(model).__name__:
                x.add_(1)  # Gemma's norms are 1 + w
            if "k_proj" in name:
                x[1 :: SHAPE["head_dim"]] *= 4
    return model.eval()


def decoder(model):
    """A `kvq.model.Decoder` of the same weights."""
    c = model.config
    is_gemma = "Gemma" in type(model).__name__
    kinds = c.layer_types if is_gemma else ["full_attention"] * c.num_hidden_layers
    slides = [kind == "sliding_attention" for kind in kinds]
    config = Config(
        architecture="gemma3" if is_gemma else "llama",
        layers=c.num_hidden_layers,
        width=c.hidden_size,
        hidden=c.intermediate_size,
        q_heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab=c.vocab_size,
        context=c.max_position_embeddings,
        eps=c.rms_norm_eps,
        rope_bases=tuple(1e4 if s or not is_gemma else 1e6 for s in slides),
        windows=tuple(WINDOW if s else None for s in slides),
    )
    w = {name: x.numpy() for name, x in model.state_dict().items()}
    one = np.float32(1 if is_gemma else 0)

    def weight(name):
        x = w[f"{name}.weight"]
        return x + one if x.ndim == 1 else x

    names = GEMMA if is_gemma else LLAMA
    return Decoder(
        config=config,
        embedding=w["model.embed_tokens.weight"],
        layers=[
            {ours: weight(f"model.layers.{i}.{n}") for ours, n in names.items()}
            for i in range(config.layers)
        ],
        norm=weight("model.norm"),
        head=w["lm_head.weight"],
    )


def ids(count, seed=0, batch=1):
    """Random token ids (batch, count); 0 is kept for padding."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(1, SHAPE["vocab_size"], (batch, count)))


def logits(model, tokens, cache, **options):
    """Logits (B, t, vocab) of token ids (B, t) after those in the cache."""
    with torch.no_grad():
        return model(tokens, **{CACHE: cache}, **options).logits


def generate(model, tokens, cache, count=20, **options):
    """Token ids of the prompt and `count` more; greedy unless options say otherwise."""
    options = {"do_sample": False, "max_new_tokens": count} | options
    return model.generate(tokens, **{CACHE: cache}, **options)

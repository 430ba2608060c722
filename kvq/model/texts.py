"""Token ids to run a model on: a bundled text, a user's text, or a user's ids."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from kvq.model.gguf_file import open_gguf
from kvq.model.tokenizer import tokenizer

SIZE_LIMIT = 64 * 2**20  # bytes that are read of a user's file
BUNDLED = ("gpt2", "smollm", 49152)  # kind, pre-tokenizer and words of the bundled ids


def bundled_tokens():
    """16,384 token ids of *Persuasion*, int32; provenance: kvq/data/austen_tokens.md.

    They are SmolLM2's: for its vocabulary alone.
    """
    with (files("kvq") / "data" / "austen_tokens.npy").open("rb") as file:
        return np.load(file, allow_pickle=False).astype(np.int32)


def tokens_for(model_path, text=None, ids=None):
    """Token ids for the model in a GGUF file (a path or GGUFFile): int32 (T,).

    text : a UTF-8 file, cut by the model's own tokenizer. ids : a .npy file of
    integers. Neither: the bundled text, if the model has SmolLM2's vocabulary.
    Raises ValueError for a vocabulary, a text or ids that cannot be used.
    """
    if ids is not None:
        return _read_ids(Path(ids))
    if text is not None:
        return np.array(tokenizer(model_path).encode(_read_text(text)).ids, np.int32)
    file = open_gguf(model_path)
    keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    words = file.shape("token_embd.weight")[0]
    if (*(file.get(key, None) for key in keys), words) != BUNDLED:
        raise file.error(
            "has another vocabulary than the bundled ids: give text or ids"
        )
    return bundled_tokens()


def _read_text(path):
    data = _read(Path(path))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason})") from None
    if not text.strip():
        raise ValueError(f"{path}: holds no text")
    return text


def _read(path):
    if path.stat().st_size > SIZE_LIMIT:
        raise ValueError(f"{path}: larger than {SIZE_LIMIT:,} bytes")
    return path.read_bytes()


def _read_ids(path):
    if path.stat().st_size > SIZE_LIMIT:
        raise ValueError(f"{path}: larger than {SIZE_LIMIT:,} bytes")
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not a .npy file ({reason})") from None
    if getattr(ids, "ndim", 0) != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError(f"{path}: expected one row of integers, token ids")
    if ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"{path}: token ids {ids.min()}..{ids.max()}; valid: >= 0")
    return ids.astype(np.int32)

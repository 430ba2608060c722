"""Text <-> token ids, with the vocabulary inside a GGUF file.

The package `tokenizers` does the work; what a file must say is which way of cutting
text before the byte-pair merges its model was trained with (`tokenizer.ggml.pre`).
"""

from kvq.model.gguf_file import GGUFFile

PRE_TOKENIZERS = ("smollm",)
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def tokenizer(path):
    """A `tokenizers.Tokenizer` from the vocabulary in a GGUF file.

    Byte-pair encoding as SmolLM2 uses it: digits apart, then GPT-2's pattern, bytes
    as letters. Control tokens such as <|im_end|> are recognized in text; no BOS token
    is added. Raises ValueError for a vocabulary of another kind.
    """
    file = GGUFFile(path)
    kind = file.get("tokenizer.ggml.model", None)
    pre = file.get("tokenizer.ggml.pre", None)
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise file.error(
            f"unsupported tokenizer {kind!r} with pre-tokenizer {pre!r}; valid: 'gpt2' "
            f"with {', '.join(map(repr, PRE_TOKENIZERS))} (or give token ids)"
        )
    words = file.get("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in file.get("tokenizer.ggml.merges")]
    if len(words) != len(types) or len(set(words)) != len(words):
        raise file.error(f"{len(words)} words, some twice, or {len(types)} types")
    return _bpe(file, words, types, merges)


def _bpe(file, words, types, merges):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(words)}
    try:
        result = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the package raises nothing more precise
        raise file.error(f"its merges do not fit its words ({error})") from None
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    result.decoder = decoders.ByteLevel()
    for word, kind in zip(words, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            added = [AddedToken(word, normalized=False, special=kind == CONTROL)]
            add = result.add_special_tokens if kind == CONTROL else result.add_tokens
            add(added)
    return result

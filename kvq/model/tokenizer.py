"""Text <-> token ids, with the vocabulary inside a GGUF file.

The package `tokenizers` does the work. Two kinds are understood, both byte-pair
encodings: merges by rank over GPT-2's alphabet of bytes (SmolLM2), and merges by the
score of the word they make, SentencePiece's kind (Gemma, Llama 2).
"""

from kvq.model.gguf_file import open_gguf

PRE_TOKENIZERS = ("smollm",)
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece writes a space


def tokenizer(path):
    """A `tokenizers.Tokenizer` from the vocabulary in a GGUF file (a path or GGUFFile).

    Control tokens such as <|im_end|> are recognized in text; `bos_token` says what must
    come first. Raises ValueError for a vocabulary of another kind.
    """
    file = open_gguf(path)
    kind = file.get("tokenizer.ggml.model", None)
    pre = file.get("tokenizer.ggml.pre", None)
    if kind == "gpt2" and pre in PRE_TOKENIZERS:
        make = _byte_level
    elif kind == "llama":
        make = _sentencepiece
    else:
        raise file.error(
            f"unsupported tokenizer {kind!r} with pre-tokenizer {pre!r}; valid: 'gpt2' "
            f"with {', '.join(map(repr, PRE_TOKENIZERS))}, or 'llama' (else give ids)"
        )
    words = file.get("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type")
    if len(words) != len(types) or len(set(words)) != len(words):
        raise file.error(f"{len(words)} words, some twice, or {len(types)} types")
    try:
        result = make(file, words)
    except ValueError:
        raise
    except Exception as error:  # the package raises nothing more precise
        raise file.error(f"its merges do not fit its words ({error})") from None
    _add_tokens(result, words, types)
    return result


def bos_token(path):
    """The id that must come before any text, or None. path : as for `tokenizer`."""
    file = open_gguf(path)
    sentencepiece = file.get("tokenizer.ggml.model", None) == "llama"
    if not file.get("tokenizer.ggml.add_bos_token", sentencepiece):
        return None
    return file.integer("tokenizer.ggml.bos_token_id")


def _byte_level(file, words):
    """Digits apart, then GPT-2's pattern, then merges of bytes as letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(words)}
    merges = [tuple(m.split(" ")) for m in file.get("tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    result.decoder = decoders.ByteLevel()
    return result


def _sentencepiece(file, words):
    """Spaces as a letter; what has no word becomes bytes, <0x0A>."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {word: i for i, word in enumerate(words)}
    merges = merges_by_score(vocab, file.get("tokenizer.ggml.scores"))
    result = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Replace(" ", SPACE)]
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
        back.append(decoders.Strip(content=" ", left=1))
    result.normalizer = normalizers.Sequence(steps)
    result.decoder = decoders.Sequence(back)
    return result


def merges_by_score(vocab, scores):
    """Merges in SentencePiece's order: the word of the highest score comes first.

    vocab : {word: id}. scores : one per id. Every way of cutting a word into two words
    is a merge. Returns a list of (left, right).
    """
    ranked = []
    for word, i in vocab.items():
        cuts = ((word[:n], word[n:]) for n in range(1, len(word)))
        known = [
            (vocab[a], vocab[b], a, b) for a, b in cuts if a in vocab and b in vocab
        ]
        ranked += [(-scores[i], i, *cut) for cut in known]
    return [(a, b) for *_, a, b in sorted(ranked)]


def _add_tokens(result, words, types):
    from tokenizers import AddedToken

    for kind, add in (
        (CONTROL, result.add_special_tokens),
        (USER_DEFINED, result.add_tokens),
    ):
        chosen = [w for w, t in zip(words, types, strict=True) if t == kind]
        user = kind == USER_DEFINED
        add([AddedToken(w, normalized=user, special=not user) for w in chosen])

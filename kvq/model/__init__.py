"""Real language models in NumPy: weights from a file, keys and values from a text.

Read it in this order:

gguf_file    what is in a GGUF file, checked before it is used
decoder      the models: Llama and Gemma 3 families, every equation above its function
attend       attention over a `KVCache`, many queries at once, each at its own length
tokenizer    text <-> token ids
weights      where weights come from: a folder of your own, or the package index
capture      keys, values and queries of some layers as a file
evaluate     what a policy costs in perplexity
search       which layers and sides are sensitive, and the best use of a budget

It needs the packages `gguf` and, for text, `tokenizers`; both are imported where they
are used.
"""

from kvq.model.decoder import Decoder, load

__all__ = ["Decoder", "load"]

"""Caches of other libraries that store their tokens in a `kvq.KVCache`.

transformers    `KVQCache` for `model.generate` of Hugging Face Transformers

Each needs the library it is for and is imported by its own name; nothing else here
imports them.
"""

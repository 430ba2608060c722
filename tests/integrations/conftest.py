"""Packages that warn while they are imported, imported before warnings are errors."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.llama.modeling_llama  # noqa: F401

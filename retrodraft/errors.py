"""Errors a caller can tell apart."""


class UnsupportedModelError(ValueError):
    """The object is not a causal language model that `generate` works on."""

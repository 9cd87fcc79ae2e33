"""Turn files and hub data sets into batches of tokens: formats, sources, tokenization, packing."""

__all__ = ["formats", "packing", "schema", "sources", "splits", "squad", "tokenize"]

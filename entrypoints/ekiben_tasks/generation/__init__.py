"""Answer prompts with a model: sampling, conversations, batches, resumable output files."""

__all__ = ["batch", "chat", "record", "resumable_jsonl", "sampling", "settings", "smoke"]

"""Train a model: settings, plan, loop, checkpoints, summary."""

__all__ = [
    "batches",
    "checkpoint",
    "class_scores",
    "loop",
    "plan",
    "prepare",
    "progress",
    "run",
    "run_summary",
    "samples",
    "settings",
    "smoke",
    "token_cache",
    "train",
]

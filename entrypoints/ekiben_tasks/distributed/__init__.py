"""Spread training over processes: their context, and one module for each parallel strategy."""

__all__ = [
    "bf16_adamw",
    "context",
    "failures",
    "gather",
    "heartbeat",
    "model_loading",
    "optimizer",
    "options",
    "partitioned",
    "replicated",
    "saved_state",
    "sharded",
    "strategies",
    "strategy",
    "watch",
]

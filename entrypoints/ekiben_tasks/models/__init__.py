"""Provide causal language models: devices, loading, adapters, architectures, attention, loss, kernels and costs."""

__all__ = [
    "adapter",
    "architecture",
    "architectures",
    "attention",
    "attention_kernel",
    "checkpoint_folder",
    "compile_patches",
    "device",
    "flops",
    "fused_rope",
    "load",
    "lora",
    "loss",
    "memory",
    "merge",
    "merge_checkpoint",
    "sharded_checkpoint",
    "tiny",
    "tuning",
]

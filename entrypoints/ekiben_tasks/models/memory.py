"""Estimate the GPU memory of a run before it starts, and suggest settings for one that would not fit.

What blocks keep is counted for each model (activations.py); what the loss takes, a test counts. Buffers of FSDP2 and
DeepSpeed are those that their sources allocate (torch 2.11, DeepSpeed 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ekiben_tasks.models.activations import kept_bytes
from ekiben_tasks.models.architecture import list_blocks, strip_adapter
from ekiben_tasks.models.classifier import is_classifier
from ekiben_tasks.models.description import find_head
from ekiben_tasks.models.loss import CHUNK
from ekiben_tasks.models.proof import choose_layout
from ekiben_tasks.task.errors import SettingError, nearest

GIB = 1 << 30
# What PyTorch's allocator reserves beyond what is in use, in parts of what blocks keep: batches have different sizes,
# blocks of former ones do not fit. Fitted to max_memory_reserved() of seven runs. With expandable_segments two runs
# reserved nothing beyond.
SPREAD = 0.55
_BUCKET = 500_000_000  # numbers: DeepSpeed's reduce_bucket_size, allocated whole (stage_1_and_2.py, stage3.py)
_LIVE = 1_000_000_000  # numbers: DeepSpeed's stage3_max_live_parameters
_KEPT = (13, 4)  # of a block that cannot be counted: numbers per token in widths and inner widths, a Llama's
Strategy = Literal["none", "ddp", "fsdp", "zero2", "zero3"]

# GiB that a program can allocate, a little less than the data sheet says. The longer name first: "A100-SXM4-80GB"
# before "A100".
SIZES = {
    "GB300": 268,
    "B300": 268,
    "GB200": 178,
    "B200": 178,
    "H200": 139,
    "GH200": 94,
    "H20": 94,
    "RTX PRO 6000": 94,
    "H100 NVL": 93,
    "H100": 79,
    "H800": 79,
    "A100-SXM4-80GB": 79,
    "A100 80GB": 79,
    "A100": 39,
    "A800 40GB": 39,
    "A800": 79,
    "RTX 6000 Ada": 47,
    "RTX A6000": 47,
    "L40S": 44,
    "L40": 44,
    "L20": 44,
    "A40": 44,
    "RTX 5090": 31,
    "RTX 4090": 23,
    "RTX 3090": 23,
    "A30": 23,
    "A10G": 22,
    "A10": 22,
    "L4": 22,
    "V100-SXM2-32GB": 31,
    "V100-PCIE-32GB": 31,
    "V100S": 31,
    "V100": 15,
    "T4": 14,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Hold the counts of parameters and activations of a run; ``expect_memory`` converts them to bytes."""

    frozen: int
    trainable: int
    products: int  # of the frozen: weights of the blocks' GEMMs, which quantisation shrinks
    unit: int  # the weights of the largest block
    root: int  # those outside blocks
    layers: int
    width: int
    vocabulary: int
    kept: float  # per token, in one block
    is_counted: bool = True  # ``kept``; else it is estimated as a Llama's of these widths
    trains_head: bool = False
    compiled: bool = False
    keeps_scores: bool = False  # attention as separate GEMMs (kernel ``math``), which keep the square of the scores
    longest: int = 0  # tokens of the longest example
    size: int = 2  # bytes of an element of weights and activations
    bits: Literal[16, 8, 4] = 16  # of frozen weights; 16: as in ``size``
    gradient_size: int = 4  # bytes per trainable weight: fp32 sums
    optimizer_size: int = 12  # bytes per trainable weight: AdamW's two moments and an exact copy, all fp32
    strategy: Strategy = "none"
    gpus: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"  # states in the host's memory; all: sharded weights, too


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold the expected bytes on one GPU: those that do not depend on the batch, and those that each token adds."""

    weights: int
    gradients: int
    optimizer: int
    loss: int
    per_token: int
    per_token_checkpointed: int
    buffers: int = 0  # of communication
    host: int = 0  # of the host's memory instead, for this GPU
    loss_positions: int = 0  # of the chunk that ``loss`` processes
    loss_per_position: int = 0
    is_counted: bool = True  # what each token adds

    @property
    def fixed(self) -> int:
        """Return the bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.loss + self.buffers

    def total(self, tokens: int, *, checkpointing: bool) -> int:
        """Return the bytes in use at the peak, with micro-batches of ``tokens`` tokens."""
        missing = max(self.loss_positions - tokens, 0) * self.loss_per_position
        return self.fixed - missing + self._activations(tokens, checkpointing=checkpointing)

    def reserved(self, tokens: int, *, checkpointing: bool, expandable: bool) -> int:
        """Return the bytes that the allocator is expected to hold at the peak, with micro-batches of ``tokens``.

        expandable: whether its segments are, as ``has_expandable_segments`` says.
        """
        kept = self._activations(tokens, checkpointing=checkpointing)
        return self.total(tokens, checkpointing=checkpointing) + (0 if expandable else int(SPREAD * kept))

    def _activations(self, tokens: int, *, checkpointing: bool) -> int:
        return tokens * (self.per_token_checkpointed if checkpointing else self.per_token)


def gpu_memory(name: str) -> int:
    """Return the bytes that a program can allocate on the GPU of this name, or of a longer one, as drivers report it.

    Raises:
        SettingError: unknown GPU.
    """
    for known, size in SIZES.items():
        if re.search(rf"\b{re.escape(known)}\b", name, re.IGNORECASE):
            return size * GIB
    raise SettingError(f"--on {name}: unknown GPU.{nearest(name, SIZES)}")


def has_expandable_segments(env: Mapping[str, str]) -> bool:
    """Return whether ``env`` lets the segments of PyTorch's allocator grow, which tasks set where the user sets
    nothing.
    """
    configured = env.get("PYTORCH_ALLOC_CONF", env.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return re.search(r"\bexpandable_segments\s*:\s*true\b", configured, re.IGNORECASE) is not None


def profile_model(model: Any, **choices: Any) -> MemoryProfile:
    """Return the profile of a causal model as it will be trained. The model may be on the meta device.

    choices: the fields of MemoryProfile that depend on the run, such as ``strategy`` and ``bits``.

    Raises:
        TaskError: no layout of its batches is exact.
    """
    causal = strip_adapter(model)
    blocks = list_blocks(causal)
    config = causal.config
    # Kernels of quantised GEMMs separate the compiled parts, so there recomputation is not certain.
    compiled = choices.get("compiled", False) and choices.get("bits", 16) == 16
    size, longest = choices.get("size", 2), int(choices.get("longest", 0))
    table, heads = causal.get_input_embeddings(), getattr(config, "num_attention_heads", None) or 0
    head, width = find_head(causal), table.weight.size(1)
    counted = kept_bytes(model, longest, torch.bfloat16 if size == 2 else torch.float32, compiled=compiled)
    if counted is None:
        kept = float(_KEPT[0] * width + _KEPT[1] * _inner_width(blocks[0], width))
    else:
        kept = counted / size / len(blocks)
    if choices.get("keeps_scores", False) and choose_layout(config) == "packed":
        # The softmax, in fp32 (aten's _scaled_dot_product_attention_math).
        kept += heads * longest * 4 / size
    # Blocks without trained weights keep no activations: only those of the current block exist.
    flows = any(p.requires_grad for module in (*blocks, table) for p in module.parameters())
    everything = list(causal.parameters())
    inside = {id(p) for block in blocks for p in block.parameters()}
    return MemoryProfile(
        frozen=sum(p.numel() for p in everything if not p.requires_grad),
        trainable=sum(p.numel() for p in everything if p.requires_grad),
        products=sum(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2 and not p.requires_grad),
        unit=max(sum(p.numel() for p in block.parameters()) for block in blocks),
        root=sum(p.numel() for p in everything if id(p) not in inside),
        layers=len(blocks) if flows else 1,
        width=width,
        vocabulary=len(head.weight) if is_classifier(causal) else len(table.weight),
        kept=kept,
        is_counted=counted is not None,
        trains_head=head.weight.requires_grad,
        **choices,
    )


def expect_memory(profile: MemoryProfile) -> Memory:
    """Return the estimate. With checkpointing, a token costs one hidden state per block, and one complete block."""
    shards_weights = profile.strategy in ("fsdp", "zero3")
    shards_optimizer = shards_weights or profile.strategy == "zero2"
    # 4-bit and 8-bit weights carry a scale per block of 64, in fp32.
    frozen = profile.frozen * profile.size
    if profile.bits < 16:
        frozen += int(profile.products * (profile.bits / 8 + 4 / 64 - profile.size))
    weights = frozen + profile.trainable * profile.size
    gradients, optimizer = profile.trainable * profile.gradient_size, profile.trainable * profile.optimizer_size
    host = 0
    if shards_optimizer:
        gradients, optimizer = gradients // profile.gpus, optimizer // profile.gpus
    if profile.offload != "none":
        host = gradients + optimizer
        gradients, optimizer = 0, 0
    gathered = 0
    if shards_weights:
        # FSDP2 gathers trained weights from the optimizer's exact copy; DeepSpeed keeps another.
        shard = (frozen if profile.strategy == "fsdp" else weights) // profile.gpus
        if profile.offload == "all":
            host, shard = host + shard, 0
        gathered, weights = _gathered(profile) * profile.size, shard
    positions = CHUNK if profile.trains_head else CHUNK // 2
    return Memory(
        weights,
        gradients,
        optimizer,
        loss=_head_bytes(profile) + positions * _logit_bytes(profile),
        buffers=gathered + _buffer_bytes(profile),
        per_token=int(profile.kept * profile.layers * profile.size),
        per_token_checkpointed=int((profile.width * profile.layers + 2 * profile.kept) * profile.size),
        host=host,
        loss_positions=positions,
        loss_per_position=_logit_bytes(profile),
        is_counted=profile.is_counted,
    )


def _gathered(profile: MemoryProfile) -> int:
    """Return the weights that are gathered simultaneously in a run with sharded ones."""
    if profile.strategy == "zero3":  # DeepSpeed releases them only above that number
        return min(max(_LIVE, 2 * profile.unit), profile.unit * profile.layers + profile.root)
    # FSDP2: the weights outside blocks during the whole pass, the current block, the next one, and the buffer that
    # the gathered one is copied out of (_fsdp_collectives.py: foreach_all_gather, foreach_all_gather_copy_out).
    return profile.root + 3 * profile.unit


def _buffer_bytes(profile: MemoryProfile) -> int:
    """Return the bytes of the buffers for reducing gradients, besides the sums."""
    if profile.strategy == "fsdp" and profile.trainable > profile.frozen:
        # The complete gradient, and the input of the reduction in fp32 (foreach_reduce: reduce_scatter_input).
        return max(profile.unit, profile.root) * (profile.size + 4)
    if profile.strategy in ("zero2", "zero3"):
        # A bucket, with overlap_comm stage 2 has two; and this process's part of the gradients in the weights' dtype.
        buckets = (2 if profile.strategy == "zero2" else 1) * _BUCKET
        return (buckets + profile.trainable // profile.gpus) * profile.size
    return 0


def _head_bytes(profile: MemoryProfile) -> int:
    """Return the gradient of a trained head, which the loss makes (loss.py)."""
    return profile.vocabulary * profile.width * profile.size if profile.trains_head else 0


def _logit_bytes(profile: MemoryProfile) -> int:
    """Return the bytes of the loss at its peak for one position: its logits and values computed from them (loss.py)."""
    # Compiled: the logits, their gradient, and rows of fp32 numbers that Triton keeps in registers or in 8 bytes.
    # Otherwise: three fp32 tensors, a mask of a byte, the logits and their gradient, of which a test counts the bytes.
    per_logit = 2 * profile.size + 8 if profile.compiled else profile.size + 13 + (4 if profile.size < 4 else 0)
    return profile.vocabulary * per_logit


def suggest(profile: MemoryProfile, budget_bytes: int, *, quantises: bool = True, offloads: bool = False) -> list[str]:
    """Return settings, each of which makes one example fit into ``budget_bytes`` per GPU, with checkpointing.

    quantises: whether frozen weights in 4 bits are an option. offloads: whether the host's memory is one, by DeepSpeed.
    """
    suggestions = []
    longest = max(profile.longest, 1)

    def expected(**changes: Any) -> int:
        changed = replace(profile, **changes)
        return expect_memory(changed).total(max(changed.longest, 1), checkpointing=True)

    shorter = longest // 2
    while shorter >= 256 and expected(longest=shorter) > budget_bytes:
        shorter //= 2
    if shorter >= 256:
        suggestions.append(f"examples of at most {shorter:,} tokens (--set max_length={shorter})")
    for gpus in (2, 4, 8, 16, 32, 64, 128):
        if gpus > profile.gpus and expected(strategy="fsdp", gpus=gpus, offload="none") <= budget_bytes:
            suggestions.append(f"{gpus} GPUs like this one with sharded weights (--set parallel=fsdp)")
            break
    can_offload = offloads and profile.offload == "none" and profile.bits == 16
    if can_offload and expected(strategy="zero3", offload="all") <= budget_bytes:
        suggestions.append("weights in the host's memory (--set parallel=deepspeed --set deepspeed.offload=all)")
    everything = profile.frozen + profile.trainable
    if profile.trainable > everything // 2:
        few = max(everything // 200, 1)
        if (
            expected(frozen=everything, trainable=few, products=everything - 2 * profile.width * profile.vocabulary)
            <= budget_bytes
        ):
            suggestions.append("LoRA instead of training every weight (--set method=lora)")
    elif quantises and profile.bits > 4 and expected(bits=4) <= budget_bytes:
        suggestions.append("the frozen weights in 4 bits (--set bits=4)")
    bigger = [name for name, size in SIZES.items() if budget_bytes < size * GIB and expected() <= size * GIB * 0.9]
    if bigger:
        suggestions.append(f"a GPU with more memory: {', '.join(bigger)}")
    return suggestions


def _inner_width(block: Any, width: int) -> int:
    """Return the feed-forward's width, which every configuration names differently: the widest input of a GEMM."""
    inputs = [
        module.nx if type(module).__name__ == "Conv1D" else getattr(module, "in_features", 0)
        for module in block.modules()
    ]
    return max([*inputs, width])

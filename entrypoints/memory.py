"""What a run will need of a GPU's memory, before it starts; and, where that is too much, what would make it fit.

Upper estimates. What blocks keep, compiled and not, was counted with autograd's own hooks for every architecture, and a
test counts it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from architectures import list_blocks, strip_adapter
from loss import CHUNK

GIB = 1 << 30
Strategy = Literal["none", "ddp", "fsdp", "zero2", "zero3"]

# GiB that a program can have, a little less than the data sheet says. The longer name first: "A100-SXM4-80GB" before "A100".
SIZES = {
    "B200": 178, "H200": 139, "H100 NVL": 93, "H100": 79, "A100-SXM4-80GB": 79, "A100 80GB": 79, "A100": 39, "L40S": 44,
    "A40": 44, "RTX 4090": 23, "L4": 22, "V100-SXM2-32GB": 31, "V100": 15, "T4": 14,
}  # fmt: skip

# Per block: numbers kept per token for backward, in widths and in inner widths (of the feed-forward), and per head and
# token of its row where attention takes a mask. First with the block's own weights frozen, then trained.
_KEPT = {
    "gpt2": ((8, 4, 0), (10, 5, 0)),
    "gpt_neo": ((9, 4, 3), (11, 5, 3)),
    "gpt_neox": ((9, 1, 0), (11, 2, 0)),
    "falcon": ((6, 1, 2), (7, 2, 2)),
    "mpt": ((3, 2, 3), (5, 3, 3)),
    "llama": ((9, 3, 0), (13, 4, 0)),
}
# The same of compiled blocks, which compute again what is cheap. Each has a width more than the large tensors that were
# counted, for the small ones: the sums of norms and of attention, what an adapter has narrowed.
_KEPT_COMPILED = {
    "gpt2": ((7, 1, 0), (9, 2, 0)),
    "gpt_neo": ((8, 1, 3), (11, 2, 3)),
    "gpt_neox": ((8, 1, 0), (11, 2, 0)),
    "falcon": ((8, 1, 2), (10, 2, 2)),
    "mpt": ((6, 1, 2), (9, 2, 2)),
    "llama": ((7, 2, 0), (9, 3, 0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the estimate is made of. The numbers are counts, not bytes; ``expect_memory`` turns them into bytes."""

    frozen: int
    trainable: int
    products: int  # of the frozen: weights of the blocks' products, the ones that quantisation shrinks
    unit: int  # the largest part whose weights a sharded run gathers at once
    layers: int
    width: int
    vocabulary: int
    kept: float  # per token, in one block
    compiled: bool = False
    longest: int = 0  # tokens of the longest row
    size: int = 2  # bytes of a number in weights and activations
    bits: Literal[16, 8, 4] = 16  # of frozen products; 16: as ``size`` says
    gradient_size: int = 4  # bytes per trainable weight: fp32 sums
    optimizer_size: int = 12  # bytes per trainable weight: AdamW's two moments and an exact copy, all fp32
    strategy: Strategy = "none"
    gpus: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"  # what is in the host's memory; all: sharded weights, too


@dataclass(frozen=True, slots=True)
class Memory:
    """Expected bytes on one GPU: what is there whatever the batch, and what each token of a pack adds."""

    weights: int
    gradients: int
    optimizer: int
    loss: int
    per_token: int
    per_token_checkpointed: int
    host: int = 0  # of the host's memory instead, for this GPU

    @property
    def fixed(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.loss

    def of(self, tokens: int, *, checkpointing: bool) -> int:
        return self.fixed + tokens * (self.per_token_checkpointed if checkpointing else self.per_token)


def count_needs(model: Any, **choices: Any) -> Needs:
    """``Needs`` of a causal model as it will be trained, without weights (meta) will do; ``choices``: its other fields."""
    causal = strip_adapter(model)
    blocks = list_blocks(causal)
    config = causal.config
    trained_block = any(p.requires_grad for name, p in blocks[0].named_parameters() if "lora_" not in name)
    # The kernels of quantised products stand between compiled parts, so there nothing is sure to be computed again.
    compiled = choices.get("compiled", False) and choices.get("bits", 16) == 16
    widths, inners, pairs = (_KEPT_COMPILED if compiled else _KEPT)[config.model_type][1 if trained_block else 0]
    kept = widths * config.hidden_size + inners * _inner_width(blocks[0], config)
    kept += pairs * config.num_attention_heads * int(choices.get("longest", 0))
    # Dropped-out inputs, and which were dropped: a byte each where it is compiled.
    inputs = sum(part.in_features for part in blocks[0].modules() if hasattr(part, "lora_A"))
    kept += inputs * (1 + (1 / choices.get("size", 2) if compiled else 1))
    table = causal.get_input_embeddings()
    # Where nothing in the blocks learns, nothing of them is kept: they are there one at a time.
    flows = any(p.requires_grad for part in (*blocks, table) for p in part.parameters())
    parts = [*blocks, table, causal.get_output_embeddings()]
    everything = list(causal.parameters())
    return Needs(
        frozen=sum(p.numel() for p in everything if not p.requires_grad),
        trainable=sum(p.numel() for p in everything if p.requires_grad),
        products=sum(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2 and not p.requires_grad),
        unit=max(sum(p.numel() for p in part.parameters()) for part in parts),
        layers=len(blocks) if flows else 1,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        kept=kept,
        **choices,
    )


def expect_memory(needs: Needs) -> Memory:
    """With checkpointing a token costs one width per block, and one block whole."""
    shares_weights = needs.strategy in ("fsdp", "zero3")
    shares_rest = shares_weights or needs.strategy == "zero2"
    # 4-bit and 8-bit weights carry a scale per block of 64, in fp32.
    frozen = needs.frozen * needs.size
    if needs.bits < 16:
        frozen += int(needs.products * (needs.bits / 8 + 4 / 64 - needs.size))
    weights = frozen + needs.trainable * needs.size
    gradients, optimizer = needs.trainable * needs.gradient_size, needs.trainable * needs.optimizer_size
    host = 0
    if shares_rest:
        gradients, optimizer = gradients // needs.gpus, optimizer // needs.gpus
    if needs.offload != "none":
        host = gradients + optimizer
        gradients, optimizer = 0, 0
    if shares_weights:
        # FSDP2 gathers what learns from the optimizer's exact copy; DeepSpeed keeps another.
        own = (frozen if needs.strategy == "fsdp" else weights) // needs.gpus
        if needs.offload == "all":
            host, own = host + own, 0
        # Two units gathered at once: the one at work and the next.
        weights = 2 * needs.unit * needs.size + own
    return Memory(
        weights,
        gradients,
        optimizer,
        loss=CHUNK * needs.vocabulary * (2 * needs.size + 8),
        per_token=int(needs.kept * needs.layers * needs.size),
        per_token_checkpointed=int((needs.width * needs.layers + 2 * needs.kept) * needs.size),
        host=host,
    )


def suggest(needs: Needs, room: int, *, quantises: bool = True) -> list[str]:
    """What would make one row fit ``room`` bytes on each GPU with checkpointing, each tried alone, as settings to give."""
    found = []
    rows = max(needs.longest, 1)

    def expected(**changes: Any) -> int:
        changed = replace(needs, **changes)
        return expect_memory(changed).of(max(changed.longest, 1), checkpointing=True)

    shorter = rows // 2
    while shorter >= 256 and expected(longest=shorter) > room:
        shorter //= 2
    if shorter >= 256:
        found.append(f"rows of at most {shorter:,} tokens (--set max_length={shorter})")
    for gpus in (2, 4, 8, 16, 32, 64, 128):
        if gpus > needs.gpus and expected(strategy="fsdp", gpus=gpus, offload="none") <= room:
            found.append(f"{gpus} GPUs like this one that share the weights (--set parallel=fsdp)")
            break
    everything = needs.frozen + needs.trainable
    if needs.trainable > everything // 2:
        few = max(everything // 200, 1)
        if expected(frozen=everything, trainable=few, products=everything - 2 * needs.width * needs.vocabulary) <= room:
            found.append("LoRA instead of training every weight (--set method=lora)")
    elif quantises and needs.bits > 4 and expected(bits=4) <= room:
        found.append("the frozen weights in 4 bits (--set bits=4)")
    bigger = [name for name, size in SIZES.items() if room < size * GIB and expected() <= size * GIB * 0.9]
    if bigger:
        found.append(f"a GPU with more memory: {', '.join(bigger)}")
    return found


def memory_of(device_name: str) -> int | None:
    """Bytes of a GPU that is not here, or None for one that is not in the table."""
    for name, size in SIZES.items():
        if name in device_name:
            return size * GIB
    return None


def _inner_width(block: Any, config: Any) -> int:
    """Of the feed-forward, which every configuration names differently: the widest input of a product."""
    inputs = [
        part.nx if type(part).__name__ == "Conv1D" else getattr(part, "in_features", 0) for part in block.modules()
    ]
    return max([*inputs, int(config.hidden_size)])

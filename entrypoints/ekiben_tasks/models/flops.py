"""Count the FLOPs that a model's training needs, and the share of the GPUs' peak that a run reaches (MFU).

A GEMM with a weight of n elements costs 2n FLOPs per token forward; backward 2n more for the gradient of the weight,
where that weight is trained, and 2n for the gradient of its input, where something before it is trained. So full
training costs 6N per token, a LoRA run 4N + 6A (A: the adapter's weights), a last-layer run 2N and the head's own.
Attention's two products cost 4 * width per pair of tokens that see each other, and twice that backward. Norms,
activations, softmax and table look-ups are not counted, nor is what checkpointing computes twice.

After Kaplan et al. 2020 (arXiv:2001.08361), section 2.1, and Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix
B, which count 6N, every token's logits, and pairs above the diagonal; we count what a causal model needs, which is
less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ekiben_tasks.models.architecture import attention_width, attention_windows, list_blocks, strip_adapter
from ekiben_tasks.models.description import find_head

# Dense bf16 (fp16 where there is no bf16) tensor-core peaks with fp32 sums in TFLOP/s, without sparsity, from NVIDIA's
# data sheets of each product; RTX 30, 40, 50 and PRO: the Ampere GA102, Ada and RTX Blackwell (PRO) architecture
# whitepapers. B200, B300: the HGX data sheet (36 PFLOP/s with sparsity on 8 GPUs); GB200, GB300: the NVL72 data sheets
# (360 on 72). The longer name first: "H100 PCIe" before "H100".
PEAKS = {
    "GB300": 2500,
    "GB200": 2500,
    "B300": 2250,
    "B200": 2250,
    "GH200": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A30": 165,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L20": 119.5,
    "L4": 121,
    "V100": 125,
    "T4": 65,
    "RTX PRO 6000": 503.8,
    "RTX 6000 Ada": 364,
    "RTX A6000": 155,
    "RTX 5090": 209.5,
    "RTX 4090": 165,
    "RTX 3090": 71,
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Hold the FLOPs of training, forward and backward, of each token, target and pair of tokens."""

    per_token: float  # GEMMs with the blocks' weights
    per_target: float  # the head: only where a token is a target
    per_pair: tuple[tuple[int | None, float], ...]  # (window, FLOPs of one pair of tokens in all layers with it)

    def of_examples(self, lengths: Sequence[int], num_target_tokens: int) -> float:
        """Return the FLOPs of examples of ``lengths`` tokens, ``num_target_tokens`` of them targets in all."""
        pairs = sum(cost * sum(count_pairs(length, window) for length in lengths) for window, cost in self.per_pair)
        return self.per_token * sum(lengths) + self.per_target * num_target_tokens + pairs


def count_pairs(length: int, window: int | None = None) -> int:
    """Return how many pairs of tokens attend: each of ``length`` tokens to itself and to those before it.

    window: the most tokens that one attends to, itself included; None: all before it.
    """
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def training_costs(model: Any) -> Costs:
    """Return the costs of a causal model as it will be trained, with its adapter and frozen weights.

    The model may be on the meta device. Whether a gradient flows is decided block by block: the first trained block's
    own input needs none, which is counted all the same, a fraction of one block of many.
    """
    causal = strip_adapter(model)
    blocks = list_blocks(causal)
    head, table = find_head(causal), causal.get_input_embeddings()
    flows = any(parameter.requires_grad for parameter in table.parameters())
    per_token, spans = 0.0, dict[int | None, float]()
    for block, window in zip(blocks, attention_windows(causal.config, len(blocks)), strict=True):
        flows = flows or any(parameter.requires_grad for parameter in block.parameters())
        per_token += sum(_product(module, flows) for module in block.modules())
        per_token += _experts(block, causal.config, flows)
        spans[window] = spans.get(window, 0.0) + (12 if flows else 4) * attention_width(causal.config)
    # The norm before the head: all else that is trained, and neither block nor table nor head.
    known = {id(parameter) for module in (table, head, *blocks) for parameter in module.parameters()}
    flows = flows or any(p.requires_grad for p in causal.parameters() if id(p) not in known)
    return Costs(per_token, _product(head, flows), tuple(spans.items()))


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of one GPU, or None for one that is not in PEAKS.

    Names match as words: "A40" is not in "A4000".
    """
    for name, teraflops in PEAKS.items():
        if re.search(rf"\b{name}\b(?! (Laptop|Max-Q|D\b|Ti\b))", device_name):
            return teraflops * 1e12
    return None


def utilisation(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """Return the MFU: ``flops`` over what all ``gpus`` can do in ``seconds`` (PaLM, arXiv:2204.02311, appendix B).

    peak: FLOP/s of one GPU.
    """
    return flops / seconds / (gpus * peak)


def _experts(block: Any, config: Any, flows: bool) -> float:
    """FLOPs per token of experts whose weights are one tensor, ``[experts, ...]``, of which a token uses a few."""
    known = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
    chosen = next((value for name in known if isinstance(value := getattr(config, name, None), int)), 1)
    total = 0.0
    for name, weight in block.named_parameters():
        if weight.ndim == 3 and "expert" in name:
            share = min(chosen / weight.shape[0], 1.0)
            total += 2.0 * weight.numel() * share * (1 + bool(weight.requires_grad) + flows)
    return total


def _product(module: Any, flows: bool) -> float:
    """FLOPs per token of a module that multiplies by a weight, else 0."""
    if hasattr(module, "base_layer"):
        return 0.0  # an adapted layer: its base and its adapter are modules of their own
    if hasattr(module, "in_features") and hasattr(module, "out_features"):  # not numel(): 4-bit weights are packed
        size = module.in_features * module.out_features
    elif type(module).__name__ == "Conv1D":
        size = module.nx * module.nf
    else:
        return 0.0
    return 2.0 * int(size) * (1 + bool(module.weight.requires_grad) + flows)

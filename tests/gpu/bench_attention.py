"""Speed of causal attention, forward and backward, by kernel: the table of docs/benchmarks.

    python3 tests/gpu/bench_attention.py [--json FILE] [--tokens 32768] [--heads 16]

Examples of one length: torch's scaled_dot_product_attention with each of its kernels, and flash-attn 2 where it is installed.
Examples of mixed length, packed: torch's varlen_attn, flash-attn 2's, and scaled_dot_product_attention one by one. Every case
has the same number of tokens. A number is TFLOP/s of what attention needs: 3.5 × 4 × pairs × heads × size, backward 2.5 × forward.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = (64, 80, 128)
LENGTHS = (2048, 4096, 8192, 16384, 32768)
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixed_lengths(longest: int, tokens: int) -> list[int]:
    """Return lengths from a sixteenth of ``longest`` to it, which add up to ``tokens``."""
    chance, lengths = random.Random(0), [longest]
    while sum(lengths) < tokens:
        lengths.append(min(chance.randint(longest // 16, longest), tokens - sum(lengths)))
    return lengths


def uniform_kernels(count: int) -> dict[str, Attend]:
    """By name; each of tensors [tokens, heads, size]."""

    def sdpa(backend: SDPBackend) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch = (item.unflatten(0, (count, -1)).transpose(1, 2) for item in (q, k, v))
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(*batch, is_causal=True)

        return attend

    kernels = {name: sdpa(backend) for name, backend in KERNELS.items()}
    if flash_attn := _flash_attn():
        kernels["flash-attn 2"] = lambda q, k, v: flash_attn.flash_attn_func(
            *(item.unflatten(0, (count, -1)) for item in (q, k, v)), causal=True
        )
    return kernels


def mixed_kernels(lengths: list[int]) -> dict[str, Attend]:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    most = max(lengths)

    def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        split = zip(*(item.split(lengths) for item in (q, k, v)), strict=True)
        examples = ([item.transpose(0, 1)[None] for item in qkv] for qkv in split)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return torch.cat([F.scaled_dot_product_attention(*example, is_causal=True) for example in examples], 2)

    kernels: dict[str, Attend] = {
        "varlen": lambda q, k, v: torch.as_tensor(varlen_attn(q, k, v, ends, ends, most, most, window_size=(-1, 0))),
        "one by one": one_by_one,
    }
    if flash_attn := _flash_attn():
        kernels["flash-attn 2"] = lambda q, k, v: flash_attn.flash_attn_varlen_func(
            q, k, v, ends, ends, most, most, causal=True
        )
    return kernels


def _flash_attn() -> Any:
    try:
        import flash_attn
    except ImportError:
        return None
    return flash_attn


def seconds(attend: Attend, tensors: list[torch.Tensor], weight: torch.Tensor, repeats: int) -> float:
    """Return the median of forward and backward, timed by events."""
    times: list[float] = []
    for number in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = attend(*tensors)
        output.backward(weight.view_as(output))
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def measure(tokens: int, heads: int, repeats: int) -> list[dict[str, Any]]:
    results = []
    for size in SIZES:
        for longest in LENGTHS:
            for kind in ("one length", "mixed"):
                if kind == "mixed" and longest == tokens:
                    continue
                lengths = mixed_lengths(longest, tokens) if kind == "mixed" else [longest] * (tokens // longest)
                kernels = mixed_kernels(lengths) if kind == "mixed" else uniform_kernels(len(lengths))
                work = 3.5 * 4 * heads * size * sum(length * (length + 1) / 2 for length in lengths)
                result: dict[str, Any] = {"size": size, "longest": longest, "lengths": kind, "count": len(lengths)}
                for name, attend in kernels.items():
                    tensors = [
                        torch.randn(tokens, heads, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
                        for _ in range(3)
                    ]
                    weight = torch.randn_like(tensors[0])
                    try:
                        result[name] = round(work / seconds(attend, tensors, weight, repeats) / 1e12, 1)
                    except RuntimeError as error:
                        result[name] = None
                        print(f"{name}, {size}, {longest}: {str(error).splitlines()[0]}", file=sys.stderr)
                results.append(result)
                print(json.dumps(result), flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    results = measure(args.tokens, args.heads, args.repeats)
    if args.json:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tokens": args.tokens,
            "heads": args.heads,
        }
        args.json.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

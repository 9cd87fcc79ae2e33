"""Speed of causal attention, forward and backward, by kernel: the table of docs/benchmarks.

    python3 qa/gpu/bench_attention.py [--json FILE] [--tokens 32768] [--heads 16] [--size 128]

Examples of one length: torch's scaled_dot_product_attention with each of its kernels, and flash-attn 2 and 4 where they
are installed. Examples of mixed length, packed: torch's varlen_attn, flash-attn's, and scaled_dot_product_attention one
by one. Every case has the same number of tokens. A number is TFLOP/s of what attention needs: 3.5 × 4 × pairs × heads ×
size, backward 2.5 × forward. "first_call_s" has the seconds of each kernel's first call, which is none of those:
flash-attn 4 compiles there what it did not compile for an earlier case, and keeps it on the disk only where
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
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

    def flash_attn(package: Any) -> Attend:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return _output(package.flash_attn_func(*(item.unflatten(0, (count, -1)) for item in qkv), causal=True))

        return attend

    return kernels | {name: flash_attn(package) for name, package in _flash_attn().items()}


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
    ranges = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": most, "max_seqlen_k": most}

    def flash_attn(package: Any) -> Attend:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return _output(package.flash_attn_varlen_func(*qkv, **ranges, causal=True))

        return attend

    return kernels | {name: flash_attn(package) for name, package in _flash_attn().items()}


def _flash_attn() -> dict[str, Any]:
    """Return what is installed of flash-attn 2 and 4, by name. The package flash_attn is there with either."""
    modules = {"flash-attn 2": ("flash-attn", "flash_attn"), "flash-attn 4": ("flash-attn-4", "flash_attn.cute")}
    return {
        name: importlib.import_module(module)
        for name, (package, module) in modules.items()
        if any(importlib.metadata.distributions(name=package))
    }


def _output(returned: Any) -> torch.Tensor:
    """Return the output alone: flash-attn 4 returns the logarithm of the sums beside it."""
    return torch.as_tensor(returned[0] if isinstance(returned, tuple) else returned)


def seconds(attend: Attend, tensors: list[torch.Tensor], weight: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Return the median of forward and backward, timed by events, and the time of the first call, by the clock."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    output = attend(*tensors)
    output.backward(weight.view_as(output))
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    times: list[float] = []
    for number in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = attend(*tensors)
        output.backward(weight.view_as(output))
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2], first


def measure(
    tokens: int, heads: int, repeats: int, sizes: Sequence[int] = SIZES, without: Sequence[str] = ()
) -> list[dict[str, Any]]:
    results = []
    for size in sizes:
        for longest in LENGTHS:
            for kind in ("one length", "mixed"):
                if kind == "mixed" and longest == tokens:
                    continue
                lengths = mixed_lengths(longest, tokens) if kind == "mixed" else [longest] * (tokens // longest)
                kernels = mixed_kernels(lengths) if kind == "mixed" else uniform_kernels(len(lengths))
                work = 3.5 * 4 * heads * size * sum(length * (length + 1) / 2 for length in lengths)
                result: dict[str, Any] = {"size": size, "longest": longest, "lengths": kind, "count": len(lengths)}
                first_calls: dict[str, float] = {}
                for name, attend in kernels.items():
                    if name in without:
                        continue
                    tensors = [
                        torch.randn(tokens, heads, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
                        for _ in range(3)
                    ]
                    weight = torch.randn_like(tensors[0])
                    try:
                        median, first = seconds(attend, tensors, weight, repeats)
                    except Exception as error:  # of torch, or of a compiler at run time
                        result[name] = None
                        reason = (str(error).splitlines() or [type(error).__name__])[0]
                        print(f"{name}, {size}, {longest}: {reason}", file=sys.stderr)
                    else:
                        result[name], first_calls[name] = round(work / median / 1e12, 1), round(first, 3)
                results.append({**result, "first_call_s": first_calls})
                print(json.dumps(results[-1]), flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--size", type=int, action="append", help="only heads of this size, instead of 64, 80 and 128")
    parser.add_argument("--without", action="append", default=[], metavar="KERNEL", help='leave one out: "one by one"')
    args = parser.parse_args()
    results = measure(args.tokens, args.heads, args.repeats, args.size or SIZES, args.without)
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

"""Choose the kernels of attention: by the setting ``attention``, or the fastest of this machine that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ekiben_tasks.models.attention import PackedKwargs, attend, has_varlen, round_length
from ekiben_tasks.models.attention_kernel import (
    AMPERE_KERNELS,
    FLASH_ATTN_KERNELS,
    SDPA_KERNELS,
    AttentionKernel,
    missing_package,
)
from ekiben_tasks.models.device import Device
from ekiben_tasks.models.proof import Proof, verify
from ekiben_tasks.task.errors import TaskError

FLASH_ATTN_4_SIZES = (64, 128)  # head sizes whose results were compared on an H100: with 80 its gradients were wrong
# Tokens of the longest example from which on auto takes it: with examples of 4,000 to 7,600 tokens a step took a tenth
# less.
FLASH_ATTN_4_LENGTH = 4096
MAX_DIFFERENCE = 0.1  # of a kernel from torch's results, of the largest: bf16 stays below 0.03


@dataclass(frozen=True, slots=True)
class ChosenKernels:
    """Hold the kernel for examples of one length, and that for examples of mixed lengths.

    setting: what forward() and kernels_in_use() take; note: why ``auto`` took no flash-attn 4 that is there.
    """

    one_length: str
    mixed: str
    setting: AttentionKernel = "auto"
    note: str = ""


def prefer_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Choose the flash kernels for this process, and return the name of the one for examples of mixed lengths."""
    if not has_varlen(device, dtype):
        return "sdpa"
    if torch.cuda.get_device_capability(device) == (9, 0):
        with contextlib.suppress(Exception):  # an interface without kernels, or kernels of another torch: use torch's
            torch.nn.attention.activate_flash_attention_impl("FA3")
            return "flash_attn_3"
    return "varlen"


def choose_kernels(
    kernel: AttentionKernel, config: Any, device: Device, *, is_here: bool, longest: int = 0
) -> ChosenKernels:
    """Return the kernels of training for the setting ``attention``, and prepare this process for them.

    config: the model's. is_here: ``device`` is this machine's; else it is planned for, and kernels are chosen by its
    name. longest: tokens of the longest example.

    Raises:
        TaskError: the image, the model or the device has no such kernel.
    """
    if kernel == "auto":
        return _choose_fastest(config, device, longest, is_here=is_here)
    if reason := missing_package(kernel) or _unsuited(kernel, config, device, is_here=is_here):
        raise TaskError(reason)
    if kernel == "flash_attn_3" and is_here:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    if is_here:
        _try_kernel(kernel, config, device)
    return ChosenKernels(kernel, kernel, kernel)


def _choose_fastest(config: Any, device: Device, longest: int, *, is_here: bool) -> ChosenKernels:
    proof = verify(config)
    if proof.layout != "packed":
        return ChosenKernels(proof.implementation, proof.implementation)
    if _is_bound(config, proof, longest):
        return _choose_limited(config, proof, device, is_here=is_here)
    note = ""
    if longest >= FLASH_ATTN_4_LENGTH and device.is_hopper(is_here=is_here) and missing_package("flash_attn_4") is None:
        try:
            return choose_kernels("flash_attn_4", config, device, is_here=is_here)
        except TaskError as error:
            reason = str(error).removeprefix("setting attention=flash_attn_4: ").removesuffix("; use attention=auto")
            note = f"attention=auto leaves flash-attn 4: {reason}"
    if is_here:
        mixed = prefer_kernels(device.torch_device, device.dtype)
        return ChosenKernels("cudnn" if _prefers_cudnn(device.torch_device) else "sdpa", mixed, note=note)
    return ChosenKernels("sdpa", "varlen" if device.dtype == torch.bfloat16 else "sdpa", note=note)


def _is_bound(config: Any, proof: Proof, longest: int) -> bool:
    """Return whether the limits of attention have an effect on examples of at most ``longest`` tokens; 0: of any."""
    window = getattr(config.get_text_config(), "sliding_window", None)
    only_windows = not (proof.has_softcap or proof.has_sinks or proof.masks)
    if only_windows and isinstance(window, int) and longest > 0 and round_length(longest) <= window:
        return False
    return proof.is_limited


def _choose_limited(config: Any, proof: Proof, device: Device, *, is_here: bool) -> ChosenKernels:
    """Choose kernels for attention with windows, chunks, soft caps or sinks: torch's flash kernel, else row by row."""
    if proof.one_by_one:
        return ChosenKernels("sdpa", "sdpa", "sdpa", note="attention is computed row by row: no kernel has its limits")
    if not is_here:
        mixed = "varlen" if device.dtype == torch.bfloat16 else "sdpa"
        return ChosenKernels(mixed, mixed, "varlen" if mixed == "varlen" else "sdpa")
    if not has_varlen(device.torch_device, device.dtype):
        return ChosenKernels("sdpa", "sdpa", "sdpa")
    try:
        _try_kernel("varlen", config, device)
    except TaskError as error:
        return ChosenKernels("sdpa", "sdpa", "sdpa", note=f"attention is computed row by row: {error}")
    return ChosenKernels("varlen", "varlen", "varlen")


def _unsuited(kernel: AttentionKernel, config: Any, device: Device, *, is_here: bool) -> str | None:
    """Return why this model or GPU does not support ``kernel``, or None."""
    setting = f"setting attention={kernel}:"
    proof = verify(config)
    if proof.layout == "packed" and proof.is_limited and kernel not in ("sdpa", "math", "varlen"):
        return (
            f"{setting} the attention of {config.model_type} has windows, sinks or a soft cap, which it is not given"
            " here; use attention=auto"
        )
    if proof.one_by_one and kernel == "varlen":
        return f"{setting} it has neither soft caps nor chunks; use attention=auto"
    if proof.layout != "packed" and (kernel not in SDPA_KERNELS or proof.implementation != "sdpa"):
        choices = f"one of {', '.join(SDPA_KERNELS)}, or auto" if proof.implementation == "sdpa" else "attention=auto"
        return f"{setting} the attention of {config.model_type} cannot take it; use {choices}"
    if not device.is_gpu:
        gpu_only = kernel not in ("sdpa", "flash", "math")
        return f"{setting} it runs on a GPU only; use attention=auto" if gpu_only and is_here else None
    if kernel in AMPERE_KERNELS and not device.has_bf16:
        return f"{setting} {device.name} is older than Ampere, and has no such kernel; use attention=auto"
    if kernel == "flash_attn_4" and device.is_older_than_hopper(is_here=is_here):
        return f"{setting} {device.name} is older than Hopper, and has no such kernel; use attention=auto"
    if kernel == "flash_attn_4" and _head_size(config) not in FLASH_ATTN_4_SIZES:
        return (
            f"{setting} its results were compared with heads of 64 and 128 alone, and are wrong with 80; use"
            " attention=auto"
        )
    if kernel == "flash_attn_3" and is_here and torch.cuda.get_device_capability(device.torch_device) != (9, 0):
        return f"{setting} its kernels are for Hopper, and {device.name} is none; use attention=flash_attn_2 or auto"
    return None


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _try_kernel(kernel: AttentionKernel, config: Any, device: Device) -> None:
    """Compare ``kernel`` with torch's arithmetic on two small examples, forward and backward, with the model's heads.

    Raises:
        TaskError: it does not run, with what torch or the kernel's package says, or its results are others.
    """
    heads = int(config.num_attention_heads)
    size = _head_size(config)
    what = f"{device.name} with heads of {size} in {str(device.dtype).removeprefix('torch.')}"
    try:
        kept = int(getattr(config, "num_key_value_heads", None) or heads)
        difference = compare_kernel(kernel, heads, kept, size, device, limited=verify(config).is_limited)
    # Any exception: a kernel that is compiled at run time raises its compiler's errors, and AssertionError.
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(
            f"setting attention={kernel}: it does not run on {what} ({first}); use attention=auto"
        ) from error
    if not difference <= MAX_DIFFERENCE:
        raise TaskError(
            f"setting attention={kernel}: its results on {what} differ from torch's by {difference:.0%} of the largest;"
            " use attention=auto"
        )


def compare_kernel(
    kernel: AttentionKernel, heads: int, kept: int, size: int, device: Device, *, limited: bool = False
) -> float:
    """Return the largest difference of outputs and gradients from fp32's, as a share of the largest; NaN where there is
    one.

    kept: heads of keys and values. limited: with a window and sinks. Raises what the kernel does.
    """
    chance = torch.Generator().manual_seed(0)
    values = [torch.randn(1, count, 512, size, generator=chance) for count in (heads, kept, kept, heads)]
    ends = torch.tensor([0, 333, 512], device=device.torch_device, dtype=torch.int32)
    seq_lens = () if kernel in ("varlen", "flash_attn_3", *FLASH_ATTN_KERNELS) else (333, 179)
    both: tuple[tuple[AttentionKernel, tuple[int, ...], torch.dtype], ...] = (
        (kernel, seq_lens, device.dtype),
        ("math", (333, 179), torch.float32),
    )
    results: list[list[torch.Tensor]] = []
    for name, lengths, dtype in both:
        rounded = [value.to(device.torch_device, device.dtype).to(dtype, copy=True) for value in values]
        query, key, value = (tensor.requires_grad_() for tensor in rounded[:3])
        with kernels_in_use(name, device.torch_device):
            packed = PackedKwargs(cu_seq_lens_q=ends, max_length_q=333, row_lengths=lengths, kernel=name)
            sinks = torch.linspace(-2, 2, heads, device=device.torch_device).to(dtype).requires_grad_()
            limits = {"sliding_window": 64, "s_aux": sinks} if limited else {}
            mixed, _ = attend(torch.nn.Module(), query, key, value, None, **packed, **limits)
            mixed.backward(rounded[3].transpose(1, 2))
        learned = [query, key, value, *([sinks] if limited else [])]
        results.append([mixed.detach().float(), *(torch.as_tensor(item.grad).float() for item in learned)])
    shares = [(one - two).abs().max() / two.abs().max() for one, two in zip(*results, strict=True)]
    return float(torch.stack(shares).max())


@contextlib.contextmanager
def kernels_in_use(kernel: AttentionKernel, device: torch.device) -> Iterator[None]:
    """Restrict torch's attention to ``kernel`` in this context; for ``auto``, prefer the fastest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    if kernel in backends:
        with sdpa_kernel(backends[kernel]):
            yield
    else:
        with uniform_kernels(device) if kernel == "auto" else contextlib.nullcontext():
            yield


def _prefers_cudnn(device: torch.device) -> bool:
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9)


@contextlib.contextmanager
def uniform_kernels(device: torch.device) -> Iterator[None]:
    """Prefer cuDNN's attention in this context, on Hopper and later: it is the fastest for examples of one length."""
    if not _prefers_cudnn(device):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield

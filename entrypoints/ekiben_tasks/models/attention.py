"""Choose an attention kernel for packed examples, each attending only to itself, and call a model with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F

from ekiben_tasks.data.packing import Layout, PackedBatch
from ekiben_tasks.models.architecture import find_architecture, plain_attention
from ekiben_tasks.models.attention_kernel import (
    AMPERE_KERNELS,
    FLASH_ATTN_KERNELS,
    SDPA_KERNELS,
    AttentionKernel,
    missing_package,
)
from ekiben_tasks.models.device import Device
from ekiben_tasks.task.errors import TaskError

ATTENTION = "ekiben_packed"
FLASH_ATTN_4_SIZES = (64, 128)  # of heads, whose results were compared on an H100: with 80 its gradients were wrong
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


def choose_layout(config: Any) -> Layout:
    """Return the layout of batches for this model: packed where its attention takes lengths, else padded.

    Raises:
        TaskError: the ``model_type`` is not supported.
    """
    return "packed" if find_architecture(config).attention == "interface" else "padded"


def choose_attention(config: Any) -> str:
    """Return ``attn_implementation`` for training: ATTENTION for packed examples, else that of plain_attention().

    Raises:
        TaskError: the ``model_type`` is not supported.
    """
    return ATTENTION if choose_layout(config) == "packed" else str(plain_attention(config))


class PackedKwargs(TypedDict, total=False):
    """Define the arguments of a packed batch that transformers passes on to each layer's attention, and its own."""

    cu_seq_lens_q: torch.Tensor | None  # bounds of the examples, [examples + 1]
    max_length_q: int  # tokens of the longest example, or more
    row_lengths: tuple[int, ...]
    uniform_rows: int
    kernel: AttentionKernel
    dropout: float


_QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **packed: Unpack[PackedKwargs],
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each example. query, key, value: ``[1, heads, tokens, size]``.

    The result is ``[1, tokens, heads, size]``, with None for the weights (Vaswani et al. 2017, arXiv:1706.03762,
    equation 1). ``uniform_rows``: as a batch of so many examples; ``row_lengths``: one by one; ``cu_seq_lens_q`` alone:
    by the variable-length flash kernel; none of them: as one example. ``kernel`` "flash_attn_2" or "flash_attn_4": by
    that flash-attn, whatever the lengths. No attention dropout: the kernels for packed examples have none.
    """
    cu_seq_lens_q, max_length_q = packed.get("cu_seq_lens_q"), packed.get("max_length_q", 0)
    lengths, uniform_rows = packed.get("row_lengths", ()), packed.get("uniform_rows", 0)
    kernel = packed.get("kernel", "auto")
    if kernel in FLASH_ATTN_KERNELS and cu_seq_lens_q is not None:
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        flash_attn = _flash_attn_2 if kernel == "flash_attn_2" else _flash_attn_4
        return flash_attn((q, k, v), cu_seq_lens_q, max_length_q, uniform_rows, scaling)[None], None
    # A branch: where sharded blocks are compiled, a comparison is no plain bool, which would break their graph.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if uniform_rows:
        q, k, v = (tensor.squeeze(0).unflatten(1, (uniform_rows, -1)).transpose(0, 1) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, **grouped)
        return mixed.transpose(1, 2).flatten(0, 1)[None], None
    if cu_seq_lens_q is not None and not lengths:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        mixed = varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, 0)
        )
        return torch.as_tensor(mixed)[None], None
    rows = lengths or (query.shape[2],)
    parts = zip(query.split(rows, 2), key.split(rows, 2), value.split(rows, 2), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, **grouped) for q, k, v in parts]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _flash_attn_2(
    qkv: _QueryKeyValue,
    cu_seq_lens: torch.Tensor,
    longest: int,
    num_examples: int,
    scaling: float | None,
) -> torch.Tensor:
    """Return causal attention by flash-attn 2 (Dao 2023, arXiv:2307.08691), ``[tokens, heads, size]`` as its
    arguments.
    """
    import flash_attn

    return _call_flash_attn(flash_attn, qkv, cu_seq_lens, longest, num_examples, scaling)


# It is no operator of torch: torch.compile would follow its autograd function into the package's own compiler.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
def _flash_attn_4(
    qkv: _QueryKeyValue,
    cu_seq_lens: torch.Tensor,
    longest: int,
    num_examples: int,
    scaling: float | None,
) -> torch.Tensor:
    """Return what _flash_attn_2() does by flash-attn 4 (Zadouri et al. 2026, arXiv:2603.05451), compiled at the first
    call.
    """
    from flash_attn import cute

    return _call_flash_attn(cute, qkv, cu_seq_lens, longest, num_examples, scaling)


def _call_flash_attn(
    functions: Any,
    qkv: _QueryKeyValue,
    cu_seq_lens: torch.Tensor,
    longest: int,
    num_examples: int,
    scaling: float | None,
) -> torch.Tensor:
    options = {"softmax_scale": scaling, "causal": True}
    if num_examples:
        q, k, v = (tensor.unflatten(0, (num_examples, -1)) for tensor in qkv)
        mixed = functions.flash_attn_func(q, k, v, **options)
    else:
        lengths = {
            "cu_seqlens_q": cu_seq_lens,
            "cu_seqlens_k": cu_seq_lens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }
        mixed = functions.flash_attn_varlen_func(*qkv, **lengths, **options)
    # flash-attn 4 returns the logarithm of the sums beside it.
    mixed = torch.as_tensor(mixed[0] if isinstance(mixed, tuple) else mixed)
    return mixed.flatten(0, 1) if num_examples else mixed


def register() -> None:
    """Register ``attn_implementation=ATTENTION``. It has no mask function, so transformers builds no mask at all."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def forward(body: Any, batch: PackedBatch, dtype: torch.dtype, kernel: AttentionKernel = "auto") -> torch.Tensor:
    """Return the hidden states after the last norm, ``[positions, width]``, for all positions of ``batch.ids``.

    body: a model without its head, computing in ``dtype``.
    """
    if batch.layout == "padded":
        return torch.as_tensor(body(input_ids=batch.ids, use_cache=False).last_hidden_state).flatten(0, 1)
    # A power of two: the longest example only sizes the kernel's grid, and each new value may cost a compilation.
    longest = 1 << (max(batch.seq_lens) - 1).bit_length()
    by_lengths = kernel in ("varlen", "flash_attn_3")
    even = len(batch.seq_lens) if batch.is_uniform and not by_lengths else 0
    if kernel == "auto":
        by_lengths = has_varlen(batch.ids.device, dtype)
    output = body(
        input_ids=batch.ids,
        position_ids=batch.position_ids,
        use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens,
        max_length_q=longest,
        row_lengths=() if even or by_lengths else batch.seq_lens,
        uniform_rows=even,
        # An argument only where it matters: blocks that are compiled guard on each.
        **({"kernel": kernel} if kernel in FLASH_ATTN_KERNELS else {}),
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the variable-length flash kernel runs: for bf16 and fp16 on Ampere or later."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= 8)


def prefer_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Choose the flash kernels for this process, and return the name of the one for examples of mixed lengths."""
    if not has_varlen(device, dtype):
        return "sdpa"
    if torch.cuda.get_device_capability(device) == (9, 0):
        with contextlib.suppress(Exception):  # an interface without kernels, or kernels of another torch: then ours
            torch.nn.attention.activate_flash_attention_impl("FA3")
            return "flash_attn_3"
    return "varlen"


def choose_kernels(
    kernel: AttentionKernel, config: Any, device: Device, *, is_here: bool, longest: int = 0
) -> ChosenKernels:
    """Return the kernels that training takes, as the setting ``attention`` says, and prepare this process for them.

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
    if choose_layout(config) == "padded":
        return ChosenKernels(str(plain_attention(config)), str(plain_attention(config)))
    note = ""
    if longest >= FLASH_ATTN_4_LENGTH and device.is_hopper(is_here=is_here) and missing_package("flash_attn_4") is None:
        try:
            return choose_kernels("flash_attn_4", config, device, is_here=is_here)
        except TaskError as error:
            reason = str(error).removeprefix("setting attention=flash_attn_4: ").removesuffix("; take attention=auto")
            note = f"attention=auto leaves flash-attn 4: {reason}"
    if is_here:
        mixed = prefer_kernels(device.torch_device, device.dtype)
        return ChosenKernels("cudnn" if _prefers_cudnn(device.torch_device) else "sdpa", mixed, note=note)
    return ChosenKernels("sdpa", "varlen" if device.dtype == torch.bfloat16 else "sdpa", note=note)


def _unsuited(kernel: AttentionKernel, config: Any, device: Device, *, is_here: bool) -> str | None:
    """Return why this model or GPU cannot take ``kernel``, or None."""
    setting = f"setting attention={kernel}:"
    is_padded = choose_layout(config) == "padded"
    if is_padded and (kernel not in SDPA_KERNELS or plain_attention(config) != "sdpa"):
        choices = (
            f"one of {', '.join(SDPA_KERNELS)}, or auto" if plain_attention(config) == "sdpa" else "attention=auto"
        )
        return f"{setting} the attention of {config.model_type} cannot take it; take {choices}"
    if not device.is_gpu:
        gpu_only = kernel not in ("sdpa", "flash", "math")
        return f"{setting} it runs on a GPU only; take attention=auto" if gpu_only and is_here else None
    if kernel in AMPERE_KERNELS and not device.has_bf16:
        return f"{setting} {device.name} is older than Ampere, and has no such kernel; take attention=auto"
    if kernel == "flash_attn_4" and device.is_older_than_hopper(is_here=is_here):
        return f"{setting} {device.name} is older than Hopper, and has no such kernel; take attention=auto"
    if kernel == "flash_attn_4" and _head_size(config) not in FLASH_ATTN_4_SIZES:
        return (
            f"{setting} its results were compared with heads of 64 and 128 alone, and are wrong with 80; take"
            " attention=auto"
        )
    if kernel == "flash_attn_3" and is_here and torch.cuda.get_device_capability(device.torch_device) != (9, 0):
        return f"{setting} its kernels are for Hopper, and {device.name} is none; take attention=flash_attn_2 or auto"
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
        difference = compare_kernel(
            kernel, heads, int(getattr(config, "num_key_value_heads", None) or heads), size, device
        )
    # Not those of torch alone: a kernel that is compiled at run time has its compiler's, and asserts what it can
    # compute.
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(
            f"setting attention={kernel}: it does not run on {what} ({first}); take attention=auto"
        ) from error
    if not difference <= MAX_DIFFERENCE:
        raise TaskError(
            f"setting attention={kernel}: its results on {what} differ from torch's by {difference:.0%} of the largest;"
            " take attention=auto"
        )


def compare_kernel(kernel: AttentionKernel, heads: int, kept: int, size: int, device: Device) -> float:
    """Return the largest difference of outputs and gradients from fp32's, as a share of the largest; NaN where there is
    one.

    kept: heads of keys and values. Raises what the kernel does.
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
            mixed, _ = attend(torch.nn.Module(), query, key, value, None, **packed)
            mixed.backward(rounded[3].transpose(1, 2))
        results.append([mixed.detach().float(), *(torch.as_tensor(item.grad).float() for item in (query, key, value))])
    shares = [(one - two).abs().max() / two.abs().max() for one, two in zip(*results, strict=True)]
    return float(torch.stack(shares).max())


@contextlib.contextmanager
def kernels_in_use(kernel: AttentionKernel, device: torch.device) -> Iterator[None]:
    """Let torch's attention take ``kernel`` alone in this context; for ``auto``, prefer the fastest."""
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

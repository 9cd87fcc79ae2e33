"""Attend inside each of the packed examples, and call a model with them."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.nn.functional as F

from ekiben_tasks.data.packing import PackedBatch
from ekiben_tasks.models.attention_kernel import FLASH_ATTN_KERNELS, AttentionKernel
from ekiben_tasks.models.limited_attention import Limits, Mask, QueryKeyValue, attend_examples, attend_varlen
from ekiben_tasks.task.errors import TaskError

ATTENTION = "ekiben_packed"


class PackedKwargs(TypedDict, total=False):
    """Define the arguments of a packed batch that transformers passes on to each layer's attention, and its own."""

    cu_seq_lens_q: torch.Tensor | None  # cumulative lengths of the examples, [examples + 1]
    max_length_q: int  # tokens of the longest example, or more
    row_lengths: tuple[int, ...]
    uniform_rows: int
    kernel: AttentionKernel
    dropout: float


# Further arguments of models to their attention, without an effect here.
_HARMLESS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
_READ = {*PackedKwargs.__annotations__, "sliding_window", "softcap", "s_aux", *_HARMLESS}
MASK = "ekiben_mask"  # attribute of a module with a mask that no argument describes


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each example. query, key, value: ``[1, heads, tokens, size]``.

    The result is ``[1, tokens, heads, size]``, with None for the weights (Vaswani et al. 2017, arXiv:1706.03762,
    equation 1). arguments: PackedKwargs, of which ``uniform_rows`` is the number of examples of a batch,
    ``row_lengths`` one by one, ``cu_seq_lens_q`` alone by the variable-length flash kernel; and what the model limits
    its attention with. ``kernel`` "flash_attn_2" or "flash_attn_4": by that flash-attn, whatever the lengths. No
    attention dropout: the kernels for packed examples have none.

    Raises:
        TaskError: no lengths arrive, or an argument or a mask that would be ignored here.
    """
    cu_seq_lens_q, max_length_q = arguments.get("cu_seq_lens_q"), arguments.get("max_length_q", 0)
    lengths, uniform_rows = arguments.get("row_lengths", ()), arguments.get("uniform_rows", 0)
    kernel = arguments.get("kernel", "auto")
    if cu_seq_lens_q is None and not lengths and not uniform_rows:
        raise TaskError(f"{type(module).__name__}: the lengths of packed rows do not reach its attention")
    for name, argument in arguments.items():
        if name not in _READ and argument is not None:
            raise TaskError(f"{type(module).__name__}: its attention has an argument that is not known here: {name}")
    if attention_mask is not None:
        raise TaskError(f"{type(module).__name__}: its attention makes a mask of its own")
    limits = limits_of(module, arguments)
    if limits is not None and limits.bind(max_length_q):
        if uniform_rows and not lengths:
            lengths = (query.size(2) // uniform_rows,) * uniform_rows
        if lengths:
            return attend_examples((query, key, value), lengths, scaling, limits), None
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        return attend_varlen((q, k, v), cu_seq_lens_q, max_length_q, scaling, limits)[None], None
    if kernel in FLASH_ATTN_KERNELS and cu_seq_lens_q is not None:
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        flash_attn = _flash_attn_2 if kernel == "flash_attn_2" else _flash_attn_4
        return flash_attn((q, k, v), cu_seq_lens_q, max_length_q, uniform_rows, scaling)[None], None
    # A branch: where sharded blocks are compiled, a comparison is not a plain bool, which would break their graph.
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
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, **grouped) for q, k, v in parts]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def limits_of(module: torch.nn.Module, arguments: dict[str, Any]) -> Limits | None:
    """Return the limits of ``module``'s attention, None without limits. arguments: of this call."""
    window, cap, sinks = arguments.get("sliding_window"), arguments.get("softcap"), arguments.get("s_aux")
    mask = getattr(module, MASK, None)
    if window is None and cap is None and sinks is None and mask is None:
        return None
    return Limits(mask or Mask(window=window), cap, sinks)


def _flash_attn_2(
    qkv: QueryKeyValue,
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


# It is not an operator of torch: torch.compile would follow its autograd function into the package's own compiler.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
def _flash_attn_4(
    qkv: QueryKeyValue,
    cu_seq_lens: torch.Tensor,
    longest: int,
    num_examples: int,
    scaling: float | None,
) -> torch.Tensor:
    """Return the result of _flash_attn_2(), computed by flash-attn 4 (Zadouri et al. 2026, arXiv:2603.05451).

    The kernel is compiled at the first call.
    """
    from flash_attn import cute

    return _call_flash_attn(cute, qkv, cu_seq_lens, longest, num_examples, scaling)


def _call_flash_attn(
    functions: Any,
    qkv: QueryKeyValue,
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
    # flash-attn 4 also returns the log-sum-exp.
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
    if batch.layout != "packed":
        return torch.as_tensor(body(input_ids=batch.ids, use_cache=False)[0]).flatten(0, 1)
    longest = round_length(max(batch.seq_lens))
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
    hidden: torch.Tensor = output[0][0]
    return hidden


def round_length(longest: int) -> int:
    """Return the next power of two: the longest example only sizes the kernel's grid, and each new value may cost a
    compilation.
    """
    return 1 << (longest - 1).bit_length()


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the variable-length flash kernel runs: for bf16 and fp16 on Ampere or later."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= 8)

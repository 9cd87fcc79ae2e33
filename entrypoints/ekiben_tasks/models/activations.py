"""Count the bytes that a model keeps for its backward pass, on the meta device: nothing is computed.

What autograd saves in one forward pass is counted, each storage once (torch.autograd.graph.saved_tensors_hooks).
Compiled blocks are traced and cut in two as for a GPU, without generating code: that chooses what they keep.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from ekiben_tasks.models import compile_patches
from ekiben_tasks.models.architecture import list_blocks, strip_adapter
from ekiben_tasks.models.attention import ATTENTION, limits_of
from ekiben_tasks.models.description import find_body_path
from ekiben_tasks.models.limited_attention import attend_examples
from ekiben_tasks.models.proof import attach_masks, verify

_COUNTED = "ekiben_counted"
_LENGTHS = (128, 256)
_BACKEND = "aot_eager_decomp_partition"
_MOST = 300  # tensors of a block: one that steps through its tokens in Python takes minutes to trace


def kept_bytes(model: Any, longest: int, dtype: torch.dtype, *, compiled: bool) -> float | None:
    """Return the bytes that each token of a row of ``longest`` tokens adds; None where it cannot be counted.

    model: causal, with or without an adapter, as it will be trained. A model whose blocks have nothing to learn keeps
    nothing of them: then that of a run that hands gradients through them, which is more than its forward pass holds.
    """
    with _quiet(), _one_row():
        try:
            return _count(model, longest, dtype, compiled=compiled)
        except Exception:  # a family whose forward pass reads values, which tensors of the meta device have not
            return None


def _count(model: Any, longest: int, dtype: torch.dtype, *, compiled: bool) -> float:
    """Return the bytes. Those of masks and scores grow with the row: two lengths tell them from the others."""
    (first, _), (second, tensors) = (_saved(_prepare(model, dtype), length) for length in _LENGTHS)
    one, two = first / _LENGTHS[0], second / _LENGTHS[1]
    grows = two > 1.01 * one
    if compiled and tensors <= _MOST * len(list_blocks(strip_adapter(model))):
        with contextlib.suppress(Exception):  # what is not compiled keeps more
            one, two = (
                _saved_compiled(model, dtype, length) if grows or length == _LENGTHS[1] else 0.0 for length in _LENGTHS
            )
    growth = (two - one) / (_LENGTHS[1] - _LENGTHS[0]) if grows else 0.0
    return two + growth * (max(longest, 1) - _LENGTHS[1])


def _saved_compiled(model: Any, dtype: torch.dtype, length: int) -> float:
    """Return the bytes that each token adds to compiled blocks, as LossModule.compile_blocks() compiles them."""
    counted = _prepare(model, dtype)
    causal = strip_adapter(counted)
    torch._dynamo.reset()
    try:
        compile_patches.prepare(counted, causal.get_submodule(find_body_path(causal)))
        for block in list_blocks(causal):
            # Sizes left open keep the same, and take ten times as long to trace.
            block.compile(dynamic=False, backend=_BACKEND)
        return _saved(counted, length)[0] / length
    finally:
        torch._dynamo.reset()


def _prepare(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy on the meta device whose attention saves what kernels on a GPU do."""
    counted = copy.deepcopy(model).to("meta", dtype).train()
    causal = strip_adapter(counted)
    proof = verify(causal.config)
    attach_masks(causal, proof)
    causal.set_attn_implementation(_COUNTED if proof.implementation in (ATTENTION, "sdpa") else proof.implementation)
    modules = (causal.get_input_embeddings(), *list_blocks(causal))
    if not any(p.requires_grad for module in modules for p in module.parameters()):
        modules[0].register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return counted


def _saved(model: Any, length: int) -> tuple[int, int]:
    """Return the bytes that a row of ``length`` tokens leaves for the backward pass, and the number of tensors."""
    causal = strip_adapter(model)
    weights = {_identity(tensor) for tensor in [*causal.parameters(), *causal.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}  # which keeps them, so that no other gets the same identity

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if _identity(tensor) not in weights:
            kept[_identity(tensor)] = tensor.untyped_storage()
        return tensor

    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = causal.base_model(input_ids=ids, use_cache=False)
    del output
    return sum(storage.nbytes() for storage in kept.values()), len(kept)


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@torch.library.custom_op("ekiben::counted_attention", mutates_args=())  # type: ignore[untyped-decorator]  # torch has no types here
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Have the shapes of a flash kernel's results: attention, and the logarithms of its sums. Nothing computes them."""
    raise NotImplementedError("this operator counts on the meta device alone")


@_attention.register_fake  # type: ignore[untyped-decorator]  # torch has no types here
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(*query.shape[:-1], value.shape[-1]), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("ekiben::counted_attention_backward", mutates_args=())  # type: ignore[untyped-decorator]  # torch has no types here
def _attention_backward(
    gradient: torch.Tensor, saved: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Have the shapes of the gradients of query, key and value. Nothing computes them."""
    raise NotImplementedError("this operator counts on the meta device alone")


@_attention_backward.register_fake  # type: ignore[untyped-decorator]  # torch has no types here
def _(gradient: torch.Tensor, saved: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(saved[0]), torch.empty_like(saved[1]), torch.empty_like(saved[2])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
    return torch.ops.ekiben.counted_attention_backward(gradient, list(ctx.saved_tensors))


_attention.register_autograd(_backward, setup_context=_save)


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    limits = limits_of(module, arguments)
    if limits is not None and (limits.softcap is not None or limits.mask.chunk is not None):  # no kernel has these
        return attend_examples((query, key, value), (query.size(2),), arguments.get("scaling"), limits), None
    return torch.ops.ekiben.counted_attention(query, key, value)[0].transpose(1, 2), None


transformers.AttentionInterface.register(_COUNTED, _attend)


@contextlib.contextmanager
def _one_row() -> Iterator[None]:
    """Keep transformers from looking for packed rows in the values of positions, which are not there."""
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what libraries say of models that compute nothing."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)

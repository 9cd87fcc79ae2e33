"""Find the parts of a causal model in the model itself: blocks, body, norms behind them, layers for an adapter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch


def find_blocks_path(model: Any) -> str:
    """Return the name of the list of repeated blocks: the outermost ModuleList with the most parameters.

    Lists inside a block, of experts for example, are not outermost.
    """
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in sizes):
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    if not sizes:
        raise ValueError(f"{type(model).__name__} has no list of blocks")
    return max(sizes, key=lambda name: sizes[name])


def find_blocks(model: Any) -> Sequence[Any]:
    """Return the repeated blocks of a causal model or its body."""
    blocks: Sequence[Any] = model.get_submodule(find_blocks_path(model))
    return blocks


def find_body_path(causal: Any) -> str:
    """Return the name of the body, which makes hidden states of tokens: the innermost such module with the blocks."""
    path = find_blocks_path(causal).rpartition(".")[0]
    while path and "input_ids" not in inspect.signature(type(causal.get_submodule(path)).forward).parameters:
        path = path.rpartition(".")[0]
    if not path:
        raise ValueError(f"{type(causal).__name__} has no body apart from its head")
    return path


def find_body(causal: Any) -> Any:
    """Return the model without its head."""
    return causal.get_submodule(find_body_path(causal))


def find_head(causal: Any) -> Any:
    """Return the output layer of a causal model, or the head of a classifier."""
    head = causal.get_output_embeddings()
    return causal.score if head is None else head


def list_linear(modules: Sequence[Any]) -> tuple[str, ...]:
    """Return the last parts of the names of the linear layers in ``modules``, in their order, each once."""
    names: dict[str, None] = {}
    for module in modules:
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.Linear) or type(child).__name__ == "Conv1D":
                names.setdefault(name.rsplit(".", 1)[-1] or type(child).__name__)
    return tuple(names)


def find_late_modules(causal: Any, ids: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the modules with parameters of their own that run after the last block, without the head."""
    blocks, head = find_blocks(causal), causal.get_output_embeddings()
    # Other stacks of such blocks may run between the first and the last.
    stacked = [module for module in causal.modules() if isinstance(module, type(blocks[-1]))]
    inside = {id(module) for block in stacked for module in block.modules()}
    late: dict[str, None] = {}
    handles = [blocks[-1].register_forward_hook(lambda *_: late.clear())]
    for name, module in causal.named_modules():
        apart = module is not head and not any(id(child) in inside for child in module.modules())
        if apart and any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_hook(lambda *_, name=name: late.setdefault(name)))
    try:
        with torch.no_grad():
            causal(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(late)

"""Discover how a model calls its attention: the mask of each module, and the arguments that limit it.

transformers builds a mask for every attention function that has a mask function. The one here returns the predicate
instead of a tensor; a forward pass hands it to each module's attention, where it is compared with the masks that have a
name: causal, windows, chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ekiben_tasks.models.limited_attention import Mask

NAME = "ekiben_discovery"
_FAR = 1 << 20  # a position behind every window
Predicate = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MaskPredicate:
    """Which keys a query attends to, as a predicate that replaces a mask's tensor."""

    sees: Predicate


@dataclass(slots=True)
class Discovery:
    """Hold the arguments of a model's attention by module. A mask of None: of a kind not supported here."""

    masks: dict[str, Mask | None] = field(default_factory=dict)
    windows: dict[str, int | None] = field(default_factory=dict)  # the argument sliding_window
    has_softcap: bool = False
    has_sinks: bool = False

    def differing(self) -> tuple[tuple[str, Mask], ...]:
        """Return the modules whose mask is not what their arguments say."""
        return tuple(
            (name, mask)
            for name, mask in self.masks.items()
            if mask is not None and mask != Mask(window=self.windows.get(name))
        )


def discover(model: Any, ids: torch.Tensor, *, with_masks: bool = True) -> Discovery:
    """Return the arguments of ``model``'s attention. Errors of the model with an unusual mask are raised.

    with_masks: else it is called without any, and ``masks`` stays empty.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    names = {id(module): name for name, module in model.named_modules()}
    discovery = Discovery()

    def record(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **arguments: Any
    ) -> tuple[torch.Tensor, None]:
        name = names[id(module)]
        if with_masks:
            discovery.masks[name] = classify(attention_mask)
        discovery.windows[name] = arguments.get("sliding_window")
        discovery.has_softcap |= arguments.get("softcap") is not None
        discovery.has_sinks |= arguments.get("s_aux") is not None
        output: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, None, scaling=arguments.get("scaling"), is_causal=True
        )[0]
        return output, None

    chosen = NAME if with_masks else f"{NAME}_without_masks"
    AttentionInterface.register(chosen, record)
    AttentionMaskInterface.register(NAME, _keep_predicate)
    before = model.config._attn_implementation
    model.set_attn_implementation(chosen)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return discovery


def _keep_predicate(*_: Any, mask_function: Predicate, **__: Any) -> MaskPredicate:
    return MaskPredicate(mask_function)


def classify(mask: Any) -> Mask | None:
    """Return the Mask that equals ``mask``, None if there is none. mask: a MaskPredicate, or None for a causal one."""
    if mask is None:
        return Mask()
    if not isinstance(mask, MaskPredicate):
        return None
    for candidate in (Mask(), Mask(window=_seen(mask.sees, _FAR)), Mask(chunk=_chunk(mask.sees))):
        if _agrees(mask.sees, candidate):
            return candidate
    return None


def _seen(sees: Predicate, query: int) -> int:
    """Return how many keys up to its own position ``query`` sees, at most 2^17."""
    keys = torch.arange(query - (1 << 17) + 1, query + 1)
    return int(_look(sees, torch.full_like(keys, query), keys).sum())


def _chunk(sees: Predicate) -> int | None:
    """Return the distance of the positions that see themselves alone, None where there are not two of them."""
    positions = torch.arange(1, 1 << 17)
    alone = (~_look(sees, positions, positions - 1)).nonzero()
    return int(alone[0]) + 1 if len(alone) else None


def _agrees(sees: Predicate, mask: Mask) -> bool:
    if mask.window == 0:
        return False
    size = mask.window or mask.chunk or 64
    positions = torch.arange(48)
    # Around the ends of windows and chunks, where a mistake of one would be, and far behind every window.
    queries = torch.cat(
        [positions, positions + max(size - 24, 0), positions + max(2 * size - 24, 0), torch.tensor([_FAR])]
    )
    back = torch.tensor([0, 1, size - 1, size, size + 1, *(1 << power for power in range(1, 18))])
    keys = torch.cat([positions, (queries[:, None] - back).flatten().clamp(min=0)])
    grid = torch.meshgrid(queries, keys, indexing="ij")
    query, key = (axis.flatten() for axis in grid)
    expected = key <= query
    if mask.window is not None:
        expected &= query - key < mask.window
    if mask.chunk is not None:
        expected &= query // mask.chunk == key // mask.chunk
    return bool(torch.equal(_look(sees, query, key), expected))


def _look(sees: Predicate, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(sees(0, 0, query, key)).expand_as(query)

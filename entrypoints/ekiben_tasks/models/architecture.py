"""Describe what differs between the supported decoders: the names of their modules, and how their attention is called.

Names are those of transformers 5; where a checkpoint's own differ (`embed_out`), it renames them while loading.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from ekiben_tasks.models import architectures
from ekiben_tasks.task.errors import TaskError

Kept = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Describe one ``model_type``. Module names start at the causal model; LoRA targets are last parts of names."""

    name: str  # as people call it
    blocks: str  # the list of repeated blocks
    final_norm: str
    lora: tuple[str, ...]  # default targets of an adapter
    linear: tuple[str, ...]  # all linear layers of a block: the most an adapter can target
    transposed: bool = False  # Conv1D, [in, out]: PEFT's fan_in_fan_out
    # interface: takes any function registered with transformers, so packed examples need no mask at all.
    # mask: the classes of its own file; packed examples need a block-diagonal mask.
    attention: Literal["interface", "mask"] = "interface"
    implementations: tuple[str, ...] = ("flash_attention_3", "flash_attention_2", "sdpa", "eager")  # best first
    # Per block: numbers kept per token for backward, in widths and in inner widths (of the feed-forward), and per head
    # and token of its row where attention takes a mask. First with the block's own weights frozen, then trained.
    kept: tuple[Kept, Kept]
    # The same of compiled blocks, which compute again what is cheap. Each has a width more than the large tensors that
    # were counted, for the small ones: the sums of norms and of attention, what an adapter has narrowed.
    kept_compiled: tuple[Kept, Kept]


class ArchitectureModule(Protocol):
    """Define what a module of ``architectures`` provides."""

    ARCHITECTURE: Architecture

    def attention_windows(self, config: Any) -> list[int | None]:
        """Return per layer how many tokens back attention looks; None: to the start."""

    def tiny_config(self, layers: int, width: int) -> dict[str, Any]:
        """Return a configuration of ``layers`` blocks of ``width``, with 4 heads, 1024 positions and no dropout.

        Its keys are the family's own names.
        """


def names() -> list[str]:
    """Return the ``model_type`` of every supported architecture, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(architectures.__path__))


def find_module(model_type: str) -> ArchitectureModule:
    """Return the module of ``architectures`` for this ``model_type``.

    Raises:
        TaskError: there is none.
    """
    if model_type not in names():
        raise TaskError(
            f"model_type {model_type!r} is not one whose parts are known here ({', '.join(names())}); "
            "for LoRA, name the layers yourself (--set lora.target_modules=[...])"
        )
    return cast(ArchitectureModule, importlib.import_module(f"{architectures.__name__}.{model_type}"))


def find_architecture(config: Any) -> Architecture:
    """Return the architecture of a model's configuration.

    Raises:
        TaskError: its ``model_type`` is not supported.
    """
    return find_module(config.model_type).ARCHITECTURE


def last_layer(config: Any) -> tuple[str, ...]:
    """Return the modules that a last-layer run trains: the final norm, and the head if it is not tied.

    A head that is tied to the embeddings is the first layer's weight: training it would change both ends.

    Raises:
        TaskError: the ``model_type`` is not supported.
    """
    norm = find_architecture(config).final_norm
    return (norm,) if config.tie_word_embeddings else (norm, "lm_head")


def strip_adapter(model: Any) -> Any:
    """Return the causal model inside a PEFT model; its adapted layers stay adapted."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def list_blocks(model: Any) -> Sequence[Any]:
    """Return the repeated blocks of a causal model, with or without an adapter.

    Raises:
        TaskError: its ``model_type`` is not supported.
    """
    causal = strip_adapter(model)
    blocks: Sequence[Any] = causal.get_submodule(find_architecture(causal.config).blocks)
    return blocks


def attention_width(config: Any) -> int:
    """Return the width of the queries: heads times the size of a head. Keys of grouped heads are narrower."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_attention_heads * size)


def plain_attention(config: Any) -> str | None:
    """Return transformers' ``attn_implementation`` for unpacked examples: sdpa, else eager.

    None for an unknown architecture: transformers chooses.
    """
    if config.model_type not in names():
        return None
    return "sdpa" if "sdpa" in find_architecture(config).implementations else "eager"


def attention_windows(config: Any) -> list[int | None]:
    """Return the attention window of each layer in tokens; None: unlimited.

    Raises:
        TaskError: the ``model_type`` is not supported.
    """
    return find_module(config.model_type).attention_windows(config)


def full_attention(config: Any) -> list[int | None]:
    """Return None for each layer: the windows of an architecture whose attention has none."""
    return [None] * int(config.num_hidden_layers)

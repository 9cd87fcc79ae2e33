"""Describe the decoders with a file in ``architectures``, and derive the others' structure from the model.

Names are those of transformers 5; where a checkpoint's own differ (`embed_out`), it renames them while loading.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ekiben_tasks.models import architectures
from ekiben_tasks.task.errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Describe one ``model_type``. Module names start at the causal model; LoRA targets are last parts of names."""

    name: str  # as people call it
    blocks: str  # the list of repeated blocks
    final_norm: str
    lora: tuple[str, ...]  # default targets of an adapter
    linear: tuple[str, ...]  # all linear layers of a block: the most an adapter can target
    transposed: bool = False  # Conv1D, [in, out]: PEFT's fan_in_fan_out


class ArchitectureModule(Protocol):
    """Define the interface of a module of ``architectures``."""

    ARCHITECTURE: Architecture

    def attention_windows(self, config: Any) -> list[int | None]:
        """Return per layer how many tokens back attention looks; None: to the start."""

    def tiny_config(self, layers: int, width: int) -> dict[str, Any]:
        """Return a configuration of ``layers`` blocks of ``width``, with 4 heads, 1024 positions and no dropout.

        Its keys are the family's own names.
        """


def names() -> list[str]:
    """Return the ``model_type`` of every architecture that has a file, sorted."""
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


def find_architecture(config: Any) -> Architecture | None:
    """Return the architecture of a model's configuration, None where its ``model_type`` has no file."""
    return find_module(config.model_type).ARCHITECTURE if config.model_type in names() else None


def last_layer(causal: Any) -> tuple[str, ...]:
    """Return the modules that a last-layer run trains: the norms behind the blocks, and the head if it is not tied.

    A head that is tied to the embeddings is the first layer's weight: training it would change both ends.
    """
    from ekiben_tasks.models.classifier import HEAD, is_classifier
    from ekiben_tasks.models.proof import verify

    known = find_architecture(causal.config)
    norms = (known.final_norm,) if known else verify(causal.config).late
    if is_classifier(causal):
        return (*norms, HEAD)
    if causal.config.get_text_config().tie_word_embeddings:
        return norms
    head = causal.get_output_embeddings()
    return (*norms, next(name for name, module in causal.named_modules() if module is head))


def lora_targets(causal: Any) -> tuple[str, ...]:
    """Return the layers that an adapter targets by default, as last parts of their names.

    Those of the family's file, else of PEFT's table, else the linear layers of the modules that call attention, else
    all linear layers of the blocks.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    from ekiben_tasks.models.description import find_blocks, list_linear
    from ekiben_tasks.models.proof import verify

    if known := find_architecture(causal.config):
        return known.lora
    if listed := TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(causal.config.model_type):
        return tuple(listed)
    classes, blocks = verify(causal.config).attention_classes, find_blocks(causal)
    attentions = [module for block in blocks for module in block.modules() if type(module).__name__ in classes]
    # PEFT refuses these two of Mamba's blocks: a kernel reads their weights directly.
    return list_linear(attentions) or tuple(name for name in list_linear(blocks) if name not in ("out_proj", "conv1d"))


def strip_adapter(model: Any) -> Any:
    """Return the causal model inside a PEFT model; its adapted layers stay adapted."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def list_blocks(model: Any) -> Sequence[Any]:
    """Return the repeated blocks of a causal model, with or without an adapter."""
    from ekiben_tasks.models.description import find_blocks

    return find_blocks(strip_adapter(model))


def attention_width(config: Any) -> int:
    """Return the width of the queries: heads times the size of a head. Keys of grouped heads are narrower.

    0 for a model without attention.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(heads * size)


def attention_windows(config: Any, layers: int) -> list[int | None]:
    """Return the attention window of each of the ``layers`` in tokens; None: unlimited."""
    if config.model_type in names():
        return find_module(config.model_type).attention_windows(config)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if len(kinds) == layers:
        chunk = getattr(config, "attention_chunk_size", None)
        sizes = {"sliding_attention": window, "chunked_attention": chunk}
        return [sizes.get(kind) for kind in kinds]
    return [window if isinstance(window, int) else None] * layers


def full_attention(config: Any) -> list[int | None]:
    """Return None for each layer: the windows of an architecture whose attention has none."""
    return [None] * int(config.num_hidden_layers)

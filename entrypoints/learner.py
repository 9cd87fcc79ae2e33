"""A model as training sees it: a pack of rows in, their summed loss out. Every way of spreading it over GPUs wraps this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import torch

import fusion
import loss as losses
import models
import packing
from architectures import find_architecture, last_layer
from settings import TaskError, nearest
from train_settings import Settings


class Learner(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """``model``: a causal model of transformers, with or without an adapter. dtype: what it computes in."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.layout = packing.choose_layout(self.causal.config)
        self.chunk_loss: losses.ChunkLoss = losses.softmax_loss

    @property
    def causal(self) -> Any:
        return self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model

    @property
    def body(self) -> Any:
        return getattr(self.causal, self.causal.base_model_prefix)

    def forward(self, pack: packing.Pack) -> torch.Tensor:
        """Summed loss of the learnt tokens, fp32."""
        hidden = packing.forward(self.body, pack, self.dtype).index_select(0, pack.sources)
        # Looked up here and not before: a sharded head is whole only while its model runs.
        return losses.head_loss(hidden, self.causal.get_output_embeddings().weight, pack.targets, self.chunk_loss)

    def compile_blocks(self, backend: Any = "inductor") -> None:
        """Compile each block in place: alike blocks share one compilation, where a whole model takes minutes."""
        fusion.prepare(self.model, self.body)
        for block in find_blocks(self.body):
            block.compile(dynamic=True, backend=backend)
        self.chunk_loss = losses.compile_loss(backend)

    def checkpoint_activations(self, count: int) -> None:
        """Compute the activations of the first ``count`` blocks again in the backward pass instead of keeping them."""
        # Later versions of transformers 5 renamed it. Not reentrant: the only leaves that want gradients are inside the blocks.
        enable = getattr(self.causal, "activation_checkpointing_enable", None)
        (enable or self.causal.gradient_checkpointing_enable)({"use_reentrant": False})
        for block in find_blocks(self.body)[count:]:
            block.gradient_checkpointing = False


def find_blocks(body: Any) -> list[Any]:
    """The repeated blocks of a decoder: its longest ModuleList."""
    lists = [list(part) for part in body.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len)


def dress(causal: Any, settings: Settings) -> Any:
    """``causal`` as ``settings.method`` trains it: an adapter on it, or what is trained marked. Errors: TaskError."""
    causal.requires_grad_(settings.method == "full")
    if settings.method == "lora":
        targets = settings.lora.target_modules
        return models.add_adapter(
            causal, r=settings.lora.r, alpha=settings.lora.alpha, dropout=settings.lora.dropout, seed=settings.seed,
            target_modules=find_architecture(causal.config).lora if targets == "auto" else targets,
        )  # fmt: skip
    if settings.method == "last-layer":
        chosen = last_layer(causal.config) if settings.last_layer == "auto" else settings.last_layer
        _mark(causal, chosen)
    return causal


def describe(model: Any, settings: Settings) -> str:
    """What of a dressed model is trained, in words."""
    if settings.method == "lora":
        return f"LoRA r {settings.lora.r} on {', '.join(sorted(model.peft_config['default'].target_modules))}"
    if settings.method == "full":
        return "every weight"
    return ", ".join(
        dict.fromkeys(name.rsplit(".", 1)[0] for name, part in model.named_parameters() if part.requires_grad)
    )


def _mark(causal: Any, names: Sequence[str]) -> None:
    """Let the modules or weights of these names learn, and nothing else. Errors: TaskError for one that is not there."""
    for name in names:
        found = [part for path, part in causal.named_parameters() if f".{name}." in f".{path}."]
        if not found:
            known = sorted({path.rsplit(".", 2)[-2] for path, _ in causal.named_parameters()})
            raise TaskError(f"setting last_layer: no module is called {name}.{nearest(name, known)}")
        for part in found:
            part.requires_grad_(True)


def check_weights(model: Any, name: str) -> None:
    """Errors: TaskError where the model's files hold a value that is no number: each loss would be one, too."""
    for path, part in model.named_parameters():
        if part.is_floating_point() and not part.sum(dtype=torch.float32).isfinite():
            raise TaskError(
                f"model {name}: its weight {path} holds values that are no numbers (as {part.dtype}); "
                "compare the files with their source, and download or convert them again"
            )


def check_head(learner: Learner) -> None:
    """Errors: TaskError where logits are more than hidden states times head (scaled, capped, with a bias)."""
    causal, body = learner.causal, learner.body
    head = causal.get_output_embeddings()
    ids = torch.arange(8, device=head.weight.device)[None] % causal.config.vocab_size
    was_training = causal.training
    causal.eval()
    with torch.no_grad():
        own = causal(input_ids=ids, use_cache=False).logits[0].float()
        ours = (body(input_ids=ids, use_cache=False).last_hidden_state[0] @ head.weight.T).float()
    causal.train(was_training)
    if (own - ours).abs().max() > 1e-3 * own.abs().max() + 1e-4:
        raise TaskError(
            f"{type(causal).__name__}: its logits are more than hidden states times head; not supported here"
        )

"""Choose which weights of a model are trained, and wrap it in the module that returns its loss, for every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import peft
import torch
import torch.nn.functional as F

from ekiben_tasks.data import packing
from ekiben_tasks.models import adapter, attention, compile_patches
from ekiben_tasks.models import loss as losses
from ekiben_tasks.models.architecture import last_layer, lora_targets
from ekiben_tasks.models.attention_kernel import AttentionKernel
from ekiben_tasks.models.classifier import is_classifier
from ekiben_tasks.models.description import find_blocks, find_body_path, find_head
from ekiben_tasks.models.head import Tail
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.models.proof import verify
from ekiben_tasks.task.errors import TaskError, nearest


class TuningMethod(Protocol):
    """Define which weights are trained: an adapter's, the last layer's, or all. A run's settings satisfy this."""

    @property
    def method(self) -> Literal["lora", "full", "last-layer"]:
        """Return which weights are trained."""

    @property
    def lora(self) -> Lora:
        """Return the adapter's settings, which method ``lora`` uses."""

    @property
    def neftune_noise_alpha(self) -> float:
        """Return the size of the noise on the embeddings; 0: none."""

    @property
    def adapter(self) -> str:
        """Return the folder of an adapter to go on from, or nothing."""

    @property
    def last_layer(self) -> Literal["auto"] | tuple[str, ...]:
        """Return the modules or weights that method ``last-layer`` trains; auto: the final norm and an untied head."""

    @property
    def seed(self) -> int:
        """Return the seed of an adapter's first weights."""


class LossModule(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Compute the summed loss of a packed batch. model: causal, with or without an adapter, computing in ``dtype``."""

    def __init__(self, model: Any, dtype: torch.dtype, attention_kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.attention_kernel = attention_kernel
        proof = verify(self.causal.config)
        self.layout = proof.layout
        self.body_path = find_body_path(self.causal)
        # Not where the head is a plain product, which is faster. In a tuple: its modules are the model's own.
        self.classifies = is_classifier(self.causal)
        is_product = self.classifies or (proof.has_plain_head and is_plain(self.causal))
        self.tails = () if is_product else (Tail(self.causal),)
        self.chunk_loss: losses.ChunkLoss = losses.softmax_loss
        self.noise_alpha, self.noise = 0.0, None

    @property
    def causal(self) -> Any:
        """Return the causal model, without the PEFT model around it."""
        return self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model

    @property
    def body(self) -> Any:
        """Return the causal model without its head."""
        return self.causal.get_submodule(self.body_path)

    def forward(self, batch: packing.PackedBatch) -> torch.Tensor:
        """Return the summed loss of the target tokens of ``batch``, a scalar in fp32.

        If it asks: the likeliest tokens, or of a classifier the logits, ``[rows, labels]``, in fp32.
        """
        self.noise = self._noise_size(batch) if self.noise_alpha and self.training else None
        hidden = attention.forward(self.body, batch, self.dtype, self.attention_kernel)
        hidden = hidden.index_select(0, batch.target_positions)
        if self.classifies:
            logits: torch.Tensor = find_head(self.causal)(hidden).float()
            return logits if batch.asks else F.cross_entropy(logits, batch.labels, reduction="sum")
        if batch.asks:
            weight = self.causal.get_output_embeddings().weight
            return (self.tails[0](hidden) if self.tails else hidden @ weight.T).argmax(-1)
        if self.tails:
            return losses.tail_loss(hidden, self.tails[0], batch.labels)
        # Looked up here: a sharded head is gathered only during the forward pass.
        return losses.head_loss(hidden, self.causal.get_output_embeddings().weight, batch.labels, self.chunk_loss)

    def add_noise(self, alpha: float) -> None:
        """Add noise to the embeddings in training (Jain et al. 2023, arXiv:2310.05914); each row has its own length."""
        self.noise_alpha = alpha

        def disturb(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if self.noise is None:
                return output
            return output + torch.zeros_like(output).uniform_(-1, 1) * self.noise.to(output.dtype)

        if alpha:
            self.causal.get_input_embeddings().register_forward_hook(disturb)

    def _noise_size(self, batch: packing.PackedBatch) -> torch.Tensor:
        """Return the largest noise of each token, ``[1, tokens, 1]``, or of each row, ``[rows, 1, 1]``."""
        lengths = torch.tensor(batch.seq_lens, device=batch.ids.device)
        sizes = self.noise_alpha / (lengths * self.causal.get_input_embeddings().weight.size(1)).sqrt()
        return sizes.repeat_interleave(lengths)[None, :, None] if batch.layout == "packed" else sizes[:, None, None]

    def compile_blocks(self, backend: Any = "inductor") -> None:
        """Compile each block in place.

        Equal blocks share one compilation; that of a complete model would take minutes.
        """
        compile_patches.prepare(self.model, self.body)
        for block in find_blocks(self.body):
            block.compile(dynamic=True, backend=backend)
        self.chunk_loss = losses.compile_loss(backend)

    def checkpoint_activations(self, count: int) -> None:
        """Checkpoint the activations of the first ``count`` blocks."""
        if not getattr(self.causal, "supports_gradient_checkpointing", False):
            raise TaskError(
                f"{type(self.causal).__name__}: transformers has no gradient checkpointing for it; use smaller"
                " micro-batches (--set micro_batch=1 --set gradient_checkpointing=false), or shorter rows"
            )
        # Later versions of transformers 5 renamed it. Not reentrant: the only leaves that require gradients are inside
        # the blocks.
        enable = getattr(self.causal, "activation_checkpointing_enable", None)
        (enable or self.causal.gradient_checkpointing_enable)({"use_reentrant": False})
        for block in find_blocks(self.body)[count:]:
            block.gradient_checkpointing = False


def is_plain(causal: Any) -> bool:
    """Return whether the head is a linear layer, without an adapter or a trained copy around it."""
    return type(causal.get_output_embeddings()) is torch.nn.Linear


def apply_tuning_method(causal: Any, tuning: TuningMethod) -> Any:
    """Return ``causal`` as ``tuning`` trains it, with an adapter or with the trained weights unfrozen.

    Raises:
        TaskError: no module has the name of a target.
    """
    causal.requires_grad_(tuning.method == "full")
    if tuning.method == "lora":
        if tuning.adapter:
            return adapter.resume_adapter(causal, Path(tuning.adapter))
        targets = tuning.lora.target_modules
        if targets == "all-linear":
            targets = ("all-linear",)
        return adapter.add_adapter(
            causal, tuning.lora, lora_targets(causal) if targets == "auto" else targets, tuning.seed
        )
    if tuning.method == "last-layer":
        chosen = last_layer(causal) if tuning.last_layer == "auto" else tuning.last_layer
        set_trainable(causal, chosen)
    return causal


def describe(model: Any, tuning: TuningMethod) -> str:
    """Return which weights of ``model`` are trained, in words."""
    if tuning.method == "lora":
        config = model.peft_config["default"]
        targets = config.target_modules
        parts = [
            f"{'DoRA' if config.use_dora else 'LoRA'} r {config.r} on"
            f" {targets if isinstance(targets, str) else ', '.join(sorted(targets))}",
            f"all of {', '.join(config.modules_to_save)}" if config.modules_to_save else "",
            f"embeddings of {len(config.trainable_token_indices)} tokens" if config.trainable_token_indices else "",
            f"from {tuning.adapter}" if tuning.adapter else "",
        ]
        return ", ".join(filter(None, parts))
    if tuning.method == "full":
        return "every weight"
    return ", ".join(
        dict.fromkeys(name.rsplit(".", 1)[0] for name, parameter in model.named_parameters() if parameter.requires_grad)
    )


def set_trainable(causal: Any, names: Sequence[str]) -> None:
    """Unfreeze the modules or weights of these names.

    Raises:
        TaskError: a name does not exist.
    """
    for name in names:
        matches = [parameter for path, parameter in causal.named_parameters() if f".{name}." in f".{path}."]
        if not matches:
            known = sorted({path.rsplit(".", 2)[-2] for path, _ in causal.named_parameters()})
            raise TaskError(f"setting last_layer: no module is called {name}.{nearest(name, known)}")
        for parameter in matches:
            parameter.requires_grad_(True)


def check_weights(model: Any, name: str) -> None:
    """Check that no weight of the model ``name`` is NaN or infinite: every loss would be, too.

    Raises:
        TaskError: one is.
    """
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.sum(dtype=torch.float32).isfinite():
            raise TaskError(
                f"model {name}: its weight {path} holds NaN or infinite values (as {parameter.dtype}); "
                "compare the files with their source, and download or convert them again"
            )


def check_head(module: LossModule) -> None:
    """Check that the logits of the loss are the model's own, whether of a plain product or of its tail.

    Raises:
        TaskError: they are not.
    """
    causal, head = module.causal, find_head(module.causal)
    # No padding: a classifier reads the last token that is none.
    first = (causal.config.pad_token_id + 1) if module.classifies else 0
    ids = (first + torch.arange(8, device=head.weight.device)[None]) % len(causal.get_input_embeddings().weight)
    ends = torch.tensor([0, 8], dtype=torch.int32, device=ids.device)
    lengths: dict[str, Any] = {"cu_seq_lens_q": ends, "max_length_q": 8, "row_lengths": (8,)}
    arguments = {"input_ids": ids, "use_cache": False, **(lengths if module.layout == "packed" else {})}
    was_training = causal.training
    causal.eval()
    with torch.no_grad():
        if module.classifies:
            model_logits, head_logits = _classify(causal, head, ids)
        else:
            hidden = module.body(**arguments)[0][0]
            model_logits = causal(**arguments).logits[0].float()
            head_logits = (module.tails[0](hidden) if module.tails else hidden @ head.weight.T).float()
    causal.train(was_training)
    if (model_logits - head_logits).abs().max() > 1e-3 * model_logits.abs().max() + 1e-4:
        raise TaskError(f"{type(causal).__name__}: its logits are not those of its head alone; not supported here")


def _classify(causal: Any, head: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a classifier's logits of one row, ``[labels]``, by transformers' own forward, and those of its head.

    Some pass no lengths of rows on to the attention of packed ones: both are computed with another one here, since two
    kinds of attention differ by more than the rounding of one in bf16.
    """
    before = causal.config._attn_implementation
    causal.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = causal(input_ids=ids, use_cache=False).logits[0].float()
        hidden = causal.base_model(input_ids=ids, use_cache=False)[0]
        return logits, head(hidden)[0, -1].float()
    finally:
        causal.set_attn_implementation(before)

"""Compute a head's cross-entropy in chunks, without ever holding the logits of a complete sequence.

Training needs of the head the loss and its gradients with respect to the hidden states and, where the head is trained,
its weight. One pass over chunks of positions gives all of them: no logits are kept for the backward pass, and nothing
is computed for ignored positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 4096  # positions at a time: 4096 x 52224 logits in bf16 are 0.4 GiB

ChunkLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def head_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, chunk_loss: ChunkLoss | None = None
) -> torch.Tensor:
    """Return the summed loss in fp32; call backward on it at most once.

    hidden: ``[positions, width]``, head: ``[vocabulary, width]``, targets: ``[positions]``, int64.
    """
    if not torch.is_grad_enabled():
        return summed_loss(hidden, head, targets)
    loss: torch.Tensor = _HeadLoss.apply(hidden, head, targets, chunk_loss or softmax_loss)
    return loss


class _HeadLoss(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, work: ChunkLoss
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        # A trained head's gradient is read and written once per chunk.
        size = CHUNK if grad_weight is not None else CHUNK // 2
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            loss, grad_logits = work(hidden[chunk] @ head.T, targets[chunk])
            total += loss
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ head
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[chunk])
        # Attributes, not save_for_backward: backward scales them in place, and no other code uses them.
        ctx.grad_hidden, ctx.grad_weight = grad_hidden, grad_weight
        return total

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> Any:
        gradients = [
            None if grad_logits is None else grad_logits.mul_(scales[0])
            for grad_logits in (ctx.grad_hidden, ctx.grad_weight)
        ]
        ctx.grad_hidden = ctx.grad_weight = None
        return *gradients, None, None


def tail_loss(hidden: torch.Tensor, tail: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed loss in fp32 of logits that ``tail`` makes of hidden states; call backward on it at most once.

    tail: a Tail (head.py), for a head with a bias, a scale, a cap or an adapter. Shapes are those of ``head_loss``.
    """
    if not torch.is_grad_enabled():
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        losses = [F.cross_entropy(tail(states).float(), labels, reduction="sum") for states, labels in chunks]
        return torch.stack([torch.zeros((), device=hidden.device), *losses]).sum()
    parameters = [each for each in tail.parameters() if each.requires_grad]
    loss: torch.Tensor = _TailLoss.apply(hidden, targets, tail, *parameters)
    return loss


class _TailLoss(torch.autograd.Function):  # type: ignore[misc]
    """As _HeadLoss, with autograd's gradients of each chunk: of the hidden states, and of all that the tail trains."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, tail: Any, *parameters: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for start in range(0, len(hidden), CHUNK // 2):
            chunk = slice(start, start + CHUNK // 2)
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_()
                loss = F.cross_entropy(tail(states).float(), targets[chunk], reduction="sum")
            first, *rest = torch.autograd.grad(loss, [states, *parameters], allow_unused=True)
            total += loss.detach()
            grad_hidden[chunk] = first
            for gathered, gradient in zip(sums, rest, strict=True):
                if gradient is not None:
                    gathered += gradient
        ctx.gradients = [grad_hidden, *sums]
        return total

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> Any:
        grad_hidden, *sums = (gradient.mul_(scales[0]) for gradient in ctx.gradients)
        ctx.gradients = None
        return grad_hidden, None, None, *sums


def softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (summed cross-entropy in fp32, its gradient with respect to the logits, in their dtype).

    logits: ``[positions, vocabulary]``, targets: ``[positions]``, int64. The gradient is softmax minus the one-hot
    target (Bishop 2006, Pattern Recognition and Machine Learning, section 4.3.4).
    """
    wide = logits.float()
    log_sum = wide.logsumexp(-1, keepdim=True)
    loss = (log_sum - wide.gather(-1, targets[:, None])).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return loss, ((wide - log_sum).exp() - is_target.to(wide.dtype)).to(logits.dtype)


def compile_loss(backend: Any = "inductor") -> ChunkLoss:
    """Return ``softmax_loss`` compiled once for any number of positions.

    The vocabulary's size is static, which gives a faster kernel.
    """
    work = torch.compile(softmax_loss, dynamic=True, backend=backend)

    def chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.mark_static(logits, 1)
        loss_and_grad: tuple[torch.Tensor, torch.Tensor] = work(logits, targets)
        return loss_and_grad

    return chunk_loss


def summed_loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed loss in fp32 alone, for evaluation. Shapes are those of ``head_loss``."""
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), CHUNK):
        chunk = slice(start, start + CHUNK)
        wide = (hidden[chunk] @ head.T).float()
        total += (wide.logsumexp(-1) - wide.gather(-1, targets[chunk, None])[:, 0]).sum()
    return total

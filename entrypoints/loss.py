"""Cross-entropy of a head, by chunks, without ever holding the logits of a whole sequence.

All that training needs of the head is the loss and its gradients with respect to the hidden states and, where the head
is trained, its weights. All come out of one pass over chunks of positions: no logits are kept for the backward pass,
nothing is computed for positions whose token is not learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK = 4096  # positions at a time: 4096 x 52224 logits in bf16 are 0.4 GiB

ChunkLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def head_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, chunk_loss: ChunkLoss | None = None
) -> torch.Tensor:
    """Summed loss in fp32, to be called backward on at most once.

    hidden: [positions, width], head: [vocabulary, width], targets: [positions].
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
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        # A trained head's gradient is read and written once for each chunk.
        size = CHUNK if of_head is not None else CHUNK // 2
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            loss, slope = work(hidden[part] @ head.T, targets[part])
            total += loss
            if of_hidden is not None:
                of_hidden[part] = slope @ head
            if of_head is not None:
                of_head.addmm_(slope.T, hidden[part])
        # Attributes, not save_for_backward: backward scales them in place, and nobody else ever sees them.
        ctx.of_hidden, ctx.of_head = of_hidden, of_head
        return total

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> Any:
        gradients = [None if slope is None else slope.mul_(scales[0]) for slope in (ctx.of_hidden, ctx.of_head)]
        ctx.of_hidden = ctx.of_head = None
        return *gradients, None, None


def softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed cross-entropy in fp32, its gradient with respect to the logits, in their dtype)."""
    wide = logits.float()
    log_sum = wide.logsumexp(-1, keepdim=True)
    loss = (log_sum - wide.gather(-1, targets[:, None])).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return loss, ((wide - log_sum).exp() - is_target.to(wide.dtype)).to(logits.dtype)


def compile_loss(backend: Any = "inductor") -> ChunkLoss:
    """``softmax_loss`` compiled once for any number of positions. The vocabulary's size is told: a kernel that does not know
    how long its sums are is slower."""
    work = torch.compile(softmax_loss, dynamic=True, backend=backend)

    def chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.mark_static(logits, 1)
        found: tuple[torch.Tensor, torch.Tensor] = work(logits, targets)
        return found

    return chunk_loss


def summed_loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The summed loss alone, for evaluation."""
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        wide = (hidden[part] @ head.T).float()
        total += (wide.logsumexp(-1) - wide.gather(-1, targets[part, None])[:, 0]).sum()
    return total

"""Cross-entropy of a frozen head, by chunks, without ever holding the logits of a whole sequence.

The head's weights are frozen, so all that training needs of it is the loss and its gradient with respect to the hidden
states. Both come out of one pass over chunks of positions: nothing is kept for a backward pass, nothing is computed
for positions whose token is not learnt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

CHUNK = 4096  # positions at a time: 4096 x 52224 logits in bf16 are 0.4 GiB


def head_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | float,
    chunk_loss: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed loss in fp32, its gradient with respect to hidden times ``scale``, in hidden's dtype).

    hidden: [positions, width], head: [vocabulary, width], targets: [positions].
    """
    work = chunk_loss or softmax_loss
    total = torch.zeros((), device=hidden.device)
    gradient = torch.empty_like(hidden)
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        loss, slope = work(hidden[part] @ head.T, targets[part])
        total += loss
        gradient[part] = (slope @ head).float().mul_(scale)
    return total, gradient


def softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed cross-entropy in fp32, its gradient with respect to the logits, in their dtype)."""
    wide = logits.float()
    log_sum = wide.logsumexp(-1, keepdim=True)
    loss = (log_sum - wide.gather(-1, targets[:, None])).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return loss, ((wide - log_sum).exp() - is_target.to(wide.dtype)).to(logits.dtype)


def summed_loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The summed loss alone, for evaluation."""
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        wide = (hidden[part] @ head.T).float()
        total += (wide.logsumexp(-1) - wide.gather(-1, targets[part, None])[:, 0]).sum()
    return total

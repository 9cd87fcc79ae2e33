"""Count how well a classifier finds the labels of rows for evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class ClassScores:
    """Collect a loss, and a confusion matrix [label of the row, label predicted], in one vector for one reduction."""

    def __init__(self, labels: int, device: torch.device) -> None:
        self.sums = torch.zeros(1 + labels * labels, dtype=torch.float64, device=device)
        self.labels = labels

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count rows. logits: ``[rows, labels]``, labels: ``[rows]``, int64."""
        self.sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        index = 1 + labels * self.labels + logits.argmax(-1)
        self.sums.index_add_(0, index, torch.ones_like(index, dtype=self.sums.dtype))

    def results(self) -> tuple[float, dict[str, float]]:
        """Return the summed loss, and ``accuracy`` and ``f1``: its mean over the labels that occur or were predicted.

        As scikit-learn's f1_score(average="macro").
        """
        matrix = self.sums[1:].view(self.labels, self.labels)
        correct, actual, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        occurs = actual + predicted > 0
        f1 = (2 * correct[occurs] / (actual + predicted)[occurs]).mean()
        return float(self.sums[0]), {"accuracy": float(correct.sum() / matrix.sum()), "f1": float(f1)}

"""Choose the examples of each step, and split them into micro-batches for the processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ekiben_tasks.data import packing
from ekiben_tasks.data.tokenize import Example
from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.training.plan import Plan
from ekiben_tasks.training.prepare import Prepared


class Batches:
    """Choose the examples of a step, split them among the processes, and collate them.

    A step uses batch_size of the packed sequences in ``data``, or without them as many examples.
    collective: all processes have to run the model equally often, so some get empty micro-batches at the end.
    """

    def __init__(
        self,
        data: Prepared,
        plan: Plan,
        world: DistributedContext,
        *,
        layout: packing.Layout,
        collective: bool,
        device: torch.device,
    ) -> None:
        self.data, self.plan, self.world = data, plan, world
        self.layout, self.collective, self.device = layout, collective, device
        self.max_tokens = plan.max_tokens  # of a micro-batch; less once the memory was too small
        self._order: tuple[int, torch.Tensor] | None = None  # epoch, order of its rows

    def rows_of(self, step: int) -> list[Example]:
        """Return the examples of ``step``, of all processes together; each epoch has an order of its own."""
        count = self.data.count
        epoch, position = divmod(step, self.plan.steps_per_epoch(count))
        if self._order is None or self._order[0] != epoch:  # once: shuffling millions of rows takes as long as a step
            generator = torch.Generator().manual_seed(self.plan.settings.seed + epoch)
            self._order = (epoch, torch.randperm(count, generator=generator))
        size = self.plan.settings.batch_size
        chosen = self._order[1][position * size : (position + 1) * size]
        if self.data.sequences is not None:
            return [self.data.train[index] for number in chosen.tolist() for index in self.data.sequences[number]]
        return [self.data.train[index] for index in chosen.tolist()]

    def share(self, rows: Sequence[Example], *, training: bool) -> list[list[Example]]:
        """Return this process's micro-batches of ``rows``. training: limit them as the plan says.

        Where all processes have to run the model equally often, empty micro-batches may follow.
        """
        max_rows, max_tokens = (self.plan.max_rows, self.max_tokens) if training else (len(rows), self.plan.max_tokens)
        ordered = sorted(rows, key=lambda row: len(row.ids), reverse=True)

        def split(rank: int) -> list[list[Example]]:
            return packing.split_micro_batches(ordered[rank :: self.world.size], max_rows, max_tokens, self.layout)

        micro_batches = split(self.world.rank)
        if self.collective:
            most = max(len(split(rank)) for rank in range(self.world.size))
            micro_batches += [[] for _ in range(most - len(micro_batches))]
        return micro_batches

    def collate(self, rows: Sequence[Example]) -> packing.PackedBatch:
        """Return ``rows`` as a packed batch on the device.

        An empty micro-batch becomes the shortest training example, whose loss the caller does not count.
        """
        return packing.pack(rows or [self._shortest], self.layout).to(self.device)

    @functools.cached_property
    def _shortest(self) -> Example:
        return min(self.data.train, key=lambda row: len(row.ids))

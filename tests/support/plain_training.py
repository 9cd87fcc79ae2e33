"""Training in a plain loop over transformers' own model: what runs of `train` are compared with."""

from __future__ import annotations

from typing import Any

import torch

from ekiben_tasks.data.sources import parse_sources
from ekiben_tasks.training.plan import Plan
from ekiben_tasks.training.prepare import prepare_data
from ekiben_tasks.training.settings import Settings

STEPS = 4
# All examples are in each step, so their order does not matter.
SMALL_RUN: dict[str, Any] = {
    "validation_split": 0.8,
    "batch_size": 64,
    "epochs": STEPS,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "max_length": 100,
}


def train_plainly(settings: Settings, tokenizer: Any, model: Any, optimizers: list[Any]) -> None:
    """Train ``model``, one example at a time, as ``settings`` say, by these optimizers."""
    data = prepare_data(settings, parse_sources(settings.data, settings.validation_split), tokenizer, 10_000, False)
    plan = Plan(settings, 1, 1, checkpointed=0, compile=False)
    for step in range(STEPS):
        for example in data.train:
            ids = torch.tensor(example.ids[None], dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            labels[0, example.target_positions] = ids[0, example.target_positions]
            logits = model(input_ids=ids).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
            (loss / data.num_target_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(step, STEPS)
            optimizer.step()
        model.zero_grad()

"""Answer a few rows for evaluation while a model is in training, by the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ekiben_tasks.data.packing import PackedBatch
from ekiben_tasks.data.tokenize import Example, end_tokens
from ekiben_tasks.distributed.strategy import ParallelStrategy
from ekiben_tasks.training.prepare import Prepared

MAX_NEW_TOKENS = 64


class Samples:
    """Answer the first ``count`` rows for evaluation. Every strategy can run it: it has no other model and no cache."""

    def __init__(self, data: Prepared, tokenizer: Any, count: int) -> None:
        self.tokenizer, self.limit = tokenizer, data.limit
        # A plain text is continued from its middle.
        cuts = [(each.ids, each.targets[0][0] or len(each.ids) // 2) for each in data.test[:count]]
        self.prompts = [(ids[:cut].tolist(), ids[cut:].tolist()) for ids, cut in cuts if cut]
        self.ends = set(end_tokens(tokenizer)) if count else set()

    def answer(
        self, strategy: ParallelStrategy, collate: Callable[[list[Example]], PackedBatch]
    ) -> list[dict[str, str]]:
        """Return prompt, answer and the row's own answer of each row."""
        answers: list[list[int]] = [[] for _ in self.prompts]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for number, (prompt, _) in enumerate(self.prompts):
                most = min(MAX_NEW_TOKENS, self.limit - len(prompt) - 1)
                while len(answers[number]) < most and not self.ends & set(answers[number][-1:]):
                    ids = np.array([*prompt, *answers[number], 0], dtype=np.int32)  # the last one is asked for
                    batch = collate([Example(ids, ((len(ids) - 1, len(ids)),))])
                    answers[number].append(int(strategy.loss(batch.ask())))
        decode = self.tokenizer.decode
        return [
            {
                "prompt": decode(prompt),
                "answer": decode(answer, skip_special_tokens=True),
                "expected": decode(expected, skip_special_tokens=True),
            }
            for (prompt, expected), answer in zip(self.prompts, answers, strict=True)
        ]

"""Answers to a batch of prompts. What a row gets depends on the seed and the row alone, not on the batch it is in.

A batch has one stream of chance in transformers, so another size of batch, or a run that was stopped and goes on, would
give other answers. Here each row has its own: the token is the one with the largest logit plus Gumbel noise, which is
the same as drawing from the softmax (the Gumbel-max trick; Maddison et al. 2014, arXiv:1411.0030).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from prompt import end_tokens
from settings import TaskError


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0  # 0: always the likeliest
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    max_new_tokens: int,
    how: Sampling,
    *,
    streamer: Any = None,
) -> list[tuple[list[int], bool]]:
    """(token ids of the answer without its end, whether it came to an end) per prompt. ``numbers``: of the rows' chance."""
    place = model.get_input_embeddings().weight.device
    ends = end_tokens(tokenizer)
    longest = max(len(ids) for ids in prompts)
    padding = [longest - len(ids) for ids in prompts]
    filler = tokenizer.eos_token_id
    ids = torch.tensor(
        [[filler] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)], device=place
    )
    seen = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=place)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=seen,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=filler,
                eos_token_id=ends,
                bos_token_id=None,
            ),
            logits_processor=transformers.LogitsProcessorList([_Chance(how, numbers, seen)]),
            streamer=streamer,
        )[:, longest:].tolist()
    return [_until_end(answer, ends) for answer in output]


class Printer(transformers.TextStreamer):  # type: ignore[misc]  # untyped
    """Prints an answer while it comes, without the white space before it and the end after it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.began = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self.began else text.lstrip()
        self.began = self.began or bool(text)
        print(text, end="\n" if stream_end else "", flush=True)


class _Chance(transformers.LogitsProcessor):  # type: ignore[misc]  # untyped
    """Penalty, temperature, nucleus and noise, row by row. Fillers on the left were never said, so are not penalised."""

    def __init__(self, how: Sampling, numbers: Sequence[int], mask: torch.Tensor) -> None:
        self.how, self.mask = how, mask
        self.said: torch.Tensor | None = None
        self.chances = [torch.Generator(mask.device).manual_seed(how.seed * 1_000_003 + number) for number in numbers]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float()
        if self.said is None and not scores.isfinite().all():
            raise TaskError(
                "the model's logits are no numbers (NaN or infinite): its weights are broken, or fp16 is too narrow"
            )
        scores = self._penalise(input_ids, scores)
        if self.how.temperature <= 0:
            return scores
        scores = scores / self.how.temperature
        if self.how.top_p < 1:
            scores = _nucleus(scores, self.how.top_p)
        waits = [
            torch.empty_like(row).exponential_(generator=chance)
            for row, chance in zip(scores, self.chances, strict=True)
        ]
        return scores - torch.stack(waits).log()

    def _penalise(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As Keskar et al. 2019 (CTRL, arXiv:1909.05858), which transformers follows, too."""
        if self.said is None:
            # A filler counts as the row's last token, which was said anyway.
            told = torch.where(self.mask.bool(), input_ids, input_ids[:, -1:])
            self.said = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, told, True)
        else:
            self.said.scatter_(1, input_ids[:, -1:], True)
        penalty = self.how.repetition_penalty
        return torch.where(self.said, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _nucleus(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Only the likeliest tokens that together have ``share`` of the probability; the first one always."""
    ordered, order = scores.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, before >= share)
    return scores.masked_fill(dropped, -torch.inf)


def _until_end(answer: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    first = next((place for place, token in enumerate(answer) if token in ends), None)
    return (answer, False) if first is None else (answer[:first], True)

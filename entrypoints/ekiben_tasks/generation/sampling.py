"""Sample answers for a batch of prompts. An answer depends on the seed and its row, not on the rest of the batch.

transformers has one random stream per batch, so another batch size, or a resumed run, would give other answers. Here
each row has a generator of its own: the token is the one with the largest logit plus Gumbel noise, which is the same as
drawing from the softmax (the Gumbel-max trick; Maddison et al. 2014, arXiv:1411.0030).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ekiben_tasks.data.tokenize import end_tokens
from ekiben_tasks.models.architecture import strip_adapter
from ekiben_tasks.task.errors import TaskError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Hold the parameters of sampling, and callbacks.

    top_p: nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751). streamer: of transformers, for a single prompt.
    on_token: called before each token with the number of those before it.
    """

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    streamer: Any = None
    on_token: Callable[[int], None] | None = None


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    row_seeds: Sequence[int],
    max_new_tokens: int,
    params: Sampling,
) -> list[tuple[list[int], bool]]:
    """Return (token ids of the answer without its end, whether it ended by itself) for each prompt.

    prompts: token ids. row_seeds: the seed of each prompt's random numbers, together with that of ``params``.

    Raises:
        TaskError: the model's logits are NaN or infinite.
    """
    device = model.get_input_embeddings().weight.device
    ends = end_tokens(tokenizer)
    longest = max(len(ids) for ids in prompts)
    padding = [longest - len(ids) for ids in prompts]
    pad_id = tokenizer.eos_token_id
    ids = torch.tensor(
        [[pad_id] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)], device=device
    )
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=device)
    config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad_id, eos_token_id=ends, bos_token_id=None
    )
    processors = transformers.LogitsProcessorList([GumbelSampler(params, row_seeds, mask)])
    with torch.inference_mode(), _without_generation_defaults(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=processors,
            streamer=params.streamer,
        )[:, longest:].tolist()
    return [_until_end(answer, ends) for answer in output]


@contextlib.contextmanager
def _without_generation_defaults(model: Any) -> Iterator[None]:
    """generate() takes from the model's generation_config what a call leaves open: penalties, n-gram limits, suppressed
    tokens.
    """
    owners = {id(owner): owner for owner in (model, strip_adapter(model))}.values()
    defaults = [owner.generation_config for owner in owners]
    try:
        for owner in owners:
            owner.generation_config = transformers.GenerationConfig()
        yield
    finally:
        for owner, config in zip(owners, defaults, strict=True):
            owner.generation_config = config


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and ends of lines


def printable(text: str) -> str:
    r"""Return ``text`` for a terminal: a model's control characters, which would move the cursor or rename the window,
    as ``\x1b``.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r", ""))


class StrippingStreamer(transformers.TextStreamer):  # type: ignore[misc]  # untyped
    """Print an answer on a terminal while it is generated, without leading white space and special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.began = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print ``text``, without white space before the answer's first character; transformers calls this."""
        text = text if self.began else text.lstrip()
        self.began = self.began or bool(text)
        print(printable(text), end="\n" if stream_end else "", flush=True)


class GumbelSampler(transformers.LogitsProcessor):  # type: ignore[misc]  # untyped
    """Apply repetition penalty, temperature, top-p and Gumbel noise to logits ``[rows, vocabulary]``, row by row.

    mask: ``[rows, tokens]``, 0 for padding on the left, which is not penalised.
    """

    def __init__(self, params: Sampling, row_seeds: Sequence[int], mask: torch.Tensor) -> None:
        self.params, self.mask = params, mask
        self.seen: torch.Tensor | None = None  # [rows, vocabulary]
        self.generators = [
            torch.Generator(mask.device).manual_seed(params.seed * 1_000_003 + row_seed) for row_seed in row_seeds
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.params.on_token is not None:
            self.params.on_token(input_ids.size(1) - self.mask.size(1))
        scores = scores.float()
        # A logit of -inf excludes a token; only a row of nothing else is an error.
        if self.seen is None and not scores.amax(-1).isfinite().all():
            raise TaskError(
                "the model's logits are NaN or infinite: its weights are broken, or fp16 is too narrow for them"
            )
        scores = self._penalise(input_ids, scores)
        if self.params.temperature <= 0:
            return scores
        scores = scores / self.params.temperature
        if self.params.top_p < 1:
            scores = _keep_top_p(scores, self.params.top_p)
        exponential = [
            torch.empty_like(row).exponential_(generator=generator)
            for row, generator in zip(scores, self.generators, strict=True)
        ]
        return scores - torch.stack(exponential).log()

    def _penalise(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As Keskar et al. 2019 (CTRL, arXiv:1909.05858), which transformers follows, too."""
        if self.seen is None:
            # Padding repeats the row's last token, which is penalised anyway.
            tokens = torch.where(self.mask.bool(), input_ids, input_ids[:, -1:])
            self.seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, tokens, True)
        else:
            self.seen.scatter_(1, input_ids[:, -1:], True)
        penalty = self.params.repetition_penalty
        return torch.where(self.seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens that together have probability ``top_p``; the first one always."""
    ordered, order = scores.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, before >= top_p)
    return scores.masked_fill(dropped, -torch.inf)


def _until_end(answer: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    first = next((index for index, token in enumerate(answer) if token in ends), None)
    return (answer, False) if first is None else (answer[:first], True)

"""Read, split and tokenise the examples of a run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from ekiben_tasks.data.schema import LabelledText, RawExample
from ekiben_tasks.data.sources import (
    InvalidExample,
    Source,
    SplitExamples,
    format_invalid,
    identify,
    locate_examples,
    read_all,
)
from ekiben_tasks.data.tokenize import (
    Example,
    describe_unknown,
    encode_examples,
    encode_labelled,
    join_texts,
    split_example,
)
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.settings import Settings


@dataclass(frozen=True)
class Prepared:
    """Hold a run's examples as tokens, and how many were left out."""

    train: list[Example]
    test: list[Example]
    rows: SplitExamples
    too_long: int
    limit: int = 0  # tokens of the longest example allowed
    limit_reason: str = ""
    sequences: list[list[int]] | None = None  # packed sequences: indices of their training examples
    labels: tuple[str, ...] = ()  # of a classification head's outputs, in order

    @property
    def count(self) -> int:
        """Return the items of an epoch, of which a step uses batch_size: packed sequences, or examples."""
        return len(self.train) if self.sequences is None else len(self.sequences)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the training examples."""
        return sum(len(example.ids) for example in self.train)

    @property
    def num_target_tokens(self) -> int:
        """Return how many of the training examples' tokens the loss counts."""
        return sum(example.num_target_tokens for example in self.train)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest example, evaluation included."""
        return max(len(example.ids) for example in [*self.train, *self.test])

    def batch_tokens(self, count: int) -> int:
        """Return the tokens of the largest batch of ``count`` training examples that a shuffled epoch is expected to
        have.

        Three standard deviations above the mean: a few in a thousand are larger.
        """
        lengths = [len(example.ids) for example in self.train]
        count = min(count, len(lengths))
        usual = count * statistics.fmean(lengths) + 3 * math.sqrt(count) * statistics.pstdev(lengths)
        return max(self.longest, min(round(usual), count * max(lengths), sum(lengths)))


def prepare_data(settings: Settings, sources: list[Source], tokenizer: Any, context: int, skip_bad: bool) -> Prepared:
    """Read, split and tokenise the examples of ``sources``. context: the model's longest, in tokens.

    Raises:
        TaskError: nothing can be read, an example is invalid (unless ``skip_bad``), or no training example fits.
    """
    rows = read_all(sources, seed=settings.seed, skip_bad=skip_bad, form=settings.form, mixture=settings.mixture)
    limit = min(settings.max_length, context)
    reason = ", all that the model takes," if context < settings.max_length else ""
    labels = _choose_labels(settings, rows) if settings.form.kind == "classification" else ()
    kept = []
    too_long = 0
    last_only: list[RawExample] = []
    for examples in (rows.train, rows.test):
        if labels:
            encoded = encode_labelled(tokenizer, examples, labels)
        else:
            encoded = _encode(settings, sources, tokenizer, examples, rows if skip_bad else None, last_only)
        if settings.form.kind == "text":
            encoded = join_texts(encoded, limit)
        fitting = [example for example in encoded if len(example.ids) <= limit]
        too_long += len(encoded) - len(fitting)
        if settings.long_examples != "drop":
            fitting = [chunk for example in encoded for chunk in _shorten(example, limit, settings.long_examples)]
        kept.append(fitting)
    if too_long and settings.long_examples != "drop":
        done = {"cut": "cut at the end", "chunk": "split into several"}[settings.long_examples]
        rows.notes.append(
            f"{too_long:,} examples longer than {limit:,} tokens are {done}; what has no target is left out"
        )
        too_long = 0
    if settings.form.kind == "text":
        rows.notes.append(f"{len(rows.train):,} texts are joined and cut into rows of {limit:,} tokens")
    if last_only:
        rows.notes.append(
            f"{len(last_only):,} conversations train their last message alone: the chat template changes earlier ones"
        )
    if not kept[0]:
        raise TaskError(f"setting max_length: none of the {len(rows.train)} rows fits {limit} tokens{reason}")
    return Prepared(kept[0], kept[1], rows, too_long, limit, reason, labels=labels)


def _choose_labels(settings: Settings, examples: SplitExamples) -> tuple[str, ...]:
    """Return the labels of the head: the settings', or those of all rows, sorted; numbers by their value.

    Raises:
        TaskError: there is one label alone.
    """
    learned, evaluated = (
        {each.label for each in part if isinstance(each, LabelledText)} for part in (examples.train, examples.test)
    )
    are_numbers = all(label.removeprefix("-").isdecimal() for label in learned | evaluated)
    known = sorted(learned | evaluated, key=lambda label: (int(label) if are_numbers else 0, label))
    labels = settings.form.labels or tuple(known)
    if len(labels) < 2:
        raise TaskError(
            f"setting data: every row has the {settings.form.label} {known[0]!r}, and a classifier needs two labels;"
            " name the column with --set form.label="
        )
    if unseen := [label for label in labels if label not in learned]:
        examples.notes.append(f"no row for training has the label {', '.join(unseen[:5])}")
    return labels


def _shorten(example: Example, limit: int, way: str) -> list[Example]:
    """Return ``example`` cut or split into chunks, without those that have no target, if it is above ``limit`` tokens.

    A chunk begins without what was before it. way: cut or chunk.
    """
    if len(example.ids) <= limit:
        return [example]
    if example.label is not None:
        return [Example(example.ids[:limit], label=example.label)]
    if way == "chunk":
        return split_example(example, limit)
    targets = tuple((start, min(end, limit)) for start, end in example.targets if start < limit)
    shorter = Example(example.ids[:limit], targets)
    return [shorter] if shorter.num_target_tokens else []


def check_tokens(data: Prepared, settings: Settings, sources: list[Source], tokenizer: Any, embeddings: int) -> None:
    """Check that the model has an embedding of every token. embeddings: how many it has.

    Raises:
        TaskError: it has not; the message names the token and the example.
    """
    encoded = next((each for each in (*data.train, *data.test) if int(each.ids.max()) >= embeddings), None)
    if encoded is None:
        return
    where = ""
    for content in [*data.rows.train, *data.rows.test]:
        if data.labels:
            (again,) = encode_labelled(tokenizer, [content], data.labels)
        else:
            (again,) = encode_examples(tokenizer, [content], mask_prompt=settings.mask_prompt)
        if int(again.ids.max()) >= embeddings:
            where = f"{locate_examples(sources, settings.form)[identify(content)]}: "
            break
    raise TaskError(f"{where}{describe_unknown(tokenizer, encoded.ids.tolist(), embeddings)}")


def _encode(
    settings: Settings,
    sources: list[Source],
    tokenizer: Any,
    examples: list[RawExample],
    skipped: SplitExamples | None,
    last_only: list[RawExample],
) -> list[Example]:
    """Return the tokens of ``examples``. skipped: gets those that the chat template refuses; None: they are an error.

    last_only: gets the conversations whose last message alone is a target.

    Raises:
        TaskError: the chat template refuses one; the message says where it is.
    """
    conversations: list[RawExample] = []
    try:
        encoded = encode_examples(tokenizer, examples, mask_prompt=settings.mask_prompt, last_only=conversations)
        last_only += conversations
        return encoded
    except TaskError:
        locations = locate_examples(sources, settings.form)
    encoded = []
    for example in examples:
        try:
            encoded += encode_examples(tokenizer, [example], mask_prompt=settings.mask_prompt, last_only=last_only)
        except TaskError as error:
            invalid = InvalidExample(locations.get(identify(example), "an example"), str(error))
            if skipped is None:
                raise TaskError(format_invalid([invalid])) from error
            skipped.bad.append(invalid)
    if not encoded and skipped:
        raise TaskError(format_invalid(skipped.bad))
    return encoded

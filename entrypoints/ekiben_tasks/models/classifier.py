"""Build a decoder with a classification head in place of its output layer, as transformers has it.

The head, ``score``, is a linear layer on the hidden state of a text's last token that is not padding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ekiben_tasks.task.errors import TaskError

HEAD = "score"  # its name in every decoder of transformers that is supported here
_SUFFIX = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class Classes:
    """Describe a classification head. labels: of its outputs, in order. seed: of a new head's weights."""

    labels: tuple[str, ...]
    pad_token_id: int
    seed: int


def is_classifier(model: Any) -> bool:
    """Return whether a transformers model, without an adapter around it, has a classification head."""
    return type(model).__name__.endswith(_SUFFIX)


def describes_classifier(config: Any) -> bool:
    """Return whether a configuration is of a model that was saved with a classification head."""
    return any(str(name).endswith(_SUFFIX) for name in getattr(config, "architectures", None) or ())


def refuse_classifier(config: Any, name: str) -> None:
    """Raise TaskError if the configuration of the model ``name`` is of a classifier, which cannot write text."""
    if describes_classifier(config):
        raise TaskError(
            f"model {name}: is a classifier, which has labels and writes no text; load it with transformers'"
            ' pipeline("text-classification"), or train it further with --set form.kind=classification'
        )


def list_labels(config: Any) -> tuple[str, ...]:
    """Return the labels of a classifier's configuration, in order; none where they are transformers' placeholders."""
    labels = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
    return () if labels == tuple(f"LABEL_{index}" for index in range(len(labels))) else labels


def add_classes(config: Any, classes: Classes) -> Any:
    """Return a copy of ``config`` for a model with these classes."""
    labelled = copy.deepcopy(config)
    labelled.num_labels = len(classes.labels)
    labelled.id2label = dict(enumerate(classes.labels))
    labelled.label2id = {label: index for index, label in enumerate(classes.labels)}
    labelled.problem_type = "single_label_classification"
    return labelled


def choose_class(classes: Classes | None) -> Any:
    """Return transformers' class that loads the model."""
    return transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForCausalLM


def check_classifier(model: Any, name: str) -> None:
    """Check that the head of ``model`` is a linear layer on hidden states.

    Raises:
        TaskError: it is not.
    """
    head: Any = getattr(model, HEAD, None)
    if type(head) is not torch.nn.Linear or head.bias is not None:
        raise TaskError(
            f"model {name}: the classification head of {type(model).__name__} is not a linear layer called {HEAD};"
            " use a decoder such as Llama, Qwen, Gemma, Mistral, GPT-2 or GPT-NeoX"
        )


def finish_classifier(model: Any, classes: Classes, *, is_new: bool) -> None:
    """Set the padding token, and with ``is_new`` the weights of the head, which are the same on every device."""
    # Not before the model is built: embeddings of a padding token would get no gradient.
    model.config.pad_token_id = classes.pad_token_id
    if is_new:
        weight = getattr(model, HEAD).weight
        scale = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
        generator = torch.Generator().manual_seed(classes.seed)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

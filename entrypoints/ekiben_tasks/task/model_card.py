"""Write the README.md of a model or an adapter, the hub's model card, from the records of its training and evaluations.

Values of records are text of users: they are escaped, and only numbers, names and prompts of known form are shown: no
path, no host, no job, no other text, in which a secret could be.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ekiben_tasks.task import files, input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.public_values import as_mapping, as_number, flatten_settings, is_public

CARD = "README.md"
_CARRIED = ".training.json"  # the record of the training of a model that another task wrote from the trained one
_ADVICE = "remove it, and the card has nothing of it"
_MARK = re.compile(r"<!-- Written by Ekiben, until it is edited: ([0-9a-f]{64}) -->\n")
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9.-]{1,40})['\"]?[ \t]*$", re.MULTILINE)
_MAX_CARD = 1 << 20  # bytes
_MAX_PROMPT = 2000  # characters
_RESULTS = {
    "steps": "steps",
    "final_loss": "loss, last step",
    "final_eval_loss": "loss, evaluation",
    "final_eval_perplexity": "perplexity, evaluation",
    "best_eval_loss": "lowest loss of an evaluation",
    "time_to_train_s": "seconds",
    "tokens_per_s": "tokens per second",
}
_DATA = ("rows", "sequences", "eval_rows", "documents", "tokens", "num_target_tokens", "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Hold what a card is written from.

    name: OWNER/NAME. base: the hub id of the model that was trained; empty: there is none, or it is a folder.
    training: the record of the training; None: there is none.
    """

    name: str
    base: str
    is_adapter: bool
    licence: str
    training: Mapping[str, Any] | None
    evaluations: Sequence[Mapping[str, Any]] = ()

    def text(self) -> str:
        """Return the card, with the mark by which it is known as long as nobody edits it."""
        body = "\n".join(self._lines()) + "\n"
        front = yaml.safe_dump(self._front(), allow_unicode=True, sort_keys=False)
        digest = hashlib.sha256(f"{front}{body}".encode()).hexdigest()
        return f"---\n{front}---\n<!-- Written by Ekiben, until it is edited: {digest} -->\n{body}"

    def _front(self) -> dict[str, Any]:
        """Return the metadata, https://huggingface.co/docs/hub/model-cards."""
        training = self.training or {}
        data = [name for name in _sources(training) if _HUB.fullmatch(name)]
        relation = "adapter" if self.is_adapter else "finetune"
        return {
            **({"license": self.licence} if self.licence else {}),
            **({"base_model": self.base, "base_model_relation": relation} if self.base else {}),
            **({"datasets": data} if data else {}),
            "library_name": "peft" if self.is_adapter else "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["ekiben", *(["lora"] if self.is_adapter else [])],
        }

    def _lines(self) -> Iterator[str]:
        training = self.training or {}
        model, settings = as_mapping(training.get("model")), as_mapping(training.get("settings"))
        yield f"# {escape(self.name)}\n"
        kind = "An adapter of" if self.is_adapter else "A model trained from"
        yield f"{kind} `{self.base}`.\n" if self.base else "A causal language model.\n"
        image, commit = as_mapping(training.get("image")), _short(model.get("commit"))
        described = {
            "base": f"{self.base}, revision {commit}" if self.base and commit else self.base,
            "parameters": model.get("parameters"),
            "trained parameters": model.get("trainable"),
            "method": training.get("task") or settings.get("method"),
            "recipe": image.get("recipe"),
            "stack": image.get("stack"),
            "image, checksum of the recipe's files": _short(image.get("recipe_sha256")),
            "image, key of the uppermost layer": _short(_uppermost(image)),
        }
        yield from _table("Model", ("", ""), [(name, value) for name, value in described.items() if is_public(value)])
        yield from self._data_lines(training)
        yield from self._training_lines(training, settings)
        scores = [
            (task, metric, value)
            for record in self.evaluations
            for task, metrics in as_mapping(record.get("scores")).items()
            for metric, value in as_mapping(metrics).items()
        ]
        yield from _table("Evaluation", ("task", "metric", "value"), scores)
        yield "## Licence\n"
        if self.licence:
            yield f"{escape(self.licence)}\n"
        else:
            yield f"The licence of the base model{'' if self.base else ', if any,'} and those of the data apply.\n"
        versions = [(name, value) for name, value in as_mapping(training.get("versions")).items() if is_public(value)]
        yield from _table("Versions", ("package", "version"), versions)

    @staticmethod
    def _data_lines(training: Mapping[str, Any]) -> Iterator[str]:
        data = as_mapping(training.get("data"))
        sources = _sources(training)
        shown = [(name if _HUB.fullmatch(name) else Path(name).name, count) for name, count in sources.items()]
        yield from _table("Data", ("source", "rows"), [(name, "" if count is None else count) for name, count in shown])
        counts = [(name.replace("_", " "), data[name]) for name in _DATA if is_public(data.get(name))]
        yield from _table("" if sources else "Data", ("", ""), counts)

    @staticmethod
    def _training_lines(training: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        values = {**training, **{f"last {name}": value for name, value in as_mapping(training.get("last")).items()}}
        named = {**_RESULTS, **{name: name for name in values if name.startswith("last ")}}
        results = [(title, values[name]) for name, title in named.items() if as_number(values.get(name)) is not None]
        device = as_mapping(training.get("device"))
        results += [(name, device[name]) for name in ("name", "count", "dtype") if is_public(device.get(name))]
        yield from _table("Training", ("", ""), results)
        yield from _table("Settings", ("setting", "value"), list(flatten_settings(settings)))
        form = as_mapping(settings.get("form"))
        for name in ("prompt", "response"):
            text = form.get(name)
            if form.get("kind") == "template" and isinstance(text, str) and len(text) <= _MAX_PROMPT:
                yield f"The {name} of a training example:\n"
                yield from _fenced(text)


def escape(text: str) -> str:
    """Return ``text`` as one line of Markdown that shows it, in a cell of a table, too."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return re.sub(r"([\\`*_{}\[\]()#|~!$])", r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;")


def is_generated(text: str) -> bool:
    """Return whether a card was written here, and nobody has edited it since."""
    match = _MARK.search(text[:_MAX_CARD])
    if not match or not text.startswith("---\n"):
        return False
    rest = text[len("---\n") : match.start()].removesuffix("---\n") + text[match.end() :]
    return hashlib.sha256(rest.encode()).hexdigest() == match[1]


def write(folder: Path, card: Card) -> bool:
    """Write the card into ``folder``; return False where there is one that a user wrote or edited, which stays.

    Raises:
        TaskError: it cannot be read or written.
    """
    file = folder / CARD
    if file.exists() and not is_generated(input_files.read_text(file, "remove it", max_size=_MAX_CARD)):
        return False
    try:
        files.replace_text(file, card.text())
    except OSError as error:
        raise TaskError(f"{file}: cannot be written: {error.strerror}") from error
    return True


def read_licence(card: str) -> str:
    """Return the licence that the metadata of a card name, an empty text where they do not."""
    front = card[4:].partition("\n---")[0] if card.startswith("---\n") else ""
    match = _LICENCE.search(front)
    return match[1].lower() if match else ""


# ------------------------------------------------------------------------------------------------------------- records


def find_training(folder: Path) -> dict[str, Any] | None:
    """Return the record of the training that wrote the model or adapter in ``folder``; None where there is none.

    Raises:
        TaskError: it is damaged.
    """
    for file in (folder / _CARRIED, folder.absolute().parent / "run.json", folder / "run.json"):
        if file.is_file():
            record = input_files.read_object(file, _ADVICE)
            if isinstance(record.get("settings"), dict) and "steps" in record and "status" in record:
                return record
    return None


def carry_training(source: Path, target: Path) -> None:
    """Keep the record of the training of ``source`` in the folder ``target`` of a model that was written from it.

    Raises:
        TaskError: the record is damaged.
    """
    if record := find_training(source):
        files.write_json(target / _CARRIED, {name: value for name, value in record.items() if name != "site"})


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the record of an evaluation. path: its file, or the output of the task.

    Raises:
        TaskError: it cannot be read, or has no scores.
    """
    file = path / "run.json" if path.is_dir() else path
    record = input_files.read_object(file, "name the output of evaluate, jsquad or perplexity")
    if not isinstance(record.get("scores"), dict):
        raise TaskError(f"{file}: has no scores; name the output of evaluate, jsquad or perplexity")
    return record


def is_of(record: Mapping[str, Any], folder: Path) -> bool:
    """Return whether an evaluation is of the model or adapter in ``folder``."""
    settings = as_mapping(record.get("settings"))
    name = settings.get("adapter") or settings.get("model")
    return isinstance(name, str) and Path(name).expanduser().resolve() == folder.resolve()


# -------------------------------------------------------------------------------------------------------------- values


def _short(digest: object) -> str:
    """Return the first 12 digits of a digest, an empty text for another value."""
    return digest[:12] if isinstance(digest, str) and re.fullmatch("[0-9a-f]{12,64}", digest) else ""


def _uppermost(image: Mapping[str, Any]) -> object:
    layers = image.get("layers")
    return as_mapping(layers[-1]).get("cache_key") if isinstance(layers, list) and layers else None


def _sources(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data's sources with their rows, None where they were not counted."""
    sources = as_mapping(training.get("data")).get("sources")
    if isinstance(sources, list):
        return {source: None for source in sources if isinstance(source, str)}
    return {name: as_number(count) for name, count in as_mapping(sources).items() if "://" not in name}


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield a heading and a table; nothing without lines."""
    if not lines:
        return
    if title:
        yield f"## {title}\n"
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for line in lines:
        yield f"| {' | '.join(escape(_format(value)) for value in line)} |"
    yield ""


def _format(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return json.dumps(value) if isinstance(value, bool) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _fenced(text: str) -> Iterator[str]:
    """Yield ``text`` as a block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    yield f"{fence}text\n{text}\n{fence}\n"

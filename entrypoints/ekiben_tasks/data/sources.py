"""Read examples from hub data sets, folders and files, and check them one by one."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ekiben_tasks.data import formats
from ekiben_tasks.data.schema import (
    INSTRUCTION,
    Conversation,
    DatasetFormat,
    PromptCompletion,
    RawExample,
    check_format,
    list_unused,
    parse_example,
)
from ekiben_tasks.data.splits import choose_files, describe_splits
from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError, nearest
from ekiben_tasks.task.hub import format_hub_error
from ekiben_tasks.task.settings import warn_renamed

Mixture = Literal["first_exhausted", "all_exhausted"]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Describe the source of examples: a hub data set, a folder or a file.

    validation_split: the share of its rows kept for evaluation; 1: all. split, eval_split: of a hub data set or a
    folder: what is trained on, and what evaluation takes instead of a share; empty: train and, of a folder, its
    validation or test files. subset, revision: of a hub data set. take: the number of rows to read, from the first one,
    and of a hub data set fetched; 0: all. weight: its share of a mixture of sources.
    """

    location: str
    validation_split: float = 0.0
    subset: str | None = None
    split: str = ""
    eval_split: str = ""
    revision: str | None = None
    take: int = 0
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class InvalidExample:
    """Describe an example that cannot be used: where it is, and the reason."""

    where: str
    problem: str


@dataclass(slots=True)
class SplitExamples:
    """Hold the training and evaluation examples of a run. sha256: of all examples read, in order, before the split."""

    train: list[RawExample] = field(default_factory=list)
    test: list[RawExample] = field(default_factory=list)
    bad: list[InvalidExample] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # file → its SHA-256, hub data set → its commit
    unused: Counter[str] = field(default_factory=Counter)  # unused column or key → number of examples
    notes: list[str] = field(default_factory=list)  # sentences about the files read, for the plan
    sha256: str = ""


def parse_sources(data: Any, validation_split: float) -> list[Source]:
    """Parse the ``data`` setting: a location, or {source, validation_split, ...}, or a list of them.

    Raises:
        TaskError: it is empty, or a group has an unknown key or a wrong value.
    """
    items = data if isinstance(data, list) else [data]
    if data in (None, "", []) or not items:
        raise TaskError("setting data: is empty; name a hub data set, a folder or a file, such as .jsonl or .parquet")
    sources = [_parse_source(item, validation_split) for item in items]
    weighted = [source.weight is not None for source in sources if source.validation_split < 1]
    if any(weighted) and not all(weighted):
        raise TaskError("setting data: give each source that is trained on a weight, or none")
    return sources


def check_locations(sources: Sequence[Source]) -> bool:
    """Return whether any source is on the hub.

    Raises:
        TaskError: a file or folder does not exist.
    """
    of_hub = [is_hub(source.location) for source in sources]  # all of them: each may be a typo
    return any(of_hub)


def read_all(
    sources: Sequence[Source],
    *,
    seed: int,
    skip_bad: bool,
    form: DatasetFormat = INSTRUCTION,
    mixture: Mixture = "first_exhausted",
) -> SplitExamples:
    """Read every source and split it into training and evaluation examples. skip_bad: leave invalid ones out.

    mixture: when a mixture of sources with weights ends.

    Raises:
        TaskError: nothing is found, no example is valid, or one of a local file is not (unless ``skip_bad``).
    """
    check_format(form)
    examples, digest, train_sets = SplitExamples(), hashlib.sha256(), list[list[RawExample]]()
    for source in sources:
        selection, evaluation, notes = _open_source(source, form)
        examples.notes += notes
        train = _read_examples(source, selection, form, examples, skip_bad=skip_bad)
        test = _read_examples(source, evaluation, form, examples, skip_bad=skip_bad) if evaluation else []
        for example in (*train, *test):
            digest.update(identify(example).encode())
        examples.counts[source.location] = examples.counts.get(source.location, 0) + len(train) + len(test)
        if not evaluation:
            train, test = split(train, source.validation_split, seed)
        train_sets.append(train)
        examples.test += test
    if any(source.weight for source in sources):
        digest.update(
            json.dumps(
                [[source.weight, len(train_set)] for source, train_set in zip(sources, train_sets, strict=True)]
            ).encode()
        )
        train_sets = _mix(sources, train_sets, seed, mixture, examples.notes)
    examples.train = [example for train_set in train_sets for example in train_set]
    plain = sum(isinstance(each, PromptCompletion) for each in (*examples.train, *examples.test))
    if plain and form.kind == "instruction":
        examples.notes.append(f"{plain:,} examples of prompt and completion are trained as one text, without headings")
    if examples.unused:
        columns = ", ".join(f"{name} ({count:,})" for name, count in examples.unused.most_common())
        examples.notes.append(f"nothing uses the columns {columns}")
    if not examples.train:
        raise TaskError("setting data: every source is for evaluation (validation_split: 1); name one to train on")
    examples.sha256 = digest.hexdigest()
    return examples


def read_prompts(
    source: Source, form: DatasetFormat, *, skip_bad: bool
) -> tuple[list[RawExample], list[InvalidExample], dict[str, str]]:
    """Return (examples that need only a prompt, invalid ones, file or data set → its SHA-256 or commit).

    Raises TaskError as ``read_all``.
    """
    check_format(form)
    selection, _, notes = _open_source(source, form)
    if notes and not source.split:
        raise TaskError(
            f"{source.location}: its files belong to several splits; name one of them:"
            f" --set 'data={{source: {source.location}, split: test}}'"
        )
    result = SplitExamples()
    good = _read_examples(source, selection, form, result, skip_bad=skip_bad, asked=True)
    return good, result.bad, result.versions


def list_items(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield (where it is, item) of each item of a source, for data that are no examples of a form.

    Raises:
        TaskError: the source cannot be read.
    """
    selection, _, notes = _open_source(source, INSTRUCTION)
    if notes and not source.split:
        raise TaskError(
            f"{source.location}: its files are of several splits; name one:"
            f" --set 'data={{source: {source.location}, split: train}}'"
        )
    return _list_items(source, selection)


def locate_examples(sources: Sequence[Source], form: DatasetFormat) -> dict[str, str]:
    """Return where each example of ``sources`` is, by its content as identify() returns it: for messages.

    Raises:
        TaskError: as read_all().
    """
    locations: dict[str, str] = {}
    for source in sources:
        selection, evaluation, _ = _open_source(source, form)
        for each in (selection, *([evaluation] if evaluation else [])):
            for where, item in _list_items(source, each):
                example = parse_example(item, form)
                if not isinstance(example, str):
                    locations.setdefault(identify(example), where)
    return locations


def identify(example: RawExample) -> str:
    """Return the content of ``example`` as JSON."""
    return json.dumps(_content(example), ensure_ascii=False)


def split(rows: list[RawExample], validation_split: float, seed: int) -> tuple[list[RawExample], list[RawExample]]:
    """Return (training, evaluation) examples, the same for the same seed and examples.

    At least one is for training, unless ``validation_split`` is 1.
    """
    if validation_split == 1:
        return [], rows
    count = min(round(len(rows) * validation_split) or (1 if validation_split > 0 else 0), len(rows) - 1)
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [rows[index] for index in sorted(chosen)]


def _mix(
    sources: Sequence[Source], train_sets: Sequence[list[RawExample]], seed: int, mixture: Mixture, notes: list[str]
) -> list[list[RawExample]]:
    """Return the examples of ``train_sets`` in one list, drawn by the sources' weights as interleave_datasets() draws.

    notes: gets a sentence for each source.
    """
    import datasets

    used = [(source, train_set) for source, train_set in zip(sources, train_sets, strict=True) if train_set]
    total = sum(source.weight or 0 for source, _ in used)
    tables = [
        datasets.Dataset.from_dict({"at": [[number, index] for index in range(len(train_set))]})
        for number, (_, train_set) in enumerate(used)
    ]
    shares = [(source.weight or 0) / total for source, _ in used]
    drawn = datasets.interleave_datasets(tables, shares, seed=seed, stopping_strategy=mixture)["at"][:]
    for number, (source, train_set) in enumerate(used):
        indices = [index for which, index in drawn if which == number]
        drawn_from = f"{len(set(indices)):,} of its {len(train_set):,}"
        notes.append(f"{source.location}: {len(indices):,} of {len(drawn):,} rows of the mixture, {drawn_from}")
    return [[used[number][1][index] for number, index in drawn]]


def _parse_source(item: Any, validation_split: float) -> Source:
    if isinstance(item, str) and item:
        return Source(item, validation_split)
    if not isinstance(item, dict) or not isinstance(item.get("source"), str) or not item["source"]:
        raise TaskError(
            f"setting data: {item!r} is not a source; write a location, or {{source: LOCATION, validation_split: 0.01}}"
        )
    if "test_share" in item:
        warn_renamed("data: {test_share}", "data: {validation_split}")
        item = {"validation_split" if key == "test_share" else key: value for key, value in item.items()}
    hub_keys = ("subset", "revision", "split", "eval_split")
    known = ("source", "validation_split", "take", "weight", *hub_keys)
    for key, value in item.items():
        if key not in known:
            raise TaskError(f"setting data: no key '{key}' in a source.{nearest(str(key), known)}")
        is_folder = key in ("split", "eval_split") and Path(item["source"]).expanduser().is_dir()
        if key in hub_keys and (not isinstance(value, str) or not (is_folder or is_hub(item["source"]))):
            where = "a hub data set or a folder" if key in ("split", "eval_split") else "a hub data set"
            raise TaskError(f"setting data: {key} names a part of {where}, so {value!r} is wrong for {item['source']}")
    share = item.get("validation_split", validation_split)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise TaskError(f"setting data: validation_split must be from 0 to 1, not {share!r}")
    take, weight = item.get("take", 0), item.get("weight")
    if isinstance(take, bool) or not isinstance(take, int) or take < 0:
        raise TaskError(f"setting data: take must be a number of rows (0: all), not {take!r}")
    if weight is not None and (
        isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf
    ):
        raise TaskError(f"setting data: weight must be above 0, not {weight!r}")
    return Source(item["source"], float(share), **{key: value for key, value in item.items() if key in known[2:]})


@dataclass(frozen=True, slots=True)
class _Selection:
    """Hold the part of a source for one use: files, or a table of the hub."""

    files: tuple[Path, ...] = ()
    table: Any = None


def _open_source(source: Source, form: DatasetFormat) -> tuple[_Selection, _Selection | None, list[str]]:
    """Return (training data, evaluation data if they are not a share of them, sentences for the plan)."""
    if is_hub(source.location):
        train = _Selection(table=_load_hub(source, source.split or "train"))
        return train, _Selection(table=_load_hub(source, source.eval_split)) if source.eval_split else None, []
    path = Path(source.location).expanduser()
    files = _list_files(path, texts=form.kind == "text")
    if not path.is_dir():
        return _Selection(tuple(files)), None, []
    splits = choose_files(path, files, source.split, source.eval_split)
    notes = [describe_splits(path, splits)] if splits.evaluation or splits.skipped else []
    return _Selection(splits.train), _Selection(splits.evaluation) if splits.evaluation else None, notes


def _read_examples(
    source: Source,
    selection: _Selection,
    form: DatasetFormat,
    result: SplitExamples,
    *,
    skip_bad: bool,
    asked: bool = False,
) -> list[RawExample]:
    """Return the valid examples of ``selection``, and add invalid ones and versions to ``result``."""
    of_hub = selection.table is not None
    good, bad = _check(_list_items(source, selection), form, result.unused, asked=asked)
    if bad and not skip_bad and not of_hub:  # a hub data set is not the user's to correct
        raise TaskError(format_invalid(bad))
    if not good:
        raise TaskError(f"{source.location}: holds no valid example" + (f"; {format_invalid(bad)}" if bad else ""))
    result.bad += bad
    if of_hub:
        result.versions |= {source.location: commit} if (commit := find_commit(selection.table)) else {}
    else:  # after they were read: no checksum of a file that is not data
        result.versions |= {str(file): _sha256(file) for file in selection.files}
    return good


def _list_items(source: Source, selection: _Selection) -> Iterator[tuple[str, Any]]:
    stop = source.take or None
    if selection.table is None:
        return itertools.islice((pair for file in selection.files for pair in formats.read_file(file)), stop)
    return _read_table(source, itertools.islice(selection.table, stop))


def _read_table(source: Source, items: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a hub data set, which are fetched meanwhile if only some are taken."""
    for number in itertools.count(1):
        try:
            item = next(items, None)
        except Exception as error:
            raise TaskError(format_hub_error(error, source.location, "data set")) from error
        if item is None:
            return
        yield f"{source.location} row {number}", item


def identify_versions(sources: Sequence[Source], form: DatasetFormat) -> list[str] | None:
    """Return what changes when the content of a source does; None: nothing says it, for its rows are streamed.

    Raises:
        TaskError: a source cannot be opened.
    """
    versions = list[str]()
    for source in sources:
        selection, evaluation, _ = _open_source(source, form)
        for each in (selection, *([evaluation] if evaluation else [])):
            if each.table is not None and source.take:
                return None
            versions += [each.table._fingerprint] if each.table is not None else map(_identify_file, each.files)
    return versions


def _identify_file(file: Path) -> str:
    status = file.stat()
    return f"{file.absolute()} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_hub(location: str) -> bool:
    """Return whether ``location`` is a hub id.

    Raises:
        TaskError: it is a file or folder that does not exist.
    """
    path = Path(location).expanduser()
    if path.exists():
        return False
    if formats.is_data(path) or location.startswith(("/", "./", "../", "~")) or not _HUB_ID.fullmatch(location):
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, beside)
        hint = close if "Did you mean" in close else ""
        raise TaskError(f"data {path.absolute()}: no such file or folder; is it bound into the container?{hint}")
    return True


def _list_files(path: Path, *, texts: bool) -> list[Path]:
    if not path.is_dir():
        input_files.check_regular(path, formats.ADVICE)
        return [path]
    files = sorted(file for file in path.rglob("*") if formats.is_data(file) and not file.is_dir())
    files = [file for file in files if not any(name.startswith(".") for name in file.relative_to(path).parts)]
    files = [file for file in files if texts or not formats.is_text(file)]  # a README is not a data
    if not files:
        raise TaskError(f"{path}: holds no {', '.join(formats.SUFFIXES)} file")
    return files


def _load_hub(source: Source, split: str) -> Any:
    import datasets  # imported here: seconds of import that local files do not need

    datasets.disable_progress_bars()
    try:
        options: dict[str, Any] = {"streaming": True} if source.take else {}
        return datasets.load_dataset(source.location, source.subset, split=split, revision=source.revision, **options)
    except Exception as error:
        raise TaskError(format_hub_error(error, source.location, "data set")) from error


def find_commit(table: Any) -> str | None:
    """Return the commit that the addresses of a hub data set's files name, or of their copies here; else None."""
    copies = [file["filename"] for file in getattr(table, "cache_files", None) or ()]
    streamed = str(getattr(getattr(table, "_ex_iterable", None), "kwargs", ""))
    commits = re.findall(r"[@/]([0-9a-f]{40})/", " ".join([*(table.info.download_checksums or ()), *copies, streamed]))
    return commits[-1] if commits else None


def _content(example: RawExample) -> Any:
    """Return the fields of ``example`` for its digest; of a conversation, those that are not the default."""
    if not isinstance(example, Conversation):
        return dataclasses.astuple(example)
    messages = [
        [each.role, each.content, *([each.is_target, each.keys] if each.keys or not each.is_target else [])]
        for each in example.messages
    ]
    return [messages, example.tools] if example.tools else [messages]


def _check(
    items: Iterator[tuple[str, Any]], form: DatasetFormat, unused: Counter[str], *, asked: bool
) -> tuple[list[RawExample], list[InvalidExample]]:
    good: list[RawExample] = []
    bad: list[InvalidExample] = []
    for where, item in items:
        row = parse_example(item, form, asked=asked)
        if isinstance(row, str):
            bad.append(InvalidExample(where, row))
        else:
            good.append(row)
            unused.update(list_unused(item, form, asked=asked))
    return good, bad


def format_invalid(bad: Sequence[InvalidExample]) -> str:
    """Return a message with the number of invalid examples, the first five of them, and what to do."""
    shown = "\n".join(f"  {row.where}: {row.problem}" for row in bad[:5])
    more = f"\n  and {len(bad) - 5} more" if len(bad) > 5 else ""
    return (
        f"{len(bad)} invalid example{'s' * (len(bad) > 1)}; correct them, or leave them out with"
        f" --skip-invalid\n{shown}{more}"
    )

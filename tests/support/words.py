"""Count words that this project used in a meaning of its own, where the field has a term.

``make words`` prints the counts.

Each term stands with the field's. A private word is counted wherever it stands: as a part of an identifier, as a string
that is one word (a JSON key, most often), and in texts: messages, help, docstrings. An ordinary English word is counted
where it names something: in identifiers and one-word strings. tests/unit/words.json holds the counts that were reached;
they may only shrink, and REASONS says of every term that is left in which meaning it stays.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ROOT / "tests/unit/words.json"
AREAS = {"ekiben": ("ekiben",), "tasks": ("entrypoints", "recipes", "images"), "tests": ("tests", "qa", "bench")}
PRIVATE = {  # never an ordinary word here: counted in texts, too
    "learnt": "num_target_tokens, compile_stats",
    "unlearnt": "ignored",
    "taken": "StageCopy, copied",
    "bill": "sbom",
    "handed": "outputs",
    "told": "log, stdout",
    "wanted": "required, requested",
    "asks": "resource_args",
    "wish": "request",
    "fate": "PruneDecision",
    "settle": "apply_permissions",
    "pour": "write_entries",
    "unrelated": "name-confusion check",
    "hostenv": "host_config",
    "adopt": "import",
    "narrowed": "filter_archs",
    "savings_of": "format_savings",
    "proven": "verified",
    "prove": "verify, smoke_test",
    "capture": "changeset",
    "canonical": "normalize",
    "deliver": "export",
    "assemble": "exporters",
    "behind": "upstream",
    "lend": "mount",
    "lent": "mounted",
    "borrows": "bind-mounted",
    "unfit": "IncompatibleHostError",
    "forget": "untag, truncate",
    "begun": "started, location",
    "catalogue": "catalog",
    "unread": "read_error",
}
ORDINARY = {  # a name that says nothing of what it names
    "place": "device, shared_dir, destination, ref, folder",
    "places": "label_positions, folders",
    "found": "name the thing",
    "said": "message, stdout, stderr",
    "say": "print_*",
    "says": "print_*",
    "tell": "log",
    "made": "created, sif, layer",
    "about": "metadata, description",
    "own": "name the thing",
    "part": "layer, shard, param",
    "parts": "layers, sections",
    "others": "unmatched",
    "there": "existing",
    "moved": "bytes_copied",
    "why": "reason",
    "how": "params",
    "words": "argv",
    "row": "example, JobStatus",
    "rows": "examples",
    "room": "budget_bytes, workspace",
    "pack": "PackedBatch",
    "packs": "micro_batches",
    "chain": "ResolvedRecipe",
    "given": "prebuilt, options",
    "needs": "stage_deps, depends",
    "whole": "complete, file digest",
    "obtain": "ensure_layer",
    "member": "entry",
    "supply": "PackageSources",
    "facts": "image_requirements",
    "opened": "ImageReader",
    "contents": "image_reader",
    "flat": "squash",
    "least": "minimum",
    "shape": "ModelConfig",
    "trained": "ParallelStrategy",
    "learner": "LossModule",
    "slope": "grad",
    "dress": "apply_tuning_method",
    "journal": "ResumableJsonlWriter",
    "quieten": "silence_warnings",
    "drill": "fake_task",
    "together": "multiprocess",
    "accidents": "crash_recovery",
    "notice": "grace_period",
}
IN_TEXTS = {  # of PRIVATE, ordinary English in a sentence: counted in names and keys only. Word → what it says in texts
    "taken": "which of several is taken; a name that is taken",
    "wanted": "what is wanted of an option's value",
    "asks": "a requirements file, or a program, asks for something",
    "behind": "the file left behind; behind a proxy",
    "canonical": "the canonical form of JSON, or of a path",
    "handed": "what a stage hands over is handed to the next",
    "forget": "a daemon or a registry forgets an image",
    "lent": "folders of the host that a build sees for a while",
}
REASONS = {  # each term that is still counted → the meaning in which it stays
    "about": "what is known about one thing, a mapping on its way to JSON or to a test",
    "asks": "tasks: what a program asks for",
    "behind": "files that a killed process left behind",
    "bill": "tests: a bill of materials",
    "borrows": "tests: the text of an old record",
    "begun": "tasks: a file that was begun and not ended",
    "catalogue": "tests and pages: British spelling in prose",
    "chain": "layers from the bottom to the top; a certificate chain",
    "contents": "what a file or folder holds",
    "facts": "what a script printed about a machine, in JSON",
    "flat": "of one partition; squashfs and DeepSpeed say so",
    "found": "the result of the search that the function is",
    "forget": "tests: untag, in the name of a test",
    "given": "what the caller gave",
    "handed": "handed on to a subprocess",
    "how": "tests: parametrized behaviour",
    "learnt": "a key of old records, which are still read",
    "least": "the least of several numbers",
    "lend": "tests: of an old interface",
    "made": "what the function just created",
    "member": "of a tar, of a group",
    "moved": "tests: bytes that a copy moved",
    "needs": "what something requires, in a predicate",
    "notice": "--grace-period's former name; a scheduler's notice before the end",
    "opened": "a file or store that was opened",
    "others": "the rest of several",
    "own": "a user's, as opposed to another's or the image's",
    "pack": "struct.pack; examples packed into one sequence",
    "packs": "several of them",
    "part": "a piece of a path, of a word or of a file",
    "parts": "several of them",
    "place": "a folder or an address, in images and tests",
    "places": "paths where a rule may look",
    "prove": "tasks: to show by an example",
    "proven": "tests: the same",
    "room": "free bytes",
    "row": "a line of a table, of a plot, or of data",
    "rows": "several of them",
    "said": "what a program printed",
    "say": "prints one line",
    "says": "a predicate about what a file says",
    "shape": "of a tensor; of a model without weights",
    "slope": "tests: of a line",
    "supply": "tests: PackageSources",
    "taken": "tests, tasks: which of several was taken",
    "there": "present on disk or in a registry",
    "together": "at the same time, of processes",
    "told": "tests: what was printed",
    "trained": "PreTrainedTokenizer; a model that was trained",
    "unread": "a key of former records",
    "unrelated": "runs that do not belong together",
    "wanted": "what was asked for, beside what there is",
    "whole": "all of a GPU, a node or a file, as opposed to a part",
    "why": "a reason as text, beside a decision",
    "words": "words of a command line or of a shell",
}
_IN_TEXT = {*PRIVATE} - {*IN_TEXTS}
_IN_NAMES = {*PRIVATE, *ORDINARY}
LIBRARY = {  # names of Python's library, which stay
    "FileNotFoundError",
    "ModuleNotFoundError",
    "PackageNotFoundError",
    "CaptureFixture",
    "break_long_words",
    "capture_output",
    "load_cert_chain",
    "tell",
    "parts",
}
ALLOWED = {  # (file, identifier or one-word string): why it stays
    ("ekiben/store/_records.py", "learnt"): "the folder's name in older stores, which are still read",
    ("ekiben/bundle/read.py", "member"): "a member of a tar, as tarfile names it",
    ("ekiben/bundle/read.py", "_unpack_member"): "a member of a tar, as tarfile names it",
    ("ekiben/store/image.py", "flat"): "hashed into the ids of squashed SIFs; the keyword belongs with it",
    ("ekiben/publish/catalog/runs.py", "rows"): "a key of run.json, which the tasks write",
    ("ekiben/publish/catalog/_types.py", "rows"): "a key of run.json, which the tasks write; rows of a plot",
    ("entrypoints/ekiben_tasks/distributed/saved_state.py", "fp32_flat_groups"): "a key of DeepSpeed's checkpoints",
    (
        "entrypoints/ekiben_tasks/distributed/partitioned.py",
        "fp32_partitioned_groups_flat",
    ): "DeepSpeed's name",
    ("entrypoints/ekiben_tasks/distributed/partitioned.py", "ds_shape"): "DeepSpeed's name",
    ("ekiben/core/settings.py", "in_place"): "the key of config.yaml, as sed's --in-place",
    ("qa/gpu/carry_image.py", "pack"): "its command, the opposite of unpack",
    ("qa/gpu/carry_image.py", "contents"): "SquashfsReader's method",
    ("qa/test_carry_image.py", "pack"): "the command",
}


@dataclass(frozen=True, slots=True)
class Use:
    """One occurrence of ``term``. ``kind``: name, key or text; ``text``: the identifier, or the string."""

    path: str
    line: int
    kind: str
    term: str
    text: str


@cache
def terms_in(text: str) -> frozenset[str]:
    """Return the lower-case words of an identifier or a text."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text))


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that stand at one node of a syntax tree."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.alias(asname=str(name)):
            yield name


def unused_exceptions() -> list[tuple[str, str]]:
    """Return the entries of ALLOWED that allow nothing any more."""
    return [
        (path, name)
        for path, name in ALLOWED
        if not any(use.text == name for use in uses_in_python(path, (ROOT / path).read_text(encoding="utf-8")))
    ]


def uses_in_python(path: str, source: str) -> Iterator[Use]:
    """Yield the uses in one module."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        for name in names_of(node):
            terms = terms_in(name) & _IN_NAMES if name not in LIBRARY else frozenset[str]()
            yield from (Use(path, line, "name", term, name) for term in terms)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"\w+", node.value):
                terms = terms_in(node.value) & _IN_NAMES
                yield from (Use(path, line, "key", term, node.value) for term in terms)
            else:
                yield from (Use(path, line, "text", term, node.value) for term in terms_in(node.value) & _IN_TEXT)


def uses_in_text(path: str, text: str) -> Iterator[Use]:
    """Yield the uses in a template or a script."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from (Use(path, number, "text", term, line.strip()) for term in terms_in(line) & _IN_TEXT)


def all_uses(folders: tuple[str, ...]) -> Iterator[Use]:
    """Yield the uses in every module, template and script of ``folders``, without those that are allowed."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*")):
            path = file.relative_to(ROOT).as_posix()
            if path == "tests/support/words.py" or file.suffix not in (".py", ".html", ".js", ".sh"):
                continue
            text = file.read_text(encoding="utf-8")
            uses = uses_in_python(path, text) if file.suffix == ".py" else uses_in_text(path, text)
            yield from (use for use in uses if (path, use.text) not in ALLOWED)


@cache
def counts() -> dict[str, dict[str, int]]:
    """Return area → term → number of uses."""
    return {
        area: dict(sorted(Counter(use.term for use in all_uses(folders)).items())) for area, folders in AREAS.items()
    }


def main(arguments: list[str]) -> None:
    """Print the counts, with --write store them, and with a term or a path print where it stands."""
    if arguments == ["--write"]:
        LIMITS.write_text(json.dumps(counts(), indent=1) + "\n", encoding="utf-8")
    elif arguments:
        for use in (use for folders in AREAS.values() for use in all_uses(folders)):
            if use.term in arguments or any(use.path.startswith(argument) for argument in arguments):
                print(f"{use.path}:{use.line}: {use.kind} {use.term}: {' '.join(use.text.split())[:90]}")
    else:
        for area, terms in counts().items():
            print(f"{area}: {sum(terms.values())}")
            for term, count in sorted(terms.items(), key=lambda item: -item[1]):
                print(
                    f"  {count:5}  {term:<10} {({**PRIVATE, **ORDINARY})[term]}; stays as:"
                    f" {REASONS.get(term, 'no reason yet')}"
                )


if __name__ == "__main__":
    main(sys.argv[1:])

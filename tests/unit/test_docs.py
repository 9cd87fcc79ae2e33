"""What the documents show exists: commands, options, targets, variables, files, links; generated pages are current."""

from __future__ import annotations

import functools
import json
import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml

from bench import picture
from docs.pictures import charts
from ekiben.cli import root
from ekiben.cli.options import TaskCommand

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "recipes/*/README.md", "bench/*.md", "ekiben/project/template/README.md")
    for path in ROOT.glob(pattern)
)
IDS = [str(path.relative_to(ROOT)) for path in DOCS]
CTX = click.Context(root, info_name="ekiben")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
MADE = {"bench/scratch/", "ekiben/_data/"}  # by a run of the benchmarks, in a wheel
PLACEHOLDER = re.compile(r"NAME|PACKAGE|TOPIC|-N/|\bmine\b")
FOLDERS = "bench|docs|ekiben|entrypoints|images|qa|recipes|sites|tests"


def load(path: Path) -> ModuleType:
    """Import a script below docs/, which is not a package."""
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load(ROOT / "docs/generate.py")
draw = load(ROOT / "docs/pictures/draw.py")


# ---------------------------------------------------------------------------------------------------- reading documents


def code(path: Path) -> list[str]:
    """Return the lines of code blocks, and what stands between backquotes."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^(?: {4}|\t)(.*)$", prose, re.MULTILINE)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^(?: {4}|\t).*$", "", prose, flags=re.MULTILINE))
    return [line.strip() for line in lines] + [" ".join(snippet.split()) for snippet in inline]


def commands(path: Path, program: str) -> list[str]:
    """Return what follows ``program`` in every line that starts it, alone or after ``&&``, ``;`` or a variable."""
    parts = [
        part
        for line in code(path)
        for part in re.split(
            r"\s&&\s|;\s|\s\|\s|\s#\s", re.sub(r"\s{2,}\D.*$", "", line) if program == "make" else line
        )
    ]
    started = re.compile(rf"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/python )?{program}(?: (.*))?$")
    return [found[1] or "" for part in parts if (found := started.match(part.strip()))]


def problem_of(argv: list[str]) -> str | None:
    """Return what is wrong with a command of ekiben, by click's own parser; None when nothing is."""
    ctx, command = CTX, root
    parser_words = argv
    while True:
        parser = command.make_parser(ctx)
        try:
            arranged = command.arrange(ctx, list(parser_words)) if isinstance(command, TaskCommand) else parser_words
            _, rest, _ = parser.parse_args(list(arranged))
        except click.NoSuchOption as error:
            return error.format_message()
        except click.UsageError:  # a value or an argument is left out, as in the name of an option
            return None
        if not isinstance(command, click.Group) or not rest:
            return None
        name, parser_words = rest[0], rest[1:]
        if name.isupper():  # COMMAND, where any can stand
            return None
        found = command.get_command(ctx, name)
        if found is None:
            return f"no command {name}"
        ctx, command = click.Context(found, info_name=name, parent=ctx), found  # type: ignore[assignment]


def words_of(line: str) -> list[str]:
    """Return a command's words, without placeholders' brackets and a remark behind it."""
    line = re.split(r"\s#|\s{2,}|…", line)[0]
    return shlex.split(line.replace("[", "").replace("]", "").replace("OPTIONS", ""))


def task_arguments() -> dict[str, set[str]]:
    """Return the arguments of every task, over all recipes that have it, from the generated page."""
    known: dict[str, set[str]] = {}
    for section in re.split(
        r"^### ", (ROOT / "docs/reference/tasks.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    ):
        if found := re.match(r"[\w-]+: ([\w-]+)\n", section):
            rows = re.findall(r"^\| `(-[^`]*)`", section, re.MULTILINE)
            known.setdefault(found[1], {"--help"}).update(
                name for row in rows for name in re.findall(r"--?[\w-]+", row)
            )
    return known


TASKS = task_arguments()


# ---------------------------------------------------------------------------------------------------------------- tests


def test_readers_find_commands() -> None:
    readme = ROOT / "README.md"
    assert len(commands(readme, "ekiben")) >= 10
    assert {"image recipe=hello", "run recipe=hello task=hello"} <= set(commands(readme, "make"))
    assert "no-such" in (problem_of(["image", "hello", "--no-such"]) or "")
    assert problem_of(["wheels", "lend"]) == "no command lend"
    assert problem_of(["--store", "x", "image", "hello", "--format", "sif"]) is None
    assert {"--smoke", "--set"} <= TASKS["train"]


@pytest.mark.parametrize("path", DOCS, ids=IDS)
class TestDocument:
    def test_commands_and_options_exist(self, path: Path) -> None:
        lines = [line for program in ("ekiben", r"(?:\S*/)?build\.py") for line in commands(path, program)]
        found = {line: problem_of(words_of(line.replace("@{name}", "mine"))) for line in lines}
        assert {line: problem for line, problem in found.items() if problem} == {}

    def test_arguments_of_tasks_exist(self, path: Path) -> None:
        wrong = []
        for program in ("singularity", "apptainer"):
            for line in commands(path, program):
                found = re.match(r"(?:exec|run)(?: --nv)? \S+ ([\w-]+)(.*)", line)
                if found and found[1] in TASKS:
                    options = {word.split("=")[0] for word in words_of(found[2]) if word.startswith("--")}
                    wrong += [f"{found[1]} {name}" for name in options - TASKS[found[1]]]
        assert wrong == []

    def test_make_targets_exist(self, path: Path) -> None:
        targets = {words_of(line)[0] for line in commands(path, "make") if words_of(line)}
        assert {target for target in targets if re.fullmatch(r"[a-z-]+", target)} <= TARGETS

    def test_links_lead_somewhere(self, path: Path) -> None:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
        # `_*.md` are parts of generated pages.
        assert [target for target in local if not (path.parent / target).exists()] == []

    def test_files_between_backquotes_exist(self, path: Path) -> None:
        named = {
            word for word in code(path) if "template" not in path.parts
        }  # a template's paths are those of a new recipe
        named = {word for word in named if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+", word)}
        real = {word for word in named - MADE if not PLACEHOLDER.search(word)}
        recipe = path.parent  # a recipe's README also names its own files
        assert [word for word in sorted(real) if not (ROOT / word).exists() and not (recipe / word).exists()] == []

    def test_variables_exist(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"\bEKIBEN_[A-Z]+(?:_[A-Z]+)*\b", text))
        assert named <= variables("tests", "qa") or path.name == "CHANGELOG.md"  # that speaks of what is gone, too


@functools.cache
def variables(*more: str) -> set[str]:
    """Return the variables of Ekiben that code reads or sets."""
    sources = [
        file
        for folder in ("ekiben", "entrypoints", "images", *more)
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".sh", ".def"}
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    return set(re.findall(r"(?<![\w])EKIBEN_[A-Z]+(?:_[A-Z]+)*\b", text))


def test_every_variable_is_documented() -> None:
    assert variables() <= set(
        re.findall(r"EKIBEN_[A-Z_]+", (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8"))
    )


def test_both_readmes_show_the_same_commands() -> None:
    english, japanese = ROOT / "README.md", ROOT / "README.ja.md"
    for program in ("ekiben", "make", "singularity", "uv"):
        assert [words_of(line) for line in commands(english, program)] == [
            words_of(line) for line in commands(japanese, program)
        ]


@pytest.mark.parametrize(("name", "limit"), [("README.md", 160), ("README.ja.md", 160), ("CONTRIBUTING.md", 120)])
def test_short_documents_stay_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


def test_generated_files_are_current() -> None:
    assert generate.out_of_date() == [], "run: python docs/generate.py"


def test_pictures_are_current() -> None:
    stale = [
        name
        for name, picture in draw.PICTURES.items()
        if (ROOT / "docs/pictures" / name).read_text(encoding="utf-8") != picture()
    ]
    assert stale == [], "run: python docs/pictures/draw.py"


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``: https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_pictures_are_readable_in_light_and_dark_colours() -> None:
    for dark in ({}, picture.DARK):
        paper = dark.get(picture.PAPER, picture.PAPER)
        for colours, minimum in (((picture.INK, picture.GREY), 4.5), ((picture.FIRST, picture.OTHER, picture.COPY), 3)):
            assert min(contrast(dark.get(colour, colour), paper) for colour in colours) >= minimum
    for dark in ({}, draw.DARK):
        for paper in (draw.PAPER, draw.BLUE, draw.GREEN, draw.ORANGE):
            for ink in (draw.INK, draw.GREY):
                assert contrast(dark.get(ink, ink), dark.get(paper, paper)) >= 4.5


def test_charts_show_the_numbers_of_the_page() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert "{" not in re.sub(r"`[^`]*`", "", page)
    for name, chart in charts.charts().items():
        assert f"![{chart.description}](pictures/benchmarks-{name}.svg)" in page
        for _, bars in chart.groups:
            assert bars
            assert all(0 <= bar.length <= 1 for bar in bars)
            assert sum(bar.colour == picture.FIRST for bar in bars) >= 1


def test_a_chart_without_its_table_is_an_error() -> None:
    tables = charts.read_tables("| a | b |\n|---|---|\n| **1** | `x` |\n\ntext\n\n| c |\n|---|\n| 2 |\n")
    assert tables == [[{"a": "1", "b": "x"}], [{"c": "2"}]]
    assert charts.find_table(tables, "c") == [{"c": "2"}]
    with pytest.raises(LookupError, match="no table with the columns a, c"):
        charts.find_table(tables, "a", "c")


def test_packages_picture_has_the_floors_of_the_code() -> None:
    from support import architecture

    graph = architecture.package_graph(architecture.edges(architecture.builder_modules()))
    picture = draw.draw_packages()
    rows = {
        name: int(y) for y, name in re.findall(r"<text x='\d+' y='(\d+)'[^>]*font-weight[^>]*>([\w.]+)</text>", picture)
    }
    floors = architecture.floors(graph)
    packages = {face.parent.name for face in (ROOT / "ekiben").glob("*/__init__.py")}
    assert packages <= set(rows)
    for upper in packages:
        for lower in packages & graph.get(upper, set()):
            assert rows[upper] < rows[lower], f"{upper} imports {lower}: floors {floors[upper]}, {floors[lower]}"


def test_every_key_has_a_meaning_and_every_meaning_a_key() -> None:
    for name, (kind, _) in generate.FILES.items():
        assert set(generate.MEANINGS[name]) == {key for key, *_ in generate.rows_of(kind, name)}


def schema(name: str) -> Any:
    return json.loads((ROOT / f"docs/schemas/{name}.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("recipe", "recipes/*/recipe.yaml"), ("stack", "images/stacks/*/stack.yaml"), ("site", "sites/*.yaml")],
)
def test_schemas_accept_the_shipped_files_and_refuse_an_unknown_key(name: str, pattern: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    files = sorted(ROOT.glob(pattern))
    assert files
    kind = jsonschema.validators.validator_for(schema(name))
    kind.check_schema(schema(name))
    validator = kind(schema(name))
    for path in files:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        validator.validate(content)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**content, "no_such_key": 1})


def test_schema_of_config() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate({"shared": "/groups/lab", "registry": None, "recipes": ["~/recipes"]}, schema("config"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"shared": 1}, schema("config"))


def test_shipped_recipes_name_their_schema() -> None:
    for path in ROOT.glob("recipes/*/recipe.yaml"):
        found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text(encoding="utf-8"))
        assert found, path
        assert (path.parent / found[1]).is_file(), path


def test_citation_has_the_newest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    releases = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation["version"] == releases[0]


OTHERS = {"driver version is insufficient"}  # messages of CUDA, not ours


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    folders = ("ekiben", "entrypoints")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".sh"}]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)))
    assert len(quoted) > 15
    pieces = [piece.strip(" '") for phrase in quoted if phrase not in {*OTHERS} for piece in phrase.split("…")]
    assert [piece for piece in pieces if piece and piece not in text] == []

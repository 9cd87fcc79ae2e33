"""Random definition files: what is read is what was written, and written again it is read as the same."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from ekiben.spec.definition import Copy, Stage, read_definition

tokens = st.text(
    st.characters(exclude_characters="\n\r\0$`{}", exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12
)
# A path is not an option, climbs nowhere, and its end is not a slash.
paths = st.lists(
    tokens.map(lambda word: word.replace("/", "_")).filter(lambda word: word.strip(".")), min_size=1, max_size=3
).map("/".join)
# In a script, a % that only blanks precede begins a section, and Bootstrap: a stage.
lines = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=("Cs",)), max_size=30).filter(
    lambda line: not re.match(r"\s*%|bootstrap:", line, re.IGNORECASE) and not re.search(r"\{\{\s*\w+\s*\}\}", line)
)
bodies = st.lists(lines, max_size=5).map("\n".join).map(lambda body: body.strip("\n") + "\n" if body.strip() else "")
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    return Stage(
        name=None,
        header={"bootstrap": "localimage", "from": "base.sif"},
        arguments={},
        files=tuple(
            Copy(source, "/" + destination, None, 0)
            for source, destination in draw(st.lists(st.tuples(paths, paths), max_size=3))
        ),
        post=draw(bodies),
        environment=draw(st.dictionaries(names, tokens, max_size=3)),
        labels=draw(st.dictionaries(names, tokens.map(str.strip).filter(bool), max_size=3)),
        test=draw(bodies),
        help=draw(bodies),
        runscript=draw(bodies),
    )


def text_of(stage: Stage) -> str:
    sections = {
        "files": [f"    {shlex.quote(copy.source)} {shlex.quote(copy.destination)}" for copy in stage.files],
        "environment": [f"    export {name}={shlex.quote(value)}" for name, value in stage.environment.items()],
        "labels": [f"    {name} {value}" for name, value in stage.labels.items()],
    }
    body = [f"%{name}\n" + "\n".join(section) for name, section in sections.items()]
    body += [f"%{name}\n{getattr(stage, name)}" for name in ("post", "test", "help", "runscript")]
    return "\n".join(["Bootstrap: localimage\nFrom: base.sif\n", *body, ""])


def read(text: str) -> Stage:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "random.def")
        path.write_text(text, encoding="utf-8", newline="")
        return read_definition(path, root=Path(folder)).final


def without_lines(stage: Stage) -> tuple[object, ...]:
    files = [(copy.source, copy.destination) for copy in stage.files]
    sections = (stage.post, stage.test, stage.help, stage.runscript)
    return stage.header["from"], files, dict(stage.environment), dict(stage.labels), sections


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(stages())
def test_definition_is_read_as_it_was_written(stage: Stage) -> None:
    once = read(text_of(stage))
    assert without_lines(once) == without_lines(stage)
    assert without_lines(read(text_of(once))) == without_lines(once)

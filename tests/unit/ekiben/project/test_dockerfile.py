"""A Dockerfile becomes definition files: what is read, what is refused with its line, and what scripts mean."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.project.dockerfile import Conversion, convert, dockerfile_of, find_dockerfile
from ekiben.project.dockerfile.base_config import BaseConfig, parse_config
from ekiben.project.dockerfile.expansion import expand_word, split_line
from ekiben.project.dockerfile.ignore import read_ignore
from ekiben.project.dockerfile.pattern import copy_pattern, ignore_pattern
from ekiben.project.dockerfile.reader import parse_dockerfile
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import ShippedRecipe, find_recipe
from support.sample_recipe import RunCli

BASE = f"127.0.0.1:9/lab/base@sha256:{'1' * 64}"
CONFIG = BaseConfig(
    environment={"PATH": "/usr/bin:/bin", "SET": "base"},
    workdir="/srv",
    entrypoint=("start",),
    cmd=("now",),
    onbuild=("ENV TRIGGERED=1", "RUN echo trigger"),
)


def converted(
    tmp_path: Path, text: str, config: BaseConfig | None = None, arguments: dict[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """The definition files' texts by layer, and the notes."""
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(text.replace("BASE", BASE))
    request = Conversion(
        dockerfile=dockerfile,
        arguments=arguments or {},
        arch="amd64",
        base_config=lambda reference: config or BaseConfig(),
    )
    files, notes = convert(tmp_path / "mine", request)
    return {path.stem: path.read_text() for path in files if path.suffix == ".def"}, notes


def script(text: str, section: str = "post") -> str:
    """The lines of one section, as a shell reads them."""
    return text.split(f"%{section}\n")[-1].split("\n%")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nRUN x \\\n  y\n", [("FROM", "a"), ("RUN", "x   y")]),
        ("from a\n\n# c\n  run x \\\n# c\n   # c\n\n y", [("FROM", "a"), ("RUN", "x  y")]),
        ("# escape=`\nFROM a\nRUN x `\n y\\\n", [("FROM", "a"), ("RUN", "x  y\\")]),
        ("\ufeff# syntax=docker/dockerfile:1\r\nFROM a\r\nRUN x\r\n", [("FROM", "a"), ("RUN", "x")]),
        ("FROM a\nRUN --mount=type=cache,target=/x \\\n  --network=default \\\n  y", [("FROM", "a"), ("RUN", "y")]),
        ("FROM a\nRUN <<A <<-B cat\n1\nA\n\t2\n\tB\nRUN z", [("FROM", "a"), ("RUN", "<<A <<-B cat"), ("RUN", "z")]),
        ("FROM a\nRUN cat <<<x '<<A'", [("FROM", "a"), ("RUN", "cat <<<x '<<A'")]),
    ],
)
def test_instructions_are_read(text: str, expected: list[tuple[str, str]]) -> None:
    read = parse_dockerfile(Path("Dockerfile"), text)
    assert [(item.name, item.text) for item in read.instructions] == expected


def test_heredocs_of_a_line_are_read_in_their_order() -> None:
    read = parse_dockerfile(Path("Dockerfile"), 'FROM a\nCOPY <<A <<-"B" /x/\n1\nA\n\t\t2\n\tB\n')
    assert [(item.name, item.content, item.is_quoted) for item in read.instructions[1].heredocs] == [
        ("A", "1\n", False),
        ("B", "2\n", True),
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$A-${A}-$B-${B}", "1-1--"),
        ("${A:-x} ${B:-x} ${E:-x} ${E-x} ${B-x}", "1 x x  x"),
        ("${A:+x} ${B:+x} ${E:+x} ${E+x}", "x   x"),
        ("${B:-${A}2} ${B:-'$A'} \"${B:-a b}\"", "12 $A a b"),
        ("'$A' \"$A\" \\$A \"\\$A\" '\\$A'", "$A 1 $A $A \\$A"),
        ('a\\ b "a\\ b" "\\\\" $ $1 a$', "a b a\\ b \\ $  a$"),
    ],
)
def test_variables_are_expanded(word: str, expected: str) -> None:
    assert expand_word(word, {"A": "1", "E": ""}) == expected


@pytest.mark.parametrize("word", ["'a", '"a', "${A", "${A:-x", "${}", "${A%x}", "${A/x/y}", "${B:?must}", "${A:x}"])
def test_what_cannot_be_expanded_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand_word(word, {"A": "1"})


def test_lines_are_split_outside_quotes() -> None:
    assert split_line("A=1  B='2 3' C=\"4 ' 5\"\tD=6\\ 7") == ["A=1", "B='2 3'", 'C="4 \' 5"', "D=6\\ 7"]


@pytest.mark.parametrize(
    ("patterns", "path", "is_out"),
    [
        ("a", "a/b", True),
        ("a", "b/a", False),
        ("**/a", "b/c/a", True),
        ("**/a", "a", True),
        ("*.md\n!R*.md", "README.md", False),
        ("!README.md\n*.md", "README.md", True),
        ("a/**\n!a/b/c", "a/b/c", False),
        ("a/**", "a", False),
        ("/a/", "a", True),
        ("./a/../b", "b", True),
        ("a/*/c", "a/b/c", True),
        ("a?[0-9]", "ab1", True),
        ("# x\n\n  a  ", "a", True),
        ("a\\*", "ab", False),
        ("a.b", "axb", False),
    ],
)
def test_dockerignore(tmp_path: Path, patterns: str, path: str, is_out: bool) -> None:
    (tmp_path / ".dockerignore").write_text(patterns)
    assert read_ignore(tmp_path / "Dockerfile").leaves_out(path) is is_out


def test_dockerignore_of_the_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("a")
    (tmp_path / "gpu.Dockerfile.dockerignore").write_text("b")
    ignore = read_ignore(tmp_path / "gpu.Dockerfile")
    assert (ignore.leaves_out("a"), ignore.leaves_out("b")) == (False, True)


def test_patterns_of_copy() -> None:
    assert copy_pattern("s*/[^a]?.p\\*").matches("src/bc.p*")
    assert not copy_pattern("s*").matches("src/a")
    assert copy_pattern("a[b").matches("a[b")


def test_pattern_matches_as_its_regular_expression() -> None:
    pieces = {"a": "a", "*": "[^/]*", "?": "[^/]", "**/": "(.*/)?", "[^a]": "[^a]", "/": "/", "\\*": r"\*"}
    paths = ["".join(letters) for length in range(5) for letters in itertools.product("ab/*", repeat=length)]
    for count, end in itertools.product(range(4), ("", "**")):
        for chosen in itertools.product(pieces, repeat=count):
            text = "".join([*chosen, end])
            stars = any(above == "*" and below.startswith("*") for above, below in itertools.pairwise([*chosen, end]))
            if stars or text.endswith("**/") or not text:  # more stars than one or two; a slash that is removed before
                continue
            expression = re.compile("".join(pieces[piece] for piece in chosen) + (".*" if end else ""), re.DOTALL)
            pattern = ignore_pattern(text)
            assert [path for path in paths if pattern.matches(path)] == [
                path for path in paths if expression.fullmatch(path)
            ], text


@pytest.mark.parametrize(
    ("text", "path"),
    [("**/" * 50 + "x", "a/" * 50 + "y"), ("*a" * 30 + "b", "a" * 200), ("**/*a*/" * 20 + "b", "a/" * 60)],
)
def test_pattern_that_would_take_ages_is_matched(text: str, path: str) -> None:
    assert not ignore_pattern(text).matches(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("RUN --mount=type=secret,id=x cat", "type=secret is refused"),
        ("RUN --mount=type=ssh git clone x", "type=ssh is refused"),
        ("RUN --mount=type=cache,target=/x,from=y z", "from is not supported"),
        ("RUN --mount=target=/x,source=none z", "nothing in"),
        ("RUN --network=none x", "--network=none is not supported"),
        ("RUN [1]", "JSON list of strings"),
        ("RUN <<A\nx", "has no end"),
        ("RUN", "needs an argument"),
        ("RUNN x", "Did you mean 'RUN'"),
        ("RUN a\\\\\n b", "only some versions of Docker"),
        ("COPY x /", "nothing in"),
        ("COPY ../x /", "nothing in"),
        ("COPY Dockerfile Dockerfile x", "has to end with a slash"),
        ("COPY x", "expected SOURCE"),
        ("COPY --from=9 /x /", "there is no such stage"),
        ("COPY --parents Dockerfile /x/", "--parents is not supported"),
        ("COPY --chmod=u+x Dockerfile /", "expected octal digits"),
        ("COPY leads /x", "points out of the build context"),
        ("ADD https://example.org/x /", "is not on this machine"),
        ("ADD git@example.org:x.git /", "is not on this machine"),
        ("ENV A", "A has no value"),
        ("ENV A=1 B", "expected NAME=VALUE"),
        ("ENV A-B=1", "not a name that a shell can set"),
        ("ENV A=${B%x}", "write the value itself"),
        ("ARG 1=2", "not the name of a variable"),
        ("SHELL bash -c", "expected SHELL"),
        ("USER a b", "expected USER"),
        ("FROM scratch", "scratch has no shell"),
        ("FROM $NONE", "is empty"),
        ("FROM --platform=linux/s390x a", "--arch names"),
        ("FROM a AS 1x", "a stage's name"),
        ("FROM a b", "expected FROM IMAGE"),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "leads").symlink_to("/etc/passwd")
    with pytest.raises(DefinitionError) as error:
        converted(tmp_path, f"FROM BASE\n\n{line}\n")
    assert f"{tmp_path}/Dockerfile:3: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "there is no FROM"), ("RUN x\nFROM a", "only ARG may come before FROM"), ("# escape=x\nFROM a", "escape is")],
)
def test_what_is_no_dockerfile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        converted(tmp_path, text)


def test_every_problem_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError) as error:
        converted(tmp_path, "FROM BASE\nCOPY none /\nRUN --mount=type=ssh x\n", arguments={"VERSON": "1"})
    assert [line.split(": ")[0].rpartition("/")[2] for line in str(error.value).splitlines()] == [
        "Dockerfile:2",
        "Dockerfile:3",
        "Dockerfile",
    ]


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("MAINTAINER me", "kept as the label org.opencontainers.image.authors"),
        ('LABEL "a b"=c', "a b is left out"),
        ("COPY none* /x/", "matches nothing"),
        ("ARG TARGETARCH", "TARGETARCH is amd64"),
    ],
)
def test_what_is_not_used_is_named(tmp_path: Path, line: str, note: str) -> None:
    _, notes = converted(tmp_path, f"FROM BASE\n{line}\n")
    assert [text for text in notes if f"{tmp_path}/Dockerfile:2: " in text and note in text] == notes != []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"entrypoint": ["start"], "cmd": ["now"], "workdir": "/srv"}),
        ("USER root\nWORKDIR x", {"entrypoint": ["start"], "cmd": ["now"], "workdir": "/srv/x", "user": "root"}),
        ('ENTRYPOINT ["a"]', {"entrypoint": ["a"], "cmd": [], "workdir": "/srv"}),
        ("CMD a b", {"entrypoint": ["start"], "cmd": ["/bin/sh", "-c", "a b"], "workdir": "/srv"}),
        ("EXPOSE 80 8000-8001/UDP $P", {"ports": ["80/tcp", "8000/udp", "8001/udp", "9/tcp"]}),
        ('VOLUME /v /w\nVOLUME ["/y z"]', {"volumes": ["/v", "/w", "/y z"]}),
        ("STOPSIGNAL SIGINT", {"stop_signal": "SIGINT"}),
        ("HEALTHCHECK CMD a b", {"healthcheck": {"test": ["CMD-SHELL", "a b"]}}),
        ('HEALTHCHECK --interval=1m30s --retries=2 CMD ["a"]', {"healthcheck": {"test": ["CMD", "a"]}}),
        ("HEALTHCHECK none", {"healthcheck": {"test": ["NONE"]}}),
        ('SHELL ["bash", "-c"]', {"shell": ["bash", "-c"]}),
        ("ONBUILD RUN x", {"onbuild": ["RUN x"]}),
    ],
)
def test_configuration_of_the_docker_image(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    converted(tmp_path, f"FROM BASE\nARG P=9\n{text}\n", CONFIG)
    docker = yaml.safe_load((tmp_path / "mine/recipe.yaml").read_text())["docker"]
    if "healthcheck" in expected and "--" in text:
        expected = {"healthcheck": {"test": ["CMD", "a"], "interval": "1m30s", "retries": 2}}
    assert {name: value for name, value in docker.items() if name in expected} == expected
    if "workdir" in expected:
        assert docker == expected
    recipe = find_recipe(str(tmp_path / "mine"))
    shipped = ShippedRecipe.parse((recipe.folder / "recipe.yaml").read_bytes())
    assert recipe.file.docker == shipped.docker is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("EXPOSE 70000", "expected EXPOSE PORT"),
        ("VOLUME x", "volumes: 'x' is not an absolute path"),
        ("STOPSIGNAL a b", "'a b' is not a signal"),
        ("HEALTHCHECK x", "expected HEALTHCHECK"),
        ("HEALTHCHECK --interval=5 CMD x", "'5' is not a duration"),
        ("HEALTHCHECK --some=5 CMD x", "--some: expected --interval"),
        ("ONBUILD FROM x", "FROM cannot follow ONBUILD"),
    ],
)
def test_wrong_configuration_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=f"Dockerfile:2: .*{message}"):
        converted(tmp_path, f"FROM BASE\n{line}\n")


def test_triggers_of_a_stage_are_carried_out_on_it(tmp_path: Path) -> None:
    files, _ = converted(tmp_path, "FROM BASE AS one\nONBUILD RUN echo trigger\nFROM one\nRUN echo mine\n")
    assert script(files["mine-1"]).index("echo trigger") < script(files["mine-1"]).index("echo mine")
    assert "onbuild" not in (tmp_path / "mine/recipe.yaml").read_text()


def test_unknown_base_is_named_and_its_variables_stay(tmp_path: Path) -> None:
    files, notes = converted(tmp_path, "FROM BASE\nENV PATH=/x:$PATH\n", BaseConfig(is_known=False))
    assert "did not answer" in notes[0]
    assert 'export PATH=/x:"${PATH}"' in files["mine-1"]
    with pytest.raises(DefinitionError, match="its variables are not known here"):
        converted(tmp_path / "mine", "FROM BASE\nWORKDIR $HOME/x\n", BaseConfig(is_known=False))


def test_configuration_of_the_base_counts(tmp_path: Path) -> None:
    text = 'FROM BASE\nCOPY Dockerfile .\nRUN pwd\nENV P=$PATH:$SET\nCMD ["later"]\n'
    files, _ = converted(tmp_path, text, CONFIG)
    assert "context/Dockerfile /srv/Dockerfile" in files["mine-1"] or "context/Dockerfile /srv/" in files["mine-2"]
    (last,) = [text for text in files.values() if "%runscript" in text]
    assert "export TRIGGERED=1" in files["mine-1"] and "echo trigger" in files["mine-1"]
    assert "cd /srv\n    pwd" in last and "export P=/usr/bin:/bin:base" in last
    assert script(last, "runscript").split("\n    ")[1:] == [
        "if [ $# -eq 0 ]; then set -- later; fi",
        'exec start "$@"\n',
    ]


def test_config_is_parsed_and_checked() -> None:
    data = b'{"config": {"Env": ["A=1=2"], "User": "me", "Cmd": null, "Entrypoint": ["x"], "OnBuild": ["RUN y"]}}'
    config = parse_config(data)
    assert (config.environment["A"], config.user, config.cmd, config.entrypoint) == ("1=2", "me", (), ("x",))
    assert config.environment["PATH"].endswith(":/bin") and config.onbuild == ("RUN y",)
    for wrong in (b'{"config": {"Env": [1]}}', b'{"config": {"User": 1}}', b"[]", b'{"config": 3}'):
        with pytest.raises(ValueError, match=r"."):
            parse_config(wrong)


# What a heredoc means is not known to Docker 20.10: here the script of %post runs in a shell of this machine.
@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("RUN <<EOF\necho a\n  echo $((1 + 1))\nEOF", "a\n2\n"),
        ("RUN <<EOF\nfalse\necho it is\nEOF", "it is\n"),
        ("RUN <<-EOF\n\techo a\n\tEOF", "a\n"),
        ("RUN cat <<EOF\n%post\n{{ x }} $((2 * 3))\nEOF", "%post\n{{ x }} 6\n"),
        ("RUN cat <<'EOF' && echo end\n$A `x`\n\ttab\nEOF", "$A `x`\n\ttab\nend\n"),
        ("RUN cat <<A - <<B /dev/fd/3 3<<C\n1\nA\n2\nB\n3\nC", "2\n3\n"),
        ("RUN bash <<'EOF'\nx=(1 2); echo ${x[1]}\nEOF", "2\n"),
        ('SHELL ["bash", "-c"]\nRUN <<EOF\nx=(1 2)\necho "${x[1]}"\nEOF', "2\n"),
        ("RUN echo a \\\n  b; false; echo c", "a b\nc\n"),
    ],
)
def test_heredocs_run_as_written(tmp_path: Path, instruction: str, expected: str) -> None:
    files, _ = converted(tmp_path, f"FROM BASE\n{instruction}\n")
    text = script(files["mine-1"])
    done = subprocess.run(["sh", "-ec", text], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == expected


def test_heredoc_with_an_interpreter(tmp_path: Path) -> None:
    files, _ = converted(tmp_path, "FROM BASE\nRUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF\n")
    text = script(files["mine-1"]).replace("/.dockerfile", str(tmp_path / "scratch"))
    done = subprocess.run(["sh", "-ec", text], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_copied_heredocs(tmp_path: Path) -> None:
    text = "FROM BASE\nENV A=1\nCOPY --chmod=600 <<one <<'two' /x/\n$A \"q\" it's\none\n$A\n%post\ntwo\n"
    files, _ = converted(tmp_path, text)
    run = script(files["mine-1"]).replace("/x", str(tmp_path / "x"))
    subprocess.run(["sh", "-ec", run], check=True)
    assert (tmp_path / "x/one").read_text() == '1 "q" it\'s\n'
    assert (tmp_path / "x/two").read_text() == "$A\n%post\n"
    assert (tmp_path / "x/one").stat().st_mode & 0o777 == 0o600


def test_layers_do_not_depend_on_lines_and_remarks(tmp_path: Path) -> None:
    text = "FROM BASE\nCOPY Docker* /x/\nRUN a && \\\n  b\nENV A=1\nRUN c\n"
    keys = []
    for number, written in enumerate((text, "# remark\n\n" + text.replace("RUN c", "# more\nRUN c"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        converted(folder, written.replace("Docker*", "a*"))
        keys.append([layer.cache_key for layer in resolve(find_recipe(str(folder / "mine"))).layers[:-1]])
    assert keys[0] == keys[1]


def test_each_group_of_commands_is_a_layer(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    files, _ = converted(
        tmp_path, "FROM BASE AS b\nRUN 1\nRUN 2\nFROM b\nCOPY a /\nRUN 3\nCOPY a /b\nRUN 4\nUSER me\nRUN 5\n"
    )
    assert [*files] == ["mine-b-1", "mine-1", "mine-2"]
    assert "From: mine-b-1.sif" in files["mine-1"] and "From: mine-1.sif" in files["mine-2"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu", "gpu.Dockerfile", "Containerfile"])
def test_names_of_dockerfiles(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("FROM a\n")
    assert find_dockerfile(tmp_path / name) == tmp_path / name
    assert find_dockerfile(tmp_path / "other") is None


def test_command_line(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nARG A=1\nRUN echo $A\nLABEL 'a b'=c\n")
    done = run_cli("init", tmp_path / "mine", "--from", tmp_path, "--build-arg", "A=7")
    assert f"{tmp_path}/mine/images/mine-1.def" in done.stdout
    assert "Dockerfile:4: LABEL: a b is left out" in done.stderr and f"lock {tmp_path}/mine" in done.stderr
    assert "export A=7" in (tmp_path / "mine/images/mine-1.def").read_text()
    assert "is for a Dockerfile" in run_cli("init", tmp_path / "new", "--target", "x", code=2).stderr
    assert "no Dockerfile" in run_cli("init", tmp_path / "new", "--from", tmp_path / "mine", code=2).stderr
    with pytest.raises(UsageError, match="not empty"):
        convert(tmp_path / "mine", Conversion(dockerfile=tmp_path / "Dockerfile"))


def test_paths_of_dockerfiles_and_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one/Dockerfile", "both/Dockerfile", "both/recipe.yaml", "none/a", "x.dockerfile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    named = {
        name: dockerfile_of(name) for name in ("./one", "one", "one/Dockerfile", "./both", "./none", "x.dockerfile")
    }
    assert {name: str(path) for name, path in named.items() if path} == {
        "./one": "one/Dockerfile",
        "one/Dockerfile": "one/Dockerfile",
        "x.dockerfile": "x.dockerfile",
    }

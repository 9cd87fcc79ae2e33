"""The reader of definition files: faithful to the byte, and every problem named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.definition import Copy, Definition, declared_arguments, expand, read_definition
from builder.errors import DefinitionError

HEADER = "Bootstrap: localimage\nFrom: python.sif\n"
DIGEST = "sha256:" + "0" * 64


def read(tmp_path: Path, text: str, **arguments: str) -> Definition:
    path = tmp_path / "images" / "x.def"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    return read_definition(path, root=tmp_path, arguments=arguments)


def problems(tmp_path: Path, text: str, **arguments: str) -> list[str]:
    """What is wrong, without the folder: ``x.def:LINE: …``."""
    with pytest.raises(DefinitionError) as caught:
        read(tmp_path, text, **arguments)
    assert caught.value.exit_code == 3
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{tmp_path}/images/x.def:") for line in lines)
    return [line.removeprefix(f"{tmp_path}/images/") for line in lines]


def test_every_section_is_read(tmp_path: Path) -> None:
    stage = read(tmp_path, HEADER + """
%arguments
    word=hello
%files
    a /a
%post
    echo {{ word }}
%environment
    export A=b
%labels
    title It is a title
%test
    true
%help
    Help {{word}}
%runscript
    exec "$@"
%startscript
    :
""").final  # fmt: skip
    assert stage.parent == "python"
    assert stage.arguments == {"word": "hello"}
    assert stage.files == (Copy("a", "/a", None, 7),)
    assert stage.post == "    echo hello\n"
    assert stage.environment == {"A": "b"}
    assert stage.labels == {"title": "It is a title"}
    assert (stage.test, stage.help, stage.runscript) == ("    true\n", "    Help hello\n", '    exec "$@"\n')


def test_a_body_keeps_its_bytes(tmp_path: Path) -> None:
    body = "\tcat > /f <<-'EOF'\n\t\tTabs  and   trailing \t \n\n  Percent 100%\n\u2028\f\x0bodd\n% not a section\n%1 neither\n\tEOF\n"
    assert read(tmp_path, HEADER + "%post\n" + body + "\n\n%test\n  true\n").final.post == body


def test_from_keeps_its_case_and_keys_do_not_matter_in_theirs(tmp_path: Path) -> None:
    final = read(tmp_path, f"BOOTSTRAP: docker\nfrom: Example.org/Some/Image:Tag@{DIGEST}  # a remark\n").final
    assert final.header["from"] == f"Example.org/Some/Image:Tag@{DIGEST}"
    assert final.parent is None


@pytest.mark.parametrize("said", ["python.sif", "./python.sif", "images/python.sif", "python"])
def test_a_parent_is_the_name_of_a_file(tmp_path: Path, said: str) -> None:
    assert read(tmp_path, f"Bootstrap: localimage\nFrom: {said}\n").final.parent == "python"


def test_windows_line_ends_are_line_ends(tmp_path: Path) -> None:
    assert read(tmp_path, (HEADER + "%post\n  a\n  b\n").replace("\n", "\r\n")).final.post == "  a\n  b\n"


class TestFiles:
    @pytest.mark.parametrize(
        ("line", "source", "destination"),
        [
            ("a /b", "a", "/b"),
            ("a", "a", "/a"),
            ("./dir/a", "./dir/a", "/dir/a"),
            ("a b", "a", "/b"),
            ("a /opt/", "a", "/opt/"),
            ("a /", "a", "/"),
            ("a /opt//x/./y", "a", "/opt/x/y"),
            ("'with space' \"/to here\"", "with space", "/to here"),
            (r"with\ space /x", "with space", "/x"),
            ("a#1.txt /b  # a remark, don't read it", "a#1.txt", "/b"),
        ],
    )
    def test_a_line(self, tmp_path: Path, line: str, source: str, destination: str) -> None:
        (copy,) = read(tmp_path, f"{HEADER}%files\n    {line}\n").final.files
        assert (copy.source, copy.destination, copy.line) == (source, destination, 4)

    def test_comments_and_empty_lines_are_nothing(self, tmp_path: Path) -> None:
        assert read(tmp_path, HEADER + "%files\n\n    # a b c d\n").final.files == ()

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("a b c", "%files wants 'source [destination]', found 3 words: a b c"),
            ("'a", "%files: No closing quotation: 'a"),
            ("a /opt/../etc/passwd", "the destination climbs with '..'; write the path it means"),
            ("../a", "the destination climbs with '..'"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, line: str, said: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%files\n    {line}\n")
        assert problem.startswith("x.def:4: ")
        assert said in problem

    def test_words_after_files(self, tmp_path: Path) -> None:
        assert problems(tmp_path, HEADER + "%files off build\n") == [
            "x.def:3: %files off build: expected '%files' or '%files from <stage>'"
        ]


class TestEnvironment:
    @pytest.mark.parametrize(
        ("line", "value"),
        [
            ("export A=b", "b"),
            ("export A=", ""),
            ('export A=""', ""),
            ('export A="a b"', "a b"),
            ("export A='a b'", "a b"),
            ("export A=\"it's\" # a remark, isn't it", "it's"),
            ("export A=http://h/#part", "http://h/#part"),
            ('export A="#1"', "#1"),
            ('export A="cuda>=13.0"', "cuda>=13.0"),
            ("export A=/opt/bin:$PATH", "/opt/bin:$PATH"),
            ('export A="${HOME}/x"', "${HOME}/x"),
            ("\texport  A=b", "b"),
        ],
    )
    def test_a_value(self, tmp_path: Path, line: str, value: str) -> None:
        assert read(tmp_path, f"{HEADER}%environment\n{line}\n").final.environment == {"A": value}

    @pytest.mark.parametrize(
        "line",
        ["A=b", "export A", "export A=b B=c", "export A=b; export B=c", "export A=b;", "export A=b && true",
         "if true; then export A=b; fi", ". /etc/profile", 'export A="b', "unset A", "export A=$(date)", "export 1A=b"],
    )  # fmt: skip
    def test_a_script_is_refused(self, tmp_path: Path, line: str) -> None:
        assert problems(tmp_path, f"{HEADER}%environment\n# fine\n{line}\n") == [
            f"x.def:5: %environment takes only 'export NAME=value' lines, found: {line}"
        ]

    @pytest.mark.parametrize("value", ["`date`", '"$(date)"', "${A:-b}", "$1", "a$", "'$HOME'", r"\$HOME", '"\\$HOME"'])
    def test_what_only_a_shell_expands_is_refused(self, tmp_path: Path, value: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%environment\nexport A={value}\n")
        assert problem.startswith("x.def:4: %environment")
        assert "write the value itself" in problem or "takes only" in problem

    def test_expand_takes_what_came_before(self) -> None:
        inherited = {"PATH": "/bin", "B": "old"}
        assert expand({"PATH": "/opt:$PATH", "A": "${B}!", "B": "new", "C": "$B$NOTHING"}, inherited) == {
            "PATH": "/opt:/bin", "A": "old!", "B": "new", "C": "new",
        }  # fmt: skip
        assert inherited == {"PATH": "/bin", "B": "old"}


def test_labels_are_a_name_and_the_rest_of_the_line(tmp_path: Path) -> None:
    final = read(tmp_path, HEADER + "%labels\n  a b c\n  tab\tvalue\n  empty\n  # no\n").final
    assert final.labels == {"a": "b c", "tab": "value", "empty": ""}


class TestArguments:
    TEXT = HEADER.replace("python", "{{ below }}") + '%arguments\n    below="python"\n    # no\n%post\n    {{below}}\n'

    def test_a_default_and_a_binding(self, tmp_path: Path) -> None:
        assert read(tmp_path, self.TEXT).final.parent == "python"
        bound = read(tmp_path, self.TEXT, below="torch", other="x").final
        assert (bound.parent, bound.post) == ("torch", "    torch\n")

    def test_declared(self, tmp_path: Path) -> None:
        assert declared_arguments(read(tmp_path, self.TEXT).path) == {"below"}

    def test_missing_and_unused(self, tmp_path: Path) -> None:
        assert problems(tmp_path, HEADER + "%arguments\n    torch=1\n%post\n    echo {{ trch }}\n") == [
            "x.def:6: argument 'trch' is not declared in %arguments. Did you mean 'torch'?",
            "x.def:4: argument 'torch' is declared and never used; remove it or write {{ torch }}",
        ]

    def test_a_value_is_not_read_again(self, tmp_path: Path) -> None:
        assert read(tmp_path, self.TEXT, below="{{ word }}").final.parent == "{{ word }}"


class TestStages:
    TEXT = """\
Bootstrap: localimage
From: nvcc.sif
Stage: build

%arguments
    word=one
%post
    make {{ word }}

Bootstrap: localimage
From: python.sif

%files from build
    /wheels /wheels
%files
    a /a
%post
    install
"""

    def test_several_stages_parse(self, tmp_path: Path) -> None:
        build, final = read(tmp_path, self.TEXT).stages
        assert (build.name, build.parent, build.post) == ("build", "nvcc", "    make one\n")
        assert (final.name, final.parent, final.post) == (None, "python", "    install\n")
        assert [(copy.source, copy.stage) for copy in final.files] == [("/wheels", "build"), ("a", None)]

    def test_an_unknown_stage(self, tmp_path: Path) -> None:
        assert problems(tmp_path, self.TEXT.replace("from build", "from biuld")) == [
            "x.def:14: %files from biuld: no such stage before this one. Did you mean 'build'?"
        ]

    def test_bootstrap_inside_a_heredoc_of_post_is_text(self, tmp_path: Path) -> None:
        assert "bootstrap: x" in read(tmp_path, HEADER + "%post\ncat <<E\nbootstrap: x\nE\n").final.post


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (HEADER + "%pots\n", "x.def:3: unknown section %pots. Did you mean 'post'?"),
            (HEADER + "%setup\n    cp a b\n", "x.def:3: %setup is refused: it runs on the host, outside any cache key; do the work in %post"),
            (HEADER + "%pre\n", "x.def:3: %pre is refused: it runs on the host, outside any cache key; do the work in %post"),
            (HEADER + "%appinstall x\n", "x.def:3: %appinstall is refused: SCIF apps are not supported; a recipe's tasks take their place"),
            (HEADER + "%post\n a\n%post\n b\n", "x.def:5: %post appears twice; put both in one"),
            (HEADER + "%post -c /bin/bash\n", "x.def:3: %post -c /bin/bash: only /bin/sh runs here; start another shell inside"),
            (HEADER + "%test now\n", "x.def:3: %test takes no words: now"),
            ("Bootstrap: localimage\nForm: a.sif\nFrom: a.sif\n", "x.def:2: unknown key 'Form'. Did you mean 'from'?"),
            (HEADER + "From: b.sif\n", "x.def:3: 'From:' appears twice; leave one"),
            ("Bootstrap: localimage\nFrom a.sif\nFrom: a.sif\n", "x.def:2: expected 'Key: value' or a %section, found: From a.sif"),
            ("From: a.sif\n", "x.def:1: no 'Bootstrap:' key. Known: debootstrap, docker, localimage."),
            ("Bootstrap: dokcer\nFrom: a\n", "x.def:1: 'Bootstrap: dokcer' is not supported. Did you mean 'docker'?"),
            ("Bootstrap: localimage\n", "x.def:1: Bootstrap: localimage needs 'From:'"),
            ("Bootstrap: debootstrap\n", "x.def:1: Bootstrap: debootstrap needs 'OSVersion: <suite>'"),
            ("Bootstrap: docker\nFrom: debian:12\n", "x.def:1: From: debian:12 is a tag that can move; pin it: debian:12@sha256:<digest>"),
            ("Bootstrap: docker\nFrom: debian@sha256:12\n", "x.def:1: From: debian@sha256:12 is a tag that can move; pin it: debian@sha256:12@sha256:<digest>"),
            ("", "x.def:1: no 'Bootstrap:' key. Known: debootstrap, docker, localimage."),
            ("%post\n    true\n", "x.def:1: no 'Bootstrap:' key. Known: debootstrap, docker, localimage."),
        ],
    )  # fmt: skip
    def test_one_problem(self, tmp_path: Path, text: str, said: str) -> None:
        assert problems(tmp_path, text) == [said]

    def test_all_problems_of_a_file_together(self, tmp_path: Path) -> None:
        found = problems(
            tmp_path, "Bootstrap: docker\nFrom: debian:12\nFoo: 1\n%pots\n%files\n a b c\n%environment\nA=b\n"
        )
        assert [problem.split(":")[1] for problem in sorted(found)] == ["1", "3", "4", "6", "8"]

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "x.def").write_bytes(b"Bootstrap: \xff\n")
        for name in ("x.def", "gone.def"):
            with pytest.raises(DefinitionError, match=f"{name}: cannot be read: "):
                read_definition(tmp_path / name, root=tmp_path)

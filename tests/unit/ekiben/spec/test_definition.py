"""The reader of definition files: faithful to the byte, and every problem named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.spec.definition import APPS, Copy, Definition, declared_arguments, expand, read_definition

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
    stage = read(
        tmp_path,
        HEADER
        + """
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
""",
    ).final
    assert stage.parent == "python"
    assert stage.arguments == {"word": "hello"}
    assert stage.files == (Copy("a", "/a", None, 7),)
    assert stage.post == "    echo hello\n"
    assert stage.environment == {"A": "b"}
    assert stage.labels == {"title": "It is a title"}
    assert (stage.test, stage.help, stage.runscript) == ("    true\n", "    Help hello\n", '    exec "$@"\n')


def test_a_body_keeps_its_bytes(tmp_path: Path) -> None:
    body = (
        "\tcat > /f <<-'EOF'\n\t\tTabs  and   trailing \t \n\n  Percent 100%\n\u2028\f\x0bodd\n% not a section\n%1"
        " neither\n\tEOF\n"
    )
    assert read(tmp_path, HEADER + "%post\n" + body + "\n\n%test\n  true\n").final.post == body


def test_from_keeps_its_case_and_header_keys_ignore_case(tmp_path: Path) -> None:
    final = read(tmp_path, f"BOOTSTRAP: docker\nfrom: Example.org/Some/Image:Tag@{DIGEST}  # a remark\n").final
    assert final.header["from"] == f"Example.org/Some/Image:Tag@{DIGEST}"
    assert final.parent is None


@pytest.mark.parametrize("message", ["python.sif", "./python.sif", "images/python.sif", "python"])
def test_a_parent_is_the_name_of_a_file(tmp_path: Path, message: str) -> None:
    assert read(tmp_path, f"Bootstrap: localimage\nFrom: {message}\n").final.parent == "python"


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
    def test_files_lines_are_parsed(self, tmp_path: Path, line: str, source: str, destination: str) -> None:
        (copy,) = read(tmp_path, f"{HEADER}%files\n    {line}\n").final.files
        assert (copy.source, copy.destination, copy.line) == (source, destination, 4)

    def test_comments_and_empty_lines_are_ignored(self, tmp_path: Path) -> None:
        assert read(tmp_path, HEADER + "%files\n\n    # a b c d\n").final.files == ()

    def test_backslash_between_single_quotes_quotes_nothing(self, tmp_path: Path) -> None:
        text = HEADER + "%environment\n    export A='\\'\"'\"' '\"'\"' #x'  # a remark\n"
        assert read(tmp_path, text).final.environment == {"A": "\\' ' #x"}

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("a b c", "%files wants 'source [destination]', found 3 words: a b c"),
            ("'a", "%files: No closing quotation: 'a"),
            ("a /opt/../etc/passwd", "the destination climbs with '..'; write the path it means"),
            ("../a", "the destination climbs with '..'"),
        ],
    )
    def test_invalid_files_lines_are_refused(self, tmp_path: Path, line: str, message: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%files\n    {line}\n")
        assert problem.startswith("x.def:4: ")
        assert message in problem

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
    def test_environment_values_are_parsed(self, tmp_path: Path, line: str, value: str) -> None:
        assert read(tmp_path, f"{HEADER}%environment\n{line}\n").final.environment == {"A": value}

    @pytest.mark.parametrize(
        "line",
        [
            "A=b",
            "export A",
            "export A=b B=c",
            "export A=b; export B=c",
            "export A=b;",
            "export A=b && true",
            "if true; then export A=b; fi",
            ". /etc/profile",
            'export A="b',
            "unset A",
            "export A=$(date)",
            "export 1A=b",
        ],
    )
    def test_script_in_environment_is_refused(self, tmp_path: Path, line: str) -> None:
        assert problems(tmp_path, f"{HEADER}%environment\n# fine\n{line}\n") == [
            f"x.def:5: %environment takes only 'export NAME=value' lines, found: {line}"
        ]

    @pytest.mark.parametrize("value", ["`date`", '"$(date)"', "${A:-b}", "$1", "a$", "'$HOME'", r"\$HOME", '"\\$HOME"'])
    def test_shell_expansion_in_environment_is_refused(self, tmp_path: Path, value: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%environment\nexport A={value}\n")
        assert problem.startswith("x.def:4: %environment")
        assert "write the value itself" in problem or "takes only" in problem

    def test_expand_uses_earlier_variables(self) -> None:
        inherited = {"PATH": "/bin", "B": "old"}
        assert expand({"PATH": "/opt:$PATH", "A": "${B}!", "B": "new", "C": "$B"}, inherited) == {
            "PATH": "/opt:/bin",
            "A": "old!",
            "B": "new",
            "C": "new",
        }
        assert inherited == {"PATH": "/bin", "B": "old"}


def test_labels_are_a_name_and_the_rest_of_the_line(tmp_path: Path) -> None:
    final = read(tmp_path, HEADER + "%labels\n  a b c\n  tab\tvalue\n  empty\n  # no\n").final
    assert final.labels == {"a": "b c", "tab": "value", "empty": ""}


class TestArguments:
    TEXT = HEADER.replace("python", "{{ below }}") + '%arguments\n    below="python"\n    # no\n%post\n    {{below}}\n'

    def test_argument_default_and_binding(self, tmp_path: Path) -> None:
        assert read(tmp_path, self.TEXT).final.parent == "python"
        bound = read(tmp_path, self.TEXT, below="torch", other="x").final
        assert (bound.parent, bound.post) == ("torch", "    torch\n")

    def test_declared_arguments_of_all_sections(self, tmp_path: Path) -> None:
        assert declared_arguments(read(tmp_path, self.TEXT).text) == {"below"}

    def test_missing_and_unused_arguments_are_refused(self, tmp_path: Path) -> None:
        assert problems(tmp_path, HEADER + "%arguments\n    torch=1\n%post\n    echo {{ trch }}\n") == [
            "x.def:6: argument 'trch' is not declared in %arguments. Did you mean 'torch'?",
            "x.def:4: argument 'torch' is declared and never used; remove it or write {{ torch }}",
        ]

    def test_argument_value_is_not_expanded_again(self, tmp_path: Path) -> None:
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

    def test_unknown_stage_is_refused(self, tmp_path: Path) -> None:
        assert problems(tmp_path, self.TEXT.replace("from build", "from biuld")) == [
            "x.def:14: %files from biuld: no such stage before this one. Did you mean 'build'?"
        ]

    def test_bootstrap_inside_a_heredoc_of_post_is_text(self, tmp_path: Path) -> None:
        assert "bootstrap: x" in read(tmp_path, HEADER + "%post\ncat <<E\nbootstrap: x\nE\n").final.post


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (HEADER + "%pots\n", "x.def:3: unknown section %pots. Did you mean 'post'?"),
            (
                HEADER + "%setup\n    cp a b\n",
                "x.def:3: %setup is refused: it runs on the host, outside any cache key; do the work in %post",
            ),
            (
                HEADER + "%pre\n",
                "x.def:3: %pre is refused: it runs on the host, outside any cache key; do the work in %post",
            ),
            *(
                (
                    HEADER + f"%{name} x\n",
                    f"x.def:3: %{name} is refused: SCIF apps are not supported; a recipe's tasks take their place",
                )
                for name in APPS
            ),
            (HEADER + "%post\n a\n%post\n b\n", "x.def:5: %post appears twice; put both in one"),
            (
                HEADER + "%post -c /bin/bash\n",
                "x.def:3: %post -c /bin/bash: only /bin/sh runs here; start another shell inside",
            ),
            (HEADER + "%test now\n", "x.def:3: %test takes no arguments: now"),
            ("Bootstrap: localimage\nForm: a.sif\nFrom: a.sif\n", "x.def:2: unknown key 'Form'. Did you mean 'from'?"),
            (HEADER + "From: b.sif\n", "x.def:3: 'From:' appears twice; leave one"),
            (
                "Bootstrap: localimage\nFrom a.sif\nFrom: a.sif\n",
                "x.def:2: expected 'Key: value' or a %section, found: From a.sif",
            ),
            ("From: a.sif\n", "x.def:1: no 'Bootstrap:' key. Known: debootstrap, docker, localimage."),
            ("Bootstrap: dokcer\nFrom: a\n", "x.def:1: 'Bootstrap: dokcer' is not supported. Did you mean 'docker'?"),
            ("Bootstrap: localimage\n", "x.def:1: Bootstrap: localimage needs 'From:'"),
            ("Bootstrap: debootstrap\n", "x.def:1: Bootstrap: debootstrap needs 'OSVersion: <suite>'"),
            (
                "Bootstrap: debootstrap\nOSVersion: --setup-hook=id\n",
                "x.def:1: OSVersion: '--setup-hook=id' is not the name of a suite, as bookworm is",
            ),
            (
                "Bootstrap: debootstrap\nOSVersion: bookworm\nInclude: curl,--simulate\n",
                "x.def:1: Include: '--simulate' is not the name of a package",
            ),
            (
                "Bootstrap: docker\nFrom: debian:12\n",
                "x.def:1: From: debian:12 is a tag that can move; pin it: debian:12@sha256:<digest>",
            ),
            (
                "Bootstrap: docker\nFrom: debian@sha256:12\n",
                "x.def:1: From: debian@sha256:12 is a tag that can move; pin it: debian@sha256:12@sha256:<digest>",
            ),
            ("", "x.def:1: no 'Bootstrap:' key. Known: debootstrap, docker, localimage."),
            ("%post\n    true\n", "x.def:1: no 'Bootstrap:' key. Known: debootstrap, docker, localimage."),
        ],
    )
    def test_single_problem_is_reported(self, tmp_path: Path, text: str, message: str) -> None:
        assert problems(tmp_path, text) == [message]

    def test_all_problems_of_a_file_are_reported(self, tmp_path: Path) -> None:
        found = problems(
            tmp_path, "Bootstrap: docker\nFrom: debian:12\nFoo: 1\n%pots\n%files\n a b c\n%environment\nA=b\n"
        )
        assert [problem.split(":")[1] for problem in sorted(found)] == ["1", "3", "4", "6", "8"]

    def test_unreadable_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "x.def").write_bytes(b"Bootstrap: \xff\n")
        for name in ("x.def", "gone.def"):
            with pytest.raises(DefinitionError, match=f"{name}: cannot be read: "):
                read_definition(tmp_path / name, root=tmp_path)


class TestIgnoredNoMore:
    """What was accepted and did nothing is refused, with what to do."""

    @pytest.mark.parametrize("key", ["Registry: r.example.org", "Namespace: lab", "Fingerprints: 12045C8C0B1004D058DE"])
    def test_header_key_without_effect_is_refused(self, tmp_path: Path, key: str) -> None:
        text = f"Bootstrap: docker\nFrom: debian@{DIGEST}\n{key}\n"
        (problem,) = problems(tmp_path, text)
        assert problem.startswith(f"x.def:1: '{key.partition(':')[0].lower()}:' is refused: ")

    @pytest.mark.parametrize("key", ["OSVersion: bookworm", "Include: curl", "MirrorURL: {{ mirror }}"])
    def test_header_key_of_another_bootstrap_is_refused(self, tmp_path: Path, key: str) -> None:
        reported = problems(
            tmp_path, f"{HEADER}{key}\n%arguments\n    mirror=\n    x=\n%post\n    {{{{ mirror }}}} {{{{ x }}}}\n"
        )
        assert reported == [
            f"x.def:1: '{key.partition(':')[0].lower()}:' is not used with Bootstrap: localimage; remove it"
        ]

    def test_literal_mirror_is_refused(self, tmp_path: Path) -> None:
        (problem,) = problems(
            tmp_path, "Bootstrap: debootstrap\nOSVersion: bookworm\nMirrorURL: http://mirror.example.org/debian\n"
        )
        assert "x.def:3: MirrorURL: is not used" in problem

    @pytest.mark.parametrize("parent", ["/srv/base.sif", "~/base.sif"])
    def test_image_file_as_parent_is_refused(self, tmp_path: Path, parent: str) -> None:
        (problem,) = problems(tmp_path, f"Bootstrap: localimage\nFrom: {parent}\n")
        assert "a layer is named, not a file" in problem

    @pytest.mark.parametrize("section", ["environment", "test", "help", "runscript", "startscript"])
    def test_section_of_a_build_stage_without_effect_is_refused(self, tmp_path: Path, section: str) -> None:
        stages = (
            f"{HEADER}Stage: build\n\n%{section}\n    export A=b\n\n{HEADER}Stage: final\n\n%files from build\n    /x\n"
        )
        assert problems(tmp_path, stages) == [
            f"x.def:5: %{section} of a build stage has no effect: the stage only compiles files, and does not ship"
        ]

    @pytest.mark.parametrize(
        "file", ["$APPTAINER_ENVIRONMENT", '"$SINGULARITY_ENVIRONMENT"', '"${APPTAINER_ENVIRONMENT}"']
    )
    def test_environment_written_by_a_script_is_refused(self, tmp_path: Path, file: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%post\n    true\n    echo A=b >>{file}\n")
        assert (
            problem == "x.def:5: %post cannot add to the image's environment: write %environment, with the value itself"
        )

    @pytest.mark.parametrize(
        "line", ['echo "$APPTAINER_ENVIRONMENT"', "echo >${APPTAINER_LABELS:-/dev/null}", "echo >$APPTAINER_LABELSX"]
    )
    def test_other_uses_of_these_names_stay(self, tmp_path: Path, line: str) -> None:
        assert read(tmp_path, f"{HEADER}%post\n    {line}\n").final.post == f"    {line}\n"

    def test_argument_that_names_another_is_refused(self, tmp_path: Path) -> None:
        text = (
            f"{HEADER}%arguments\n    a=b\n    # c={{{{ a }}}}\n    c=x {{{{ a }}}}\n%post\n    {{{{ a }}}} {{{{ c"
            " }}\n"
        )
        assert problems(tmp_path, text) == [
            "x.def:6: an argument's value names another one; write the value: c=x {{ a }}"
        ]

    def test_other_shell_is_refused(self, tmp_path: Path) -> None:
        assert "only /bin/sh runs here" in problems(tmp_path, HEADER + "%post -c /bin/bash\n    true\n")[0]


@pytest.mark.parametrize("value", ["$HOME/.cache", "${NEVER}", "/opt/lib:$LD_LIBRARY_PATH"])
def test_a_variable_that_no_layer_sets_is_refused(value: str) -> None:
    with pytest.raises(DefinitionError, match="which no layer sets") as caught:
        expand({"A": value}, {"PATH": "/bin"}, "recipe.yaml: ")
    assert "leave $" in str(caught.value.hint)


@pytest.mark.parametrize("value", ["$5", "$(id)", "${A:-b}", "a$", "`id`", "~/x", "/bin:~/bin"])
def test_other_shell_expansions_are_refused(value: str) -> None:
    with pytest.raises(DefinitionError, match=r"only \$NAME and \$\{NAME\} are known"):
        expand({"B": value}, {"A": "x"})


def test_a_lone_carriage_return_stays_in_a_script(tmp_path: Path) -> None:
    script = read(tmp_path, HEADER + "%post\n    printf 'a\rb'\n\tx\n").final.post
    assert script == "    printf 'a\rb'\n\tx\n"

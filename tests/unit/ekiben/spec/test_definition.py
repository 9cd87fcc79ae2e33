"""The reader of definition files: faithful to the byte, and every problem named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.spec.bases_lock import base_reference
from ekiben.spec.definition import Copy, Definition, declared_arguments, read_definition
from ekiben.spec.definition_scripts import interpreter_command
from ekiben.spec.environment import depends_on_start, expand, table_script, writes_environment

HEADER = "Bootstrap: localimage\nFrom: python.sif\n"
DIGEST = "sha256:" + "0" * 64
AGENTS = "busybox, debootstrap, docker, docker-archive, localimage, oci, oci-archive, oras, scratch"


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
    body = "\tcat > /f <<-'EOF'\n\t\tTabs  and   trailing \t \n\n  Percent 100%\n\u2028\f\x0bodd\n\tEOF\n"
    assert read(tmp_path, HEADER + "%post\n" + body + "\n\n%test\n  true\n").final.post == body


def test_from_keeps_its_case_and_header_keys_ignore_case(tmp_path: Path) -> None:
    final = read(tmp_path, f"BOOTSTRAP: docker\nfrom: Example.org/some/image:Tag@{DIGEST}  # a remark\n").final
    assert final.header["from"] == f"Example.org/some/image:Tag@{DIGEST}"
    assert final.parent is None


@pytest.mark.parametrize("message", ["python.sif", "images/python.sif", "python"])
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
            ("a b c", "%files needs 'source [destination]', found 3 words: a b c"),
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
            "export A= b",
            "export A=b; export B=c",
            "export A=b;",
            "export A=b \\",
            "export A=b && true",
            "export A=b\nexport A=c",
            "if true; then export A=b; fi",
            ". /etc/profile",
            'export A="b',
            "unset A",
            "export 1A=b",
            *(
                f"export A={value}"
                for value in ("`date`", '"$(date)"', "${A:-b}", "$1", "a$", "'$HOME'", r"\$HOME", '"\\$HOME"', r"a\ b")
            ),
            "export A=~/x",
            "export A='~'",
            "export A=b:~/c",
        ],
    )
    def test_more_than_values_is_a_script_as_it_is_written(self, tmp_path: Path, line: str) -> None:
        stage = read(tmp_path, f"{HEADER}%environment\n\n  {line}\n# remark\n").final
        assert (stage.environment, stage.environment_text, stage.environment_line) == ({}, f"  {line}\n# remark\n", 5)

    def test_remarks_alone_are_nothing(self, tmp_path: Path) -> None:
        stage = read(tmp_path, f"{HEADER}%environment\n  # export A=b\n\n").final
        assert (stage.environment, stage.environment_text) == ({}, "")

    @pytest.mark.parametrize(
        ("text", "depends"),
        [
            ("export A=b C=$HOME/x; D=e # remark\n\nexport D\nunset A", False),
            ('export A="${B:-c d}"', False),
            ("A=b program", True),
            ("program", True),
            (". /etc/profile", True),
            ("[ -d /x ] && export A=b", True),
            ("if true; then A=b; fi", True),
            ("export A=$(date)", True),
            ("export A=`date`", True),
            ("export A=$RANDOM", True),
            ("export A=$1", True),
            ('export A="first\nsecond"', True),
            ("export A=b \\\n C=d", True),
            ("export -f A", True),
        ],
    )
    def test_script_depends_on_the_start(self, text: str, depends: bool) -> None:
        assert depends_on_start(text) is depends

    @pytest.mark.parametrize(
        ("line", "writes"),
        [
            ("echo A=b >>$APPTAINER_ENVIRONMENT", True),
            ('echo A=b >> "${SINGULARITY_ENVIRONMENT}"', True),
            ("echo A b | tee -a $APPTAINER_LABELS", True),
            ("echo export A=b >/environment", True),
            ("tee -a '/environment' <<E", True),
            ("cp x /.singularity.d/env/91-x.sh", True),
            ("echo A=b >>/etc/environment", False),
            ("echo A=b >>$HOME/environment", False),
            ("cp x /environment.yml", False),
            ("echo $APPTAINER_LABELSX", False),
        ],
    )
    def test_script_writes_the_environment(self, line: str, writes: bool) -> None:
        assert writes_environment(line) is writes

    def test_values_of_a_recipe_become_a_script(self) -> None:
        script = table_script({"A": 'a "b" $B', "C": "$A\\ ${D}"}, Path("recipe.yaml"))
        assert script.text == 'export A="a \\"b\\" $B"\nexport C="$A\\\\ ${D}"'
        assert (script.required, script.where) == (("B", "D"), "recipe.yaml")

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
    TEXT = HEADER.replace("python", "{{ below }}") + "%arguments\n    below=python\n    # no\n%post\n    {{below}}\n"

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

    @pytest.mark.parametrize(
        ("line", "value"),
        [
            ("{{ a }}", "one"),
            ("{{b}}{{ c }}", "<one><<{{ a }}>>"),
            ("{{ quoted }}", '"two words"'),
            ("x # {{ a }} {{ gone }}", "x # {{ a }} {{ gone }}"),
            ("{{ a }} # {{ a }}", "one # {{ a }}"),
            ("'#{{ a }}' ${#x} {{ a }}", "'#one' ${#x} {{ a }}"),
            ("#! {{ a }}", "#! one"),
        ],
    )
    def test_values_are_set_as_apptainer_sets_them(self, tmp_path: Path, line: str, value: str) -> None:
        arguments = '%arguments\n  a = one\n  b=<{{ a }}>\n  c=<{{ b }}>\n  quoted="two words"\n'
        all_used = "true {{ a }} {{ b }} {{ c }} {{ quoted }}\n"
        post = read(tmp_path, f"{HEADER}{arguments}%post\n{all_used}{line}\n").final.post
        assert post.splitlines()[1] == value

    def test_a_section_line_has_its_values(self, tmp_path: Path) -> None:
        text = TestStages.TEXT.replace("from build", "from {{ from }}").replace(
            "%files\n", "%arguments\n from=build\n%files\n"
        )
        assert read(tmp_path, text).final.files[0].stage == "build"

    def test_argument_value_is_not_expanded_again(self, tmp_path: Path) -> None:
        assert read(tmp_path, self.TEXT, below="{{ word }}").final.parent == "{{ word }}"


class TestSections:
    def test_a_section_that_appears_twice_is_joined(self, tmp_path: Path) -> None:
        first = "%post\n a\n\n%environment\n export A=1\n%labels\n x 1\n y 1\n"
        final = read(tmp_path, HEADER + first + "%post\n b\n%environment\n export B=2\n%labels\n x 2\n").final
        assert (final.post, final.environment) == (" a\n\n b\n", {"A": "1", "B": "2"})
        assert final.labels == {"x": "2", "y": "1"}

    def test_problems_of_joined_sections_have_their_lines(self, tmp_path: Path) -> None:
        found = problems(tmp_path, HEADER + "%files\n a b c\n%help\n%files\n d e f\n")
        assert [problem.split(":")[1] for problem in found] == ["4", "7"]

    @pytest.mark.parametrize("section", ["post", "Post", "POST ", "post # install", "post  #x", "%post"])
    def test_a_remark_may_follow_a_name(self, tmp_path: Path, section: str) -> None:
        assert read(tmp_path, f"{HEADER}%{section}\n x\n").final.post == " x\n"

    @pytest.mark.parametrize("section", ["help", "labels", "environment", "arguments"])
    def test_text_after_the_name_of_no_script_has_no_effect(self, tmp_path: Path, section: str) -> None:
        assert read(tmp_path, f"{HEADER}%{section} some text\n").final.post == ""

    @pytest.mark.parametrize("line", ["% post", "  %post", "\t%(name)s", "%", "%%"])
    def test_a_line_that_begins_with_a_percent_sign_is_a_section(self, tmp_path: Path, line: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%runscript\n  a\n{line}\n  b\n")
        assert problem.startswith(f"x.def:5: '{line.strip()}' is not a section: ")

    @pytest.mark.parametrize("name", ["post:", "post\tx", "post#x", "1"])
    def test_a_name_ends_with_a_blank(self, tmp_path: Path, name: str) -> None:
        (problem,) = problems(tmp_path, f"{HEADER}%{name}\n")
        assert problem.startswith(f"x.def:3: unknown section %{name}.")

    def test_a_byte_order_mark_is_named(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, "\ufeff" + HEADER + "%post\n x\n")
        assert problem.startswith("x.def:1: the file begins with a byte order mark (BOM)")

    def test_files_that_apptainer_would_not_copy_are_refused(self, tmp_path: Path) -> None:
        assert read(tmp_path, HEADER + "%files # remark\n a\n").final.files
        for text, line in (("%files  \n a\n", 3), ("%files  # remark\n a\n", 3), ("%files\n a # remark\n", 4)):
            (problem,) = problems(tmp_path, HEADER + text)
            assert problem.startswith(f"x.def:{line}: ")
            assert "Apptainer" in problem


class TestApps:
    def test_sections_of_apps_are_read(self, tmp_path: Path) -> None:
        text = "%post\n a\n%apprun foo # x\n\n run\n%appfiles foo\n a b # x\n bin/\n%apprun bar\n%apprun foo\n more\n"
        final = read(tmp_path, HEADER + text).final
        foo, bar = final.apps
        assert (foo.name, foo.texts["apprun"], bar.name) == ("foo", "\n run\n more\n", "bar")
        assert [(copy.source, copy.destination, copy.line) for copy in foo.files] == [
            ("a", "/scif/apps/foo/b", 9),
            ("bin/", "/scif/apps/foo/bin/", 10),
        ]
        assert final.post.startswith(" a\n\ncd /\n. /scif/apps/foo/scif/env/01-base.sh\n\ncd /scif/apps/foo\n")

    def test_an_app_alone_is_installed(self, tmp_path: Path) -> None:
        assert "\ncd /scif/apps/x\n" in read(tmp_path, HEADER + "%apprun x\n").final.post


class TestScripts:
    @pytest.mark.parametrize("section", ["runscript", "startscript", "test"])
    @pytest.mark.parametrize(
        ("options", "body", "expected"),
        [
            ("", "  a\n", "  a\n"),
            (" # -c x", "\n\n  a\n\n", "  a\n"),
            ("", "#!/bin/bash\n  a\n\n", "#!/bin/bash\n  a\n"),
            ("", "  #!/bin/bash -e \n  a\n", "#!/bin/bash -e\n  a\n"),
            (" -e", "  a\n", "#!/bin/sh -e\n  a\n"),
            (" -e", "#!/bin/bash\n", "#!/bin/bash -e\n\n"),
            ("", "\n#!/bin/bash\n  a\n", "#!/bin/sh\n#!/bin/bash\n  a\n"),
            ("", "  a\n#!/bin/bash\n", "  a\n#!/bin/bash\n"),
            ("", "\n  \n", ""),
        ],
    )
    def test_a_file_has_its_shebang(self, tmp_path: Path, section: str, options: str, body: str, expected: str) -> None:
        assert getattr(read(tmp_path, f"{HEADER}%{section}{options}\n{body}").final, section) == expected

    @pytest.mark.parametrize(
        ("options", "command"),
        [
            ("", ""),
            (" # text", ""),
            (" -c /bin/bash", '/bin/bash "$0"'),
            (" -c /bin/bash -e # text", '/bin/bash -e "$0"'),
            (" -u", '/bin/sh -e -u "$0"'),
            (" -u -c /bin/bash", '/bin/sh -e -u -c \'/bin/bash "$0"\' "$0"'),
        ],
    )
    def test_post_is_run_by_the_shell_after_its_name(self, tmp_path: Path, options: str, command: str) -> None:
        final = read(tmp_path, f"{HEADER}%post{options}\n#!/usr/bin/python3\n a\n").final
        assert (final.post, final.shell) == ("#!/usr/bin/python3\n a\n", command)

    @pytest.mark.parametrize(
        ("text", "command"),
        [
            ("a\n", '/bin/sh "$0"'),
            ("#!/bin/bash\na\n", '/bin/bash "$0"'),
            ("#! /usr/bin/env -S  python3 -u \n", "/usr/bin/env '-S  python3 -u' \"$0\""),
        ],
    )
    def test_a_file_is_run_as_the_kernel_runs_it(self, text: str, command: str) -> None:
        assert interpreter_command(text) == command


class TestHeader:
    @pytest.mark.parametrize(
        ("keys", "source"),
        [
            ("From: lab/x@{0}\nRegistry: r.example.org", "r.example.org/lab/x@{0}"),
            ("From: x@{0}\nNamespace: lab\nRegistry: r.example.org", "r.example.org/lab/x@{0}"),
            ("From: x@{0}\nNamespace: lab", "lab/x@{0}"),
            ("From: lab/\\\n    x@{0}", "lab/x@{0}"),
            ("From : lab/x@{0}# remark", "lab/x@{0}"),
        ],
    )
    def test_header_values(self, tmp_path: Path, keys: str, source: str) -> None:
        final = read(tmp_path, f"Bootstrap : docker\n{keys.format(DIGEST)}\n").final
        assert base_reference(final) == source.format(DIGEST)

    @pytest.mark.parametrize("rest", ["", "\nFrom: a.sif", " # remark"])
    def test_a_value_without_its_rest_is_refused(self, tmp_path: Path, rest: str) -> None:
        found = problems(tmp_path, f"Bootstrap: localimage\nInclude: a \\\n\n{rest}\n")
        assert "x.def:2: 'Include:' ends with '\\', and" in found[0]


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

    @pytest.mark.parametrize("line", [" bootstrap: x", "bootstrap : x", "Bootstrap\t: x"])
    def test_only_a_key_in_the_first_column_begins_a_stage(self, tmp_path: Path, line: str) -> None:
        for section in ("post", "help"):
            (final,) = read(tmp_path, f"{HEADER}%{section}\ncat <<E\n{line}\nE\n").stages
            assert line in getattr(final, section)

    def test_a_key_in_the_first_column_begins_a_stage_in_any_section(self, tmp_path: Path) -> None:
        text = HEADER + "%post\ncat <<E\nbootstrap: x\nE\n"
        assert problems(tmp_path, text) == [
            "x.def:6: expected 'Key: value' or a %section, found: E",
            f"x.def:5: 'Bootstrap: x' is not supported. Known: {AGENTS}.",
        ]


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
            (
                HEADER + "%apprun  x\n",
                "x.def:3: %apprun  x: write the app's name after one blank, of letters, digits and _ . + -: %apprun"
                " NAME",
            ),
            *(
                (HEADER + f"%apprun {name}\n", f"x.def:3: %apprun {name}: write the app's name after one blank")
                for name in ("a/b", "..", "$(id)", "#")
            ),
            *(
                (
                    HEADER + f"%appfiles x\n a\n {line}\n",
                    f"x.def:5: %appfiles needs 'source [destination]', one blank between them and no quotes: {line}",
                )
                for line in ("a  b", '"a" b', "a b c", "a\tb")
            ),
            (HEADER + "%appfiles x\n a ../b\n", "x.def:4: %appfiles: the destination climbs with '..': a ../b"),
            (HEADER + "%post -c\n a\n", "x.def:3: %post -c: the shell is missing, as in '%post -c /bin/bash'"),
            (
                HEADER + "%post some text\n a\n",
                "x.def:3: %post some text: /bin/sh is started with these arguments, and runs no file named 'some'; put"
                " a # before the text, or name a shell with '%post -c /bin/bash'",
            ),
            (
                HEADER + "%test now # then\n a\n",
                "x.def:3: %test now: Apptainer writes '#!/bin/sh now' as the script's first line, and the script does"
                " not start; put a # before the text, or write it into the section",
            ),
            (
                HEADER + "%runscript -c /bin/bash\n a\n",
                "x.def:3: %runscript -c /bin/bash: Apptainer writes '#!/bin/sh -c /bin/bash' as the script's first"
                " line, and no shell starts; write '#!/bin/bash' there, under %runscript",
            ),
            ("Bootstrap: localimage\nForm: a.sif\nFrom: a.sif\n", "x.def:2: unknown key 'Form'. Did you mean 'from'?"),
            (HEADER + "From: b.sif\n", "x.def:3: 'From:' appears twice; leave one"),
            (
                "Bootstrap: localimage\nFrom a.sif\nFrom: a.sif\n",
                "x.def:2: expected 'Key: value' or a %section, found: From a.sif",
            ),
            (
                "From: a.sif\n",
                f"x.def:1: no 'Bootstrap:' key. Known: {AGENTS}.",
            ),
            ("Bootstrap: dokcer\nFrom: a\n", "x.def:1: 'Bootstrap: dokcer' is not supported. Did you mean 'docker'?"),
            (
                "Bootstrap: library\nFrom: a\n",
                "x.def:1: 'Bootstrap: library' is not supported: `apptainer pull base.sif library://…` once, then"
                " Bootstrap: localimage and From: ./base.sif",
            ),
            ("Bootstrap: localimage\n", "x.def:1: Bootstrap: localimage needs 'From:'"),
            ("Bootstrap: debootstrap\n", "x.def:1: Bootstrap: debootstrap needs 'OSVersion: <suite>'"),
            (
                "Bootstrap: debootstrap\nOSVersion: --setup-hook=id\n",
                "x.def:1: OSVersion: '--setup-hook=id' is not the name of a suite, as bookworm is",
            ),
            (
                "Bootstrap: debootstrap\nOSVersion: bookworm\nMirrorURL: http://a b\n",
                "x.def:1: MirrorURL: 'http://a b' is not the URI of an archive, as http://mirror.example.org/debian is",
            ),
            (
                "Bootstrap: debootstrap\nOSVersion: bookworm\nInclude: curl,--simulate\n",
                "x.def:1: Include: '--simulate' is not the name of a package",
            ),
            (
                "Bootstrap: docker\nFrom: debian@sha256:12\n",
                "x.def:1: From: debian@sha256:12 is not a reference to an image",
            ),
            (
                "Bootstrap: docker\nFrom: debian:12\nNamespace: A b\n",
                "x.def:1: From: A b/debian:12 is not a reference to an image",
            ),
            (
                "",
                f"x.def:1: no 'Bootstrap:' key. Known: {AGENTS}.",
            ),
            (
                "%post\n    true\n",
                f"x.def:1: no 'Bootstrap:' key. Known: {AGENTS}.",
            ),
        ],
    )
    def test_single_problem_is_reported(self, tmp_path: Path, text: str, message: str) -> None:
        (problem,) = problems(tmp_path, text)
        assert problem.startswith(message)

    def test_all_problems_of_a_file_are_reported(self, tmp_path: Path) -> None:
        found = problems(tmp_path, "Bootstrap: docker\nFrom: Debian:12\nFoo: 1\n%pots\n%files\n a b c\n%post x\nA=b\n")
        assert [problem.split(":")[1] for problem in sorted(found)] == ["1", "3", "4", "6", "7"]

    def test_unreadable_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "x.def").write_bytes(b"Bootstrap: \xff\n")
        for name in ("x.def", "gone.def"):
            with pytest.raises(DefinitionError, match=f"{name}: cannot be read: "):
                read_definition(tmp_path / name, root=tmp_path)


class TestIgnoredNoMore:
    """What was accepted and did nothing is refused, with what to do."""

    def test_fingerprints_are_refused(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, f"Bootstrap: docker\nFrom: debian@{DIGEST}\nFingerprints: 12045C8C\n")
        assert problem.startswith("x.def:1: 'fingerprints:' is refused: ")

    @pytest.mark.parametrize(
        "key", ["OSVersion: bookworm", "Include: curl", "MirrorURL: http://x/", "IncludeCmd: yes", "otherurl2: x"]
    )
    def test_header_key_that_an_agent_does_not_read_has_no_effect(self, tmp_path: Path, key: str) -> None:
        assert read(tmp_path, HEADER + key + "\n").final.header == {"bootstrap": "localimage", "from": "python.sif"}

    @pytest.mark.parametrize("source", ["/srv/base.sif", "./base.sif", "../base.sif"])
    def test_path_names_a_file_and_no_layer(self, tmp_path: Path, source: str) -> None:
        assert read(tmp_path, f"Bootstrap: localimage\nFrom: {source}\n").final.parent is None

    def test_home_is_not_expanded(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, "Bootstrap: localimage\nFrom: ~/base.sif\n")
        assert "write the file's path" in problem

    @pytest.mark.parametrize("section", ["environment", "help", "runscript", "startscript"])
    def test_section_of_a_build_stage_has_no_effect(self, tmp_path: Path, section: str) -> None:
        build, _ = read(tmp_path, self.STAGES.format(section)).stages
        assert not getattr(build, section)

    STAGES = f"{HEADER}Stage: build\n\n%{{}}\n    export A=b\n\n{HEADER}Stage: final\n\n%files from build\n    /x\n"

    def test_test_of_a_build_stage_is_refused(self, tmp_path: Path) -> None:
        assert problems(tmp_path, self.STAGES.format("test")) == [
            "x.def:5: %test of a build stage is refused: the stage only compiles files; test in its %post"
        ]


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

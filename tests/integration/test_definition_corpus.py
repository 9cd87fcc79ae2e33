"""Definition files of the kinds that Apptainer's manual shows, built here and by Apptainer: equal trees, or a reason
why not.

All stand on one small base: a shell and a few programs of this machine. What differs, and what is refused here, is
listed with its reason in docs/reference/definition-files.md; a reason that no longer applies fails, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ekiben.artifacts.export import export
from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.errors import DefinitionError, LayerError
from ekiben.core.files import digest_of
from ekiben.core.progress import Progress
from ekiben.formats.changeset import PLACEHOLDERS, Lower, normalize
from ekiben.formats.layer import Entry, sort_key, write_entries
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter
from ekiben.formats.upper import Changes
from ekiben.resolve.graph import Layer, ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.run.app import app_command
from ekiben.spec.definition import REFUSED, UNUSED
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, Store, StoredLayer
from support.sample_recipe import RECIPE, SampleRecipe, quiet
from test_layer_content import DIFFERENCES, Seen, is_same, read_folder, read_image
from workspaces import ROOT, USER, as_user, give, home_of, need

pytestmark = pytest.mark.covers("ekiben/spec", "ekiben/resolve", "ekiben/builder", "ekiben/formats")

PAGE = ROOT / "docs/reference/definition-files.md"
HEADER = "Bootstrap: localimage\nFrom: base.sif\n"
PROGRAMS = (
    "sh",
    "bash",
    "tar",
    "env",
    "cat",
    "mkdir",
    "chmod",
    "chown",
    "ln",
    "rm",
    "cp",
    "mv",
    "ls",
    "grep",
    "mkfifo",
    "touch",
    "id",
    "find",
    "umount",
    "sed",
    "sort",
)

# ---------------------------------------------------------------------------------------------- what both of them build

MODES = "files have mode 0644, or 0755 where their owner may execute them"
LOGS = "logs, caches and locks that differ from run to run are left out"
HOLLOW = "a stage's empty folders are not copied"


APPS = (
    HEADER
    + """
%post
    echo base >/opt/base
%appinstall foo
    echo "$SCIF_APPNAME $PWD $SCIF_APPBIN_foo $SCIF_APPDATA" >out; test -e /opt/base
    printf '#!/bin/sh\\necho tool\\n' >bin/tool; chmod 755 bin/tool
%appfiles foo
    files/plain.txt bin
    files/plain.txt lib/renamed.txt # remark
    files/tree data
%appenv foo
    export SOFTWARE=foo
    PATH=/x:$PATH
%apprun foo
    echo "run $SOFTWARE $# $1"; tool; env | grep ^SCIF | sort; echo "$LD_LIBRARY_PATH $PATH"
%apphelp foo
    help <of> foo
%applabels foo
    VERSION 1.0 <a&b>
    # no
%apptest foo
    echo "test $SCIF_APPROOT"; false; echo on
%apprun bar-2 # remark
    env | grep ^SCIF | sort; exit 3
%appinstall foo
    echo again >>out
%runscript
    env | grep ^SCIF | sort
"""
)


@dataclass(frozen=True)
class Case:
    """A definition file, and of each path that is another in our image the reason."""

    text: str
    differences: Mapping[str, str] = field(default_factory=dict)
    compared: tuple[str, ...] = ()  # paths that have to be there, so that something is compared


CASES = {
    "files": Case(
        HEADER
        + """
%files
    # a remark, and an empty line

    files/plain.txt
    files/plain.txt /opt/renamed.txt
    files/plain.txt /opt/into/
    files/plain.txt /srv
    files/plain.txt opt/relative.txt
    files/plain.txt /data/through-a-link.txt
    files/plain.txt /etc/old
    files/tool.sh /usr/local/bin/tool
    files/tree /opt/tree
    files/tree /srv
    files/tree /opt/new/
    files/hollow /opt/hollow
    files/*.md /srv
    files/one*.md /opt/notes/
    "files/a name.txt" "/opt/a name.txt"
    files/link.txt /opt/followed.txt
    files/link-to-tree /opt/linked
    files/日本.txt /srv
    @HERE@/files/plain.txt /opt/absolute.txt
""",
        compared=("files/plain.txt", "srv/plain.txt", "srv/tree/sub/deep.txt", "opt/a name.txt", "opt/absolute.txt"),
    ),
    "modes": Case(
        HEADER + "\n%files\n    files/private.txt /opt/private.txt\n    files/group.txt /opt/group.txt\n",
        {"opt/private.txt": MODES},
        ("opt/private.txt", "opt/group.txt"),
    ),
    "post": Case(
        HEADER
        + """
%files
    files/plain.txt /opt/plain.txt

%post
    # The files of %files are there, and what fails ends the script.
    test "$(id -u)" = 0; cat /opt/plain.txt /etc/old >/opt/both.txt
    cd /opt
    cat >heredoc <<'END'
a line\twith a tab, and $nothing expanded
END
    mkdir -p work/deep; ln -s ../work work/link; ln -s nowhere dangling; ln plain.txt hard.txt
    mkfifo work/pipe; chmod 2750 work/deep; printf x >setuid; chmod 4755 setuid
    printf x >owned; chown 12:34 owned; mv heredoc moved
    rm -r /usr/share/doc; mkdir /usr/share/doc; printf x >/usr/share/doc/new; rm /etc/old
    (umask 077; printf x >closed)
    printf '%s\\n' 'it'"'"'s' "\\$5" `printf back`quotes "$((1 + 2))" >quoting
    printf x >/var/log/noise
""",
        {"var/log/noise": LOGS},
        ("opt/both.txt", "opt/moved", "usr/share/doc/new"),
    ),
    "arguments": Case(
        """Bootstrap: localimage
From: {{ base }}.sif

%arguments
    # a remark
    base=base
    word=hello
    number = 3
    both={{ word }}-{{ number }}
    target=/opt/said.txt
    empty=
    quoted="two words"

%files
    files/{{ word }}.txt {{ target }}

%post
    printf '%s\\n' {{ both }} {{word}} {{ number }} '{{empty}}' "{{  word  }}{{number}}" >/opt/values
    cat >/opt/quoted <<END
{{ quoted }}
END
    printf '%s\\n' '# {{ word }}' >/opt/comment

%labels
    word {{ word }}
""",
        compared=("opt/said.txt", "opt/values", "opt/quoted", "opt/comment"),
    ),
    "stages": Case(
        HEADER
        + """Stage: first

%files
    files/plain.txt /opt/plain.txt

%post
    mkdir -p /opt/out/sub /opt/out/hollow "/opt/a folder"
    printf '#!/bin/sh\\necho made\\n' >/opt/tool; chmod 755 /opt/tool
    cat /opt/plain.txt >/opt/out/one; printf two >/opt/out/sub/two; printf x >/opt/left-behind
    printf x >/opt/private; chmod 600 /opt/private; printf x >"/opt/a folder/a file"

Bootstrap: localimage
From: base.sif
Stage: second

%files from first
    /opt/tool /usr/local/bin/tool

%post
    tool >/opt/made

Bootstrap: localimage
From: base.sif
Stage: final

%files from first
    /opt/tool
    /opt/out /opt/result
    /opt/private /etc/private
    "/opt/a folder/a file" "/srv/a file"
    /opt/tool /opt/bin/
%files from second
    /opt/made /opt/made
%files
    files/plain.txt /opt/result.txt

%post
    cat /opt/made /opt/result/one /opt/result.txt >/opt/all
""",
        {"etc/private": MODES, "opt/result/hollow": HOLLOW},
        ("opt/tool", "opt/result/sub/two", "opt/bin/tool", "srv/a file", "opt/all"),
    ),
    "sections": Case(
        HEADER
        + """IncludeCmd: yes
MirrorURL: http://mirror.example.org/

%post # a remark
    cd /opt
    cat >bootstrap <<END
 bootstrap: text
bootstrap : text
END
%files # a remark
    files/plain.txt /opt/plain.txt
%POST
    cat bootstrap plain.txt >both
%files
    files/hello.txt /opt/hello.txt
%help some words
    a word
""",
        compared=("opt/both", "opt/plain.txt", "opt/hello.txt"),
    ),
    "another shell": Case(
        HEADER + "\n%post -c /bin/bash -f\n#!/bin/sh\na=(x y); false; printf '%s ' \"${a[1]}\" /* >/opt/x\n",
        compared=("opt/x",),
    ),
    "a shebang in %post": Case(
        HEADER + "\n%post -u\n#!/bin/bash\nprintf '%s' \"${BASH_VERSION-sh}\" >/opt/x\n", compared=("opt/x",)
    ),
    "apps": Case(APPS, compared=("scif/apps/foo/scif/labels.json", "scif/apps/bar-2/lib", "scif/apps/foo/out")),
    "names of another case": Case(
        "BootStrap: localimage\nFROM: base.sif\n\n%Post\n    printf x >/opt/x\n", compared=("opt/x",)
    ),
}
KNOWN = {*DIFFERENCES}  # what every image of Apptainer's has, in patterns of paths


# ------------------------------------------------------------------------------------------------------- what both show

SECTIONS = (
    HEADER
    + """
%environment
    # a remark
    export LISTEN_PORT=12345
    export GREETING="hello there"
    export LC_ALL=C
    export PATH=/opt/bin:$PATH

%post
    mkdir /opt/bin; printf '#!/bin/sh\\necho found "$@"\\n' >/opt/bin/search; chmod 755 /opt/bin/search

%labels
    Author someone@example.org
    Version v0.0.1
    Remark several words

%runscript
    echo "departed at $LISTEN_PORT with $# argv: $*"
    exec search "$@"

%startscript
    echo "started at $LISTEN_PORT with $*"

%test
    test "$LISTEN_PORT" = 12345
    search for | grep -q found
    echo tested

%help
    A container that shows what each section does.
      This line is indented.
"""
)


# ------------------------------------------------------------------------------------------------- what is refused here

Refusal = tuple[str, str, str]  # the text after the header, what we say, and how the page names it

REFUSED_SECTIONS: dict[str, Refusal] = {
    **{
        name: (f"%{name}\n    true\n", f"%{name} is refused: {REFUSED[name]}", f"`%{name}`")
        for name in ("setup", "pre")
    },
    "an app without a name": ("%apprun\n    true\n", "write the app's name after one blank", "an app without a name"),
    "an app's file with quotes": (
        '%appfiles tool\n    "files/a name.txt" x\n',
        "one blank between them and no quotes",
        "quotes, and several blanks, in `%appfiles`",
    ),
    "a shell of a file": (
        "%test -c /bin/bash\n    true\n",
        "no shell starts; write '#!/bin/bash' there",
        "`%runscript -c`, `%startscript -c`, `%test -c`",
    ),
    "text after a script's name": ("%post text\n    true\n", "runs no file named 'text'", "text after the name"),
    "an argument that nothing uses": (
        "%arguments\n    a=b\n",
        "is declared and never used",
        "an argument that nothing uses",
    ),
    "a source that is not there": ("%files\n    nothing /opt\n", "no such file under", "a source that is not there"),
    "a destination that climbs": (
        "%files\n    files/plain.txt /opt/../etc/x\n",
        "climbs with '..'",
        "`..` in a destination",
    ),
}
REFUSED_HEADERS: dict[str, Refusal] = {
    **{
        key: (
            f"Bootstrap: docker\nFrom: debian@sha256:{'0' * 64}\n{key}: x\n",
            f"'{key}:' is refused",
            f"`{key.title()}:`",
        )
        for key in UNUSED
    },
    "a tag": ("Bootstrap: docker\nFrom: debian:12\n", "is not locked", "a tag without a lock"),
    "a home": ("Bootstrap: localimage\nFrom: ~/base.sif\n", "write the file's path", "`From: ~/…`"),
    "an unknown key": (f"{HEADER}IncludeAll: yes\n", "unknown key 'IncludeAll'", "other keys"),
    **{
        agent: (f"Bootstrap: {agent}\nFrom: x\n", f"'Bootstrap: {agent}' is not supported", f"`{agent}`")
        for agent in (
            "library",
            "shub",
            "docker-daemon",
            "yum",
            "dnf",
            "zypper",
            "arch",
        )
    },
}

# What only a build shows: a stage's script, lines of the last stage, what we say, and how the page names it.
REFUSED_STAGES: dict[str, tuple[str, str, str, str]] = {
    "into a folder": (
        "mkdir /opt/srv; printf x >/opt/srv/x",
        "%files from first\n    /opt/srv /usr",
        "/usr is a folder in the layers below; name where the stage's folder goes: /usr/srv",
        "a stage's folder into a folder",
    ),
    "into a folder with a slash": (
        "mkdir /opt/a; printf x >/opt/a/x",
        "%files from first\n    /opt/a /srv/",
        "/opt/a is a folder; name its destination: /srv/a",
        "a stage's folder into a folder",
    ),
    "a file into a folder": (
        "printf x >/opt/x",
        "%files from first\n    /opt/x /usr",
        "/usr is a folder in the layers below; name the file in it",
        "a stage's file into a folder",
    ),
    "a folder of the layers below": (
        "printf x >/etc/new",
        "%files from first\n    /etc /opt/etc",
        "only files that the stage creates are copied",
        "a folder with files of the layers below",
    ),
    "two sources": (
        "printf x >/opt/x",
        "%files from first\n    /opt/x /opt/x\n%files\n    files/plain.txt /opt/x",
        "both write /opt/x",
        "one path from `%files` and `%files from`",
    ),
    "a link": (
        "ln -s nowhere /opt/x",
        "%files from first\n    /opt/x /opt/x",
        "only regular files are copied",
        "a stage's links",
    ),
    "a pattern": (
        "printf x >/opt/x.md",
        "%files from first\n    /opt/*.md /opt/",
        "the stage made nothing at",
        "patterns in `%files from`",
    ),
}


# ----------------------------------------------------------------------------------------------------------- the set-up


def make_root(root: Path) -> None:
    """A root file system of a shell and a few programs of this machine."""
    for folder in (
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "var/tmp",
        "var/log",
        "root",
        "home",
        "opt",
        "srv",
        "etc",
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "usr/local/bin",
        "usr/share/doc",
    ):
        (root / folder).mkdir(parents=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).chmod(0o1777)
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    (root / "data").symlink_to("srv")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/old").write_text("old\n")
    (root / "usr/share/doc/old").write_text("old\n")
    for name in PROGRAMS:
        program = Path(shutil.which(name) or "/missing").resolve()
        shutil.copy(program, root / "usr/bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            copy = root / "usr" / library.removeprefix("/usr").lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, copy)


def make_sources(folder: Path) -> None:
    """What definition files copy; the ordinary user's, whatever the umask."""
    files = folder / "files"
    (files / "tree/sub").mkdir(parents=True)
    (files / "hollow").mkdir()
    for name in (
        "plain.txt",
        "hello.txt",
        "a name.txt",
        "one.md",
        "two.md",
        "one-more.md",
        "日本.txt",
        "tree/top.txt",
        "tree/sub/deep.txt",
        "private.txt",
        "group.txt",
        "tool.sh",
    ):
        (files / name).write_text(f"{name}\n", encoding="utf-8")
        (files / name).chmod({"private.txt": 0o600, "group.txt": 0o664, "tool.sh": 0o755}.get(name, 0o644))
    (files / "link.txt").symlink_to("plain.txt")
    (files / "link-to-tree").symlink_to("tree")
    for path in (files, *files.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
        if not path.is_symlink():
            give(path, USER)


@dataclass(frozen=True)
class Lab:
    """A recipe's folder that both users read, a store with the base, and a folder of the ordinary user's."""

    recipe: SampleRecipe
    store: Store
    out: Path

    def resolve(self, text: str) -> ResolvedRecipe:
        """A recipe whose layer is this definition file."""
        text = text.replace("@HERE@", str(self.recipe.path))
        self.recipe.write("images/corpus.def", text)
        self.recipe.write("corpus.def", text)
        return resolve(find_recipe(str(self.recipe.path)))

    def build(self, text: str) -> tuple[ResolvedRecipe, Image]:
        """Our image."""
        resolved = self.resolve(text)
        return resolved, build(BuildContext(resolved, self.store, Options(engine="apptainer"), quiet()))

    def apptainer(self, *args: str | Path) -> str:
        """Apptainer as the ordinary user starts it: where a machine withholds capabilities root's build fails."""
        env = {"PATH": os.environ["PATH"], "HOME": home_of(USER), "USER": USER, "LANG": "C.UTF-8"}
        argv = ["apptainer", "--silent", *map(str, args)]
        done = subprocess.run(
            argv,
            cwd=self.recipe.path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            **as_user(USER),
        )
        assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def try_apptainer(self, argv: Sequence[str], image: Path) -> tuple[int, str]:
        """The exit code and standard output of a command in which IMAGE is this image."""
        name, *rest = [str(image) if argument == "IMAGE" else argument for argument in argv]
        clean = ("--cleanenv", "--contain", "--no-home") * (argv[0] != "run-help")
        env = {"PATH": os.environ["PATH"], "HOME": home_of(USER), "USER": USER, "LANG": "C.UTF-8"}
        done = subprocess.run(
            ["apptainer", "--silent", name, *clean, *rest],
            cwd=self.recipe.path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            **as_user(USER),
        )
        return done.returncode, done.stdout

    def sif(self, text: str) -> Path:
        """Our image of a definition file, as a SIF."""
        return self.sif_and_image(text)[0]

    def sif_and_image(self, text: str) -> tuple[Path, Image]:
        """The same, and its layers."""
        _, image = self.build(text)
        sif = self.recipe.path / "ours.sif"
        export(image, self.store, Progress(quiet=True), formats=("sif",), output=sif)
        sif.chmod(0o644)
        return sif, image

    def sandbox(self, text: str, *options: str) -> Path:
        """Apptainer's image of the same file, as a folder."""
        self.recipe.write("corpus.def", text.replace("@HERE@", str(self.recipe.path)))
        sandbox = Path(tempfile.mkdtemp(dir=self.out)) / "tree"
        give(sandbox.parent, USER)
        self.apptainer("build", "--fakeroot", "--sandbox", *options, sandbox, "corpus.def")
        return sandbox


def seed(store: Store, layer: Layer, root: Path) -> Path:
    """Put ``root`` into the store as this layer, and return its blob."""
    entries = [*normalize(Changes(root), Lower([]), epoch=layer.epoch)]
    entries += [(Entry(path, "file", 0o644, mtime=layer.epoch), None) for path in PLACEHOLDERS]
    entries.sort(key=lambda entry: sort_key(entry[0].path))
    store.open_for_writing()
    with store.staging() as staging:
        tar = DigestWriter()
        with (staging / "blob").open("w+b") as out:
            write_entries(entries, tar, SquashfsWriter(out, epoch=layer.epoch))
        size, digest = (staging / "blob").stat().st_size, digest_of(staging / "blob")
        store.put_file(staging / "blob", digest)
    store.put_layer(
        StoredLayer(
            name=layer.name,
            cache_key=layer.cache_key,
            diff_id=tar.diff_id,
            tar_size=tar.size,
            digest=digest,
            size=size,
            executor="hand",
            seconds=0.0,
            inputs=layer.inputs,
        )
    )
    return store.blob_path(digest)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    need("apptainer", "ldd")
    folder = Path(tempfile.mkdtemp(prefix="ekiben-corpus-"))
    folder.chmod(0o755)
    try:
        for name in (RECIPE["name"], "out"):
            (folder / name).mkdir()
            (folder / name).chmod(0o755)
        give(folder / "out", USER)
        recipe = SampleRecipe(folder / RECIPE["name"])
        recipe.write("images/base.def", "Bootstrap: debootstrap\nOSVersion: bookworm\n")
        recipe.stack(arguments={})
        recipe.recipe(layer="corpus", tasks={}, test="")
        make_sources(recipe.path)
        make_root(folder / "root")
        new_lab = Lab(recipe, Store(folder / "store"), folder / "out")
        blob = seed(new_lab.store, new_lab.resolve(HEADER).layers[0], folder / "root")
        shutil.copy(blob, recipe.path / "base.sif")
        (recipe.path / "base.sif").chmod(0o644)
        yield new_lab
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize("name", CASES)
def test_apptainer_builds_the_same_tree(name: str, lab: Lab) -> None:
    case = CASES[name]
    resolved, image = lab.build(case.text)
    theirs = dict(read_folder(lab.sandbox(case.text)))
    assert [layer.name for layer in resolved.layers] == ["base", "corpus", RECIPE["name"]]
    ours = read_image(lab.store.root, [{"digest": layer.digest} for layer in image.layers[:-1]])
    assert differing(ours, theirs) == {*case.differences}
    assert {*case.compared} <= ours.keys() & theirs.keys(), "nothing was compared"


def differing(ours: Seen, theirs: Seen) -> set[str]:
    """The paths that are not the same in both, but for what every image of Apptainer's has."""
    return {
        path
        for path in ours.keys() | theirs.keys()
        if not any(fnmatchcase(path, pattern) for pattern in KNOWN) and not is_same(ours.get(path), theirs.get(path))
    }


def test_a_comparison_finds_what_differs(lab: Lab) -> None:
    """The same comparison, of two definition files that are not the same."""
    _, image = lab.build(HEADER + "\n%post\n    printf x >/opt/x; chmod 600 /etc/old\n")
    theirs = dict(read_folder(lab.sandbox(HEADER + "\n%post\n    printf y >/opt/x; rm /srv/x 2>/dev/null || true\n")))
    ours = read_image(lab.store.root, [{"digest": layer.digest} for layer in image.layers[:-1]])
    assert differing(ours, theirs) == {"opt/x", "etc/old"}


@pytest.mark.guard
def test_apps_run_as_apptainers(lab: Lab) -> None:
    sif, theirs = lab.sif(APPS), lab.sandbox(APPS)
    for argv in (
        ("run", "--app", "foo", "IMAGE", "a word"),
        ("run", "--app", "bar-2", "IMAGE"),
        ("run", "--app", "gone", "IMAGE"),
        ("test", "--app", "foo", "IMAGE"),
        ("run-help", "--app", "foo", "IMAGE"),
        ("run", "IMAGE"),
    ):
        ours, other = (lab.try_apptainer(argv, image) for image in (sif, theirs))
        assert ours == other, argv
    for name in ("foo", "bar-2"):  # by the image's shell, which Docker has, too; here LD_LIBRARY_PATH is known before
        code, output = lab.try_apptainer(("run", "--app", name, "IMAGE", "a word"), theirs)
        by_shell = lab.try_apptainer(("exec", "IMAGE", *app_command(name, ["a word"])), sif)
        assert by_shell == (code, output.replace("::", ":"))
    assert lab.try_apptainer(("exec", "IMAGE", *app_command("foo", [])), lab.recipe.path / "base.sif") == (1, "")


@pytest.mark.guard
def test_apptainer_shows_the_same_of_every_section(lab: Lab) -> None:
    sif, theirs = lab.sif(SECTIONS), lab.sandbox(SECTIONS)
    clean = ("--cleanenv", "--contain", "--no-home")
    names = ("LISTEN_PORT", "GREETING", "LC_ALL", "PATH")

    def shown(*argv: str) -> list[str]:
        """What one command prints for either image."""
        at = argv.index("IMAGE")
        return [lab.apptainer(*argv[:at], path, *argv[at + 1 :]) for path in (sif, theirs)]

    for argv in (
        ("run", *clean, "IMAGE"),
        ("run", *clean, "IMAGE", "a word", "another"),
        ("exec", *clean, "IMAGE", "sh", "-c", "".join(f'echo "${name}";' for name in names)),
        ("exec", *clean, "IMAGE", "sh", "/.singularity.d/startscript", "a word"),
    ):
        ours, other = shown(*argv)
        assert ours == other != "", argv
    tested, other = shown("test", *clean, "IMAGE")
    assert other == "tested\n"
    assert "tested" in tested.splitlines()
    labels = [
        dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        for text in shown("inspect", "--labels", "IMAGE")
    ]
    expected = {"Author": "someone@example.org", "Version": "v0.0.1", "Remark": "several words"}
    assert [{name: image_labels.get(name) for name in expected} for image_labels in labels] == [expected, expected]
    ours, other = shown("run-help", "IMAGE")
    assert other.strip("\n") in ours, "ours has the recipe's tasks before it"


@pytest.mark.parametrize("name", REFUSED_SECTIONS)
def test_section_without_effect_is_refused(name: str, lab: Lab) -> None:
    body, message, _ = REFUSED_SECTIONS[name]
    with pytest.raises(DefinitionError) as caught:
        lab.resolve(f"{HEADER}\n{body}")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", REFUSED_HEADERS)
def test_header_without_effect_is_refused(name: str, lab: Lab) -> None:
    text, message, _ = REFUSED_HEADERS[name]
    with pytest.raises(DefinitionError) as caught:
        lab.resolve(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", REFUSED_STAGES)
def test_copy_of_a_stage_that_would_differ_is_refused(name: str, lab: Lab) -> None:
    script, lines, message, _ = REFUSED_STAGES[name]
    with pytest.raises(LayerError) as caught:
        lab.build(
            f"{HEADER}Stage: first\n\n%post\n    {script}\n\n{HEADER}Stage: final\n\n{lines}\n\n%post\n    true\n"
        )
    assert message in str(caught.value)


def test_apptainer_takes_what_is_refused_here(lab: Lab) -> None:
    """Otherwise the page would list no difference: all that this machine can build, in one file."""
    accepted = (
        "pre",
        "an argument that nothing uses",
    )
    bodies = [REFUSED_SECTIONS[name][0] for name in accepted]
    sandbox = lab.sandbox("\n".join([HEADER, *bodies]))
    assert (sandbox / "opt").is_dir()


def test_page_lists_every_difference_and_all_that_is_refused() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    reasons = {reason for case in CASES.values() for reason in case.differences.values()}
    names = {refusal[-1] for table in (REFUSED_SECTIONS, REFUSED_HEADERS, REFUSED_STAGES) for refusal in table.values()}
    assert sorted(text for text in reasons | names if text not in page) == []

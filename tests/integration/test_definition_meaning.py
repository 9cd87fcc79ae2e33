"""Random definition files that cover each pair of features, built here and by Apptainer: the image means the same.

Compared are the tree, the environment, what %runscript, %startscript, %test and apps print, their exit codes, labels
and help. The usual set covers every pair; EKIBEN_DEFINITION_FILES=300 adds random files up to that number.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.store import Image
from test_definition_corpus import HEADER, Lab, differing, lab, read_folder, read_image

__all__ = ["lab"]  # the fixture
pytestmark = pytest.mark.covers("ekiben/spec", "ekiben/resolve", "ekiben/builder", "ekiben/formats")

# Feature → text of each variant; "" leaves it out. Each section writes and prints what no other does.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "header": (
        "",
        "IncludeCmd: yes\nMirrorURL: http://mirror.example.org/ # remark\n",
        "Include: a \\\n    b\nUser: x\n",
    ),
    "arguments": (
        "",
        '%arguments\n    # remark\n    word=value\n    both = <{{ word }}>\n    quoted="a  b"\n',
        "%arguments text\n  word=first\n%arguments\n  word=value\n  both=-{{word}}-{{ word }}\n  quoted=\n",
    ),
    "post": (
        "",
        "%post\n    printf '%s\\n' \"$PWD\" '@W@' '#{{x' >/opt/post\n",
        "%post # remark\n    set -- one\n%Post\n    printf '%s ' \"$1\" $- | sed s/x// >/opt/post\n",
        "%post -c /bin/bash\n#!/bin/sh\na=(x y); false; printf '%s @W@' \"${a[1]}\" >/opt/post # @W@\n",
        "%post -u\n  #!/bin/bash\n    cat >/opt/post <<END\n bootstrap: text\nbootstrap : @W@ ${BASH_VERSION-sh}\n"
        "END\n",
    ),
    "files": (
        "",
        "%files\n    files/plain.txt /srv\n    files/tree /opt/tree\n",
        "%files # remark\n    files/hello.txt /opt/h1 # remark\n%FILES\n    files/*.md /srv/\n",
    ),
    "environment": (
        "",
        "%environment\n    export WORD='@W@'\n    export PATH=/opt/bin:$PATH\n",
        '%environment # remark\n    export A=one\n%environment\n    # {{ gone }}\n    export B="${A} two"\n',
    ),
    "runscript": (
        "",
        '%runscript\n    echo "run @W@ $# $1 ${BASH_VERSION:+bash}"; false; exit 3\n',
        "%runscript -e\n    echo 'run -e'; false; echo on\n",
        '%runscript\n  #!/bin/bash -u\n    a=(x y); echo "${a[1]} $*"; echo $NONE\n',
        '%runscript\n\n#!/bin/bash\n    echo "${BASH_VERSION-sh}"\n',
        '%runscript # remark\n    echo first\n%runscript\n    exec echo second "$@"\n',
    ),
    "startscript": (
        "",
        '%startscript\n    echo "start @W@ $1"\n',
        '%startscript\n#!/bin/bash\n    a=(x y); echo "start ${a[1]}"; exit 4\n',
    ),
    "test": (
        "",
        "%test\n    grep -q nothing /etc/passwd\n    echo 'went on @W@'\n",
        "%test\n    #!/bin/bash\n    a=(x y); [[ ${a[1]} == y ]] && echo arrays; exit 5\n",
        "%test -e\n    echo before; false; echo after\n",
        "%test # remark\n    echo one\n%test\n    echo two; false\n",
    ),
    "labels": (
        "",
        "%labels\n    Name @W@\n    Empty\n    # no\n",
        "%labels x\n    Name one\n%labels\n    Name two  words\n",
    ),
    "help": ("", "%help\nbootstrap : see the manual\n  @W@\n", "%help words\n    one\n%help # remark\n    two\n"),
    "apps": (
        "",
        '%apprun foo\n    echo "foo @W@ $# $SCIF_APPROOT"\n%appenv foo\n    export SOFT=@W@\n%apphelp foo\n    help\n',
        '%appinstall foo\n    echo "$PWD $SCIF_APPNAME" >out\n%appfiles foo\n    files/plain.txt lib\n'
        "%apptest foo\n    echo testing; exit 6\n%applabels foo\n    a b c\n%appinstall b.c\n    echo x >>/opt/apps\n",
    ),
    "stage": (
        "",
        HEADER
        + "Stage: first\n%post\n    printf made >/opt/made\n%environment\n    export NOT=here\n%help\n    not here\n"
        "%runscript\n    echo no\n%labels\n    No label\n\n",
    ),
}
CALLER = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "PS1", "HOME", "PWD", "USER", "EKIBEN_RECIPE")
Chosen = tuple[int, ...]  # the number of each feature's variant


def covering(seed: int) -> list[Chosen]:
    """Files that have each pair of variants; of random candidates always the one with most new pairs."""
    randomness, sizes = random.Random(seed), [len(variants) for variants in FEATURES.values()]
    missing = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[one])
        for b in range(sizes[two])
    }
    files: list[Chosen] = []
    while missing:
        ((one, a), (two, b)) = min(missing)
        candidates = [[randomness.randrange(size) for size in sizes] for _ in range(300)]
        for candidate in candidates:
            candidate[one], candidate[two] = a, b
        best = max(candidates, key=lambda candidate: len(missing & pairs(candidate)))
        missing -= pairs(best)
        files.append(tuple(best))
    number = int(os.environ.get("EKIBEN_DEFINITION_FILES", "0"))
    while len(files) < number:
        files.append(tuple(randomness.randrange(size) for size in sizes))
    return files


def pairs(chosen: list[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs of variants in a file."""
    return set(itertools.combinations(enumerate(chosen), 2))


def definition(chosen: Chosen) -> str:
    """The text of a file; its sections are in an order of its own."""
    parts = dict(
        zip(FEATURES, (FEATURES[name][number] for name, number in zip(FEATURES, chosen, strict=True)), strict=True)
    )
    stage, header = parts.pop("stage"), parts.pop("header")
    sections = [text for text in parts.values() if text]
    random.Random(repr(chosen)).shuffle(sections)
    if stage:
        sections.insert(0, "%files from first # remark\n    /opt/made /opt/taken\n")
    value = "{{ word }} {{both}}[{{ quoted }}]" if parts["arguments"] else "word"
    if parts["arguments"] and not any("@W@" in text for text in sections):
        sections.append("%labels\n    Arguments @W@\n")
    return stage + "\n".join([HEADER + header, *sections]).replace("@W@", value)


FILES = covering(35)


@pytest.mark.parametrize("number", range(0, len(FILES), 8))
def test_a_file_means_what_it_means_to_apptainer(number: int, lab: Lab, tmp_path: Path) -> None:
    """Eight files each, of which the texts that differ are shown."""
    wrong = [
        f"{chosen}: {difference}\n{definition(chosen)}"
        for chosen in FILES[number : number + 8]
        for difference in differences(lab, chosen)
    ]
    assert wrong == [], "\n".join(wrong)


def differences(lab: Lab, chosen: Chosen) -> Iterator[str]:
    """What is not the same in both images of a file."""
    text = definition(chosen)
    sif, image = lab.sif_and_image(text)
    theirs = lab.sandbox(text, "--notest")
    ours = read_image(lab.store.root, [{"digest": layer.digest} for layer in image.layers[:-1]])
    if paths := differing(ours, dict(read_folder(theirs))):
        yield f"paths {sorted(paths)}"
    has = {name: number > 0 for name, number in zip(FEATURES, chosen, strict=True)}
    start = "; /.singularity.d/startscript 'a word'" if has["startscript"] else ""
    commands = [("exec", "IMAGE", "sh", "-c", f"env -0{start}")]
    commands += [("test", "IMAGE")] if has["test"] else []
    commands += [("run", "IMAGE", "a word", "b")] if has["runscript"] else []
    if has["apps"]:
        commands += [("run", "--app", "foo", "IMAGE", "a word"), ("test", "--app", "foo", "IMAGE")]
    for argv in commands:
        mine, other = (shown(lab.try_apptainer(argv, image), argv) for image in (sif, theirs))
        if mine != other:
            yield f"{argv}: {mine} is not {other}"
    described = json.loads((theirs / ".singularity.d/labels.json").read_text())
    expected = {name: value for name, value in described.items() if not name.startswith("org.label-schema.")}
    if not expected.items() <= image.labels.items():
        yield f"labels {image.labels} do not have {expected}"
    if has["help"] and (text := (theirs / ".singularity.d/runscript.help").read_text().strip("\n")) not in help_of(
        image, lab
    ):
        yield f"help {help_of(image, lab)} does not have {text}"


def help_of(image: Image, lab: Lab) -> str:
    """The text of `run-help` in our image."""
    with lab.store.blob_path(image.layers[-1].digest).open("rb") as stream:
        return SquashfsReader(stream).read_file(".singularity.d/runscript.help").decode()


def shown(result: tuple[int, str], argv: tuple[str, ...]) -> object:
    """An exit code, and the output without what is the caller's or this project's."""
    code, output = result
    if argv[0] == "exec":
        return code, sorted(line for line in output.split("\0") if line and not line.startswith(CALLER))
    return code, [line for line in output.splitlines() if argv[0] != "test" or not line.startswith("test: ")]


def test_the_files_have_each_pair() -> None:
    assert len(FILES) >= 30
    sizes = [len(variants) for variants in FEATURES.values()]
    seen = set().union(*(pairs(list(chosen)) for chosen in FILES))
    assert len(seen) == sum(one * two for one, two in itertools.combinations(sizes, 2))
    assert len({definition(chosen) for chosen in FILES}) == len(set(FILES))

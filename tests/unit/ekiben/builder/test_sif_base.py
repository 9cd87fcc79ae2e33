"""A SIF's own scripts, as files of the base's layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ekiben.builder.sif_base import base_scripts, known_environment, sif_files
from ekiben.formats.base_config import BASE, BASE_RUNSCRIPT, BASE_STARTSCRIPT
from ekiben.formats.changeset import Lower
from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter

META = ".singularity.d"
KEPT = "/.singularity.d/env/89-base-00.sh"


Tree = Callable[[Mapping[str, str]], Lower]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    """Make a root file system of files; ``->`` begins the target of a link."""
    with (tmp_path / "layer").open("w+b") as out:

        def make(files: Mapping[str, str]) -> Lower:
            entries: dict[str, LayerEntry] = {"": (Entry("", "dir"), None)}
            for path, text in files.items():
                parts = path.split("/")
                for end in range(1, len(parts)):
                    entries["/".join(parts[:end])] = Entry("/".join(parts[:end]), "dir"), None
                data = text.encode()
                link, file = Entry(path, "symlink", target=text[2:]), Entry(path, "file", size=len(data))
                entries[path] = (link, None) if text.startswith("->") else (file, iter([data]))
            write_entries([entries[path] for path in sorted(entries, key=sort_key)], SquashfsWriter(out))
            return Lower([SquashfsReader(out)])

        yield make


@pytest.mark.parametrize(
    ("files", "path", "text"),
    [
        ({f"{META}/runscript": "#!/bin/sh\necho a\n"}, BASE_RUNSCRIPT, "#!/bin/sh\necho a\n"),
        ({f"{META}/runscript": "->../opt/it's"}, BASE_RUNSCRIPT, "#!/bin/sh\nexec '/opt/it'\"'\"'s' \"$@\"\n"),
        ({}, BASE_RUNSCRIPT, '#!/bin/sh\nexec /bin/sh "$@"\n'),
        ({f"{META}/startscript": "#!/bin/sh\n# none\n"}, BASE_STARTSCRIPT, None),
        ({f"{META}/runscript": f"exec {BASE_RUNSCRIPT}"}, BASE_RUNSCRIPT, None),
        ({f"{META}/test": "for script in /opt/ekiben/tests/*.sh"}, "/opt/ekiben/tests/00-base.sh", None),
        ({f"{META}/env/90-environment.sh": "#!/bin/sh\n# none\n"}, KEPT, None),
        ({f"{META}/env/90-environment.sh": "->../x"}, KEPT, "#!/bin/sh\n. /.singularity.d/x\n"),
        ({f"{META}/env/90-environment.sh": "A=b", KEPT[1:]: "B=c"}, KEPT.replace("00", "01"), "A=b"),
    ],
)
def test_what_the_recipe_replaces_is_kept(files: dict[str, str], path: str, text: str | None, tree: Tree) -> None:
    kept = sif_files(tree(files)).get(path)
    assert (kept is None) == (text is None)
    assert text is None or (kept and kept[1].decode().endswith(text))


def test_labels_are_those_of_the_image_and_not_of_its_build(tree: Tree) -> None:
    labels = {"L": "1", "org.label-schema.build-date": "today", "org.ekiben.stack": "cu124"}
    record = json.loads(sif_files(tree({f"{META}/labels.json": json.dumps(labels)}))["/" + BASE][1])
    assert record["labels"] == {"L": "1"}


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("labels.json", "{", "labels.json is not JSON"),
        ("labels.json", '{"a": 1}', "labels.json 'labels' is not names and strings"),
        ("runscript", "x" * (1 << 20) + "x", "runscript has .* more than"),
    ],
)
def test_what_cannot_be_read_is_an_error(path: str, text: str, message: str, tree: Tree) -> None:
    with pytest.raises(ValueError, match=message):
        sif_files(tree({f"{META}/{path}": text}))


@pytest.mark.parametrize(
    ("files", "values"),
    [
        ({"99-base.sh": "exit 1"}, {}),
        ({"90-environment.sh": "exit 1", "89-base-00.sh": "export A=b\n"}, {"A": "b"}),
        ({"10-own.sh": "export A=b\n", "91-environment.sh": "export B=$A.\n"}, {"A": "b", "B": "b."}),
        ({"91-environment.sh": "export A=$HOME\n"}, None),
        ({"91-environment.sh": "A=b\n"}, None),
    ],
)
def test_a_table_of_values_takes_no_shell(files: dict[str, str], values: dict[str, str] | None, tree: Tree) -> None:
    known = known_environment(base_scripts(tree({f"{META}/env/{name}": text for name, text in files.items()})))
    assert (known is None) == (values is None)
    assert known is None or {name: value for name, value in known.items() if name != "PATH"} == values

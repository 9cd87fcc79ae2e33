"""What engines list of names: any bytes but NUL, and all of them or an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ekiben.core.errors import EngineError
from ekiben.executors import FIND_MARKED, marked_folders

UNUSUAL = ("new\nline", "sep\u2028arator", "日本", "a b", "tab\there", "cr\rhere")
NAMES = [b"plain", b"caf\xe9", *map(str.encode, UNUSUAL)]


def listing(folder: Path) -> bytes:
    return subprocess.run([*FIND_MARKED, str(folder)], capture_output=True, check=True).stdout


@pytest.mark.parametrize("mark", [b".wh..opq", b".wh..wh..opq"])
def test_marked_folders_of_any_name_are_found(tmp_path: Path, mark: bytes) -> None:
    for name in NAMES:
        folder = os.fsencode(tmp_path) + b"/up/deep/" + name
        Path(os.fsdecode(folder)).mkdir(parents=True)
        os.close(os.open(folder + b"/" + mark, os.O_CREAT | os.O_WRONLY))
    (tmp_path / "up/new").mkdir()
    found = marked_folders(listing(tmp_path / "up"), str(tmp_path / "up"))
    assert found == {"deep/" + name.decode("utf-8", "surrogateescape") for name in NAMES}


def test_truncated_list_of_marks_is_an_error(tmp_path: Path) -> None:
    assert marked_folders(listing(tmp_path), str(tmp_path)) == set()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.wh..opq").touch()
    whole = listing(tmp_path)
    for length in range(len(whole)):
        with pytest.raises(EngineError, match="breaks off"):
            marked_folders(whole[:length], str(tmp_path))


def test_names_are_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    """Python takes names as Latin-1 here, as it takes them as EUC-JP elsewhere."""
    (tmp_path / "up").mkdir()
    (tmp_path / "up/日本").write_bytes(b"x")
    (tmp_path / "up/リンク").symlink_to("日本")
    code = (
        "import hashlib, sys; from pathlib import Path\n"
        "from ekiben.formats.changeset import Lower, normalize\n"
        "from ekiben.formats.layer import write_entries\n"
        "from ekiben.formats.tar import DigestWriter\n"
        "from ekiben.formats.upper import Changes\n"
        "from ekiben.formats.squashfs.writer import SquashfsWriter\n"
        "tar = DigestWriter()\n"
        "with open(sys.argv[2], 'w+b') as out:\n"
        "    entries = normalize(Changes(Path(sys.argv[1])), Lower([]), epoch=1)\n"
        "    write_entries(entries, tar, SquashfsWriter(out, epoch=1))\n"
        "print(sys.getfilesystemencoding(), tar.diff_id, hashlib.sha256(open(sys.argv[2], 'rb').read()).hexdigest())\n"
    )
    listings = []
    for environment in ({"LC_ALL": "C.UTF-8"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}):
        argv = [sys.executable, "-c", code, str(tmp_path / "up"), str(tmp_path / "out")]
        env = {**os.environ, **environment}
        listings.append(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.split())
    assert listings[0][0] != listings[1][0]
    assert listings[0][1:] == listings[1][1:]

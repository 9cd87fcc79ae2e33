"""What an engine starts: the environment of a script is in a file of its owner, and on no command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ekiben.core.paths import BUILD_MOUNT
from ekiben.executors import Script, write_run_script

VALUES = {
    "https_proxy": "http://me:pass word@proxy:3128",
    "QUOTES": "a'b\"c$d`e`\\",
    "LINES": "one\ntwo",
    "EMPTY": "",
    "PATH": "/usr/bin:/bin",
}


def test_values_stand_in_a_file_of_their_owner_alone(tmp_path: Path) -> None:
    write_run_script(tmp_path, Script("job", "true\n", VALUES))
    for name in ("run.sh", "post.sh"):
        assert "pass word" not in (tmp_path / name).read_text()
    assert (tmp_path / "environment").stat().st_mode & 0o777 == 0o600


def test_a_script_gets_the_values_as_they_are(tmp_path: Path) -> None:
    write_run_script(tmp_path, Script("job", "env -0\ntr '\\0' ' ' </proc/$$/cmdline >&2\n", VALUES))
    script = (tmp_path / "run.sh").read_text().replace(f"/{BUILD_MOUNT}/", f"{tmp_path}/")
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True)
    passed = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0")[:-1])
    assert VALUES.items() <= passed.items()
    assert b"pass word" not in done.stderr
    assert b"post.sh" in done.stderr


def test_another_command_runs_the_script_with_the_values(tmp_path: Path) -> None:
    text = 'a=(x y); false; echo "${a[1]} $PATH"\n'
    write_run_script(tmp_path, Script("job", text, {"PATH": "/usr/bin:/bin"}, '/bin/bash -u "$0"'))
    script = (tmp_path / "run.sh").read_text().replace(f"/{BUILD_MOUNT}/", f"{tmp_path}/")
    assert subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True).stdout == b"y /usr/bin:/bin\n"

"""What a live step shows of a running %post: bytes that can be seen from outside."""

from __future__ import annotations

import os
from pathlib import Path

from ekiben.builder._written import show_written, written
from ekiben.core.progress import Progress
from ekiben.executors import Job


def test_written_and_downloaded_bytes(tmp_path: Path) -> None:
    mount, scratch = tmp_path / "mount", tmp_path / "scratch"
    job = Job(name="x", lower=[], mount=mount, cache=tmp_path, scratch=scratch, staging=tmp_path, log=lambda line: None)
    assert written(job) == ""
    (upper := scratch / "overlay/upper/usr").mkdir(parents=True)
    (upper / "program").write_bytes(bytes(3000))
    (upper / "link").symlink_to("/etc/passwd")
    (apt := mount / "apt/partial").mkdir(parents=True)
    (apt / "new.deb").write_bytes(bytes(2000))
    (apt / "kept.deb").write_bytes(bytes(7000))
    os.link(apt / "kept.deb", tmp_path / "kept.deb")
    assert written(job) == "3.0 kB written, 2.0 kB of packages downloaded"
    with show_written(job, Progress(quiet=True)):  # nothing is looked at where nobody sees it
        pass

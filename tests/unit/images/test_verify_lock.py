"""images/scripts/verify_lock.py: installed packages against their lock file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.image_scripts import SCRIPTS, package


def verify_lock(site: Path, lock: str) -> tuple[int, str]:
    (site / "a.lock").write_text(lock)
    script = [sys.executable, str(SCRIPTS / "verify_lock.py"), str(site / "a.lock")]
    done = subprocess.run(script, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_compares_versions_and_files(tmp_path: Path) -> None:
    package(tmp_path, "ekibentest", {"ekibentest/__init__.py": b"1 + 1\n", "ekibentest/b.py": b""})
    assert verify_lock(tmp_path, "ekibentest==1.0 \\\n    --hash=sha256:0\n") == (0, "")
    assert verify_lock(tmp_path, "ekibentest==2.0 \\\n") == (1, "ekibentest is 1.0, the lock says 2.0\n")
    assert verify_lock(tmp_path, "ekibenother==2.0 \\\n") == (1, "ekibenother 2.0 is not installed\n")
    assert verify_lock(tmp_path, "")[0] == 1
    (tmp_path / "ekibentest/__init__.py").write_text("1\n")
    (tmp_path / "ekibentest/b.py").unlink()
    code, output = verify_lock(tmp_path, "ekibentest==1.0 \\\n")
    assert code == 1
    assert "has 2 bytes, RECORD says 6" in output
    assert "b.py is missing" in output

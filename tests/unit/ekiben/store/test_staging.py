from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import os, sys
from pathlib import Path
from ekiben.core.folder import Folder
from ekiben.store import Store

store = Store(Path(sys.argv[1]))
store.open_for_writing()
staging = store.staging()
staging.__enter__()
sys.staging = staging  # a local one would be closed before the end
remove = Folder.remove_tree

def interrupt(folder, name):
    os.kill(os.getpid(), int(sys.argv[2]))
    return remove(folder, name)

Folder.remove_tree = interrupt
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_the_end_interrupts_no_clean_up(number: signal.Signals, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(int(number))]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((tmp_path / "store" / "staging").iterdir())

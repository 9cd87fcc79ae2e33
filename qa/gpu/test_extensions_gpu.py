"""Compiled extensions against torch's own results, on a GPU: in the image that ships them, or in this Python.

EKIBEN_SIF names a built image; without it the packages of this Python are tested. What is not installed is skipped:
`make test-gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
KERNELS = Path(__file__).parent / "kernels"


def python() -> list[str]:
    if not (sif := os.environ.get("EKIBEN_SIF")):
        return [sys.executable]
    return ["apptainer", "--silent", "exec", "--nv", "--cleanenv", "--bind", str(KERNELS), sif, "python"]


@pytest.mark.parametrize(
    ("package", "script"),
    [
        ("apex", "apex_checks.py"),
        ("deepspeed", "deepspeed_checks.py"),
        ("flash-attn", "flash_attn_checks.py"),
        ("flash-attn-4", "flash_attn_4_checks.py"),
    ],
)
def test_extension_results_equal_torchs(package: str, script: str) -> None:
    # By package: the modules of flash-attn-4 are in flash_attn, too.
    search = [*python(), "-c", f"import importlib.metadata as m; print(any(m.distributions(name='{package}')))"]
    search = subprocess.run(search, capture_output=True, text=True, check=False)
    assert search.returncode == 0, search.stderr  # an image that does not run is not one without the package
    if search.stdout.strip() == "False":
        pytest.skip(f"no {package} is installed")
    done = subprocess.run([*python(), str(KERNELS / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

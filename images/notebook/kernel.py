"""The kernel of notebooks: the image's Python, with ipykernel behind its own packages and the recipe's scripts in front, as in a task."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = Path("/opt/notebook/lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")

scripts = Path(os.environ.get("EKIBEN_RECIPE", "/"), "entrypoints")
sys.path[:1] = [str(scripts)] if scripts.is_dir() else []
sys.path.append(str(PACKAGES))

from ipykernel.kernelapp import launch_new_instance  # noqa: E402  found only now

launch_new_instance()

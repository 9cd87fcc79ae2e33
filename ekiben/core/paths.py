"""Paths of this project, and of its files inside an image."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ekiben.core.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = (
    _PACKAGE / "_data"
)  # in a wheel only: images/, recipes/, entrypoints/ and sites/; a checkout has them beside the package

IS_INSTALLED = _DATA.is_dir()
PROJECT_ROOT = _DATA if IS_INSTALLED else _PACKAGE.parent
# The command that installs an engine, or prints what to ask the administrator for.
ENGINE_SETUP = (
    shlex.join(["env", f"PYTHON={sys.executable}", "sh", str(_PACKAGE / "bootstrap.sh"), "--engine"])
    if IS_INSTALLED
    else "sh ekiben/bootstrap.sh --engine"
)
RECIPE_HOME = "/opt/ekiben/recipe"  # a recipe's files, in its image
TESTS = "/opt/ekiben/tests"  # the %test of each layer, in an image
BUILD_MOUNT = "run/ekiben"  # files that exist only while a layer is built


def expand_home(path: Path, origin: str) -> Path:
    """Return ``path`` with a user's home for ``~`` or ``~NAME``.

    ``origin`` names in the error where the path comes from.

    Raises:
        UsageError: this machine knows no such user, or no home of this one.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{origin}: {path} begins with a home folder that this machine does not know",
            hint="write the path without ~, or set HOME",
        ) from error

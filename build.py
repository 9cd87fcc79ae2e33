#!/usr/bin/env python3
"""Ekiben's command line, started from a checkout. What it does is in ekiben/cli/."""

import shlex
import sys
from pathlib import Path

if __name__ == "__main__":
    try:
        from ekiben.cli import main

        main()
    except ModuleNotFoundError as error:
        if (error.name or "ekiben").partition(".")[0] == "ekiben":
            raise
        root = shlex.quote(str(Path(__file__).resolve().parent))
        hint = f"run `sh {root}/ekiben/bootstrap.sh`, then `{root}/.venv/bin/python {root}/build.py`"
        print(f"error: {sys.executable} has no module {error.name!r}\nhint: {hint}", file=sys.stderr)
        sys.exit(4)

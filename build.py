#!/usr/bin/env python3
"""Ekiben's command line, started from a checkout. What it does is in ekiben/cli/."""

import sys

if __name__ == "__main__":
    try:
        from ekiben.cli import main

        main()
    except ModuleNotFoundError as error:
        if (error.name or "ekiben").partition(".")[0] == "ekiben":
            raise
        hint = "run `sh ekiben/bootstrap.sh`, then `.venv/bin/python build.py`"
        print(f"error: {sys.executable} has no module {error.name!r}\nhint: {hint}", file=sys.stderr)
        sys.exit(4)

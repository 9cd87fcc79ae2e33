#!/usr/bin/env python3
"""Ekiben's command line. What it does is in builder/cli/, for Python keeps no bytecode of a script it is started with."""

import gc
import sys

gc.set_threshold(100_000)  # what starting up makes stays: to look through it again and again takes some milliseconds

from builder.answers import answer  # noqa: E402

if __name__ == "__main__" and answer(sys.argv[1:]):
    sys.exit()

from builder.cli import main  # noqa: E402

if __name__ == "__main__":
    main()

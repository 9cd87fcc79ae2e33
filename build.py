#!/usr/bin/env python3
"""Ekiben's command line. What it does is in builder/cli/, for Python keeps no bytecode of a script it is started with."""

from builder.cli import main

if __name__ == "__main__":
    main()

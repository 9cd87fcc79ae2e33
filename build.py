#!/usr/bin/env python3
"""Ekiben's command line, started from a checkout. What it does is in ekiben/cli/."""

from ekiben.cli import main

if __name__ == "__main__":
    main()

"""The command line: options → one call → one line of output. Heavy modules are imported by the command that needs them."""

from builder.cli import images, jobs, sharing
from builder.cli.group import main

__all__ = ["images", "jobs", "main", "sharing"]

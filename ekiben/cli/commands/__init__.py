"""The commands: every file here is one, and what the file calls ``command`` is it. Its docstring is the help text.

To add a command, add a file; ``ekiben.cli.group.SECTIONS`` says where `--help` lists it, which is under "Manage"
otherwise. A module whose name begins with an underscore is a helper of others.
"""

"""What knows no image: errors, processes, progress, files, settings."""

__all__ = [
    "atomic",
    "checked",
    "command_name",
    "decisions",
    "emulation",
    "environment",
    "errors",
    "files",
    "folder",
    "inner_path",
    "mounts",
    "output",
    "owner",
    "paths",
    "plugins",
    "printable",
    "process",
    "process_name",
    "progress",
    "settings",
]

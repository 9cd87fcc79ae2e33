"""What knows no image: errors, processes, progress, files, settings."""

__all__ = [
    "checked",
    "command_name",
    "environment",
    "errors",
    "files",
    "mounts",
    "output",
    "owner",
    "paths",
    "plugins",
    "process",
    "progress",
    "settings",
]

"""Provide what every task has: settings, a command line, errors, cache folders, the hub, output files and records."""

__all__ = [
    "adapter_folder",
    "caches",
    "checksums",
    "command",
    "errors",
    "event_file",
    "fetch",
    "fetched",
    "files",
    "hub",
    "input_files",
    "model_card",
    "output_lock",
    "plot",
    "public_values",
    "run_metadata",
    "settings",
    "trackers",
]

"""What every command works with: the settings, read once, the store, progress, and how a result is printed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from ekiben.core.decisions import log_decision
from ekiben.core.printable import printable

if TYPE_CHECKING:
    from ekiben.core.progress import Progress, Style
    from ekiben.core.settings import Settings
    from ekiben.store import Store


class Result(Protocol):
    """What a command found or did: a frozen dataclass."""

    def to_json(self) -> Any:
        """Return the object that --json prints."""

    def to_lines(self) -> Iterable[str]:
        """Return what is printed otherwise."""


@dataclass(kw_only=True)
class Context:
    """``store_option`` and ``shared_option`` are what the command line says; ``json``: --json was given;
    ``printed``: a result was; ``offline``: no registry or index is asked for an image; ``progress_style``: --progress;
    ``environment`` is this process's.

    Settings and store are read when a command first needs them, so that a broken config.yaml stops only commands that
    use it.
    """

    store_option: Path | None = None
    shared_option: Path | None = None
    json: bool = False
    printed: bool = False
    offline: bool = False
    progress_style: Style = "auto"
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def settings(self) -> Settings:
        """Return the settings: options, else environment, else config.yaml.

        Raises DefinitionError for what is wrong in that.
        """
        from ekiben.core.settings import read_settings

        settings = read_settings(self.environment, store=self.store_option, shared=self.shared_option)
        log_decision("shared folder", settings.shared or "none", settings.sources["shared"])
        log_decision("registry of layers", settings.registry or "none", settings.sources["registry"])
        return settings

    @cached_property
    def store(self) -> Store:
        """Return the user's own store; what it lacks is looked up where colleagues publish, when that is set."""
        return self.store_with(self.settings.shared)

    def store_with(self, shared: Path | None) -> Store:
        """Return the user's own store, with ``shared`` instead of what the settings say."""
        from ekiben.core.errors import StoreError
        from ekiben.core.settings import store_root, store_source
        from ekiben.store import Store

        root = store_root(self.environment, self.store_option)
        log_decision("store", root, store_source(self.environment, self.store_option))
        with contextlib.suppress(OSError):  # the store itself says what cannot be read
            if root.is_file():
                raise StoreError(
                    f"{root} is a file, and a store is a folder",
                    hint="give another folder with --store or EKIBEN_STORE",
                )
        if shared is None:
            return Store(root)
        from ekiben.store.shared import open_shared

        return Store(root, open_shared(shared))

    @cached_property
    def progress(self) -> Progress:
        """Progress on stderr."""
        from ekiben.core.progress import Progress

        return Progress(style=self.progress_style)

    @property
    def default_store(self) -> Path:
        """Return the folder of the user's own store when --store names another, a colleague's say."""
        from ekiben.core.settings import store_root

        return store_root(self.environment)

    def log(self, line: str) -> None:
        """Print a line that is not part of the result."""
        click.echo(printable(line), err=True)

    def print(self, result: Result) -> None:
        """Print a result, as JSON or as lines."""
        self.printed = True
        if self.json:
            click.echo(json.dumps(result.to_json(), indent=1))
            return
        for line in result.to_lines():
            click.echo(printable(line))

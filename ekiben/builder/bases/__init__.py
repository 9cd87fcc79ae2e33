"""Bases of images: the root file systems that ``Bootstrap:`` of a definition names.

To add an agent, add one file here: its name is the file's name, its functions are those of `Base` and `Agent`. A
distribution of your own can offer one, too: an entry point of the group `ekiben.bases` that names the module.
Definition files are read by ekiben.spec.definition, which asks the agent what is wrong with a header; so keep heavy
imports inside `entries`.

An agent may have further functions, which ekiben.spec.bases_lock calls. ``image_reference(header)`` names the image of
a registry, whose tag bases.lock binds: the header that the other functions get has its digest in ``from``.
``locked_digests(reference, platforms)`` returns these digests where it is not an image of a registry.
``image_file(header)`` names a file, and ``file_digest(path, header, arch)`` returns its digest: their header has
``file``, the path, and ``digest``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ekiben.spec.definition import Agent, load_agent

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer


class Base(Agent, Protocol):
    """One ``Bootstrap:`` agent. As per PEP 544, ``self`` is ignored when the protocol is applied to a module."""

    def entries(
        self, layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
    ) -> Iterator[LayerEntry]:
        """Make or fetch the root file system; yield its entries in order.

        ``staging`` is a folder for the agent's own use.

        ``notes`` receives facts to record about the layer; its ``executor`` is the program that made it.
        Raises EngineError when a program is missing, FetchError when a download fails.
        """


def load_base(bootstrap: str) -> Base:
    """Load what makes the root file system of a ``Bootstrap:``. Raises UsageError when there is no such agent."""
    return cast(Base, load_agent(bootstrap))

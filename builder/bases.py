"""What a chain stands on: the root file system that a definition's header names, made or fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from builder.capture import Lower, unordered_members
from builder.chain import Layer, platform
from builder.debootstrap import debootstrap_members, lent_debs
from builder.hostenv import Supply
from builder.layer import Member, pour
from builder.registry import Reference, image_layers
from builder.squashfs import SquashfsReader, SquashfsWriter, merged_members


def base_members(
    layer: Layer, staging: Path, notes: dict[str, Any], *, supply: Supply, log: Callable[[str], None]
) -> Iterator[Member]:
    """The base's members. ``notes`` takes what is worth keeping about it. Errors: EngineError, FetchError."""
    assert layer.stage is not None
    if layer.stage.bootstrap == "debootstrap":
        notes["executor"] = "mmdebstrap"
        with contextlib.ExitStack() as stack:
            sources = stack.enter_context(lent_debs(supply.debs)) if supply.debs else supply.sources
            yield from debootstrap_members(layer, staging / "root.tar", sources=sources, pins=supply.pins, log=log)
    else:
        notes["executor"] = "registry"
        yield from _docker_members(layer, staging, notes, log)


def _docker_members(layer: Layer, staging: Path, notes: dict[str, Any], log: Callable[[str], None]) -> Iterator[Member]:
    """All layers of a registry's image as one."""
    assert layer.stage is not None
    reference = Reference.parse(layer.stage.header["from"])
    received = 0

    def count(size: int) -> None:
        nonlocal received
        received += size
        log(f"{reference.repository}: {received / 1e6:.0f} MB")

    with contextlib.ExitStack() as stack:
        parts = image_layers(reference, staging, platform(), count)
        # Keys are known before anything is fetched, so an image's own environment cannot be inherited.
        notes["environment_left_out"] = next(parts)
        for name, value in notes["environment_left_out"].items():
            log(f"not taken over from {reference.repository}; state it in %environment if it is needed: {name}={value}")
        readers: list[SquashfsReader] = []
        for number, archive in enumerate(parts):
            with (staging / "spool.tar").open("w+b") as spool, (staging / f"{number}.squashfs").open("w+b") as out:
                members = unordered_members(
                    archive, spool, Lower(readers[::-1]), epoch=layer.epoch, placeholders=number == 0
                )
                pour(members, SquashfsWriter(out, epoch=layer.epoch))
            readers.append(SquashfsReader(stack.enter_context((staging / f"{number}.squashfs").open("rb"))))
        yield from merged_members(readers)

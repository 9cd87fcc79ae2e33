"""A base without a registry: ``Bootstrap: debootstrap`` made with mmdebstrap, which needs no root and gives the same
bytes each time. The mirror is the host's own, and leaves no trace in the layer."""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from builder.capture import Lower, unordered_members
from builder.chain import Layer
from builder.errors import EngineError, FetchError
from builder.layer import Member
from builder.process import ProcessError, piped, run, which

_FIELDS = "$(CREATED_BY) $(SITE) $(RELEASE) $(COMPONENT) $(REPO_URI)"


def apt_sources(suite: str, mirror: str | None) -> str | None:
    """sources.list lines for ``suite``: from ``mirror``, else as the host's own apt has them, else None.

    ``mirror``: the URI of a Debian archive, or whole sources.list lines.
    """
    if mirror:
        return mirror if mirror.startswith("deb ") else f"deb {mirror} {suite} main\n"
    if which("apt-get") is None:
        return None
    told = run(["apt-get", "indextargets", "--format", _FIELDS], check=False)
    lines: dict[str, None] = {}
    for line in told.stdout.splitlines():
        kind, _, release, component, uri = (line.split(" ") + [""] * 5)[:5]
        if kind == "Packages" and component == "main" and release in (suite, f"{suite}-updates", f"{suite}-security"):
            lines[f"deb {uri.rstrip('/')} {release} main"] = None
    ordered = sorted(lines, key=lambda line: line.split()[2] != suite)
    return "\n".join(ordered) + "\n" if any(line.split()[2] == suite for line in ordered) else None


def unavailable() -> str | None:
    return None if which("mmdebstrap") else "mmdebstrap is not installed (package mmdebstrap)"


def debootstrap_members(
    layer: Layer, spool: Path, *, sources: str | None, log: Callable[[str], None]
) -> Iterator[Member]:
    """The members of the root file system the layer's header asks for. Errors: EngineError, FetchError."""
    if reason := unavailable():
        raise EngineError(f"{layer.name}: {reason}", hint="sh builder/bootstrap.sh --engine")
    assert layer.stage is not None
    suite = layer.stage.header["osversion"]
    include = ",".join(layer.stage.header.get("include", "").replace(",", " ").split())
    argv = [
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        *([f"--include={include}"] if include else []),
        suite,
        "-",
    ]
    argv += ["-"] if sources else []
    if os.geteuid() == 0:
        # It mounts /proc, /sys and device nodes below its folder: where nobody else who tidies up can meet them.
        argv = ["unshare", "--mount", "--propagation", "private", *argv]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(layer.epoch), "TMPDIR": str(spool.parent)}
    log(f"{suite} from {'the given mirror' if sources else 'mmdebstrap’s default mirror'}")
    source_file = spool.with_suffix(".list")
    source_file.write_text(sources or "")
    try:
        with (
            source_file.open("rb") as stdin,
            spool.open("w+b") as stream,
            piped(argv, stdin=stdin if sources else None, env=environment) as archive,
            # An archive that ends early is the lesser news: the program's exit code and words come first.
            contextlib.suppress(tarfile.ReadError),
        ):
            yield from unordered_members(archive, stream, Lower([]), epoch=layer.epoch, placeholders=True)
            return
        raise FetchError(f"{layer.name}: mmdebstrap ended well, but what it wrote is no archive")
    except ProcessError as error:
        for line in error.stderr.splitlines():
            log(line)
        raise FetchError(f"{layer.name}: mmdebstrap failed with exit code {error.returncode}:\n"
                         + "\n".join(error.stderr.strip().splitlines()[-8:]),
                         hint="is the mirror reachable? another one is given with --arg mirror=URI") from error  # fmt: skip

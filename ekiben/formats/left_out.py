"""Report files that a script wrote and no layer keeps, by kind and reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

# The first match counts. No layer keeps these, see changeset.is_excluded().
_REASONS = (
    (
        ("etc/resolv.conf", "etc/hosts", "etc/hostname", "etc/machine-id", "var/lib/dbus/machine-id"),
        "runtimes put the machine's own there",
    ),
    (("etc/apt/sources.list",), "it names the mirror of this build; a file in /etc/apt/sources.list.d is kept"),
    (("dev/*", "proc/*", "sys/*", "run/*", "tmp/*", "var/tmp/*"), "runtimes mount the machine's own over it"),
    (("root/*",), "caches and histories of the build's root; write elsewhere what the image needs"),
    ((".singularity.d*", "singularity", "environment", ".dockerenv"), "Ekiben and the runtimes write it"),
    (("*",), "logs, caches and locks that differ from run to run"),
)
DEVICES = "devices and sockets belong to a machine"
ACLS = "access control lists; use modes and groups"


class LeftOut:
    """Paths by the reason why no layer keeps them."""

    def __init__(self) -> None:
        self._paths: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, path: str, reason: str | None = None) -> None:
        """Note a path; without a reason, one that is_excluded()."""
        if reason is None:
            reason = next(
                text for patterns, text in _REASONS if any(fnmatchcase(path, pattern) for pattern in patterns)
            )
        self._counts[reason] = self._counts.get(reason, 0) + 1
        if len(shown := self._paths.setdefault(reason, [])) < 3:
            shown.append(path)

    def lines(self) -> list[str]:
        """Return a line for each kind."""
        lines = []
        for reason, paths in sorted(self._paths.items()):
            shown = ", ".join(f"/{path}".encode("utf-8", "backslashreplace").decode() for path in paths)
            more = f" and {rest} more" if (rest := self._counts[reason] - len(paths)) else ""
            lines.append(f"left out: {shown}{more} ({reason})")
        return lines

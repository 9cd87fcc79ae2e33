"""Installed packages of a file system, from the metadata of dpkg and Python."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name

DPKG_STATUS = "var/lib/dpkg/status"
plain_name = canonicalize_name  # a Python package's name, however it is written
_DIST_INFO = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)-([^/-]+)\.dist-info$")


def distribution_at(path: str) -> tuple[str, str] | None:
    """Return name and version of the Python package whose .dist-info folder this is."""
    match = _DIST_INFO.search(path)
    return (canonicalize_name(match[1]), match[2]) if match else None


def installed_packages(status: str) -> dict[str, str]:
    """Return package → version out of dpkg's status file."""
    return {
        record["Package"]: record["Version"]
        for record in dpkg_records(status)
        if "Package" in record and "Version" in record
    }


def dpkg_records(status: str) -> list[dict[str, str]]:
    """Return the fields of each package in dpkg's status file."""
    blocks = (block.splitlines() for block in re.split(r"\n{2,}", status.strip("\n")))
    return [
        {
            name: value.strip()
            for line in lines
            if line[:1].strip()
            for name, colon, value in [line.partition(":")]
            if colon
        }
        for lines in blocks
    ]

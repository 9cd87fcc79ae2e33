"""Licences of packages, as SPDX identifiers where these are certain, else as the package names them.

Debian: /usr/share/doc/<package>/copyright where it is machine-readable,
https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/. Python: the fields of METADATA,
https://packaging.python.org/en/latest/specifications/core-metadata/#license-expression
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from email.message import Message

from cyclonedx.spdx import fixup_id, is_expression

_MACHINE_READABLE = re.compile(r"Format(?:-Specification)?:\s*\S*(?:copyright-format|dep5|DEP-?5)", re.IGNORECASE)
_VERSIONED = re.compile(r"(A?GPL|LGPL|GFDL)(-NIV)?-(\d+(?:\.\d+)?)(\+)?", re.IGNORECASE)
_LONGEST = 100  # longest name of a licence; longer ones are texts

# Debian's short names that are not SPDX's.
_SHORT = {
    "expat": "MIT",
    "mit/x11": "MIT",
    "artistic-1": "Artistic-1.0",
    "artistic": "Artistic-1.0",
    "mpl-1.1+": "MPL-1.1",
}

# Python's classifiers that leave no doubt.
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}

# Common spellings in Python's free-text licence field.
_FREE = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "mit license": "MIT",
    "new bsd": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause",
    "the mit license": "MIT",
}


def debian_licenses(copyright: str) -> list[str]:
    """Return the licences of a package's files; none when the copyright file is not machine-readable."""
    if not _MACHINE_READABLE.search(copyright[:500]):
        return []
    licenses: set[str] = set()
    for paragraph in re.split(r"\n[ \t]*\n", copyright):
        if re.search(r"^Files:", paragraph, re.MULTILINE) and (
            match := re.search(r"^License:[ \t]*(\S.*)", paragraph, re.MULTILINE)
        ):
            licenses.add(" ".join(match[1].split()))
    return combined(_from_debian(name) for name in licenses)


def _from_debian(text: str) -> str:
    """Parse one ``License:`` of a copyright file: short names with "and", "or" and a comma that binds less."""
    groups = [re.split(r"\s+(and|or)\s+", group.strip()) for group in re.split(r",\s*(?:and\s+)?", text)]
    if any("," in text and "or" in group for group in groups) and re.search(r",\s*or\b", text):
        return text
    groups_of_names = [
        [_short_name(word) if at % 2 == 0 else word.upper() for at, word in enumerate(group)] for group in groups
    ]
    expression = " AND ".join(
        f"({' '.join(names)})" if len(names) > 1 and len(groups_of_names) > 1 else " ".join(names)
        for names in groups_of_names
    )
    return expression if is_expression(expression) else text


def _short_name(name: str) -> str:
    if match := _VERSIONED.fullmatch(name):
        number = match[3] if "." in match[3] else f"{match[3]}.0"
        invariants = "-no-invariants" if match[2] else ""
        return f"{match[1].upper()}-{number}{invariants}-{'or-later' if match[4] else 'only'}"
    return _SHORT.get(name.lower()) or fixup_id(name) or name


def python_licenses(metadata: Message) -> list[str]:
    """Return License-Expression, else the classifiers, else the free text when that is a licence's name."""
    if expression := metadata["License-Expression"]:
        return combined([str(expression)])
    classifiers = [str(item).split(" :: ") for item in metadata.get_all("Classifier", [])]
    named = {
        _CLASSIFIERS.get(item[-1], item[-1])
        for item in classifiers
        if item[0] == "License" and item[-1] != "OSI Approved"
    }
    free = " ".join(str(metadata["License"] or "").split())
    if len(free) > _LONGEST or free.upper() in ("", "UNKNOWN"):
        return combined(named)
    free = _FREE.get(free.lower(), free)
    is_better = bool(fixup_id(free)) or is_expression(free) or not any(is_id(item) for item in named)
    return combined([free] if is_better else named)


def combined(licenses: Iterable[str]) -> list[str]:
    """Combine licences into one SPDX expression when all of them are SPDX; else return each by its name."""
    known = sorted({fixup_id(item) or item for item in licenses})
    if len(known) > 1 and all(is_expression(item) for item in known):
        return [" AND ".join(f"({item})" if re.search(r" (OR|AND|WITH) ", item) else item for item in known)]
    return known


def is_id(license: str) -> bool:
    """Return whether it is an SPDX identifier."""
    return fixup_id(license) == license


def is_license_expression(licenses: Sequence[str]) -> bool:
    """Return whether they are one SPDX expression, and no identifier."""
    return len(licenses) == 1 and not is_id(licenses[0]) and is_expression(licenses[0])

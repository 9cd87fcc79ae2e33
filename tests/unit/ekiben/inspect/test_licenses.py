"""Licences as packages state them, and as SPDX knows them."""

from __future__ import annotations

from email.parser import HeaderParser

import pytest

from ekiben.inspect.licenses import debian_licenses, python_licenses

FORMAT = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nLicense: GPL-3+\n\n"


def files(*licenses: str) -> str:
    return FORMAT + "".join(
        f"Files: {number}\nCopyright: someone\nLicense: {license_text}\n  Text\n\n"
        for number, license_text in enumerate(licenses)
    )


@pytest.mark.parametrize(
    ("licenses", "known"),
    [
        (["Expat"], ["MIT"]),
        (["GPL-2+"], ["GPL-2.0-or-later"]),
        (["LGPL-2.1"], ["LGPL-2.1-only"]),
        (["GFDL-NIV-1.3+"], ["GFDL-1.3-no-invariants-or-later"]),
        (["GPL-2+ or Artistic"], ["GPL-2.0-or-later OR Artistic-1.0"]),
        (["GPL-2+", "bsd-3-clause", "GPL-2+"], ["BSD-3-Clause AND GPL-2.0-or-later"]),
        (["Expat or Apache-2.0", "Zlib"], ["(MIT OR Apache-2.0) AND Zlib"]),
        (["GPL-1+ or Artistic, and Expat"], ["(GPL-1.0-or-later OR Artistic-1.0) AND MIT"]),
        (["GPL-2+", "public-domain"], ["GPL-2.0-or-later", "public-domain"]),
        (["GPL-3+ with Bison exception"], ["GPL-3+ with Bison exception"]),
    ],
)
def test_licenses_of_a_debian_copyright_file(licenses: list[str], known: list[str]) -> None:
    assert debian_licenses(files(*licenses)) == known


def test_free_text_copyright_gives_no_license() -> None:
    assert debian_licenses("This package was debianized by someone.\n\nLicense: GPL-2\nFiles: *\n") == []
    assert debian_licenses("") == []
    assert debian_licenses(FORMAT + "License: GPL-3+\n Text\n") == []  # the text of one, not what a file has


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ("License-Expression: MIT", ["MIT"]),
        ("License-Expression: BSD-3-Clause AND MIT\nLicense: other", ["BSD-3-Clause AND MIT"]),
        ("License-Expression: LicenseRef-Own", ["LicenseRef-Own"]),
        ("Classifier: License :: OSI Approved :: MIT License", ["MIT"]),
        ("Classifier: License :: OSI Approved\nClassifier: License :: OSI Approved :: BSD License", ["BSD License"]),
        ("License: BSD-3-Clause\nClassifier: License :: OSI Approved :: BSD License", ["BSD-3-Clause"]),
        ("License: see the file\nClassifier: License :: OSI Approved :: Apache Software License", ["Apache-2.0"]),
        ("License: Apache 2.0 License", ["Apache-2.0"]),
        ("License: mit", ["MIT"]),
        ("License: UNKNOWN", []),
        ("License: " + "all of it, " * 20, []),
        ("Name: x", []),
    ],
)
def test_licenses_of_python_metadata(fields: str, known: list[str]) -> None:
    assert python_licenses(HeaderParser().parsestr(fields)) == known

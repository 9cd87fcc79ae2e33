"""SCIF apps of a definition file: %appinstall, %appfiles, %appenv, %applabels, %apphelp, %apprun, %apptest, %appstart.

Several programs of one image, each below /scif/apps/NAME with an environment and a script of its own, as
`apptainer run --app NAME` starts them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ekiben.spec.definition_text import Report, Section

APPS = ("appinstall", "appfiles", "appenv", "applabels", "apphelp", "apprun", "apptest", "appstart")
SCIF_APPS = "/scif/apps"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class AppCopy:
    """One line of %appfiles: ``source`` relative to the folder that holds images/, to an absolute ``destination``."""

    source: str
    destination: str
    line: int


@dataclass(slots=True)
class App:
    """An app's sections; each text is as it was written, and ends with a line's end."""

    name: str
    texts: dict[str, str] = field(default_factory=dict)
    files: list[AppCopy] = field(default_factory=list)

    @property
    def root(self) -> str:
        """Return the folder of the app in the image."""
        return f"{SCIF_APPS}/{self.name}"


def read_apps(sections: Sequence[Section], report: Report) -> tuple[App, ...]:
    """Return the apps, in the order in which their first sections come."""
    apps: dict[str, App] = {}
    for section in sections:
        if section.name not in APPS:
            continue
        name = section.options.split(" ")[0]
        if not _NAME.fullmatch(name):
            report(
                section.line - 1,
                f"%{section.name} {section.options}".rstrip()
                + f": write the app's name after one blank, of letters, digits and _ . + -: %{section.name} NAME",
            )
            continue
        app = apps.setdefault(name, App(name))
        text = "".join(f"{line}\n" for line in section.body)
        app.texts[section.name] = app.texts.get(section.name, "") + text
        if section.name == "appfiles":
            app.files += _copies(app, section, report)
    return tuple(apps.values())


def _copies(app: App, section: Section, report: Report) -> Iterator[AppCopy]:
    for number, line in section.lines():
        text = line.strip().split("#")[0].strip()
        source, blank, destination = text.partition(" ")
        if re.search(r"[\s\"'\\]", source + destination):
            report(
                number,
                f"%appfiles needs 'source [destination]', one blank between them and no quotes: {line.strip()}",
            )
        elif ".." in (destination or source).split("/"):
            report(number, f"%appfiles: the destination climbs with '..': {line.strip()}")
        elif source:
            target = destination if blank else source
            folder = "/" if target.endswith("/") else ""
            yield AppCopy(source, posixpath.normpath(f"{app.root}/{target}") + folder, number)


def install_script(apps: Sequence[App]) -> str:
    """Return the commands after a %post, in the same shell: each app's %appinstall, in its folder."""
    return "".join(
        f"\ncd /\n. {app.root}/scif/env/01-base.sh\n\ncd {app.root}\n{app.texts.get('appinstall', '')}\n\ncd /\n"
        for app in apps
    )

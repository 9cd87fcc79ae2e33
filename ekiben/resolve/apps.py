"""The files and variables of SCIF apps, as Apptainer 1.4.5 lays them out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ekiben.formats.layer import File
from ekiben.spec.definition_apps import SCIF_APPS, App

_BASE = """\
#!/bin/sh

SCIF_APPNAME={0}
SCIF_APPROOT="/scif/apps/{0}"
SCIF_APPMETA="/scif/apps/{0}/scif"
SCIF_DATA="/scif/data"
SCIF_APPDATA="/scif/data/{0}"
SCIF_APPINPUT="/scif/data/{0}/input"
SCIF_APPOUTPUT="/scif/data/{0}/output"
export SCIF_APPDATA SCIF_APPNAME SCIF_APPROOT SCIF_APPMETA SCIF_APPINPUT SCIF_APPOUTPUT SCIF_DATA
"""
# Sourced where an image starts; it does something where the runtime, or `ekiben run --app`, names an app.
START = f"""\
if [ -n "${{SINGULARITY_APPNAME:-}}" ]; then
    export SINGULARITY_APPNAME
    if [ ! -d "{SCIF_APPS}/$SINGULARITY_APPNAME/" ]; then
        echo "Could not locate the container application: $SINGULARITY_APPNAME"
        exit 1
    fi
    SCIF_APPS={SCIF_APPS}
    SCIF_APPROOT="{SCIF_APPS}/$SINGULARITY_APPNAME"
    export SCIF_APPS SCIF_APPROOT
    PATH="$SCIF_APPROOT/bin:$SCIF_APPROOT:{SCIF_APPS}/singularity:$PATH"
    LD_LIBRARY_PATH="$SCIF_APPROOT/lib:${{LD_LIBRARY_PATH-}}"
    export LD_LIBRARY_PATH
    . "{SCIF_APPS}/$SINGULARITY_APPNAME/scif/env/01-base.sh"
    if [ -f "{SCIF_APPS}/$SINGULARITY_APPNAME/scif/env/90-environment.sh" ]; then
        . "{SCIF_APPS}/$SINGULARITY_APPNAME/scif/env/90-environment.sh"
    fi
    export PATH
fi
"""
START_FILE = ".singularity.d/env/95-apps.sh"
_SCRIPTS = {"apprun": "runscript", "appstart": "startscript", "apptest": "test"}


def app_files(apps: Sequence[App]) -> Iterator[File]:
    """Yield the files and folders of apps, without those of %appfiles."""
    for app in apps:
        meta = f"{app.root}/scif"
        for folder in (f"{app.root}/bin", f"{app.root}/lib", f"/scif/data/{app.name}/input"):
            yield File(folder, 0o755, is_folder=True)
        yield File(f"/scif/data/{app.name}/output", 0o755, is_folder=True)
        yield File(f"{meta}/env/01-base.sh", 0o755, content=_BASE.format(app.name).encode())
        if text := app.texts.get("appenv"):
            yield File(f"{meta}/env/90-environment.sh", 0o755, content=text.encode())
        for section, name in _SCRIPTS.items():
            if text := app.texts.get(section):
                yield File(f"{meta}/{name}", 0o755, content=f"#!/bin/sh\n\n{text}\n".encode())
        if text := app.texts.get("apphelp"):
            yield File(f"{meta}/runscript.help", 0o644, content=text.encode())
        yield File(f"{meta}/labels.json", 0o644, content=_json({"SCIF_APP_NAME": app.name, **_labels(app)}))


def app_environment(apps: Iterable[App]) -> dict[str, str]:
    """Return the variables that describe the apps to %post and to every program of the image."""
    environment: dict[str, str] = {}
    for app in apps:
        name = re.sub(r"[^a-zA-Z0-9_]", "_", app.name)  # in the paths, too: so Apptainer writes them
        root = f"{SCIF_APPS}/{name}"
        values = {"DATA": f"/scif/data/{name}", "META": f"{root}/scif", "ROOT": root}
        values |= {"BIN": f"{root}/bin", "LIB": f"{root}/lib", "LABELS": f"{root}/scif/labels.json"}
        files = {"appenv": "env/90-environment.sh", "apprun": "runscript", "appstart": "startscript"}
        values |= {
            section.removeprefix("app").upper(): f"{root}/scif/{file}"
            for section, file in files.items()
            if app.texts.get(section)
        }
        environment |= {f"SCIF_APP{key}_{name}": value for key, value in values.items()}
    return environment


def _labels(app: App) -> dict[str, str]:
    lines = (line.strip() for line in app.texts.get("applabels", "").split("\n"))
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _json(labels: Mapping[str, str]) -> bytes:
    """Return labels as Apptainer writes them: sorted, with tabs, and characters of HTML as numbers."""
    text = json.dumps(labels, indent="\t", sort_keys=True, ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()

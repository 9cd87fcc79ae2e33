"""Runs a SCIF app of an image, as `apptainer run --app` does: by the image's own shell, under every runtime."""

from __future__ import annotations

from collections.abc import Sequence

_SCRIPT = """\
export SINGULARITY_APPNAME="$0"
if [ ! -f /.singularity.d/env/95-apps.sh ]; then echo "this image has no apps" >&2; exit 1; fi
. /.singularity.d/env/95-apps.sh
if [ ! -x "/scif/apps/$0/scif/runscript" ]; then echo "no runscript for contained app: $0" >&2; exit 1; fi
exec "/scif/apps/$0/scif/runscript" "$@"
"""


def app_command(name: str, argv: Sequence[str]) -> list[str]:
    """Return the program, and its arguments, that runs the app ``name`` with ``argv`` in an image."""
    return ["/bin/sh", "-c", _SCRIPT, name, *argv]

"""The chain as one plain Dockerfile or definition file, in a folder with the files it copies: for use without Ekiben."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from builder.chain import Chain, Layer
from builder.errors import StoreError
from builder.hostenv import build_environment

# Never /tmp, /var/tmp or the home: Apptainer and Charliecloud mount the host's there while they build.
_NOISE = "rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*"


def render(chain: Chain, target: str, folder: Path) -> Path:
    """Write ``folder`` and return the path of the plain file in it. Errors: StoreError when the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} is not an empty folder; give another folder with -o")
    for layer in chain.layers:
        for file in layer.files:
            place = folder / "files" / layer.name / file.destination.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.source is not None:
                shutil.copyfile(file.source, place)
            else:
                place.write_bytes(file.content)
            place.chmod(file.mode)
        if layer.kind == "post" and layer.stage is not None and target == "dockerfile":
            (folder / "post").mkdir(parents=True, exist_ok=True)
            (folder / "post" / f"{layer.name}.sh").write_text(layer.stage.post)
    folder.mkdir(parents=True, exist_ok=True)
    name, text = (
        ("Dockerfile", dockerfile(chain)) if target == "dockerfile" else (f"{chain.recipe.name}.def", deffile(chain))
    )
    (folder / name).write_text(text)
    return folder / name


def _bootstrap_command(layer: Layer) -> str:
    assert layer.stage is not None
    header = layer.stage.header
    include = ",".join(header.get("include", "").replace(",", " ").split())
    return (f"SOURCE_DATE_EPOCH={layer.epoch} mmdebstrap --variant=minbase"
            f"{f' --include={include}' if include else ''} {header['osversion']} root.tar")  # fmt: skip


def dockerfile(chain: Chain) -> str:
    """Needs BuildKit. Every layer is one RUN; the base is a tar, since no registry is needed for it."""
    base, *others = chain.layers
    assert base.stage is not None
    lines = [f"# {chain.recipe.name}: {chain.recipe.file.description}"]
    if base.stage.bootstrap == "debootstrap":
        lines += [
            "# Beside this file, once:", f"#   {_bootstrap_command(base)}",
            "# then:", f"#   docker build --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt -t {chain.recipe.name} .",
            "FROM scratch", "ADD root.tar /",
        ]  # fmt: skip
    else:
        lines += [f"FROM {base.stage.header['from']}"]
    environment: dict[str, str] = {}
    for layer in others:
        lines += ["", f"# layer {layer.name}"]
        fresh = {key: value for key, value in layer.environment.items() if environment.get(key) != value}
        lines += [f"ENV {key}={_quoted(value)}" for key, value in sorted(fresh.items())]
        environment |= fresh
        if layer.files:
            lines.append(f"COPY files/{layer.name}/ /")
        if layer.kind == "post" and layer.stage is not None:
            settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in build_environment(layer.epoch).items())
            lines += [
                f"RUN --mount=type=bind,source=post/{layer.name}.sh,target=/run/post.sh \\",
                "    --mount=type=secret,id=ca,target=/run/ca.pem,required=false \\",
                "    if [ -s /run/ca.pem ]; then export SSL_CERT_FILE=/run/ca.pem; fi; \\",
                f"    env {settings} /bin/sh -e /run/post.sh && {_NOISE}",
            ]
    lines += ["", *(f"LABEL {key}={_quoted(value)}" for key, value in sorted(chain.labels.items()))]
    lines += [
        f"ENV {key}={_quoted(value)}"
        for key, value in sorted(chain.environment.items())
        if environment.get(key) != value
    ]
    return "\n".join([*lines, 'CMD ["/bin/sh", "/.singularity.d/runscript"]', ""])


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", " ") + '"'


def deffile(chain: Chain) -> str:
    """One stage with every %post in order. The mirror is the one argument."""
    base, *others = chain.layers
    assert base.stage is not None
    header = {key: value for key, value in base.stage.header.items() if value and key != "mirrorurl"}
    names = {"bootstrap": "Bootstrap", "from": "From", "osversion": "OSVersion", "include": "Include"}
    bundle, name = "/etc/ssl/certs/ca-certificates.crt", chain.recipe.name
    lines = [f"# {name}: {chain.recipe.file.description}"]
    if base.stage.bootstrap == "debootstrap":
        lines += [f"# With debootstrap on the machine: apptainer build --fakeroot --build-arg mirror=<URI of a Debian archive> {name}.sif {name}.def"]  # fmt: skip
    else:
        lines += [f"# apptainer build --fakeroot {name}.sif {name}.def"]
    lines += [f"# Where the network has an authority of its own, add: --bind {bundle}"]
    lines += [f"{names[key]}: {value}" for key, value in header.items() if key in names]
    if base.stage.bootstrap == "debootstrap":
        lines += ["MirrorURL: {{ mirror }}", "", "%arguments", "    mirror="]
    lines += ["", "%files"]
    runtime = ("/.singularity.d/",)  # Apptainer writes its own
    lines += [f"    files/{layer.name}{file.destination} {file.destination}"
              for layer in others for file in layer.files if not file.destination.startswith(runtime)]  # fmt: skip
    lines += ["", "%post"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in build_environment(base.epoch).items()]
    for layer in others:
        lines += [f"# layer {layer.name}"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(layer.environment.items())]
        if layer.kind == "post" and layer.stage is not None:
            lines += ["(", "set -e", layer.stage.post.rstrip(), ")"]
    lines += [_NOISE, "", "%environment"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(chain.environment.items())]
    top = {file.destination: file for file in chain.top.files}
    lines += ["", "%runscript", top["/.singularity.d/runscript"].content.decode().rstrip(), "", "%test",
              top["/.singularity.d/test"].content.decode().rstrip(), "", "%labels"]  # fmt: skip
    lines += [f"    {key} {value}" for key, value in sorted(chain.labels.items())]
    return "\n".join(lines) + "\n"

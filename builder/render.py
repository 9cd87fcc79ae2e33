"""The chain as one plain Dockerfile or definition file, in a folder with the files it copies: for use without Ekiben."""

from __future__ import annotations

import itertools
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from builder.chain import BuildStage, Chain, Layer, Taken, stages_of
from builder.errors import StoreError
from builder.hostenv import build_environment

# Never /tmp, /var/tmp or the home: Apptainer and Charliecloud mount the host's there while they build.
_NOISE = "rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*"


def render(chain: Chain, target: str, folder: Path) -> Path:
    """Write ``folder`` and return the path of the plain file in it. Errors: StoreError when the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} is not an empty folder; give another folder with -o")
    for step in _steps(chain.layers):
        for file in step.files:
            place = folder / "files" / step.name / file.destination.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.source is not None:
                shutil.copyfile(file.source, place)
            else:
                place.write_bytes(file.content)
            place.chmod(file.mode)
        if step.stage is not None and step.stage.post and target == "dockerfile":
            (folder / "post").mkdir(parents=True, exist_ok=True)
            (folder / "post" / f"{step.name}.sh").write_text(step.stage.post)
    folder.mkdir(parents=True, exist_ok=True)
    name, text = (
        ("Dockerfile", dockerfile(chain)) if target == "dockerfile" else (f"{chain.recipe.name}.def", deffile(chain))
    )
    (folder / name).write_text(text)
    return folder / name


Step = Layer | BuildStage


def _steps(layers: Sequence[Layer]) -> list[Step]:
    """Every layer with the build stages it takes from and what those stand on: each once, before what needs it."""
    found: dict[str, Step] = {}
    for layer in layers:
        _add_stages(layer.taken, found)
        found[layer.cache_key] = layer
    return list(found.values())


def _add_stages(taken: Sequence[Taken], found: dict[str, Step]) -> None:
    for stage in stages_of(taken):
        _add_stages(stage.taken, found)
        found |= {step.cache_key: step for step in _steps(stage.layers) if step.cache_key not in found}
        found[stage.cache_key] = stage


def _bases(chain: Chain) -> list[Layer]:
    """What the image stands on, and then what only build stages stand on."""
    made = [step for step in _steps(chain.layers) if isinstance(step, Layer) and step.kind == "bootstrap"]
    return [chain.layers[0], *(layer for layer in made if layer.cache_key != chain.layers[0].cache_key)]


def _bootstrap_command(layer: Layer, tar: str) -> str:
    assert layer.stage is not None
    header = layer.stage.header
    include = ",".join(header.get("include", "").replace(",", " ").split())
    return (f"SOURCE_DATE_EPOCH={layer.epoch} mmdebstrap --variant=minbase"
            f"{f' --include={include}' if include else ''} {header['osversion']} {tar}")  # fmt: skip


def dockerfile(chain: Chain) -> str:
    """Needs BuildKit. Every layer is one RUN; the base is a tar, since no registry is needed for it."""
    base, *others = chain.layers
    lines = [f"# {chain.recipe.name}: {chain.recipe.file.description}"]
    tars = {layer.cache_key: "root.tar" if layer.cache_key == base.cache_key else f"root-{layer.name}.tar"
            for layer in _bases(chain) if layer.stage and layer.stage.bootstrap == "debootstrap"}  # fmt: skip
    if tars:
        commands = [
            _bootstrap_command(layer, tars[layer.cache_key]) for layer in _bases(chain) if layer.cache_key in tars
        ]
        lines += [
            "# Beside this file, once:", *(f"#   {command}" for command in commands),
            "# then:", f"#   docker build --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt -t {chain.recipe.name} .",
        ]  # fmt: skip
    environment: dict[str, str] = {}
    if any(layer.taken for layer in others):
        for layer in _bases(chain):
            start, *rest = _docker_base(layer, tars)
            lines += [f"{start} AS {_docker_name(layer)}", *rest]
        environment = _docker_stages(chain, lines)
    else:
        lines += _docker_base(base, tars)
        for layer in others:
            lines += ["", f"# layer {layer.name}"]
            environment |= _docker_step(layer, environment, lines)
    lines += ["", *(f"LABEL {key}={_quoted(value)}" for key, value in sorted(chain.labels.items()))]
    lines += [
        f"ENV {key}={_quoted(value)}"
        for key, value in sorted(chain.environment.items())
        if environment.get(key) != value
    ]
    return "\n".join([*lines, 'CMD ["/bin/sh", "/.singularity.d/runscript"]', ""])


def _docker_base(layer: Layer, tars: Mapping[str, str]) -> list[str]:
    assert layer.stage is not None
    tar = tars.get(layer.cache_key)
    return ["FROM scratch", f"ADD {tar} /"] if tar else [f"FROM {layer.stage.header['from']}"]


def _docker_stages(chain: Chain, lines: list[str]) -> dict[str, str]:
    """Every layer and every build stage is a stage of the Dockerfile, each once; the last is the image, and its
    environment comes back."""
    parents: dict[str, Step] = {}
    for step in _steps(chain.layers):
        layers = step.layers if isinstance(step, BuildStage) else ()
        if layers:
            parents[step.cache_key] = layers[-1]
        for below, above in itertools.pairwise(layers):
            parents[above.cache_key] = below
    parents |= {above.cache_key: below for below, above in itertools.pairwise(chain.layers)}
    left: dict[str, dict[str, str]] = {}
    for step in _steps(chain.layers):
        if step.cache_key not in parents:
            left[step.cache_key] = {}
            continue
        under = parents[step.cache_key]
        lines += ["", f"FROM {_docker_name(under)} AS {_docker_name(step)}"]
        known = left[under.cache_key]
        left[step.cache_key] = {**known, **_docker_step(step, known, lines)}
    return left[chain.top.cache_key]


def _docker_name(step: Step) -> str:
    return ("stage-" if isinstance(step, BuildStage) else "layer-") + step.name.lower().replace(".", "-")


def _docker_step(step: Step, known: Mapping[str, str], lines: list[str]) -> dict[str, str]:
    """One step's lines; what of its environment is not ``known`` comes back."""
    fresh = {key: value for key, value in step.environment.items() if known.get(key) != value}
    lines += [f"ENV {key}={_quoted(value)}" for key, value in sorted(fresh.items())]
    if step.files:
        lines.append(f"COPY files/{step.name}/ /")
    for item in step.taken:
        # COPY of a folder copies what is in it; that of a file, to a name or into a folder that ends with a slash.
        lines.append(f"COPY --from={_docker_name(item.stage)} {item.source} {item.destination}")
    if step.stage is not None and step.stage.post:
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in build_environment(step.epoch).items())
        lines += [
            f"RUN --mount=type=bind,source=post/{step.name}.sh,target=/run/post.sh \\",
            "    --mount=type=secret,id=ca,target=/run/ca.pem,required=false \\",
            "    if [ -s /run/ca.pem ]; then export SSL_CERT_FILE=/run/ca.pem; fi; \\",
            f"    env {settings} /bin/sh -e /run/post.sh && {_NOISE}",
        ]
    return fresh


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", " ") + '"'


def deffile(chain: Chain) -> str:
    """Every %post in order, in one stage; build stages before it, each from the base up. The mirror is the one argument."""
    base, *others = chain.layers
    assert base.stage is not None
    bundle, name = "/etc/ssl/certs/ca-certificates.crt", chain.recipe.name
    lines = [f"# {name}: {chain.recipe.file.description}"]
    if base.stage.bootstrap == "debootstrap":
        lines += [f"# With debootstrap on the machine: apptainer build --fakeroot --build-arg mirror=<URI of a Debian archive> {name}.sif {name}.def"]  # fmt: skip
    else:
        lines += [f"# apptainer build --fakeroot {name}.sif {name}.def"]
    lines += [f"# Where the network has an authority of its own, add: --bind {bundle}"]
    stages = [step for step in _steps(chain.layers) if isinstance(step, BuildStage)]
    for stage in stages:
        lines += [*_def_stage(stage.layers[0], [*stage.layers[1:], stage], _docker_name(stage)), ""]
    lines += _def_stage(base, others, "image" if stages else None)
    lines += ["", "%environment"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(chain.environment.items())]
    top = {file.destination: file for file in chain.top.files}
    lines += ["", "%runscript", top["/.singularity.d/runscript"].content.decode().rstrip(), "", "%test",
              top["/.singularity.d/test"].content.decode().rstrip(), "", "%labels"]  # fmt: skip
    lines += [f"    {key} {value}" for key, value in sorted(chain.labels.items())]
    return "\n".join(lines) + "\n"


def _def_stage(base: Layer, others: Sequence[Step], name: str | None) -> list[str]:
    """A header with the %files and the %post of all steps on it."""
    assert base.stage is not None
    header = {key: value for key, value in base.stage.header.items() if value and key not in ("mirrorurl", "stage")}
    names = {"bootstrap": "Bootstrap", "from": "From", "osversion": "OSVersion", "include": "Include"}
    lines = [f"{names[key]}: {value}" for key, value in header.items() if key in names]
    if base.stage.bootstrap == "debootstrap":
        lines += ["MirrorURL: {{ mirror }}"]
    lines += [f"Stage: {name}"] if name else []
    if base.stage.bootstrap == "debootstrap":
        lines += ["", "%arguments", "    mirror="]
    lines += ["", "%files"]
    runtime = ("/.singularity.d/",)  # Apptainer writes its own
    lines += [f"    files/{step.name}{file.destination} {file.destination}"
              for step in others for file in step.files if not file.destination.startswith(runtime)]  # fmt: skip
    for step in others:
        for item in step.taken:
            lines += ["", f"%files from {_docker_name(item.stage)}", f"    {item.source} {item.destination}"]
    lines += ["", "%post"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in build_environment(base.epoch).items()]
    for step in others:
        lines += [f"# layer {step.name}"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(step.environment.items())]
        if step.stage is not None and step.stage.post:
            lines += ["(", "set -e", step.stage.post.rstrip(), ")"]
    return [*lines, _NOISE]

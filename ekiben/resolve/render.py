"""A recipe as one plain Dockerfile or definition file, in a folder with the files it copies: for use without Ekiben."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ekiben.core.atomic import is_vacant, new_folder
from ekiben.core.environment import build_environment
from ekiben.core.errors import DefinitionError, StoreError, UsageError
from ekiben.core.files import digest_of
from ekiben.formats import oci
from ekiben.formats.base_config import BASE_RUNSCRIPT, BASE_STARTSCRIPT
from ekiben.formats.layer import File
from ekiben.resolve.graph import BuildStage, Layer, ResolvedRecipe, StageCopy, stages_of
from ekiben.spec.container import ContainerConfig
from ekiben.spec.definition import LOCAL, SCRATCH, Stage
from ekiben.spec.definition_text import ARGUMENT
from ekiben.spec.environment import EnvironmentScript

# Never /tmp, /var/tmp or the home: Apptainer and Charliecloud mount the host's there while they build.
_NOISE = "rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*"
_FILES = "/.ekiben-files"
_COPY = "copy.sh"
_POST = "/.ekiben-post.sh"
_ESCAPED = "\\$"
_MIRROR = "MirrorURL: {{ mirror }}"
_COPY_SCRIPT = """\
# copy.sh FROM TO [NAME]: as `cp -r` copies. What TO is shows in the image alone: below a folder it gets that NAME;
# links are followed.
set -eu
from=$1 to=${2%/} name=${3-}
if [ -n "$name" ] && [ -d "$to/" ]; then to=$to/$name; fi
if [ -d "$from" ]; then
    cd "$from"
    find . -type d -exec sh -ec 'to=$1; shift
        for path; do [ -n "$(ls -A "$path")" ] || mkdir -p "$to/$path"; done' sh "$to" {} +
    find . -type f -exec sh -ec 'to=$1; shift; for path; do sh "$0" "$path" "$to/$path"; done' "$0" "$to" {} +
    exit
fi
mkdir -p "${to%/*}/"
if [ -h "$to" ]; then
    to=$(readlink -f "$to" && echo x)
    to=${to%??}
fi
if [ -d "$to" ]; then
    echo "%files: $to is a folder" >&2
    exit 1
fi
rm -f "$to"
cp -p "$from" "$to"
chown 0:0 "$to"
"""


def render(resolved: ResolvedRecipe, target: str, folder: Path) -> Path:
    """Write ``folder`` atomically, and return the path of the plain file in it.

    Raises StoreError when the folder is not empty or cannot be written, DefinitionError for what such a file cannot
    hold.
    """
    if not is_vacant(folder):
        raise StoreError(f"{folder} is not an empty folder; give another folder with -o")
    _check(resolved)
    name, text = _plain_file(resolved, target)
    with new_folder(folder, error=StoreError) as fresh:
        _write_files(resolved, target, fresh)
        (fresh / name).write_bytes(text)
    return folder / name


def _write_files(resolved: ResolvedRecipe, target: str, folder: Path) -> None:
    """Write the files that the plain file copies and runs."""
    for step in _steps(resolved.layers):
        for inside, file in _paths_of(step, target):
            path = folder / "files" / _folder_of(step) / inside
            (path if file.is_folder else path.parent).mkdir(parents=True, exist_ok=True)
            if file.is_folder:
                continue
            with file.open() as content, path.open("wb") as out:
                shutil.copyfileobj(content, out)
            path.chmod(file.mode)
        if _is_copied_by_script(step, target):
            (folder / "files" / _COPY).write_text(_COPY_SCRIPT, encoding="utf-8")
        if step.stage is not None and step.stage.post and target == "dockerfile":
            (folder / "post").mkdir(parents=True, exist_ok=True)
            (folder / "post" / f"{_folder_of(step)}.sh").write_text(step.stage.post, encoding="utf-8")


def _plain_file(resolved: ResolvedRecipe, target: str) -> tuple[str, bytes]:
    """Return the plain file's name, and what is in it.

    Apptainer and its shell read any bytes; BuildKit reads UTF-8 alone.
    """
    if target != "dockerfile":
        return f"{resolved.recipe.name}.def", deffile(resolved).encode("utf-8", "surrogateescape")
    text = dockerfile(resolved)
    try:
        return "Dockerfile", text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.end].rpartition("\n")[2].encode("utf-8", "backslashreplace").decode()
        raise DefinitionError(
            f"a Dockerfile cannot name a file whose name is not UTF-8: {line}…",
            hint="rename the file, or copy its folder as a whole",
        ) from error


Step = Layer | BuildStage


def _is_copied_by_script(step: Step, target: str) -> bool:
    """Return whether only the image's tree decides where files of the step go.

    A Dockerfile does without where it can: COPY needs no shell.
    """
    return any(file.name if target == "dockerfile" else file.line for file in step.files)


def _lines_of(step: Step) -> list[list[File]]:
    """Group the files by their line of %files."""
    return [list(group) for _, group in itertools.groupby(step.files, key=lambda file: (file.line, file.target))]


def _paths_of(step: Step, target: str) -> Iterator[tuple[str, File]]:
    """Return each file's path in the rendered folder of its step: its destination, or below its line's number."""
    if not _is_copied_by_script(step, target):
        yield from ((file.destination.lstrip("/"), file) for file in step.files)
        return
    for number, files in enumerate(_lines_of(step)):
        yield from ((f"{number}{file.destination[len(file.target) :]}", file) for file in files)


def _copy_commands(step: Step, folder: str) -> list[str]:
    """Return the commands that copy a step's files from ``folder`` to their destinations."""
    return [
        shlex.join(["sh", f"{folder}/{_COPY}", f"{folder}/{_folder_of(step)}/{number}", files[0].target, files[0].name])
        for number, files in enumerate(_lines_of(step))
    ]


def _steps(layers: Sequence[Layer]) -> list[Step]:
    """Yield every layer, its build stages and their layers: each once, before the steps that need it."""
    steps: dict[str, Step] = {}
    for layer in layers:
        _add_stages(layer.copies, steps)
        steps[layer.cache_key] = layer
    return list(steps.values())


def _add_stages(copies: Sequence[StageCopy], steps: dict[str, Step]) -> None:
    for stage in stages_of(copies):
        _add_stages(stage.copies, steps)
        steps |= {step.cache_key: step for step in _steps(stage.layers) if step.cache_key not in steps}
        steps[stage.cache_key] = stage


def _bases(resolved: ResolvedRecipe) -> list[Layer]:
    """Return the base of the image, and then those of build stages alone."""
    bases = [step for step in _steps(resolved.layers) if isinstance(step, Layer) and step.kind == "bootstrap"]
    return [resolved.layers[0], *(layer for layer in bases if layer.cache_key != resolved.layers[0].cache_key)]


def _bootstrap_command(layer: Layer, tar: str) -> str:
    assert layer.stage is not None
    header = layer.stage.header
    include = ",".join(header.get("include", "").replace(",", " ").split())
    return (
        f"SOURCE_DATE_EPOCH={layer.epoch} mmdebstrap --variant=minbase"
        f"{f' --include={include}' if include else ''} {header['osversion']} {tar}"
    )


def dockerfile(resolved: ResolvedRecipe) -> str:
    """Return a Dockerfile, for BuildKit. Every layer is one RUN; a debootstrap base is a tar beside the file."""
    base, *upper_layers = resolved.layers
    lines = _comment_lines(resolved)
    tars = {
        layer.cache_key: "root.tar" if layer.cache_key == base.cache_key else f"root-{layer.name}.tar"
        for layer in _bases(resolved)
        if layer.stage and layer.stage.bootstrap == "debootstrap"
    }
    if tars:
        commands = [
            _bootstrap_command(layer, tars[layer.cache_key]) for layer in _bases(resolved) if layer.cache_key in tars
        ]
        lines += [
            "# Beside this file, once:",
            *(f"#   {command}" for command in commands),
            "# then:",
            f"#   docker build --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt -t {resolved.recipe.name} .",
        ]
    environment: dict[str, str] = {}
    if any(layer.copies for layer in upper_layers):
        for layer in _bases(resolved):
            start, *rest = _docker_base(layer, tars)
            lines += [f"{start} AS {_docker_name(layer)}", *rest]
        environment = _docker_stages(resolved, lines)
    else:
        lines += _docker_base(base, tars)
        for layer in upper_layers:
            lines += ["", f"# layer {layer.name}"]
            environment |= _docker_step(layer, environment, lines)
    lines += ["", *(f"LABEL {key}={_quoted(value)}" for key, value in sorted(resolved.labels.items()))]
    lines += [
        f"ENV {key}={_quoted(value)}"
        for key, value in sorted(resolved.environment.items())
        if environment.get(key) != value
    ]
    return "\n".join([*lines, *_docker_start(resolved), ""])


def _docker_start(resolved: ResolvedRecipe) -> Iterator[str]:
    """Yield what a container starts with; the rest is the base's."""
    docker = resolved.recipe.file.docker or ContainerConfig()
    entrypoint = [*(docker.entrypoint or ())]
    if any(map(_is_script, resolved.scripts)):  # they set variables where a container starts
        entrypoint.insert(0, "/.singularity.d/actions/exec")
    yield from docker.instructions()
    if entrypoint or docker.entrypoint is not None:
        yield f"ENTRYPOINT {json.dumps(entrypoint)}"
    if docker.cmd is not None:
        yield f"CMD {json.dumps([*docker.cmd])}"
    elif docker.entrypoint is None and not _runs_base(resolved):
        yield f"CMD {json.dumps([*oci.RUNSCRIPT])}"


def _is_script(script: EnvironmentScript) -> bool:
    """Return whether only a shell can evaluate it; Docker and Apptainer evaluate a table and a base's own values."""
    return bool(script.text) and not script.table


def _runs_base(resolved: ResolvedRecipe) -> bool:
    """Return whether the image runs its base's own program, which a plain file's base brings along."""
    return any(
        BASE_RUNSCRIPT.encode() in file.content for file in resolved.top.files if file.destination == oci.RUNSCRIPT[-1]
    )


def _is_of_base(section: str, file: File) -> bool:
    """Return whether a script is that of the base, which a plain file's base brings along."""
    name = {"runscript": BASE_RUNSCRIPT, "startscript": BASE_STARTSCRIPT}.get(section)
    return name is not None and name.encode() in file.content


def _docker_base(layer: Layer, tars: Mapping[str, str]) -> list[str]:
    assert layer.stage is not None
    tar = tars.get(layer.cache_key)
    if "file" in layer.stage.header or layer.stage.bootstrap == "oras":
        what = "a SIF" if layer.stage.bootstrap in (LOCAL, "oras") else "an image in a file"
        raise UsageError(f"a Dockerfile cannot begin with {what}: From: {layer.stage.header['from']}")
    if layer.stage.bootstrap == "busybox":
        raise UsageError(f"a Dockerfile cannot begin with a program: {layer.stage.header['mirrorurl']}")
    if layer.stage.bootstrap == SCRATCH:
        return ["FROM scratch"]
    return ["FROM scratch", f"ADD {tar} /"] if tar else [f"FROM {layer.stage.header['from']}"]


def _docker_stages(resolved: ResolvedRecipe, lines: list[str]) -> dict[str, str]:
    """Yield each layer and build stage as a stage of the Dockerfile, the image last; return its environment."""
    parents: dict[str, Step] = {}
    for step in _steps(resolved.layers):
        layers = step.layers if isinstance(step, BuildStage) else ()
        if layers:
            parents[step.cache_key] = layers[-1]
        for below, above in itertools.pairwise(layers):
            parents[above.cache_key] = below
    parents |= {above.cache_key: below for below, above in itertools.pairwise(resolved.layers)}
    left: dict[str, dict[str, str]] = {}
    for step in _steps(resolved.layers):
        if step.cache_key not in parents:
            left[step.cache_key] = {}
            continue
        under = parents[step.cache_key]
        lines += ["", f"FROM {_docker_name(under)} AS {_docker_name(step)}"]
        known = left[under.cache_key]
        left[step.cache_key] = {**known, **_docker_step(step, known, lines)}
    return left[resolved.top.cache_key]


def _docker_name(step: Step) -> str:
    name = re.sub("[^a-z0-9]+", "-", step.name.lower())
    is_plain = re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+" if isinstance(step, BuildStage) else "[a-z0-9-]+", step.name)
    return ("stage-" if isinstance(step, BuildStage) else "layer-") + name + ("" if is_plain else f"-{_short(step)}")


def _folder_of(step: Step) -> str:
    """Return the folder of a step's files: its name, unless %files, COPY or --mount would need quotes for it."""
    return step.name if re.fullmatch(r"\w[\w.-]*", step.name) else f"layer-{_short(step)}"


def _short(step: Step) -> str:
    return digest_of(step.name.encode()).removeprefix("sha256:")[:8]


def _docker_step(step: Step, known: Mapping[str, str], lines: list[str]) -> dict[str, str]:
    """Return the lines of one step, and its environment that is not ``known``."""
    fresh = {key: value for key, value in step.environment.items() if known.get(key) != value}
    lines += [f"ENV {key}={_quoted(value)}" for key, value in sorted(fresh.items())]
    lines += [f"ENV {key}={_quoted(value).replace(_ESCAPED, '$')}" for key, value in _table_of(step).items()]
    if _is_copied_by_script(step, "dockerfile"):
        # The folder of this step only: BuildKit repeats a step when anything in its mounts has changed.
        folder = _folder_of(step)
        mounts = [f"--mount=type=bind,source=files/{name},target=/run/{name}" for name in (folder, _COPY)]
        lines.append(" && \\\n    ".join([f"RUN {' '.join(mounts)} umask 022", *_copy_commands(step, "/run")]))
    elif step.files:
        lines.append(f"COPY files/{_folder_of(step)}/ /")
    for item in step.copies:
        # COPY copies the content of a folder; a file is copied to a name, or into a folder that ends with a slash.
        paths = (
            json.dumps([item.source, item.destination])
            if " " in item.source + item.destination
            else f"{item.source} {item.destination}"
        )
        lines.append(f"COPY --from={_docker_name(item.stage)} {paths}")
    if step.stage is not None and step.stage.post:
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in build_environment(step.epoch).items())
        lines += [
            f"RUN --mount=type=bind,source=post/{_folder_of(step)}.sh,target=/run/post.sh \\",
            "    --mount=type=secret,id=ca,target=/run/ca.pem,required=false \\",
            "    if [ -s /run/ca.pem ]; then export SSL_CERT_FILE=/run/ca.pem; fi; \\",
            f"    env {settings} /bin/sh -e{_command(step.stage)} /run/post.sh && {_NOISE}",
        ]
    return fresh


def _table_of(step: Step) -> Mapping[str, str]:
    """Return what a step sets in addition to a base's own environment, with its references."""
    is_evaluated = isinstance(step, Layer) and step.kind == "environment"
    return step.scripts[-1].table if is_evaluated else {}


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", " ") + '"'


def deffile(resolved: ResolvedRecipe) -> str:
    """Return a definition file: every %post in one stage; build stages before it, each from the base up.

    Its argument: mirror.
    """
    base, *upper_layers = resolved.layers
    assert base.stage is not None
    bundle, name = "/etc/ssl/certs/ca-certificates.crt", resolved.recipe.name
    lines = _comment_lines(resolved)
    if base.stage.bootstrap == "debootstrap":
        lines += [
            "# With debootstrap on the machine: apptainer build --fakeroot --build-arg mirror=<URI of a Debian"
            f" archive> {name}.sif {name}.def"
        ]
    else:
        lines += [f"# apptainer build --fakeroot {name}.sif {name}.def"]
    lines += [f"# Where the network has an authority of its own, add: --bind {bundle}"]
    stages = [step for step in _steps(resolved.layers) if isinstance(step, BuildStage)]
    for stage in stages:
        lines += [*_def_stage(stage.layers[0], [*stage.layers[1:], stage], _docker_name(stage)), ""]
    lines += _def_stage(base, upper_layers, "image" if stages else None)
    lines += ["", "%environment"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(resolved.environment.items())]
    for script in resolved.scripts:
        _check_lines("environment", text := script.text.rstrip("\n"))
        lines += [text] if text else []
    top = {file.destination: file for file in resolved.top.files}
    for section, file in (("runscript",) * 2, ("test",) * 2, ("startscript",) * 2, ("help", "runscript.help")):
        if f"/.singularity.d/{file}" in top and not _is_of_base(section, top[f"/.singularity.d/{file}"]):
            text = top[f"/.singularity.d/{file}"].content.decode("utf-8", "surrogateescape").strip("\n")
            _check_lines(section, text)
            lines += ["", f"%{section}", text]
    lines += ["", "%labels"]
    lines += [f"    {key} {_one_line(value)}" for key, value in sorted(resolved.labels.items())]
    text = "\n".join(lines) + "\n"
    for line in text.split("\n"):
        if line != _MIRROR and ARGUMENT.search(line):
            raise _cannot_hold(f"{{{{ }}}}, which is one of its arguments: {line.strip()}")
    return text


def _def_stage(base: Layer, steps: Sequence[Step], name: str | None) -> list[str]:
    """Return a header with the %files and the %post of all its steps."""
    assert base.stage is not None
    header = {key: value for key, value in base.stage.header.items() if value and key not in ("mirrorurl", "stage")}
    if base.stage.bootstrap == "busybox":
        header["from"] = header["from"].rpartition("@")[0]
    names = {"bootstrap": "Bootstrap", "from": "From", "osversion": "OSVersion", "include": "Include"}
    names |= {"from": "MirrorURL"} if base.stage.bootstrap == "busybox" else {}
    lines = [f"{names[key]}: {value.removeprefix('oras://')}" for key, value in header.items() if key in names]
    if base.stage.bootstrap == "debootstrap":
        lines += [_MIRROR]
    lines += [f"Stage: {name}"] if name else []
    if base.stage.bootstrap == "debootstrap":
        lines += ["", "%arguments", "    mirror="]
    if copied := [step for step in steps if step.files]:
        # Apptainer copies every %files before it runs any %post: here each layer's files come with the layer, under any
        # name.
        lines += ["", "%files", *(f"    files/{_folder_of(step)} {_FILES}/{_folder_of(step)}" for step in copied)]
        if any(_is_copied_by_script(step, "def") for step in copied):
            lines += [f"    files/{_COPY} {_FILES}/{_COPY}"]
    for step in steps:
        for item in step.copies:
            lines += [
                "",
                f"%files from {_docker_name(item.stage)}",
                f"    {_word(item.source)} {_word(item.destination)}",
            ]
    lines += ["", "%post", "umask 022"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in build_environment(base.epoch).items()]
    for step in steps:
        lines += [f"# layer {step.name}"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(step.environment.items())]
        lines += [f"export {key}={_shell_quoted(value)}" for key, value in _table_of(step).items()]
        if _is_copied_by_script(step, "def"):
            lines += _copy_commands(step, _FILES)
        elif step.files:
            lines += [
                (
                    f"(cd {_FILES}/{_folder_of(step)} && rm -rf .singularity.d && find . -type f -print0 -o -type d"
                    " -empty -print0 |"
                ),
                "    tar --null --no-recursion -T - -cf - | tar --no-same-owner -C / -xf -)",
            ]
        if step.stage is not None and step.stage.post:
            lines += _post_lines(step.stage)
    return [*lines, f"rm -rf {_FILES}", _NOISE]


def _command(stage: Stage) -> str:
    return f" -c {shlex.quote(stage.shell)}" if stage.shell else ""


def _post_lines(stage: Stage) -> list[str]:
    """Return a stage's %post as a part of another one: in a shell of its own."""
    post = stage.post.rstrip("\n")
    if not stage.shell:
        return ["(", "set -e", post, ")"]
    end = next(name for number in itertools.count() if (name := f"EKIBEN{number or ''}") not in post.split("\n"))
    return [f"cat >{_POST} <<'{end}'", post, end, f"/bin/sh -e{_command(stage)} {_POST}", f"rm {_POST}"]


def _shell_quoted(value: str) -> str:
    """Return a value for a shell, in which it expands the references."""
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _word(path: str) -> str:
    """Return a word of %files, as Apptainer and Ekiben read it: Apptainer knows only double quotes."""
    if re.search(r"[\"'\\$`\n]", path):  # a shell reads the value later, and a quoted word would fail the build
        raise _cannot_hold(f"the name {path} in %files from a stage")
    return path if re.fullmatch(r"[\w/.,:@%+=-]+", path) else f'"{path}"'


def _comment_lines(resolved: ResolvedRecipe) -> list[str]:
    """Return the recipe's name and description as comments."""
    return [
        f"# {line}".rstrip()
        for line in f"{resolved.recipe.name}: {resolved.recipe.file.description}".strip().split("\n")
    ]


def _one_line(value: str) -> str:
    return " ".join(value.split("\n"))


def _cannot_hold(what: str) -> DefinitionError:
    return DefinitionError(
        f"a plain file does not support {what}", hint="change it in the recipe or its layers, and render again"
    )


def _check(resolved: ResolvedRecipe) -> None:
    """Raise DefinitionError for features that no plain file supports."""
    for step in _steps(resolved.layers):
        if step.inputs.get("writes"):
            raise _cannot_hold(f"the %post of {step.name}, which adds to the image's environment or labels")
        unknown = [*filter(_is_script, step.scripts)]
        if unknown and step.stage is not None and step.stage.post:
            raise _cannot_hold(
                f"the %post of {step.name} above a %environment that is a script, whose values it would have to know: "
                f"{unknown[-1].where}"
            )
    for name, value in resolved.environment.items():
        if "\n" in value:
            raise _cannot_hold(f"the environment variable {name}, whose value has several lines")
    for name in resolved.labels:
        if not re.fullmatch(r"[^\s#%\"'=$\\][^\s\"'=$\\]*", name):
            raise _cannot_hold(
                f"the label '{_one_line(name)}'; write its name without blanks, quotes, '#', '=', '$' and '\\', and not"
                " with '%' first"
            )


def _check_lines(section: str, text: str) -> None:
    """Raise DefinitionError when a line of a section would begin another one."""
    for line in text.split("\n"):
        if re.match(r"\s*%|bootstrap:", line, re.IGNORECASE):
            raise _cannot_hold(f"in %{section} a line that begins another section: {line}")

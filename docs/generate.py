"""Write the reference pages and JSON Schemas from the code: ``python docs/generate.py``, ``--check`` names what is out
of date.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import click
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.picture import draw_chart
from docs.pictures.charts import charts
from ekiben.cli import root
from ekiben.cli.group import ALIASES, SECTIONS
from ekiben.core import errors
from ekiben.core.settings import Config
from ekiben.run import schedulers
from ekiben.run.site import NETWORKS, RUNTIMES, SiteFile
from ekiben.spec.recipe import LAUNCH, RecipeFile
from ekiben.spec.stack import StackFile

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

NOTE = "<!-- Written by docs/generate.py from the code: do not edit. -->\n"
TEMPLATE = "ekiben/project/template/recipe.schema.json"
# file of YAML → (the dataclass that reads it, what it is)
FILES: dict[str, tuple[type[Any], str]] = {
    "recipe": (
        RecipeFile,
        "`recipes/NAME/recipe.yaml`, or a `recipe.yaml` in any folder: which top layer, which stack, which tasks.",
    ),
    "stack": (StackFile, "`images/stacks/NAME/stack.yaml`: versions that work together. The lock files lie beside it."),
    "site": (
        SiteFile,
        (
            "`sites/NAME.yaml`, or `~/.config/ekiben/sites/NAME.yaml`: the compute nodes of a cluster. "
            "What a profile leaves out is unknown, never assumed."
        ),
    ),
    "config": (
        Config,
        (
            "`~/.config/ekiben/config.yaml` and `/etc/ekiben/config.yaml`: what a user, and a site for all its users, "
            "set once. An option comes first, then the environment, then the user's file, then the site's, key by key."
        ),
    ),
}
# Options of `submit`, in config.yaml and in a site's profile.
JOB_DEFAULTS = {
    "account": "The group or account that pays",
    "partition": "Partition or queue",
    "qos": "Quality of service",
    "time": "Walltime, as `2:00:00` or `90m`",
    "gpus_per_node": "GPUs of each node",
    "cpus_per_node": "CPUs of each node",
    "memory": "Memory of each node, as `64G`",
    "exclusive": "Whether a job has its nodes alone",
    "env": "Variables for the job: `NAME`, with today's value, or `NAME=VALUE`",
    "bind": "Folders to show in the container",
    "scheduler_args": "Options of the scheduler's own",
    "check": "What a job compares of its image: `state` (size, times, inode, header), or `digest` (every byte)",
}
# What a key means. tests/unit/test_docs.py finds keys that have no meaning here, and those that are no longer there.
MEANINGS = {
    "recipe": {
        "name": "Name of the recipe, its image and its files: lower-case letters, digits, `.`, `_`, `-`",
        "description": "One line, also the image's label",
        "stack": "The stack of `images/stacks/` that it is built on",
        "layer": "The layer on top: a definition file of `images/`, here or in Ekiben",
        "tasks": "The commands of the image, by name",
        "tasks.entrypoint": "A script of the recipe's `entrypoints/`, else of Ekiben's",
        "tasks.command": (
            "In place of `entrypoint`: a program and its arguments, as `python -m mypkg.train`; paths of `code` are"
            " those in the image. No shell reads it"
        ),
        "tasks.config": "A YAML file of the recipe: the task's settings",
        "tasks.help": "One line for `--help`",
        "tasks.launch": (
            "In a job: `per-gpu`: a process for each GPU of each node; `single`: one process; `cpu`: one process, no"
            " GPU requested. Default: `single`. A `command` with `per-gpu` starts a process for each GPU of this"
            " machine under `run`, too; `EKIBEN_PROCESSES=N` is another number"
        ),
        "code": "Python packages, modules and other code of the folder, for `command`: files or folders",
        "data": "More files or folders that ship in the image, below `/opt/ekiben/recipe/`",
        "default_task": "The task that runs where none is named: `apptainer run FILE.sif`, `docker run IMAGE`",
        "environment": (
            "Variables that are set in the image; `$NAME` and `${NAME}` stand for what a layer, or an earlier line,"
            " sets"
        ),
        "labels": "Labels of the image",
        "docker": (
            "What a container of the Docker image starts with, in place of the base's and Ekiben's values; `init --from"
            " Dockerfile` writes it"
        ),
        "docker.entrypoint": "The program that gets the arguments; only without `tasks`",
        "docker.cmd": "The arguments, or the command, where `docker run` gives none",
        "docker.user": "A user of the image, or a number; `:GROUP` may follow",
        "docker.workdir": "The folder in which it starts; else the base's where there are no `tasks`, else `/work`",
        "docker.ports": "Ports that it listens on, as `8080/tcp`",
        "docker.volumes": "Folders that Docker keeps outside the container",
        "docker.stop_signal": "The signal of `docker stop`, as `SIGINT`",
        "docker.healthcheck": "A command that says whether the container works",
        "docker.healthcheck.test": "`[CMD, PROGRAM, …]`, `[CMD-SHELL, LINE]`, or `[NONE]`: not the base's",
        "docker.healthcheck.interval": "Time between two checks, as `1m30s`",
        "docker.healthcheck.timeout": "After which a check has failed",
        "docker.healthcheck.start_period": "In which a failure does not count",
        "docker.healthcheck.retries": "Failures in a row that count",
        "docker.shell": "What Dockerfiles on the image run their commands with",
        "docker.onbuild": "Instructions for Dockerfiles on the image",
        "test": "Shell script that runs in the finished image",
    },
    "stack": {
        "name": "Name of the stack, as its folder",
        "description": "One line",
        "suite": "Debian suite of the base layer; empty where a base of others has its own sources of packages",
        "python": "Version of Python",
        "cuda": "Version of CUDA's libraries; empty where the images have none",
        "torch": "Version of PyTorch; empty where the images have none",
        "driver": "Driver that CUDA needs, as `>=580.65.06`",
        "compute_capabilities": "GPUs that it serves",
        "architectures": "Processors that it is locked for: `amd64`, `arm64`",
        "epoch": "Seconds since 1970: no file of the image has a later time",
        "arguments": "Arguments of the definition files: `{{ name }}`",
        "interpreter": "Path of the Python in its images, where a base brings it (default: `/opt/venv/bin/python`)",
        "libc": "C library that wheels are chosen for, as `glibc 2.36` or `musl` (default: `glibc 2.28`)",
    },
    "site": {
        "name": "Name of the profile, as its file",
        "description": "One line",
        "node": "A compute node",
        "node.gpus": "GPUs of a node, by kind",
        "node.gpus.model": "As nvidia-smi names it",
        "node.gpus.capability": "Compute capability, as `9.0`",
        "node.gpus.memory_gib": "Memory of each GPU, in GiB",
        "node.gpus.count": "How many of this kind a node has",
        "node.driver": "Version of NVIDIA's driver",
        "node.cores": "As the scheduler counts them",
        "node.memory_gib": "Memory, in GiB",
        "node.architecture": "As Debian and OCI name it: `amd64`, `arm64`",
        "node.system": "Distribution and its version",
        "node.kernel": "Version of the kernel",
        "node.glibc": "Version of the C library",
        "node.user_namespaces": "Whether users may make user namespaces",
        "node.internet": "Whether a compute node reaches the internet",
        "node.squashfs_zstd": "Whether its kernel mounts squashfs compressed with zstd",
        "runtimes": "What runs containers there",
        "runtimes.kind": "Which runtime it is",
        "runtimes.version": "Its version",
        "runtimes.module": "Loaded first, by `module load`",
        "runtimes.setuid": "Whether it is installed setuid",
        "runtimes.gpus": "Whether Docker has NVIDIA's container toolkit, or a CDI file",
        "storage": "File systems: `home`, `group`, `scratch`, `local` (to the node), `tmp`",
        "storage.path": "May hold `$VARIABLES` of a job there",
        "storage.type": "Type of the file system: `lustre`, `nfs`, `xfs`, …",
        "storage.quota_gib": "Quota of one user, or of one group, in GiB",
        "storage.size_gib": "Size, in GiB",
        "network": "Between nodes",
        "network.kind": "Kind of the network",
        "network.ports": "Ports of each node",
        "network.gbit": "Gbit/s of each port",
        "scheduler": "What jobs are submitted to",
        "scheduler.kind": "Which scheduler it is",
        "scheduler.version": "Its version",
        "scheduler.group_required": "Whether every job has to name one",
        "scheduler.default_hours": "Walltime of a job that asks for none, in hours",
        "scheduler.defaults": "What `submit` uses where neither the command line nor a config.yaml says it",
        **{f"scheduler.defaults.{key}": meaning for key, meaning in JOB_DEFAULTS.items()},
        "scheduler.group_option": "Option that takes the group or account that pays: `-g`, `-P`, `--account=`",
        "scheduler.group_in_script": "Whether that option may stand in the job script",
        "scheduler.options": "More options for every job",
        "scheduler.resources": "What one node of a job can be: a resource type, a partition",
        "scheduler.resources.request": (
            "Options that request it; `{nodes}`, `{gpus}` (per node), `{cores}`, `{memory_gib}` are replaced"
        ),
        "scheduler.resources.gpus": "GPUs of each node",
        "scheduler.resources.cores": "CPUs of each node",
        "scheduler.resources.memory_gib": "Memory of each node, in GiB",
        "scheduler.resources.max_nodes": "Nodes that one job may have",
        "scheduler.resources.max_hours": "Longest walltime, in hours",
        "scheduler.resources.exclusive": "Whether a job has such a node alone",
        "modules": "Loaded in every job",
        "module_init": "Sourced before `module load`",
        "environment": "Variables of every job",
    },
    "config": {
        "shared": "Folder that colleagues publish to: layers there are not built again",
        "registry": "Repository of layers, asked after that",
        "recipes": "Folders of recipes that are found by name; relative to this file",
        "sync": "`build`, `run`, `shell`, `exec` and `submit` lock and build what is missing, as with `--sync`",
        "in_place": "`build` rewrites the last layer in the SIF that is there, as with `--in-place`",
        "require_signature": (
            "Full fingerprints of PGP keys: an image is run only if one of them has signed it. Where both files have "
            "it, only keys in both count"
        ),
        "jobs": "What `submit` uses where the command line does not say it",
        **{f"jobs.{key}": meaning for key, meaning in JOB_DEFAULTS.items()},
    },
}
CHOICES = {
    "tasks.launch": list(LAUNCH),
    "runtimes.kind": sorted(RUNTIMES),
    "network.kind": sorted(NETWORKS),
    "scheduler.kind": sorted(schedulers.names()),
}
GONE = {"recipe": ("modules", "tasks.runs_on")}  # known to the reader for the sake of its message only
SCALARS = {str: "string", int: "integer", bool: "boolean"}


# ----------------------------------------------------------------------------------------------------------- YAML files


def unwrapped(kind: Any) -> Any:
    """Return ``kind`` without ``| None``."""
    return get_args(kind)[0] if get_origin(kind) is UnionType else kind


def is_required(field: Field[Any]) -> bool:
    """Say whether the key has to be there."""
    return field.default is MISSING and field.default_factory is MISSING


def schema_of(kind: Any, name: str, path: str = "") -> dict[str, Any]:
    """Return the JSON Schema of a value of ``kind``. ``name`` is the file's; ``path`` the key's, dotted."""
    if get_origin(kind) is UnionType:
        schema = schema_of(unwrapped(kind), name, path)
        return {**schema, "type": [schema["type"], "null"]} if "type" in schema else schema
    if is_dataclass(kind):
        types = get_type_hints(kind)
        known = [field for field in fields(kind) if f"{path}.{field.name}".lstrip(".") not in GONE.get(name, ())]
        return {
            "type": "object",
            "properties": {
                field.name: property_of(field, types[field.name], name, f"{path}.{field.name}".lstrip("."))
                for field in known
            },
            "required": [field.name for field in known if is_required(field)],
            "additionalProperties": False,
        }
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": schema_of(get_args(kind)[1], name, path)}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": schema_of(get_args(kind)[0], name, path)}
    return {"type": SCALARS[kind]} | ({"enum": CHOICES[path]} if path in CHOICES else {})


def property_of(field: Field[Any], kind: Any, name: str, path: str) -> dict[str, Any]:
    """Return the schema of one key, with its meaning and its default."""
    schema = schema_of(kind, name, path)
    if meaning := MEANINGS[name].get(path):
        schema = {"description": meaning.replace("`", ""), **schema}
    if isinstance(field.default, str | int | bool):
        schema["default"] = field.default
    return schema


def json_schema(name: str) -> str:
    """Return the JSON Schema of a file, as text."""
    kind, about = FILES[name]
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Ekiben's {name}.yaml",
        "description": about.replace("`", ""),
    }
    return json.dumps({**head, **schema_of(kind, name)}, indent=2, ensure_ascii=False) + "\n"


def type_text(kind: Any, path: str) -> str:
    """Return what a value is, in words."""
    kind = unwrapped(kind)
    if path in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[path])
    if is_dataclass(kind):
        return "mapping"
    if get_origin(kind) is dict:
        return f"mapping of {type_text(get_args(kind)[1], '')}s"
    if get_origin(kind) is tuple:
        return f"list of {type_text(get_args(kind)[0], '')}s"
    return {str: "string", int: "integer", bool: "`true` or `false`"}[kind]


def rows_of(kind: Any, name: str, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield key, type, default and meaning of every key, nested ones too."""
    types = get_type_hints(kind)
    for field in fields(kind):
        below = f"{path}.{field.name}".lstrip(".")
        if below in GONE.get(name, ()):
            continue
        default = "**required**" if is_required(field) else ""
        if isinstance(field.default, str | int | bool):
            default = f"`{json.dumps(field.default)}`" if field.default != "" else ""
        yield below, type_text(types[field.name], below), default, MEANINGS[name].get(below, "")
        inner = unwrapped(types[field.name])
        inner = (
            get_args(inner)[-1]
            if get_origin(inner) is dict
            else get_args(inner)[0]
            if get_origin(inner) is tuple
            else inner
        )
        if is_dataclass(inner):
            yield from rows_of(inner, name, below)


def yaml_page(name: str) -> str:
    """Return the reference page of a YAML file."""
    kind, about = FILES[name]
    rows = [f"| `{key}` | {what} | {default} | {meaning} |" for key, what, default, meaning in rows_of(kind, name)]
    schema = f"../schemas/{name}.schema.json"
    return (
        f"{NOTE}\n# {name}.yaml\n\n{about}\n\nAn unknown key is an error that names the nearest known one. "
        "Keys of a list's or a mapping's items are written below it with a dot.\n\n"
        "| key | value | default | meaning |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nEditors with a YAML language server complete and check the file by its [JSON Schema]({schema}), when"
        f" its first line is\n\n    # yaml-language-server: $schema=PATH/OF/{name}.schema.json\n"
    )


# --------------------------------------------------------------------------------------------------------- command line


def escaped(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def code(text: str) -> str:
    """Return text as code in a cell of a table; GitHub and MkDocs disagree on how a bar is escaped between
    backquotes.
    """
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def option_row(param: click.Option, ctx: click.Context) -> str:
    """Return the table's row of an option."""
    metavar = "" if param.is_flag else f" {param.make_metavar(ctx)}"
    if param.is_flag or param.default is None or isinstance(param.default, tuple | list) or not param.show_default:
        default = ""
    else:
        default = f"`{param.default}`"
    names = ", ".join(f"`{name}`" for name in param.opts)
    shown = f"{names} {code(metavar.strip())}" if metavar.strip() else names
    return f"| {shown} | {default} | {escaped(param.help or '')} |"


def command_text(name: str, command: click.Command, parent: click.Context, level: str = "###") -> str:
    """Return the section of one command, and of the commands it has."""
    ctx = click.Context(command, info_name=name.split()[-1], parent=parent)
    usage = " ".join(["ekiben", *ctx.command_path.split()[1:], *command.collect_usage_pieces(ctx)])
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    prose, _, examples = (
        help_text.partition("Examples:") if "Examples:" in help_text else help_text.partition("Example:")
    )
    shown = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    parts = [f"{level} {name}", f"    {usage}", prose.strip()]
    if examples.strip():
        lines = [f"    {line.strip()}" for line in examples.strip("\n").splitlines() if line.strip()]
        parts.append("\n".join(lines))
    if shown:
        rows = [option_row(param, ctx) for param in shown]
        parts.append("| option | default | what it does |\n|---|---|---|\n" + "\n".join(rows))
    for inner, found in command.commands.items() if isinstance(command, click.Group) else ():
        parts.append(command_text(f"{name} {inner}", found, ctx, level + "#"))
    return "\n\n".join(parts)


def cli_page() -> str:
    """Return the reference page of the command line."""
    ctx = click.Context(root, info_name="ekiben")
    listed = {name for names in SECTIONS.values() for name in names}
    sections = dict(SECTIONS) | {"Manage": (*SECTIONS["Manage"], *sorted(set(root.list_commands(ctx)) - listed))}
    options = [option_row(param, ctx) for param in root.params if isinstance(param, click.Option) and not param.hidden]
    aliases = ", ".join(f"`{alias}` is `{name}`" for alias, name in ALIASES.items())
    parts = [
        f"{NOTE}\n# Command line",
        (
            "`ekiben` is the installed command; in a checkout, `.venv/bin/python build.py` is the same. "
            f"Every command has `-h`, `--help`. Other names: {aliases}."
        ),
        "These options come before the command:",
        "| option | default | what it does |\n|---|---|---|\n" + "\n".join(options),
    ]
    for title, names in sections.items():
        parts.append(f"## {title}")
        for name in names:
            command = root.get_command(ctx, name)
            if command:
                parts.append(command_text(name, command, ctx))
    return "\n\n".join(parts) + "\n"


def exit_codes_page() -> str:
    """Return the page of exit codes, from the classes of errors."""
    meaning = dict(re.findall(r"(\w+Error)\s+\d+\s+(.+)", errors.__doc__ or ""))
    classes = (kind for _, kind in inspect.getmembers(errors, inspect.isclass))
    kinds = [kind for kind in classes if issubclass(kind, errors.EkibenError) and kind.__name__ in meaning]
    rows = [
        f"| {kind.exit_code} | {meaning[kind.__name__]} | `{kind.__name__}` |"
        for kind in sorted(kinds, key=lambda kind: kind.exit_code)
    ]
    return (
        f"{NOTE}\n# Exit codes\n\n## Of ekiben\n\n| code | meaning | exception in Python |\n|---|---|---|\n| 0 | done"
        " | |\n"
        + "\n".join(rows)
        + "\n| 130, 143 | interrupted (Ctrl-C), terminated (SIGTERM); what was finished is kept | |\n\n`ekiben run`"
        " ends with the exit code of the task; `ekiben lock --check` with 9 when something is out of date;\n`ekiben"
        " doctor` with 10 when the image will not run.\n\n## Of tasks\n\n| code | meaning |\n|---|---|\n| 0 | done"
        " |\n| 1 | an error that the message explains |\n| 2 | an argument or a setting is wrong |\n| 3 | the run"
        " does not fit the memory of its GPUs, as `--dry-run --gpus N --on GPU` finds on any machine |\n| 75 |"
        " stopped by SIGTERM or SIGUSR1 after a checkpoint: the same command goes on |\n| 130 | interrupted"
        " (Ctrl-C) |\n"
    )


# ---------------------------------------------------------------------------------------------------------------- tasks

# Runs a task's script up to where it parses its arguments, and prints what --help is made of: argparse's own layout
# differs from one version of Python to the next.
PROBE = """
import argparse, json, runpy, sys
def parse(self, *_, **__):
    actions = [{"names": a.option_strings or [a.dest], "metavar": a.metavar or ("" if a.nargs == 0 else a.dest.upper()),
                "help": a.help or "", "flag": a.nargs == 0}
               for a in self._actions if a.dest != "help" and a.help != "==SUPPRESS=="]
    print(json.dumps({"description": self.description or "", "epilog": self.epilog or "", "actions": actions}))
    sys.exit()
argparse.ArgumentParser.parse_args = parse
script, sys.argv = sys.argv[1], sys.argv[1:]
sys.path.insert(0, __import__("os").path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def _value_of(action: dict[str, Any]) -> str:
    """Return what stands after the names of an argparse action: the name of its value, or nothing."""
    has_value = action["names"][0].startswith("-") and not action["flag"]
    return f" {action['metavar']}" if has_value else ""


def task_text(recipe: Path, name: str, task: dict[str, Any], level: str = "###") -> str:
    """Return the section of one task: what its --help says, with the settings of the recipe's own config."""
    own = recipe / "entrypoints" / task["entrypoint"]
    script = own if own.is_file() else ROOT / "entrypoints" / task["entrypoint"]
    config = ["--config", str(recipe / task["config"])] if task.get("config") else []
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "entrypoints"),
        "EKIBEN_RECIPE": str(recipe),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(script), *config],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script}: {done.stderr}")
    about = json.loads(done.stdout)
    first, _, examples = about["description"].partition("\n")
    parts = [f"{level} {recipe.name}: {name}", first]
    if examples.strip():
        parts.append("\n".join(f"    {line}" for line in examples.strip().splitlines()))
    rows = [
        f"| `{', '.join(action['names'])}{_value_of(action)}` | {escaped(action['help'])} |"
        for action in about["actions"]
    ]
    if rows:
        parts.append("| argument | |\n|---|---|\n" + "\n".join(rows))
    settings = about["epilog"].splitlines()[1:]
    if settings:
        pairs = zip(settings[::2], settings[1::2], strict=True)
        rows = []
        for line, help_line in pairs:
            key, _, value = line.strip().partition(" ")
            shown = code(value.strip()) if value.strip() else ""
            rows.append(f"| `{key}` | {shown} | {escaped(help_line)} |")
        parts.append("| setting | default in this recipe | |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def tasks_page() -> str:
    """Return the page of every task of every recipe."""
    parts = [
        f"{NOTE}\n# Tasks and their settings",
        (
            "A task is a command in the image of its recipe. `TASK --help` prints the same. A setting comes from the"
            " task's default, then the file of `--config` (by default the recipe's own), then `--set NAME=VALUE`. An"
            " unknown name or a value of the wrong type is an error before anything is loaded."
        ),
    ]
    for path in sorted(ROOT.glob("recipes/*/recipe.yaml")):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        parts += [f"## {recipe['name']}", recipe["description"] + "."]
        parts += [task_text(path.parent, name, task) for name, task in recipe["tasks"].items()]
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------------------- JSON


def typed_dicts(path: Path) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield name, docstring and fields of every TypedDict of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id == "TypedDict" for base in node.bases
        ):
            rows = [
                (item.target.id, ast.unparse(item.annotation))
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            yield node.name, ast.get_docstring(node) or "", rows


JSON_OUTPUTS = {
    "ekiben inspect --json": "ekiben/inspect/describe.py",
    "ekiben diff --json": "ekiben/inspect/diff.py",
    "ekiben doctor --json": "ekiben/doctor/findings.py",
    "catalog.json, and ekiben catalog --json": "ekiben/publish/catalog/_types.py",
}


def json_keys(path: Path) -> list[str]:
    """Return the keys that a command's ``to_json`` writes, in their order, nested ones too."""
    methods = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "to_json"
    )
    literals = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Dict))
    keys = [key.value for literal in literals for key in literal.keys if isinstance(key, ast.Constant)]
    return list(dict.fromkeys(str(key) for key in keys))


def json_page() -> str:
    """Return the page of what is printed and written as JSON: the hand-written part, then the types."""
    parts = [NOTE.rstrip(), (DOCS / "reference/_json.md").read_text(encoding="utf-8").strip()]
    found = {path.stem: json_keys(path) for path in sorted((ROOT / "ekiben/cli/commands").glob("[a-z]*.py"))}
    lines = [
        f"| `ekiben {name} --json` | {', '.join(f'`{key}`' for key in keys)} |" for name, keys in found.items() if keys
    ]
    parts.append("## Keys by command\n\n| command | keys, nested ones too |\n|---|---|\n" + "\n".join(lines))
    for title, module in JSON_OUTPUTS.items():
        parts.append(f"## {title}")
        for name, about, rows in typed_dicts(ROOT / module):
            table = "\n".join(f"| `{key}` | {code(kind)} |" for key, kind in rows)
            parts.append(f"### {name}\n\n{about}\n\n| key | type |\n|---|---|\n{table}")
    return "\n\n".join(parts) + "\n"


def benchmarks_page() -> str:
    """Return the page of measurements: the hand-written part, with the charts and every timing of
    bench/results.json.
    """
    results = json.loads((ROOT / "bench/results.json").read_text(encoding="utf-8"))
    rows = ["| case | what ran | n | median | least to most |", "|---|---|---|---|---|"]
    for timing in results["timings"]:
        seconds = timing["seconds"]
        spread = f"{min(seconds):.2f} to {max(seconds):.2f} s" if len(seconds) > 1 else ""
        who = timing["who"].replace("ekiben", "Ekiben")
        rows.append(f"| {timing['case']} | {who} | {len(seconds)} | {median(seconds):.2f} s | {spread} |")
    missed = [
        f"| {goal['case']} | {goal['ekiben']} | {goal['peer']} | {goal['target']} |"
        for goal in results["goals"]
        if not goal["reached"]
    ]
    table = "\n".join(["| case | Ekiben | beside | target |", "|---|---|---|---|", *missed])
    text = (DOCS / "_benchmarks.md").read_text(encoding="utf-8")
    for name, chart in charts().items():
        text = text.replace(f"{{chart:{name}}}", f"![{chart.description}](pictures/benchmarks-{name}.svg)")
    return f"{NOTE}\n" + text.replace("{timings}", "\n".join(rows)).replace("{missed}", table)


# ------------------------------------------------------------------------------------------------------ results on GPUs

GPU_RESULTS = """# Results on GPUs

What `qa/gpu/prove.py SIF CASE… --json FILE` found in images on GPU machines, from the files in
`qa/gpu/results`. `prove.py --help` says what each case does; sizes and steps are in `qa/gpu/tasks_at_size.py`. Memory
is what one GPU reserved, beside what was expected before the run. Earlier results, without such a file, are in the
[support matrix](support-matrix.md).
"""


def gpu_results_page() -> str:
    """Return the page of what ran in images on GPUs: a table for each file of qa/gpu/results."""
    parts = [NOTE, GPU_RESULTS.rstrip()]
    for path in sorted((ROOT / "qa/gpu/results").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        names = [line.partition(",")[0] for line in record["gpus"]]
        driver = record["gpus"][0].rpartition(", ")[2]
        states = {None: "not run", True: "passed", False: "**failed**"}
        rows = [
            f"| {check['case']} | {states[check['passed']]} | {check['seconds']:,.0f} | {_numbers_of(check)} |"
            for check in record["checks"]
        ]
        parts.append(
            f"\n## {path.stem.removeprefix(record['date'] + '-')}, {record['date']}\n\nImage"
            f" `{record['image']['recipe']}`, stack `{record['image']['stack']}`, SIF `{record['sha256'][:12]}`,"
            f" {record['apptainer'][0]}, a machine with {len(names)} × {names[0]}, driver {driver}.\n"
        )
        parts += ["| case | result | s | |", "|---|---|---|---|", *rows]
    return "\n".join(parts) + "\n"


def _numbers_of(check: dict[str, Any]) -> str:
    """Return what a check measured, in words; of one that failed, the end of its output."""
    results = check["results"]
    if check["passed"] is False and check["output"]:
        return str(check["output"][-1]).replace("|", "\\|")
    if not isinstance(results, dict):
        return str(results or "").removeprefix("error: ")
    if not check["case"].startswith("size/"):
        return ", ".join(f"{name}: {value}" for name, value in results.items() if isinstance(value, str | int))
    words = []
    (measured,) = results.values()
    for name, value in measured.items():
        if name == "resumed" and isinstance(value, dict):
            words.append("resumed")
        elif isinstance(value, dict) and "tokens_per_s" in value:
            memory = f", {value['peak_memory_bytes'] / 2**30:.1f} GiB" if "peak_memory_bytes" in value else ""
            memory += (
                f" ({value['expected_memory_bytes'] / 2**30:.1f} expected)" if "expected_memory_bytes" in value else ""
            )
            kernel = value.get("attention_kernels", {}).get("mixed")
            words.append(f"{name}: {value['tokens_per_s']:,.0f} tokens/s{memory}{f', {kernel}' if kernel else ''}")
        elif isinstance(value, dict) and "seconds" in value:
            words.append(f"{name}: {value['seconds']:.0f} s")
        elif isinstance(value, float):
            words.append(f"{name.replace('_', ' ')}: {value:.1g}")
    return "; ".join(words)


# ---------------------------------------------------------------------------------------------------------------- files


def generated() -> dict[str, Callable[[], str]]:
    """Return every generated file, by its path below the project's folder, with what makes its text."""
    pages: dict[str, Callable[[], str]] = {
        "docs/reference/cli.md": cli_page,
        "docs/reference/exit-codes.md": exit_codes_page,
        "docs/reference/tasks.md": tasks_page,
        "docs/reference/json.md": json_page,
        "docs/benchmarks.md": benchmarks_page,
        "docs/gpu-results.md": gpu_results_page,
        TEMPLATE: lambda: json_schema("recipe"),
    }
    for name in charts():
        pages[f"docs/pictures/benchmarks-{name}.svg"] = cast(
            Callable[[], str], lambda name=name: draw_chart(charts()[name])
        )
    for name in FILES:
        pages[f"docs/reference/{name}-yaml.md"] = cast(Callable[[], str], lambda name=name: yaml_page(name))
        pages[f"docs/schemas/{name}.schema.json"] = cast(Callable[[], str], lambda name=name: json_schema(name))
    return pages


def out_of_date() -> list[str]:
    """Return the generated files that are not what the code says today."""
    return [
        name
        for name, text in generated().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text()
    ]


def main() -> None:
    """Write all files, or name those that are out of date."""
    if "--check" in sys.argv[1:]:
        stale = out_of_date()
        sys.exit("".join(f"{name}: out of date; run: python docs/generate.py\n" for name in stale))
    for name, text in generated().items():
        (ROOT / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()

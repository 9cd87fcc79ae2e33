"""Ekiben's command line: options → one call → one line of output. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from builder.errors import EkibenError, StoreError, UnfitError, UsageError

if TYPE_CHECKING:
    from builder.assemble import Product
    from builder.chain import Chain
    from builder.doctor import Finding
    from builder.site import SiteFile
    from builder.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])


class Errors(click.Group):
    """Expected errors become one message and an exit code of their own; Ctrl-C is 130."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EkibenError as error:
            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(str(error), err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted; what was finished is kept, run the same command to go on", err=True)
            ctx.exit(130)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from builder.errors import nearest

        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UsageError(f"no command '{args[0]}'." + nearest(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


@click.group(cls=Errors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--store",
    "store_path",
    type=click.Path(path_type=Path),
    help="The store (default: $EKIBEN_STORE, else ~/.cache/ekiben/store).",
)
@click.option(
    "--shared",
    type=click.Path(path_type=Path),
    help="Where colleagues publish; layers there are not built (default: $EKIBEN_SHARED, else `shared:` in config.yaml).",
)
@click.option("-v", "--verbose", is_flag=True, help="Print every program that is started, as a command to paste.")
@click.pass_context
def main(ctx: click.Context, store_path: Path | None, shared: Path | None, verbose: bool) -> None:
    """Container images for LLM training: layered definition files become a SIF and a Docker image.

    \b
    Examples:
      build.py image lora-opencalm              build, verify, print what to run
      build.py plan lora-opencalm               what would run, and why
      build.py run lora-opencalm train          run a task
    """
    ctx.obj = store_path
    if verbose:
        from builder.process import set_trace

        set_trace(lambda line: click.echo(line, err=True))


def chain_options(command: Command) -> Command:
    command = click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Bind an argument of the definition files; may repeat.",
    )(command)
    command = click.option(
        "--gpu-arch",
        metavar="8.0,9.0|native",
        help="Compile extensions for these GPUs only (compute capabilities), or for those of this machine.",
    )(command)
    return click.option("--stack", help="Another stack of images/stacks/ than the recipe's own.")(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


@main.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE…")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["sif", "docker", "oci"]),
    help="What to make; may repeat. Default: sif, and docker when a daemon answers.",
)
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    metavar="auto|apptainer|buildah|docker",
    help="What runs the %post scripts.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the file goes (default: ./<recipe>.sif).")
@click.option("--flat", is_flag=True, help="One squashfs partition in the SIF, for tools that read only the first.")
@click.option("--locked", is_flag=True, help="Refuse what cannot be had exactly as locked.")
@click.option("--offline", is_flag=True, help="Use no network: what is not stored comes from --bundle.")
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="A file of build.py bundle to build from; means --offline."
)
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in the finished image.")
@chain_options
@json_option
@click.pass_obj
def image(
    store_path: Path | None,
    /,
    recipes: tuple[str, ...],
    formats: tuple[str, ...],
    output: Path | None,
    flat: bool,
    no_verify: bool,
    as_json: bool,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Build a recipe's image, verify it, and say how to run it.

    \b
    Examples:
      build.py image lora-opencalm
      build.py image hello --format sif -o /tmp/hello.sif
      build.py image ../my-recipes/chatbot --engine apptainer
      build.py image mine --gpu-arch 9.0
      build.py image hello --offline --bundle hello.bundle     where there is no network
    """
    if options["engine"] != "auto":
        from builder.executors import check_name

        check_name(options["engine"])
    if output and not output.absolute().parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.absolute().parent}; make it first")
    if output and len(recipes) * max(1, len(set(formats) - {"docker"})) > 1:
        raise UsageError("-o names one file; build one recipe in one format, or leave -o out")
    # What is wrong in any is said before the first.
    chains = [resolved(recipe, stack, arguments, gpu_arch) for recipe in recipes]
    results = [make_image(store_path, chain, formats, output, flat, not no_verify, bound(arguments).get("mirror"), gpu_arch, **options)
               for chain in chains]  # fmt: skip
    if as_json:
        click.echo(json.dumps(results if len(results) > 1 else results[0], indent=1))
    else:
        for result in results:
            click.echo(summary(result))


def make_image(
    store_path: Path | None,
    chain: Chain,
    formats: tuple[str, ...],
    output: Path | None,
    flat: bool,
    check: bool,
    mirror: str | None,
    gpu_arch: str | None,
    *,
    engine: str,
    locked: bool,
    offline: bool,
    bundle: Path | None,
) -> dict[str, Any]:
    import contextlib

    from builder.assemble import deliver
    from builder.config import read_config
    from builder.pipeline import Options, plan
    from builder.progress import Progress

    store, progress = open_store(store_path), Progress()
    actions = plan(chain, store)
    if gpu_arch:
        from builder.wheels import savings

        progress.tell(savings(chain, store))
    missing = [action for action in actions if not action.stored]
    told = f"{len(missing)} of {len(actions)} layers to build" if missing else f"all {len(actions)} layers are stored"
    progress.tell(f"{chain.recipe.name}: {told}")
    if offline and missing and not bundle:
        raise UsageError(f"--offline: {', '.join(action.layer.name for action in missing)} would have to be built; "
                         "give what it is built from with --bundle FILE (build.py bundle makes one)")  # fmt: skip
    data: list[Path] = []
    with contextlib.ExitStack() as stack:
        registry = None if offline else read_config().registry
        options = Options(engine=engine, locked=locked, mirror=mirror, registry=registry)
        if bundle:
            from builder.bundle import bundle_supply, check_bundle, open_bundle, take_compiled, unpack_snapshots

            opened = stack.enter_context(open_bundle(bundle, store, progress))
            check_bundle(opened, chain)
            take_compiled(opened, store)
            options = Options(engine=engine, locked=locked, supply=bundle_supply(opened, chain))
            data = unpack_snapshots(opened, (output.parent if output else Path()) / f"{chain.recipe.name}-data")
        built, products = deliver(chain, store, options, progress, formats=formats, output=output, flat=flat)
    checks = []
    if check:
        from builder.verify import verify

        checks = verify(built, store, products, progress)
    return {
        "recipe": chain.recipe.name, "stack": chain.stack.name, "name": built.name, "image": built.image_id,
        "size": built.size,
        "layers": [{"name": layer.name, "diff_id": layer.diff_id, "digest": layer.digest, "size": layer.size} for layer in built.layers],
        "built": [action.layer.name for action in missing],
        "products": [{"kind": item.kind, "place": item.place, "size": item.size, "made": item.made} for item in products],
        "checks": [{"runtime": item.runtime, "seconds": item.seconds, "known": item.known} for item in checks],
        "data": [str(path) for path in data],
        "run": run_lines(chain, products),
    }  # fmt: skip


def run_lines(chain: Chain, products: list[Product]) -> list[str]:
    """The commands that run the image, as a user pastes them."""
    task = next(iter(chain.recipe.file.tasks), "")
    lines = []
    for item in products:
        if item.kind == "sif":
            lines.append(f"singularity exec --nv {item.place} {task}")
            lines.append(f"apptainer exec --nv {item.place} {task}")
        elif item.kind == "docker":
            lines.append(f"docker run --rm --gpus all {item.place.removesuffix(':latest')} {task}")
        else:
            lines.append(f"docker load -i {item.place}")
    return lines


def summary(result: dict[str, Any]) -> str:
    lines = [
        f"image   {result['name']}  {result['image'][:19]}  {size(result['size'])} in {len(result['layers'])} layers"
    ]
    for item in result["products"]:
        label = "docker" if item["kind"] == "docker" else "file"
        lines.append(f"{label:<7} {item['place']}  {size(item['size'])}{'' if item['made'] else '  (was there)'}")
    lines += [f"data    {path}" for path in result["data"]]
    for check in result["checks"]:
        lines.append(
            f"tested  under {check['runtime']}, {check['seconds']:.0f} s{' (before, same image)' if check['known'] else ''}"
        )
    if not result["checks"]:
        lines.append(
            "tested  no: nothing here can run the image; `build.py verify` does it where Apptainer or Docker is"
        )
    return "\n".join(lines + [f"run     {line}" for line in result["run"]])


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def open_store(path: Path | None) -> Store:
    """The user's own store, before the one that colleagues publish to when there is one."""
    from builder.config import read_config
    from builder.store import Store, default_root

    root = path.expanduser().absolute() if path else default_root()
    shared = click.get_current_context().find_root().params.get("shared") or read_config().shared
    if shared is None:
        return Store(root)
    from builder.shared import open_shared

    return Store(root, open_shared(Path(shared).expanduser().absolute()))


def bound(arguments: tuple[str, ...]) -> dict[str, str]:
    pairs = [item.partition("=") for item in arguments]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise UsageError(f"--arg {name}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def resolved(recipe: str, stack: str | None, arguments: tuple[str, ...], gpu_arch: str | None = None) -> Chain:
    from builder.chain import resolve
    from builder.recipe import find_recipe

    return resolve(find_recipe(recipe), stack=stack, arguments=bound(arguments), gpu_arch=gpu_arch)


@main.command()
@click.argument("recipe")
@chain_options
@json_option
@click.pass_obj
def plan(
    store_path: Path | None,
    /,
    recipe: str,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what would run and why, layer by layer. Nothing is run or written.

    \b
    Examples:
      build.py plan lora-opencalm
      build.py plan mine --gpu-arch 8.0,9.0
    """
    from builder.pipeline import plan as make_plan

    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    actions = make_plan(chain, store)
    if as_json:
        rows = [{"layer": a.layer.name, "kind": a.layer.kind, "cache_key": a.layer.cache_key, "stored": a.stored is not None,
                 "reason": a.reason, "inputs": a.layer.inputs,
                 **({"needs": [{"step": need.step.name, "cache_key": need.step.cache_key, "stored": need.is_stored,
                                "reason": need.reason, "inputs": need.step.inputs} for need in a.needs]} if a.needs else {})}
                for a in actions]  # fmt: skip
        click.echo(json.dumps(rows, indent=1))
        return
    rows_of_text = [
        row
        for action in actions
        for row in (
            *((need.is_stored, f"{need.step.name} *", need.step.cache_key, need.reason) for need in action.needs),
            (action.stored is not None, action.layer.name, action.layer.cache_key, action.reason),
        )
    ]
    width = max(len(name) for _, name, _, _ in rows_of_text)
    for is_stored, name, key, reason in rows_of_text:
        click.echo(f"{'keep ' if is_stored else 'build'}  {name:<{width}}  {key[:12]}  {reason}")
    if any(action.needs for action in actions):
        click.echo("* for a build stage: nothing of it ships but what it hands over")
    if gpu_arch:
        from builder.wheels import savings

        click.echo(savings(chain, store))


@main.command()
@click.argument("recipe")
@click.option(
    "--to", "target", type=click.Choice(["dockerfile", "def"]), required=True, help="Which kind of plain file."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="An empty folder (default: ./<recipe>-<kind>).")
@chain_options
def render(
    recipe: str, target: str, output: Path | None, stack: str | None, gpu_arch: str | None, arguments: tuple[str, ...]
) -> None:
    """Write the chain as one plain Dockerfile or definition file, in a folder with the files it copies.

    \b
    Examples:
      build.py render lora-opencalm --to dockerfile -o context
      build.py render lora-opencalm --to def
    """
    from builder.render import render as write

    click.echo(
        write(resolved(recipe, stack, arguments, gpu_arch), target, output or Path(f"{Path(recipe).name}-{target}"))
    )


@main.command(name="list")
@json_option
@click.pass_obj
def list_(store_path: Path | None, /, as_json: bool) -> None:
    """List the recipes and the images in the store.

    \b
    Example:
      build.py list
    """
    from builder.recipe import find_recipe, recipe_folders

    store = open_store(store_path)
    images = store.images()
    rows: list[dict[str, Any]] = [{"recipe": name, "description": find_recipe(name).file.description,
             "image": images.get(name, {}).get("config")} for name in recipe_folders()]  # fmt: skip
    rows += [
        {"recipe": name, "description": "", "image": ref["config"]}
        for name, ref in images.items()
        if name not in {row["recipe"] for row in rows}
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["recipe"]) for row in rows)
    for row in rows:
        click.echo(f"{row['recipe']:<{width}}  {(row['image'] or 'not built')[:19]:<19}  {row['description']}")


@main.command()
@click.argument("image", metavar="RECIPE|FILE.sif")
@json_option
@click.pass_obj
def inspect(store_path: Path | None, /, image: str, as_json: bool) -> None:
    """Say what an image in the store, or a SIF file, is made of.

    \b
    Examples:
      build.py inspect lora-opencalm
      build.py inspect ./lora-opencalm.sif --json
    """
    from builder.inspect import describe, text

    about = describe(image, open_store(store_path))
    click.echo(json.dumps(about, indent=1) if as_json else text(about))


@main.command()
@click.argument("recipe")
@click.option(
    "--sif", type=click.Path(path_type=Path), help="The file to test (default: ./<recipe>.sif when it is there)."
)
@click.option(
    "--rebuild", "again", is_flag=True, help="Instead build it again in an empty store, and compare every byte."
)
@click.option(
    "--engine", default="auto", metavar="auto|apptainer|buildah|docker", help="What runs the scripts of --rebuild."
)
@chain_options
@json_option
@click.pass_obj
def verify(
    store_path: Path | None,
    /,
    recipe: str,
    sif: Path | None,
    again: bool,
    engine: str,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Prove an image again: every blob's digest, and every %test in the finished image on the runtimes here.

    \b
    Examples:
      build.py verify lora-opencalm
      build.py verify lora-opencalm --rebuild --engine docker      the same image again? names the files that differ
    """
    from builder.executors import check_name
    from builder.inspect import drift_of, prove

    check_name(engine)
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    if again:
        say_rebuilt(chain, store, engine, bound(arguments).get("mirror"), as_json)
        return
    proven, checks = prove(chain, store, sif)
    if as_json:
        said = {"image": proven.image_id, "drift": drift_of(proven.layers),
                "checks": [{"runtime": item.runtime, "seconds": item.seconds} for item in checks]}  # fmt: skip
        click.echo(json.dumps(said, indent=1))
    else:
        for line in drift_of(proven.layers):
            click.echo(f"drift   {line}")
        for item in checks:
            click.echo(f"passed under {item.runtime}, {item.seconds:.0f} s")


def say_rebuilt(chain: Chain, store: Store, engine: str, mirror: str | None, as_json: bool) -> None:
    from builder.pipeline import Options
    from builder.progress import Progress
    from builder.rebuild import rebuild, refuse_differences

    done = rebuild(chain, store, Options(engine=engine, mirror=mirror), Progress())
    if as_json:
        rows = [{"name": item.name, "same": item.same, "diff_id": [item.before.diff_id, item.after.diff_id],
                 "digest": [item.before.digest, item.after.digest], "executor": [item.before.executor, item.after.executor],
                 "seconds": item.after.seconds, "differing": list(item.differing)} for item in done.layers]  # fmt: skip
        click.echo(
            json.dumps({"same": done.same, "image": done.image_ids, "sif": done.sif_digests, "layers": rows}, indent=1)
        )
    refuse_differences(chain.recipe.name, done)
    if not as_json:
        seconds = sum(item.after.seconds for item in done.layers)
        click.echo(f"the same again, in {seconds:.0f} s: {len(done.layers)} layers, "
                   f"config {done.image_ids[0][:19]}, SIF {done.sif_digests[0][:19]}")  # fmt: skip


@main.command()
@click.argument("recipe")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file (default: ./<recipe>.bundle).")
@click.option("--with", "snapshots", multiple=True, type=click.Path(path_type=Path), metavar="PATH",
              help="A model or data set to put in, a file or a folder; may repeat.")  # fmt: skip
@click.option("--engine", default="auto", metavar="auto|apptainer|buildah|docker", help="What fetches the packages.")
@chain_options
@json_option
@click.pass_obj
def bundle(
    store_path: Path | None,
    /,
    recipe: str,
    output: Path | None,
    snapshots: tuple[Path, ...],
    engine: str,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Put all that a built recipe is made from into one file, for `image --offline` elsewhere.

    \b
    Examples:
      build.py bundle lora-opencalm -o lora-opencalm.bundle
      build.py bundle hello --with models/open-calm-3b
    """
    from builder.bundle import write_bundle
    from builder.executors import check_name
    from builder.inspect import stored_image
    from builder.pipeline import Options
    from builder.progress import Progress

    check_name(engine)
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    made = stored_image(chain, store)
    out = output or Path(f"{made.name}.bundle")
    options = Options(engine=engine, mirror=bound(arguments).get("mirror"))
    about = write_bundle(made, store, out, options, Progress(), snapshots=snapshots)
    total = out.stat().st_size
    parts = {
        part: sum(name.startswith(f"{part}/") for name in about["files"])
        for part in ("debs", "wheels", "compiled", "with")
    }
    if as_json:
        click.echo(json.dumps({"file": str(out), "size": total, **parts}))
        return
    click.echo(f"{out}  {size(total)}: {parts['debs'] - 2} Debian packages, {parts['wheels']} Python packages, "
               f"{parts['with']} files given\nuse it  build.py image {recipe} --offline --bundle {out}")  # fmt: skip


@main.command()
@click.argument("before", metavar="IMAGE|FILE.sif")
@click.argument("after", metavar="IMAGE|FILE.sif")
@json_option
@click.pass_obj
def diff(store_path: Path | None, /, before: str, after: str, as_json: bool) -> None:
    """Say what is different between two images: layers, packages, environment, files.

    \b
    Examples:
      build.py diff lora-opencalm lora-opencalm-cu124
      build.py diff last-year.sif ./lora-opencalm.sif --json
    """
    from builder.diff import compare, open_image, text

    store = open_store(store_path)
    with open_image(before, store) as one, open_image(after, store) as other:
        about = compare(one, other)
    click.echo(json.dumps(about, indent=1) if as_json else text(about))


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
@click.argument("words", nargs=-1, metavar="[TASK] [-- ARGS…]", type=click.UNPROCESSED)
@click.option("--cpu", is_flag=True, help="Without GPUs, even when there are some.")
@click.option("--stack", help="The image of another stack than the recipe's own.")
@click.option("--sif", type=click.Path(path_type=Path), help="The file to run (default: ./<recipe>.sif).")
@click.option(
    "--bind",
    "binds",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder to see inside, at its own path; may repeat. This one, caches and what ARGS name are seen anyway.",
)
@click.option("--stage", is_flag=True, help="Copy the SIF to the node's own disk first, once for all jobs there.")
@click.option("--force", is_flag=True, help="Even where doctor says that it will fail.")
@click.option("--dry-run", is_flag=True, help="Print the command, run nothing.")
@click.pass_obj
def run(
    store_path: Path | None,
    /,
    recipe: str,
    words: tuple[str, ...],
    cpu: bool,
    stack: str | None,
    sif: Path | None,
    binds: tuple[Path, ...],
    stage: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Run a task of a recipe's image: Apptainer or SingularityCE with the SIF, else Docker.

    Of your environment the image sees what a job needs: its scheduler's variables, NCCL's, proxies, HF_TOKEN; not
    LD_LIBRARY_PATH or PYTHONPATH.

    \b
    Examples:
      build.py run lora-opencalm train -- --smoke
      build.py run lora-opencalm train --stage -- --data=/groups/mine/talk.jsonl --output=/scratch/me/run
      build.py run hello --cpu
    """  # fmt: skip
    import shlex

    from builder import launch
    from builder.machine import has_gpu
    from builder.recipe import find_recipe

    found = find_recipe(recipe)
    if words:
        found.task(words[0])
    name = found.image_name(stack)
    sif = sif or Path(f"{name}.sif")
    wish = launch.Wish(
        words=words, gpu=not cpu and has_gpu(), binds=binds, terminal=sys.stdin.isatty() and sys.stdout.isatty()
    )
    program = launch.choose_runtime(name, sif)
    if not dry_run:
        if not force:
            warn_or_refuse(store_path, program, sif, name, gpu=wish.gpu)
        if stage and Path(program).name != "docker":
            sif = launch.stage(sif, os.environ, lambda line: click.echo(line, err=True))
    ready = launch.launch(program, sif, f"ekiben/{name}:latest", wish, os.environ)
    click.echo(f"+ {shlex.join(ready.argv)}", err=not dry_run)
    for variable in ready.kept_out:
        click.echo(f"{variable} is not passed on: the image has its own", err=True)
    if not dry_run:
        sys.stdout.flush()
        os.execvpe(ready.argv[0], ready.argv, ready.environment)


def warn_or_refuse(store_path: Path | None, program: str, sif: Path, name: str, *, gpu: bool) -> None:
    """What doctor says about running it here, before it is run. Errors: UnfitError when it will fail."""
    from builder.doctor import check_here, refuse
    from builder.store import Store

    try:
        store = open_store(store_path)
    except StoreError:  # what runs needs none: the image's facts are read again each time
        store = Store(Path(os.devnull))
    findings = check_here(store, program, sif, name, gpu=gpu, tell=lambda line: click.echo(line, err=True))
    refuse(findings)
    warn(findings)


def warn_or_refuse_there(store: Store, site: SiteFile, sif: Path, *, gpu: bool) -> None:
    """The same for a site's compute nodes, before a job waits for them."""
    from builder.doctor import check_image, check_runtimes, known_stacks, refuse
    from builder.facts import facts_of_sif

    facts = facts_of_sif(sif, store, lambda line: click.echo(line, err=True))
    findings = check_image(site, facts, known_stacks()) if gpu else check_runtimes(site.runtimes, site.node, facts)
    refuse(findings)
    warn(findings)


def warn(findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.level == "but":
            click.echo(f"{finding.topic}: {finding.said}" + (f" ({finding.do})" if finding.do else ""), err=True)


@main.command()
@click.argument("image", required=False, metavar="[RECIPE|FILE.sif]")
@click.argument("words", nargs=-1, metavar="[TASK] [-- ARGS…]", type=click.UNPROCESSED)
@click.option(
    "--site", help="A site of sites/, one of your own, or a path to a profile: its compute nodes, not this machine."
)
@click.option(
    "--record", is_flag=True, help="Write this machine as a site profile; best in a batch job on a compute node."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="With --record: the file (default: stdout). Else: where the image would be written.",
)
@chain_options
@json_option
@click.pass_obj
def doctor(
    store_path: Path | None,
    /,
    image: str | None,
    words: tuple[str, ...],
    site: str | None,
    record: bool,
    output: Path | None,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say whether it will run, and why: on this machine, or on a site's compute nodes from a login node without GPU.

    Exit code 10 when it will fail. Facts of an image are read from its layers; only with TASK something is run: its
    --dry-run, without a GPU, for the memory it expects.

    \b
    Examples:
      build.py doctor                              can one build here, which stacks run on these GPUs
      build.py doctor lora-opencalm                this image on this machine
      build.py doctor --site abci-3.0 lora-opencalm
      build.py doctor --site abci-2.0 lora-opencalm train -- --data=talk.jsonl
      build.py doctor --record -o ~/.config/ekiben/sites/mine.yaml
    """  # fmt: skip
    from builder.doctor import consult, report, text, worst
    from builder.site import find_site

    if record:
        if image or site or as_json:
            raise UsageError("--record describes this machine; leave out the image, --site and --json")
        record_machine(output)
        return
    place = find_site(site).file if site else None
    sections = consult(open_store(store_path), image, place, output or Path(), words=words, stack=stack,
                       resolved=lambda name: resolved(name, stack, arguments, gpu_arch),
                       tell=lambda line: click.echo(line, err=True))  # fmt: skip
    click.echo(json.dumps(report(sections), indent=1) if as_json else text(sections))
    if any(worst(section.findings) == "fail" for section in sections if section.does != "suit"):
        sys.exit(UnfitError.exit_code)


def record_machine(output: Path | None) -> None:
    import socket
    from datetime import UTC, datetime

    from builder.files import write_whole
    from builder.machine import profile_text, record_site

    host = socket.gethostname()
    name = output.stem if output else host.split(".")[0]
    made: SiteFile = record_site(name, os.environ)
    said = f"Recorded by `build.py doctor --record` on {host}, {datetime.now(UTC):%Y-%m-%d}. What could not be seen is left out."
    text = profile_text(made, said)
    if output is None:
        click.echo(text, nl=False)
        return
    write_whole(output, text)
    click.echo(output)


@main.command()
@click.argument("recipe")
@click.option("--to", "place", type=click.Path(path_type=Path), required=True, help="The folder colleagues read.")
@click.option("--version", metavar="VERSION", help="Default: the date, as 2026.11.21.")
@click.option(
    "--tag", "tags", multiple=True, help="A further link beside `current`; may repeat. Its image is never pruned."
)
@click.option("--pin", is_flag=True, help="Never prune this version.")
@click.option("--no-current", is_flag=True, help="Leave the link `current` as it is.")
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in the SIF before it is seen.")
@click.option(
    "--engine", default="auto", show_default=True, metavar="auto|apptainer|buildah|docker", help="What builds."
)
@chain_options
@json_option
@click.pass_obj
def publish(
    store_path: Path | None, /, recipe: str, place: Path, version: str | None, tags: tuple[str, ...], pin: bool,
    no_current: bool, no_verify: bool, engine: str, stack: str | None, gpu_arch: str | None, arguments: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Put an image and its layers where others run it and build on it; what is not built yet is built.

    \b
    Examples:
      build.py publish lora-opencalm --to /groups/lab/ekiben
      build.py publish lora-opencalm --to /groups/lab/ekiben --version 1.2 --tag stable
    """
    from builder.config import read_config
    from builder.executors import check_name
    from builder.pipeline import Options, build
    from builder.progress import Progress
    from builder.publish import publish as put

    check_name(engine)
    chain, store, progress = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path), Progress()
    options = Options(engine=engine, mirror=bound(arguments).get("mirror"), registry=read_config().registry)
    image = build(chain, store, options, progress)
    done = put(image, store, place.expanduser().absolute(), progress, version=version, tags=tags, pin=pin,
               current=not no_current, check=not no_verify)  # fmt: skip
    if as_json:
        click.echo(json.dumps({**done.record, "path": str(done.sif), "moved": done.moved}, indent=1))
        return
    task = next(iter(chain.recipe.file.tasks), "")
    shown = done.sif if no_current else done.sif.with_name("current")
    click.echo(f"published  {done.sif}  {size(done.record['size'])}"
               + (f", {size(done.moved)} of layers moved" if done.made else "  (was there)"))  # fmt: skip
    click.echo(f"run        singularity exec --nv {shown} {task}")
    click.echo(f"build on   EKIBEN_SHARED={place.expanduser().absolute()} make image recipe={recipe}")


@main.command()
@click.argument("recipe")
@click.argument("reference", metavar="REF")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["docker", "sif", "layers"]),
    default="docker",
    show_default=True,
    help="What it is there: for docker pull, for apptainer pull oras://, or layers by key for EKIBEN_REGISTRY.",
)
@chain_options
@json_option
@click.pass_obj
def push(
    store_path: Path | None, /, recipe: str, reference: str, format_: str, stack: str | None, gpu_arch: str | None,
    arguments: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Send an image to a registry; what the registry has is not sent again, and what broke off goes on.

    \b
    Examples:
      build.py push lora-opencalm registry.example.org/lab/lora-opencalm:1.2
      build.py push lora-opencalm registry.example.org/lab/lora-opencalm:1.2-sif --format sif
      build.py push lora-opencalm registry.example.org/lab/layers --format layers
    """
    from builder.config import read_config
    from builder.pipeline import Options, build
    from builder.progress import Progress
    from builder.push import push as send
    from builder.registry import Reference

    place, progress = Reference.parse(reference), Progress()
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    options = Options(mirror=bound(arguments).get("mirror"), registry=read_config().registry)
    done = send(build(chain, store, options, progress), store, place, format_, progress)
    if as_json:
        click.echo(
            json.dumps({"place": done.place, "sent": done.sent, "mounted": done.mounted, "there": done.there}, indent=1)
        )
        return
    click.echo(f"pushed  {done.place}  {size(done.sent)} sent, {done.mounted} blobs mounted, {done.there} were there")
    lines = {"docker": f"docker pull {place}", "sif": f"apptainer pull oras://{place}",
             "layers": f"EKIBEN_REGISTRY={reference} make image recipe={recipe}"}  # fmt: skip
    click.echo(f"use     {lines[format_]}")


@main.command()
@click.argument("reference", metavar="REF")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the SIF goes (default: ./<name>.sif).")
@json_option
@click.pass_obj
def pull(store_path: Path | None, /, reference: str, output: Path | None, as_json: bool) -> None:
    """Take an image from a registry as a SIF: one that was pushed as SIF, whose broken download goes on, or as Docker image.

    \b
    Examples:
      build.py pull registry.example.org/lab/lora-opencalm:1.2-sif
      build.py pull registry.example.org/lab/lora-opencalm:1.2 -o /tmp/image.sif
    """
    from builder.progress import Progress
    from builder.pull import pull as take
    from builder.registry import Reference

    product, digest = take(Reference.parse(reference), open_store(store_path), output, Progress())
    if as_json:
        click.echo(
            json.dumps(
                {"path": product.place, "size": product.size, "manifest": digest, "made": product.made}, indent=1
            )
        )
        return
    click.echo(f"pulled  {product.place}  {size(product.size)}  {digest[:19]}{'' if product.made else '  (was there)'}")
    click.echo(f"run     singularity exec --nv {product.place}")


@main.command()
@click.argument("images", nargs=-1, metavar="[IMAGE…]")
@click.option(
    "--in", "place", type=click.Path(path_type=Path), help="A folder that was published to, instead of the store."
)
@click.option(
    "--unused-for",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="With --in: keep what was used in the last DAYS.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    metavar="DAYS",
    help="With --in: what goes is moved aside, and removed DAYS later: longer than the longest job.",
)
@click.option("--engines", is_flag=True, help="Also remove the layers that docker and buildah keep for the next build.")
@click.option(
    "--wheels",
    is_flag=True,
    help="Also remove compiled wheels that no image was made with (imported ones stay), and what compilers left unfinished.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, remove nothing.")
@click.pass_obj
def prune(
    store_path: Path | None, /, images: tuple[str, ...], place: Path | None, unused_for: float, grace: float,
    engines: bool, wheels: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Make room: forget the named images, then remove every blob no image needs. Compiled wheels stay.

    With --in, in a shared folder: versions that are pinned, tagged (`current` is a tag) or were used lately stay.

    \b
    Examples:
      build.py prune --dry-run
      build.py prune hello --engines
      build.py prune --in /groups/lab/ekiben --unused-for 60
    """
    if place:
        prune_place(place.expanduser().absolute(), images, unused_for, grace, dry_run)
        return
    if engines and dry_run:
        raise UsageError("--engines removes at once; leave out --dry-run, or --engines")
    gone = open_store(store_path).prune(forget=images, wheels=wheels, dry_run=dry_run)
    total = sum(count for _, count in gone)
    click.echo(f"{'would remove' if dry_run else 'removed'} {len(gone)} blobs, {size(total)}")
    if engines:
        from builder.executors import EXECUTORS, load

        for name in EXECUTORS:
            if (executor := load(name)).unavailable() is None and (count := executor.forget_images()):
                click.echo(f"removed {count} layer images of {name}")


def prune_place(place: Path, names: tuple[str, ...], unused_for: float, grace: float, dry_run: bool) -> None:
    from builder.publish import prune as prune_published

    fates, aside, removed = prune_published(place, names=names, unused_for=unused_for, grace=grace, dry_run=dry_run)
    would = "would be " if dry_run else ""
    for fate in fates:
        click.echo(f"{'keep  ' if fate.kept else 'remove'}  {fate.file}  {size(fate.size)}  {fate.why}")
    click.echo(
        f"{size(aside)} {would}moved aside, to be removed in {grace:g} days; {size(removed)} of before {would}removed"
    )


@main.command()
@click.argument("stack", default="cu130", metavar="[STACK|FOLDER]")
@click.option(
    "--check", is_flag=True, help="Change nothing; say what is out of date and end with exit code 9 if something is."
)
@click.option("--keep", is_flag=True, help="Keep every version that still fits: only what was asked for anew changes.")
@click.option("--mirror", metavar="URI", help="A Debian archive (default: as apt has it here).")
def lock(stack: str, check: bool, keep: bool, mirror: str | None) -> None:
    """Resolve a stack's lock files: Python packages with hashes, Debian packages with versions.

    \b
    Examples:
      build.py lock
      build.py lock cu130 --check
      build.py lock cu130 --keep                  after a line was added to an .in file
    """
    from builder.lock import refresh

    for line in refresh(stack, check=check, keep=keep, mirror=mirror):
        click.echo(line)


@main.group()
def wheels() -> None:
    """Compiled wheels in the store: list them, take one elsewhere, bring one in.

    \b
    Examples:
      build.py wheels list
      build.py wheels export flash-attn -o /media/stick
      build.py wheels import mine /media/stick/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl
    """


@wheels.command(name="list")
@json_option
@click.pass_obj
def list_wheels(store_path: Path | None, /, as_json: bool) -> None:
    """List the wheels: package, what they are compiled for, size, and what compiling took.

    \b
    Example:
      build.py wheels list
    """
    from dataclasses import asdict

    kept = [item for item in open_store(store_path).results() if item.wheel]
    if as_json:
        click.echo(json.dumps([asdict(item) for item in kept], indent=1))
        return
    for item in kept:
        about = item.inputs
        click.echo(f"{item.wheel:<12}  {item.key[:12]}  torch {about['torch']}  CUDA {about['cuda']}  Python {about['python']}  "
                   f"for {' '.join(about['capabilities'])}  {size(item.size)}  {item.origin}"
                   + (f" in {item.seconds:.0f} s" if item.seconds else ""))  # fmt: skip
    if not kept:
        click.echo("no compiled wheels here; `build.py image` compiles what a recipe needs", err=True)


@wheels.command(name="export")
@click.argument("name", metavar="PACKAGE|KEY")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(), help="A folder (default: this one).")
@click.pass_obj
def export_wheel(store_path: Path | None, /, name: str, output: Path) -> None:
    """Write a wheel and its record (<wheel>.json), for a machine that cannot compile. Keep the two together.

    \b
    Example:
      build.py wheels export deepspeed -o /media/stick
    """
    from builder.wheels import export_wheel as write
    from builder.wheels import find_wheel

    store = open_store(store_path)
    click.echo(write(store, find_wheel(store, name), output))


@wheels.command(name="import")
@click.argument("recipe")
@click.argument("wheel", metavar="FILE.whl", type=click.Path(path_type=Path))
@click.option("--sha256", metavar="HASH", help="Refuse a file with another hash.")
@click.option("--engine", default="auto", show_default=True, metavar="auto|apptainer|buildah|docker", help="What runs the layer's %test.")  # fmt: skip
@chain_options
@click.pass_obj
def import_wheel(
    store_path: Path | None,
    /,
    recipe: str,
    wheel: Path,
    sha256: str | None,
    engine: str,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Take a wheel compiled elsewhere for the layer of RECIPE that would compile it, once it is proven there.

    \b
    Examples:
      build.py wheels import mine /media/stick/deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl
      build.py wheels import mine apex-0.1-cp311-cp311-linux_x86_64.whl --sha256 4f2a…
    """
    from builder.executors import check_name
    from builder.pipeline import Options, adopt_wheel
    from builder.progress import Progress

    check_name(engine)
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    options = Options(engine=engine, mirror=bound(arguments).get("mirror"))
    taken = adopt_wheel(chain, store, options, Progress(), wheel, sha256)
    click.echo(f"{taken.wheel} {taken.key[:12]}: proven and kept; the next build of {chain.recipe.name} uses it")


def runs_option(command: Command) -> Command:
    return click.option(
        "--runs", type=click.Path(path_type=Path), envvar="EKIBEN_RUNS", default=Path("ekiben-runs"), show_default=True,
        help="The folder of runs; it must be on a file system that the compute nodes share. Or $EKIBEN_RUNS.",
    )(command)  # fmt: skip


@main.command()
@click.argument("recipe")
@click.argument("words", nargs=-1, required=True, metavar="TASK [-- ARGS… [+ TASK ARGS…]]", type=click.UNPROCESSED)
@click.option("--scheduler", metavar="slurm|sge|pbs", help="Default: the site's, else the one that is here.")
@click.option("--site", help="A profile of sites/ or of your own: what the cluster's nodes are, and how it is asked.")
@click.option("--resource", metavar="NAME", help="One of the site's kinds of nodes. Default: the smallest that does.")
@click.option("--group", metavar="NAME", help="Which group or account pays, where the site wants to know.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="For tasks that run on several.")
@click.option(
    "--gpus-per-node", "gpus", type=click.IntRange(0), help="Default: what the site's kind of node has, else 0."
)
@click.option("--cpus-per-node", "cpus", type=click.IntRange(1), help="CPUs, where the kind of node leaves a choice.")
@click.option("--processes-per-node", "processes", type=click.IntRange(1), help="Default: one for each GPU.")
@click.option("--time", "walltime", metavar="H:MM:SS", help="Walltime of one job; also 90m, 2h, 1-12:00:00.")
@click.option("--notice", default="5m", show_default=True, help="How long before its end a job is told to save.")
@click.option("--max-resubmits", type=click.IntRange(0), default=20, show_default=True,
              help="How often a job that saved goes back into the queue.")  # fmt: skip
@click.option("--seeds", metavar="1,2,3", help="A job for each; {seed} in ARGS is replaced.")
@click.option(
    "--option", "options", multiple=True, metavar="WORDS", help="An option of the scheduler's own; may repeat."
)
@click.option("--sif", type=click.Path(path_type=Path), help="The file to run (default: ./<recipe>.sif).")
@click.option("--stage", is_flag=True, help="Copy the SIF to each node's own disk first, once for all jobs there.")
@click.option("--force", is_flag=True, help="Even where doctor says that it will fail.")
@click.option("--wait", is_flag=True, help="Stay until the run is over; the exit code is 1 when a job failed.")
@click.option("--dry-run", is_flag=True, help="Print the job scripts, submit nothing.")
@runs_option
@json_option
@click.pass_obj
def submit(
    store_path: Path | None, /, recipe: str, words: tuple[str, ...], scheduler: str | None, site: str | None, runs: Path, sif: Path | None,
    walltime: str | None, notice: str, seeds: str | None, force: bool, wait: bool, dry_run: bool, as_json: bool, **wanted: Any,
) -> None:  # fmt: skip
    """Submit a task to Slurm, Grid Engine or PBS, on one node or several; it goes back into the queue until it is done.

    \b
    Examples:
      build.py submit lora-opencalm train --nodes 2 --gpus-per-node 4 --time 2:00:00 -- --data rows.jsonl
      build.py submit lora-opencalm train --site abci-3.0 --group gaa00000 --resource rt_HF --dry-run
      build.py submit lora-opencalm train --gpus-per-node 1 --seeds 1,2,3
      build.py submit lora-opencalm --gpus-per-node 1 -- train --data rows.jsonl + merge --adapter result/adapter
    """
    from builder import submit as jobs
    from builder.recipe import find_recipe
    from builder.schedulers import choose, load, seconds_of
    from builder.site import find_site

    found = find_recipe(recipe)
    profile = find_site(site) if site else None
    if scheduler is None:
        if profile and profile.file.scheduler is None:
            raise UsageError(f"{profile.name} names no scheduler; say --scheduler")
        scheduler = profile.file.scheduler.kind if profile and profile.file.scheduler else choose()
    load(scheduler)
    asked = jobs.Wanted(
        seconds=seconds_of(walltime) if walltime else None, notice=seconds_of(notice),
        seeds=tuple(seeds.split(",")) if seeds else (), **wanted,
    )  # fmt: skip
    run = jobs.plan(
        found, words, asked, scheduler=scheduler, site=profile, sif=sif or Path(f"{found.name}.sif"), runs=runs
    )
    if dry_run:
        click.echo("\n".join(jobs.script(run, step) for step in run.steps))
        return
    if profile and run.sif.is_file() and not force:
        warn_or_refuse_there(open_store(store_path), profile.file, run.sif, gpu=any(step.gpus for step in run.steps))
    ids = jobs.submit(run)
    if as_json:
        click.echo(json.dumps({"run": str(run.folder), "jobs": ids}, indent=1))
    else:
        click.echo(f"run     {run.folder}")
        for step, id in ids.items():
            click.echo(f"job     {id}  {step}")
        click.echo(f"watch   build.py logs -f {run.folder.name}")
    if wait:
        (submitted,) = jobs.find_runs([str(run.folder)], runs)
        rows = jobs.wait(submitted, lambda line: click.echo(line, err=True))
        if any(row.state != "done" for row in rows):
            raise click.exceptions.Exit(1)


@main.command()
@click.argument("names", nargs=-1, metavar="[RUN…]")
@runs_option
@json_option
def status(names: tuple[str, ...], runs: Path, as_json: bool) -> None:
    """Say how the jobs of runs are. A run is named by its folder, its name, or a job's id.

    \b
    Examples:
      build.py status
      build.py status 1234 --json
    """
    import dataclasses

    from builder.submit import find_runs
    from builder.submit import status as ask

    rows = ask(find_runs(names, runs))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        again = f"  (start {row.resubmitted + 1})" if row.resubmitted else ""
        click.echo(f"{row.run}  {row.job:<12}  {row.id:<8}  {row.state:<9}  {row.detail}{again}".rstrip())


@main.command()
@click.argument("name", required=False, metavar="[RUN]")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@runs_option
def logs(name: str | None, job: str | None, follow: bool, runs: Path) -> None:
    """Print what a job of a run wrote: by default the newest run, and the job that began last.

    \b
    Examples:
      build.py logs -f
      build.py logs 1234 2-merge
    """
    from builder.submit import find_runs, log_lines

    found = find_runs([name] if name else [], runs)
    if not found:
        raise UsageError(f"there is no run in {runs}", hint="--runs DIR")
    for line in log_lines(found[-1], job, follow=follow):
        click.echo(line, nl=False)


@main.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN…")
@runs_option
def cancel(names: tuple[str, ...], runs: Path) -> None:
    """Take the jobs of runs out of the queue, running ones as well; none goes back into it.

    \b
    Example:
      build.py cancel 1234
    """
    from builder.submit import cancel as end
    from builder.submit import find_runs

    for run in find_runs(names, runs):
        ids = end(run)
        click.echo(f"{run.folder.name}: {' '.join(['cancelled', *ids]) if ids else 'nothing to cancel, all is over'}")

"""Commands that make, prove and describe images, and what they are locked to."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from builder.cli.group import (
    bound,
    chain_options,
    json_option,
    main,
    open_store,
    resolved,
    signature_options,
    size,
)
from builder.errors import StoreError, UsageError

if TYPE_CHECKING:
    from builder.assemble import Product
    from builder.chain import Chain
    from builder.pipeline import Image
    from builder.store import Store
    from builder.verify import Check


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
    if output and output.is_dir():
        raise UsageError(f"-o {output}: is a folder; name a file in it, {output / Path(recipes[0]).name}.sif say")
    if output and len(recipes) * max(1, len(set(formats) - {"docker"})) > 1:
        raise UsageError("-o names one file; build one recipe in one format, or leave -o out")
    # What is wrong in any is said before the first.
    chains = [resolved(recipe, stack, arguments, gpu_arch) for recipe in recipes]
    made = [make_image(store_path, chain, formats, output, flat, not no_verify, bound(arguments).get("mirror"), gpu_arch, **options)
            for chain in chains]  # fmt: skip
    results = [result for result, _ in made]
    if as_json:
        said = json.dumps(results if len(results) > 1 else results[0], indent=1)
    else:
        said = "\n".join(summary(result, asked=not no_verify) for result in results)
    click.echo(said)
    if len(made) == 1 and (keep := made[0][1]):
        keep(recipes[0], said)


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
) -> tuple[dict[str, Any], Callable[[str, str], None] | None]:
    """The result, and how to keep what is said of it where all of it was there."""
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
    found = f"{len(missing)} of {len(actions)} layers to build" if missing else f"all {len(actions)} layers are stored"
    told = f"{chain.recipe.name}: {found}"
    progress.tell(told)
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
        built, products = deliver(
            chain, store, options, progress, formats=formats, output=output, flat=flat, hashed=check
        )
    checks = []
    if check:
        from builder.verify import verify

        checks = verify(built, store, products, progress)
    result = {
        "recipe": chain.recipe.name, "stack": chain.stack.name, "name": built.name, "image": built.image_id,
        "size": built.size,
        "layers": [{"name": layer.name, "diff_id": layer.diff_id, "digest": layer.digest, "size": layer.size} for layer in built.layers],
        "built": [action.layer.name for action in missing],
        "products": [{"kind": item.kind, "place": item.place, "size": item.size, "made": item.made, "sha256": item.sha256}
                     for item in products],
        "checks": [{"runtime": item.runtime, "seconds": item.seconds, "known": item.known} for item in checks],
        "data": [str(path) for path in data],
        "run": run_lines(chain, products),
    }  # fmt: skip
    is_settled = not (missing or bundle or gpu_arch or any(item.made for item in products)) and (
        not check or (len(checks) == len(products) and all(item.known for item in checks))
    )
    keep = partial(keep_answer, built, store, formats, products, checks, told)
    return result, keep if is_settled else None


def keep_answer(
    built: Image,
    store: Store,
    formats: Sequence[str],
    products: Sequence[Product],
    checks: Sequence[Check],
    told: str,
    asked: str,
    said: str,
) -> None:
    """What was said of an image that was all there, for the next time (builder.answers).

    All that resolve(), plan(), deliver() and verify() looked at is named here; where that cannot be done nothing is kept.
    """
    from builder import answers, dockersock
    from builder.chain import files_of
    from builder.config import config_files
    from builder.process import search_path
    from builder.recipe import HOUSE
    from builder.verify import check_name

    folders = [HOUSE / name for name in ("builder", "entrypoints", "images", "recipes")]
    if not built.chain.recipe.folder.is_relative_to(HOUSE / "recipes"):
        folders.append(built.chain.recipe.folder)
    sources = [Path(os.path.normpath(file.source)) for file in files_of(built.chain.layers) if file.source]
    is_seen = all(any(map(source.is_relative_to, folders)) for source in sources)
    tags = [item.place for item in products if item.kind == "docker"]
    is_askable = dockersock.place() is not None or (bool(formats) and not tags)  # where the daemon has a part in it
    if store.behind or not (is_seen and is_askable) or ("docker" in formats and not tags):
        return
    daemon = [tags[0], built.image_id] if tags else None if formats else False
    records = store.records(built.name, built.layers, [check_name(built, check.runtime) for check in checks])
    made = [item.place for item in products if item.kind != "docker"]
    # What was asked for may be a link, which can lead to another recipe tomorrow.
    files = [os.path.abspath(str(file)) for file in (asked, *config_files(), *records, *made, *search_path())]
    if kept := answers.record(folders=map(str, folders), files=files, daemon=daemon, told=told, said=said):
        with contextlib.suppress(StoreError):  # where it cannot be written it is found out each time
            store.put_answer(*kept)


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


def summary(result: dict[str, Any], *, asked: bool) -> str:
    lines = [
        f"image   {result['name']}  {result['image'][:19]}  {size(result['size'])} in {len(result['layers'])} layers"
    ]
    for item in result["products"]:
        label = "docker" if item["kind"] == "docker" else "file"
        lines.append(f"{label:<7} {item['place']}  {size(item['size'])}{'' if item['made'] else '  (there already)'}")
    lines += [f"data    {path}" for path in result["data"]]
    for check in result["checks"]:
        lines.append(
            f"tested  under {check['runtime']}, {check['seconds']:.0f} s{' (before, same image)' if check['known'] else ''}"
        )
    if not asked:
        lines.append(f"tested  no: --no-verify was given; `build.py verify {result['recipe']}` does it")
    elif not result["checks"]:
        lines.append(
            "tested  no: nothing here can run the image; `build.py verify` does it where Apptainer or Docker is"
        )
    return "\n".join(lines + [f"run     {line}" for line in result["run"]])


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
    """Say what would run and why, layer by layer. Nothing is run or written; a registry of layers is asked what it has.

    \b
    Examples:
      build.py plan lora-opencalm
      build.py plan mine --gpu-arch 8.0,9.0
    """
    from builder.config import read_config
    from builder.pipeline import plan as make_plan

    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    actions, registry = make_plan(chain, store), read_config().registry
    if registry and any(action.stored is None for action in actions):
        from builder.pipeline import ask_registry
        from builder.progress import Progress
        from builder.pull import LayerCache

        actions = ask_registry(actions, LayerCache(registry, Progress()))
    if as_json:
        rows = [{"layer": a.layer.name, "kind": a.layer.kind, "cache_key": a.layer.cache_key, "stored": a.stored is not None,
                 "in_registry": a.in_registry, "reason": a.reason, "inputs": a.layer.inputs,
                 **({"needs": [{"step": need.step.name, "cache_key": need.step.cache_key, "stored": need.is_stored,
                                "in_registry": need.in_registry, "reason": need.reason, "inputs": need.step.inputs} for need in a.needs]} if a.needs else {})}
                for a in actions]  # fmt: skip
        click.echo(json.dumps(rows, indent=1))
        return

    def deed(is_stored: bool, in_registry: bool) -> str:
        return "keep " if is_stored else "fetch" if in_registry else "build"

    rows_of_text = [
        row
        for action in actions
        for row in (
            *((deed(need.is_stored, need.in_registry), f"{need.step.name} *", need.step.cache_key, need.reason)
              for need in action.needs),
            (deed(action.stored is not None, action.in_registry), action.layer.name, action.layer.cache_key, action.reason),
        )
    ]  # fmt: skip
    width = max(len(name) for _, name, _, _ in rows_of_text)
    for done, name, key, reason in rows_of_text:
        click.echo(f"{done}  {name:<{width}}  {key[:12]}  {reason}")
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
@click.argument("recipe", metavar="RECIPE|FILE.sif|REF")
@click.option(
    "--sif", type=click.Path(path_type=Path), help="The file to test (default: ./<recipe>.sif when it is there)."
)
@click.option(
    "--rebuild", "again", is_flag=True, help="Instead build it again in an empty store, and compare every byte."
)
@click.option(
    "--engine", default="auto", metavar="auto|apptainer|buildah|docker", help="What runs the scripts of --rebuild."
)
@signature_options
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
    require_signature: bool,
    signer: str | None,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Prove an image again: every blob's digest, and every %test in the finished image on the runtimes here.

    Of a file, or an image in a registry: that it is whole, and signed by a key you know.

    \b
    Examples:
      build.py verify lora-opencalm
      build.py verify lora-opencalm --rebuild --engine docker      the same image again? names the files that differ
      build.py verify ./lora-opencalm.sif                          whole, and signed by a key of my keyring?
      build.py verify registry.example.org/lab/lora-opencalm:1.2 --key lab.asc
    """
    from builder.executors import check_name
    from builder.inspect import drift_of, prove
    from builder.pipeline import image_name
    from builder.sign import is_image

    check_name(engine)
    if is_image(recipe):  # of which nothing else can be proven
        say_signers(recipe, signer, as_json)
        return
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    if require_signature or signer:
        say_signers(str(sif or f"{image_name(chain)}.sif"), signer, False, err=as_json)
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


def say_signers(name: str, signer: str | None, as_json: bool, *, err: bool = False) -> None:
    from dataclasses import asdict

    from builder.sign import check_image

    image, signers = check_image(name, signer)
    if as_json:
        click.echo(json.dumps({"image": image, "signed": [asdict(key) for key in signers]}, indent=1))
        return
    for key in signers:
        click.echo(f"{image}  signed by {key}", err=err)


def say_rebuilt(chain: Chain, store: Store, engine: str, mirror: str | None, as_json: bool) -> None:
    from builder.pipeline import Options
    from builder.progress import Progress
    from builder.rebuild import rebuild, refuse_differences

    began = time.monotonic()
    done = rebuild(chain, store, Options(engine=engine, mirror=mirror), Progress())
    seconds = time.monotonic() - began
    if as_json:
        rows = [{"name": item.name, "same": item.same, "diff_id": [item.before.diff_id, item.after.diff_id],
                 "digest": [item.before.digest, item.after.digest], "executor": [item.before.executor, item.after.executor],
                 "seconds": item.after.seconds, "differing": list(item.differing)} for item in done.layers]  # fmt: skip
        click.echo(
            json.dumps({"same": done.same, "image": done.image_ids, "sif": done.sif_digests, "layers": rows}, indent=1)
        )
    refuse_differences(chain.recipe.name, done)
    if not as_json:
        click.echo(f"the same again, in {seconds:.0f} s: {len(done.layers)} layers, "
                   f"config {done.image_ids[0][:19]}, SIF {done.sif_digests[0][:19]}")  # fmt: skip


@main.command()
@click.argument("recipe")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file (default: ./<recipe>.bundle).")
@click.option("--with", "snapshots", multiple=True, type=click.Path(path_type=Path), metavar="PATH",
              help="A model or data set to put in, a file or a folder; may repeat.")  # fmt: skip
@click.option("--compiler", is_flag=True, help="Also what build stages stand on, to compile for other GPUs there.")
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
    compiler: bool,
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
    from builder.bundle import PARTS, write_bundle
    from builder.executors import check_name
    from builder.inspect import stored_image
    from builder.pipeline import Options
    from builder.progress import Progress

    check_name(engine)
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    made = stored_image(chain, store)
    out = output or Path(f"{made.name}.bundle")
    options = Options(engine=engine, mirror=bound(arguments).get("mirror"))
    about = write_bundle(made, store, out, options, Progress(), snapshots=snapshots, compiler=compiler)
    total = out.stat().st_size
    parts = {part: sum(name.startswith(f"{part}/") for name in about["files"]) for part in PARTS}
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
    from builder.contents import open_image
    from builder.diff import compare, text

    store = open_store(store_path)
    with open_image(before, store) as one, open_image(after, store) as other:
        about = compare(one, other)
    click.echo(json.dumps(about, indent=1) if as_json else text(about))


@main.command()
@click.argument("image", metavar="RECIPE|FILE.sif|RECORD.json")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A file (default: what it says is printed).")
@click.pass_obj
def sbom(store_path: Path | None, /, image: str, output: Path | None) -> None:
    """Write an image's bill of materials, CycloneDX 1.6 as JSON: its packages, their licences, layers and dependencies.

    RECORD.json lies beside a published SIF, which has its bill beside it, too (.cdx.json). The same image has the same bill.

    \b
    Examples:
      build.py sbom lora-opencalm -o lora-opencalm.cdx.json
      build.py sbom ./lora-opencalm.sif
    """
    from builder.files import write_whole
    from builder.progress import Progress
    from builder.sbom import bill_of

    bill = bill_of(image, open_store(store_path), Progress())
    if output is None:
        click.echo(bill, nl=False)
        return
    write_whole(output, bill)
    purls = [str(item.get("purl", "")) for item in json.loads(bill)["components"]]
    kinds = {"Debian's": "pkg:deb/", "Python's": "pkg:pypi/", "of a repository": "pkg:generic/"}
    counts = [
        f"{count} {said}" for said, kind in kinds.items() if (count := sum(purl.startswith(kind) for purl in purls))
    ]
    click.echo(f"{output}  packages: {', '.join(counts)}")


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

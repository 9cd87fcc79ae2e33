"""Commands that bring images to others, and from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from builder.cli.group import (
    bound,
    chain_options,
    json_option,
    main,
    open_store,
    resolved,
    sign_option,
    signature_options,
    size,
)

if TYPE_CHECKING:
    pass


@main.command()
@click.argument("recipe")
@click.option("--to", "place", type=click.Path(path_type=Path), required=True, help="The folder colleagues read.")
@click.option("--version", metavar="VERSION", help="Default: the date, as 2026.11.21.")
@click.option(
    "--tag", "tags", multiple=True, help="A further link beside `current`; may repeat. Its image is never pruned."
)
@click.option("--pin", is_flag=True, help="Never prune this version.")
@click.option("--no-current", is_flag=True, help="Leave the link `current` as it is.")
@click.option("--modulefile", is_flag=True, help="Its tasks as commands, for `module load`; see below.")
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in the SIF before it is seen.")
@sign_option
@click.option(
    "--engine", default="auto", show_default=True, metavar="auto|apptainer|buildah|docker", help="What builds."
)
@chain_options
@json_option
@click.pass_obj
def publish(
    store_path: Path | None, /, recipe: str, place: Path, version: str | None, tags: tuple[str, ...], pin: bool,
    no_current: bool, modulefile: bool, no_verify: bool, sign: str | None, engine: str, stack: str | None, gpu_arch: str | None,
    arguments: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Put an image and its layers where others run it and build on it; what is not built yet is built.

    With --modulefile, Environment Modules and Lmod find it below DIR/modulefiles, and so do its later versions.

    \b
    Examples:
      build.py publish lora-opencalm --to /groups/lab/ekiben
      build.py publish lora-opencalm --to /groups/lab/ekiben --version 1.2 --tag stable --modulefile
      build.py publish lora-opencalm --to /groups/lab/ekiben --sign you@example.org
    """
    from builder.config import read_config
    from builder.executors import check_name
    from builder.gpg import find_key
    from builder.pipeline import Options, build
    from builder.progress import Progress
    from builder.publish import open_place
    from builder.publish import publish as put

    check_name(engine)
    chain, store, progress = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path), Progress()
    place = place.expanduser().absolute()
    open_place(place, version=version, tags=tags, module=modulefile)  # an image takes minutes, a refusal none
    key = find_key(sign) if sign is not None else None
    options = Options(engine=engine, mirror=bound(arguments).get("mirror"), registry=read_config().registry)
    image = build(chain, store, options, progress)
    done = put(image, store, place, progress, version=version, tags=tags, pin=pin,
               current=not no_current, check=not no_verify, key=key, module=modulefile)  # fmt: skip
    if as_json:
        click.echo(
            json.dumps({**done.record, "path": str(done.sif), "moved": done.moved, "module": done.module}, indent=1)
        )
        return
    task = next(iter(chain.recipe.file.tasks), "")
    shown = done.sif if no_current else done.sif.with_name("current")
    click.echo(f"published  {done.sif}  {size(done.record['size'])}"
               + (f", {size(done.moved)} of layers moved" if done.made else "  (there already)"))  # fmt: skip
    if signed := done.record.get("signature"):
        click.echo(f"signed     by {signed['user']} {signed['fingerprint']}")
    click.echo(f"run        singularity exec --nv {shown} {task}")
    if done.module:
        loaded = done.module if no_current else done.module.rpartition("/")[0]
        click.echo(f"module     module use {place}/modulefiles; module load {loaded}")
    click.echo(f"build on   EKIBEN_SHARED={place} make image recipe={recipe}")
    if done.made and (place / "catalog").is_dir():
        click.echo(f"catalogue  build.py catalog {place}   # its pages do not know this version yet")


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
@sign_option
@click.option("--sbom", is_flag=True, help="Attach its bill of materials (CycloneDX), as OCI 1.1 attaches artifacts.")
@chain_options
@json_option
@click.pass_obj
def push(
    store_path: Path | None, /, recipe: str, reference: str, format_: str, sign: str | None, sbom: bool, stack: str | None,
    gpu_arch: str | None, arguments: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Send an image to a registry; what the registry has is not sent again, and what broke off goes on.

    \b
    Examples:
      build.py push lora-opencalm registry.example.org/lab/lora-opencalm:1.2
      build.py push lora-opencalm registry.example.org/lab/lora-opencalm:1.2-sif --format sif
      build.py push lora-opencalm registry.example.org/lab/layers --format layers
      build.py push lora-opencalm registry.example.org/lab/lora-opencalm:1.2 --sign
    """
    from builder.config import read_config
    from builder.gpg import find_key
    from builder.pipeline import Options, build
    from builder.progress import Progress
    from builder.push import push as send
    from builder.registry import Reference

    place, progress = Reference.parse(reference), Progress()
    chain, store = resolved(recipe, stack, arguments, gpu_arch), open_store(store_path)
    options = Options(mirror=bound(arguments).get("mirror"), registry=read_config().registry)
    key = find_key(sign) if sign is not None else None
    done = send(build(chain, store, options, progress), store, place, format_, progress, key=key, sbom=sbom)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "place": done.place,
                    "sent": done.sent,
                    "mounted": done.mounted,
                    "there": done.there,
                    "signed": {"fingerprint": key.fingerprint, "user": key.user} if key else None,
                    "bill": done.bill,
                },
                indent=1,
            )
        )
        return
    click.echo(f"pushed  {done.place}  {size(done.sent)} sent, {done.mounted} blobs mounted, {done.there} were there")
    if key:
        click.echo(f"signed  by {key}")
    if done.bill:
        click.echo(f"sbom    {done.bill}")
    lines = {"docker": f"docker pull {place}", "sif": f"apptainer pull oras://{place}",
             "layers": f"EKIBEN_REGISTRY={reference} make image recipe={recipe}"}  # fmt: skip
    click.echo(f"use     {lines[format_]}")


@main.command()
@click.argument("reference", metavar="REF")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the SIF goes (default: ./<name>.sif).")
@signature_options
@json_option
@click.pass_obj
def pull(
    store_path: Path | None, /, reference: str, output: Path | None, require_signature: bool, signer: str | None, as_json: bool
) -> None:  # fmt: skip
    """Take an image from a registry as a SIF: one that was pushed as SIF, whose broken download goes on, or as Docker image.

    \b
    Examples:
      build.py pull registry.example.org/lab/lora-opencalm:1.2-sif
      build.py pull registry.example.org/lab/lora-opencalm:1.2 -o /tmp/image.sif
      build.py pull registry.example.org/lab/lora-opencalm:1.2 --require-signature --key lab.asc
    """
    from contextlib import nullcontext

    from builder.gpg import known_keys
    from builder.progress import Progress
    from builder.pull import pull as take
    from builder.registry import Reference

    with known_keys(signer) if require_signature or signer else nullcontext() as keys:
        product, digest, who = take(Reference.parse(reference), open_store(store_path), output, Progress(), keys=keys)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "path": product.place,
                    "size": product.size,
                    "manifest": digest,
                    "made": product.made,
                    "signed": {"fingerprint": who.fingerprint, "user": who.user} if who else None,
                },
                indent=1,
            )
        )
        return
    click.echo(
        f"pulled  {product.place}  {size(product.size)}  {digest[:19]}{'' if product.made else '  (there already)'}"
    )
    if who:
        click.echo(f"signed  by {who}")
    click.echo(f"run     singularity exec --nv {product.place}")


@main.command()
@click.argument("place", type=click.Path(path_type=Path), metavar="DIR")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The folder of pages (default: DIR/catalog).")
@click.option("--runs", type=click.Path(path_type=Path), multiple=True, metavar="PATH",
              help="Look here for run.json of finished runs, and keep what may be shared with the versions they used; may repeat.")  # fmt: skip
@json_option
@click.pass_obj
def catalog(
    store_path: Path | None, /, place: Path, output: Path | None, runs: tuple[Path, ...], as_json: bool
) -> None:
    """Write what was published to DIR as pages: contents, GPUs, how to run it, runs, changes; from file:// or a web server.

    \b
    Examples:
      build.py catalog /groups/lab/ekiben
      build.py catalog /groups/lab/ekiben --runs /groups/lab/results --runs ~/results
      build.py catalog /groups/lab/ekiben -o ~/public_html/images
    """
    from builder.catalog import make_catalog
    from builder.shared import open_shared
    from builder.store import Store, default_root

    place = place.expanduser().absolute()
    own = store_path.expanduser().absolute() if store_path else default_root()
    made = make_catalog(place, Store(own, open_shared(place)), out=output.expanduser().absolute() if output else None,
                        runs=[path.expanduser() for path in runs], tell=lambda line: click.echo(line, err=True))  # fmt: skip
    images, taken = made.catalog["images"], made.runs
    for item in (*made.catalog["skipped"], *({"file": file, "why": why} for file, why in taken.broken)):
        click.echo(f"left out: {item['file']}: {item['why']}", err=True)
    if as_json:
        click.echo(
            json.dumps({"path": str(made.out), "images": len(images), "versions": sum(len(one["versions"]) for one in images),
                        "runs": {"new": taken.new, "known": taken.known, "unfinished": taken.unfinished, "others": taken.others},
                        "skipped": made.catalog["skipped"]}, indent=1)
        )  # fmt: skip
        return
    if runs:
        click.echo(
            f"runs     {len(taken.new)} new, {taken.known} known, {taken.unfinished} not finished, {taken.others} of no image here"
        )
    click.echo(
        f"written  {made.out}/index.html  {len(images)} images, {sum(len(one['versions']) for one in images)} versions"
    )

"""What an image is made of, and proving it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from builder.assemble import Product
from builder.chain import Chain
from builder.errors import UsageError, VerifyError, nearest
from builder.pipeline import Image, image_name, plan
from builder.progress import Progress
from builder.sif import DEFFILE, SIGNATURE, read_sif
from builder.store import Store, StoredLayer
from builder.verify import Check, verify

_KINDS = {DEFFILE: "definition", SIGNATURE: "signature"}


def describe(name: str, store: Store) -> dict[str, Any]:
    """An image of the store by name, or a SIF by path. Errors: UsageError, StoreError."""
    if name.endswith(".sif") or "/" in name:
        return _describe_sif(Path(name))
    ref = store.image(name)
    if ref is None:
        raise UsageError(
            f"no image '{name}' in {store.root}." + nearest(name, store.images()), hint=f"make image recipe={name}"
        )
    manifest, config = json.loads(store.get_blob(ref["manifest"])), json.loads(store.get_blob(ref["config"]))
    layers = []
    for key, descriptor in zip(ref["keys"], manifest["layers"], strict=True):
        stored = store.layer(key)
        layers.append({
            "name": descriptor["annotations"]["org.ekiben.layer"], "cache_key": key, "digest": descriptor["digest"],
            "size": descriptor["size"],
            **({"diff_id": stored.diff_id, "unpacked": stored.tar_size, "executor": stored.executor, "seconds": stored.seconds,
                **stored.notes} if stored else {}),
        })  # fmt: skip
    return {"name": name, "image": ref["config"], "manifest": ref["manifest"], "stack": ref["stack"], "created": config["created"],
            "environment": config["config"]["Env"], "labels": config["config"]["Labels"], "tasks": ref["tasks"], "layers": layers}  # fmt: skip


def _describe_sif(path: Path) -> dict[str, Any]:
    info = read_sif(path)
    layers = {layer.number: place for place, layer in enumerate(info.layers)}
    parts = [
        {
            "name": f"layer {layers[item.number]}"
            if item.number in layers
            else item.name or _KINDS.get(item.data_type, "other"),
            "offset": item.offset,
            "size": item.size,
        }
        for item in info.descriptors
    ]
    return {
        "name": str(path),
        "id": info.id,
        "arch": info.arch,
        "size": path.stat().st_size,
        "created": _time(info.created),
        "parts": parts,
    }


def _time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, OSError, ValueError):  # a damaged header may say anything
        return f"{seconds} s since 1970"


def text(about: Mapping[str, Any]) -> str:
    lines = [f"{key:<12}{value}" for key, value in about.items() if isinstance(value, str | int)]
    for layer in about.get("layers", ()):
        lines.append(f"layer       {layer['name']:<16}{layer['size'] / 1e6:10.1f} MB  {layer['digest'][7:19]}  "
                     f"{layer.get('executor', 'gone from the store')}")  # fmt: skip
        lines += [f"  drift     {line}" for line in layer.get("drift", ())]
    for task, said in about.get("tasks", {}).items():
        lines.append(f"task        {task:<16}{said}")
    for part in about.get("parts", ()):
        lines.append(f"part        {part['name']:<16}{part['size'] / 1e6:10.1f} MB at {part['offset']}")
    return "\n".join(lines)


def drift_of(layers: Sequence[StoredLayer]) -> list[str]:
    """What could not be had as locked when the layers were built, a line each."""
    return [f"{layer.name}: {line}" for layer in layers for line in layer.notes.get("drift", ())]


def stored_image(chain: Chain, store: Store) -> Image:
    """The image as its layers in the store make it. Errors: VerifyError when one is missing."""
    from builder import oci
    from builder.chain import platform

    actions = plan(chain, store)
    stored = tuple(action.stored for action in actions if action.stored)
    if len(stored) < len(actions):
        missing = ", ".join(action.layer.name for action in actions if not action.stored)
        raise VerifyError(
            f"{chain.recipe.name} is not built: missing {missing}", hint=f"make image recipe={chain.recipe.name}"
        )
    config = oci.image_config(
        stored, environment=chain.environment, labels=chain.labels, epoch=chain.stack.file.epoch, platform=platform()
    )
    return Image(name=image_name(chain), image_id=oci.digest_of(config), config=config, chain=chain, layers=stored)


def prove(chain: Chain, store: Store, sif: Path | None) -> tuple[Image, list[Check]]:
    """Read every blob, run every test again. Errors: VerifyError, StoreError (CorruptBlob)."""
    from builder import daemon

    image = stored_image(chain, store)
    progress = Progress()
    with progress.step("read every blob", total=image.size):
        for layer in image.layers:
            store.check_blob(layer.digest, again=True)
            progress.count(layer.size)
    sif = sif or Path(f"{image.name}.sif")
    products = [Product("sif", str(sif), 0, False)] if sif.is_file() else []
    if daemon.unavailable() is None and daemon.has_image(image.tag, image.image_id):
        products.append(Product("docker", image.tag, 0, False))
    checks = verify(image, store, products, progress, again=True)
    if not checks:
        raise VerifyError("every digest is right, but nothing here can run the tests: no Apptainer, Docker or buildah")
    return image, checks

"""Images of a few bytes in files, as an OCI layout and as `docker save` writes them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar: a name that ends with a slash is a folder; ``->`` begins the target of a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif data.startswith(b"->"):
                info.type, info.linkname = tarfile.SYMTYPE, data[2:].decode()
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data if info.size else b""))
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class SmallImage:
    """An image with these layers, each the tar of some files."""

    layers: list[bytes] = field(default_factory=lambda: [tar_of({"etc/": b"", "etc/keep": b"kept\n"})])
    architecture: str = "amd64"
    env: tuple[str, ...] = ("A=of the base",)

    @property
    def config(self) -> bytes:
        container = {"Env": list(self.env), "Cmd": ["/bin/tool"], "Labels": {"L": "base"}}
        root = {"type": "layers", "diff_ids": [digest(layer) for layer in self.layers]}
        data = {"os": "linux", "architecture": self.architecture, "config": container, "rootfs": root}
        return json.dumps(data).encode()

    def saved(self, **changes: Any) -> dict[str, bytes]:
        """The files of `docker save`; ``changes`` are fields of its manifest.json."""
        names = [f"layer{number}/layer.tar" for number in range(len(self.layers))]
        item = {"Config": "config.json", "RepoTags": ["small:1"], "Layers": names, **changes}
        files = dict(zip(names, self.layers, strict=True))
        return {**files, "config.json": self.config, "manifest.json": json.dumps([item]).encode()}

    def layout(self, name: str = "small") -> dict[str, bytes]:
        """The files of an OCI layout."""
        media = "application/vnd.oci.image"
        blobs: dict[str, bytes] = {}

        def add(kind: str, data: bytes) -> dict[str, Any]:
            blobs[f"blobs/{digest(data).replace(':', '/')}"] = data
            return {"mediaType": f"{media}.{kind}", "digest": digest(data), "size": len(data)}

        layers = [add("layer.v1.tar", layer) for layer in self.layers]
        manifest = {"schemaVersion": 2, "config": add("config.v1+json", self.config), "layers": layers}
        item = add("manifest.v1+json", json.dumps(manifest).encode())
        item["annotations"] = {"org.opencontainers.image.ref.name": name}
        index = {"schemaVersion": 2, "manifests": [item]}
        return {**blobs, "index.json": json.dumps(index).encode(), "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.write_bytes(tar_of(files))
    return path

"""A server that answers as the Hugging Face hub does where models are uploaded and downloaded, for the hub's own
client.

It keeps models in memory, and large files by LFS (https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md).
Clients have to set HF_HUB_DISABLE_XET=1: its other protocol for large files is not served.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Self

LARGE = (".safetensors", ".bin")


@dataclass
class HubServer:
    """Serves the models of one owner at ``url``. ``files``: by model, OWNER/NAME, and path.

    refused: by model or data set, the status and the hub's own code of the error that every download gets. tags: names
    of the one revision that there is.
    """

    owner: str
    write_token: str = ""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    cut: dict[str, int] = field(default_factory=dict)  # file → bytes after which its next download breaks off
    downloads: list[str] = field(default_factory=list)  # names of the files that were downloaded, in part or all

    def __enter__(self) -> Self:
        hub: HubServer = self

        class Handler(_Handler):
            server_hub = hub

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def commit_of(self, model: str) -> str:
        """Return what stands for the commit: the SHA-1 of what the model holds."""
        listing = sorted((path, hashlib.sha256(data).hexdigest()) for path, data in self.files[model].items())
        return hashlib.sha1(json.dumps(listing).encode()).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        hub, token = self.server_hub, self.headers.get("Authorization", "").removeprefix("Bearer ")
        if match := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/paths-info/[^/]+", self.path):
            paths = urllib.parse.parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
            self._json([entry for entry in _tree(hub.files.get(match[1], {}), "", True) if entry["path"] in paths])
        elif self.path == "/api/validate-yaml":  # of a card, before it is committed
            self._json({"errors": [], "warnings": []})
        elif token != hub.write_token:
            self._fail(403 if token.startswith("hf_read") else 401, "")
        elif self.path == "/api/repos/create":
            name = f"{json.loads(body).get('organization') or hub.owner}/{json.loads(body)['name']}"
            if name.split("/")[0] != hub.owner:
                self._fail(403, "")
                return
            status = 409 if name in hub.files else 200
            hub.files.setdefault(name, {})
            self._json({"url": f"{hub.url}/{name}", "id": name}, status)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            modes = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            self._json({"files": modes})
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", self.path):
            self._json(
                {"transfer": "basic", "objects": [self._lfs_object(item) for item in json.loads(body)["objects"]]}
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            for line in body.splitlines():
                self._take(hub.files[match[1]], json.loads(line))
            self._json({"commitUrl": f"{hub.url}/{match[1]}/commit/main", "commitOid": hub.commit_of(match[1])})
        else:
            self._fail(404, "")

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.removeprefix("/blobs/")
        if hashlib.sha256(body).hexdigest() != oid:
            self._fail(400, "")
            return
        self.server_hub.blobs[oid] = body
        self._json({})

    def do_GET(self) -> None:
        hub, path = self.server_hub, urllib.parse.unquote(self.path.split("?")[0])
        for name, (status, code) in hub.refused.items():
            if f"/{name}/" in f"{path}/":
                self._fail(status, code)
                return
        model = next((name for name in hub.files if f"/{name}/" in f"{path}/"), None)
        if model is None:
            self._fail(404, "RepoNotFound")
            return
        files, commit = hub.files[model], hub.commit_of(model)
        rest = path.split(f"/{model}", 1)[1].strip("/")
        kind, revision, name = (*rest.split("/", 2), "", "")[:3] if rest else ("", "", "")
        if revision not in ("", "main", commit, *hub.tags):
            self._fail(404, "RevisionNotFound")
        elif kind in ("", "revision"):
            self._json({"id": model, "sha": commit, "siblings": [{"rfilename": item} for item in files]})
        elif kind == "tree":
            self._json(_tree(files, name, "recursive=true" in self.path.lower()))
        elif kind == "resolve" and name in files:
            self._file(name, files[name], commit)
        else:
            self._fail(404, "EntryNotFound", commit)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _lfs_object(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["oid"] in self.server_hub.blobs:
            return {"oid": item["oid"], "size": item["size"]}
        upload = {"href": f"{self.server_hub.url}/blobs/{item['oid']}", "header": {}}
        return {"oid": item["oid"], "size": item["size"], "actions": {"upload": upload}}

    def _take(self, files: dict[str, bytes], line: dict[str, Any]) -> None:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = self.server_hub.blobs[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]

    def _file(self, name: str, data: bytes, commit: str) -> None:
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        if name.endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        if self.command == "GET":
            self.server_hub.downloads.append(name)
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._answer(206, data[start:], headers)
            return
        if self.command == "GET" and name in self.server_hub.cut:
            self._break_off(data, headers, self.server_hub.cut.pop(name))
            return
        self._answer(200, data, headers)

    def _break_off(self, data: bytes, headers: dict[str, str], size: int) -> None:
        """Answer with the first bytes alone, and close the connection."""
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:size])
        self.close_connection = True

    def _json(self, value: object, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Repo-Commit": commit}
        self._answer(status, b"{}", {name: value for name, value in headers.items() if value})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _tree_entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files and folders in ``folder``."""
    inside = {path: data for path, data in files.items() if path.startswith(f"{folder}/" if folder else "")}
    folders = sorted({"/".join(path.split("/")[:depth]) for path in inside for depth in range(1, path.count("/") + 1)})
    depth = folder.count("/") + 1 if folder else 0
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders if path != folder
    ]
    entries += [_tree_entry(path, data) for path, data in inside.items()]
    return [entry for entry in entries if recursive or entry["path"].count("/") == depth]

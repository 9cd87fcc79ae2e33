"""A package index of this machine, with sources and wheels that a test writes."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# A build backend of the source itself: it has no requirements, and is careless about order and time.
BACKEND = """\
import os, random, socket, time, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{name}-{version}-py3-none-any.whl"
    info = "{name}-{version}.dist-info"
    members = {{
        "{name}.py": "VERSION = {version!r}\\n",
        info + "/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n{requires}",
        info + "/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    {code}
    names = [*members]
    random.shuffle(names)
    record = "".join(path + ",,\\n" for path in [*names, info + "/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path in names:
            wheel.writestr(zipfile.ZipInfo(path, time.localtime()[:6]), members[path])
        wheel.writestr(info + "/RECORD", record)
    return name
"""


def source(name: str, version: str, *, requires: Sequence[str] = (), code: str = "pass") -> bytes:
    """A source distribution whose build runs ``code``."""
    lines = "".join(f"Requires-Dist: {line}\\n" for line in requires)
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND.format(name=name, version=version, requires=lines, code=code.replace("\n", "\n    ")),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{name}-{version}/{path}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def wheel(name: str, version: str, *, requires: Sequence[str] = ()) -> bytes:
    """A wheel with one module."""
    buffer = io.BytesIO()
    info = f"{name}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    members = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*members, f"{info}/RECORD"))
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return buffer.getvalue()


@dataclass
class Index:
    """``files``: name → bytes; ``login``: USER:PASSWORD, without which none is answered; ``asked``: the paths
    requested.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    login: str = ""
    address: str = ""
    asked: list[str] = field(default_factory=list)

    def add_source(self, name: str, version: str, *, requires: Sequence[str] = (), code: str = "pass") -> None:
        self.files[f"{name}-{version}.tar.gz"] = source(name, version, requires=requires, code=code)

    def add_wheel(self, name: str, version: str, *, requires: Sequence[str] = ()) -> None:
        self.files[f"{name}-{version}-py3-none-any.whl"] = wheel(name, version, requires=requires)

    def url(self, login: str = "") -> str:
        return f"http://{login}{'@' if login else ''}{self.address}/simple/"

    def page(self, name: str) -> str:
        links = [
            f'<a href="../../files/{html.escape(file)}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>'
            for file, data in sorted(self.files.items())
            if file.split("-")[0].replace("_", "-") == name
        ]
        return "<!DOCTYPE html><body>" + "\n".join(links) + "</body>"


@contextmanager
def serve(index: Index) -> Iterator[Index]:
    """Answer for ``index`` on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            sent = self.headers.get("Authorization", "")
            if index.login and sent != "Basic " + base64.b64encode(index.login.encode()).decode():
                self.answer(401, b"")
                return
            kind, _, name = self.path.strip("/").partition("/")
            if kind == "files" and name in index.files:
                self.answer(200, index.files[name], "application/octet-stream")
            elif kind == "simple" and (page := index.page(name)):
                self.answer(200, page.encode())
            else:
                self.answer(404, b"")

        do_HEAD = do_GET

        def answer(self, code: int, body: bytes, kind: str = "text/html") -> None:
            self.send_response(code)
            if code == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

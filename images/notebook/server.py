"""Start JupyterLab in the image, with the image's Python as the kernel: ekiben-notebook [--port N] [--ip ADDRESS]

The token is random, and printed with the URL once the port answers. Settings, history, connection files and the kernels' sockets
are in a temporary folder that only its user can read, and that is removed at the end; the user's ~/.jupyter and ~/.ipython are not read.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jupyter_client.manager import start_new_kernel
from jupyterlab.labapp import LabApp
from traitlets.config import Config

KERNELS = "/opt/ekiben/notebook/jupyter"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LONGEST_BASE = 20  # of 107 bytes in a socket's path, ekiben-notebook-XXXXXXXX/runtime/kernel-UUID-ipc-N takes 83


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of this run in $TMPDIR, or in /tmp where sockets in it would have too long a path."""
    base = os.environ.get("TMPDIR") or "/tmp"
    return tempfile.TemporaryDirectory(prefix="ekiben-notebook-", dir=base if len(base) <= LONGEST_BASE else "/tmp")


def set_folders(folder: Path) -> None:
    """Let Jupyter and IPython keep what they write in ``folder``, and find the image's kernel first."""
    for name in ("config", "data", "runtime", "ipython"):
        (folder / name).mkdir(mode=0o700)
    os.environ |= {
        "JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "IPYTHONDIR": str(folder / "ipython"), "JUPYTER_PATH": KERNELS,
    }  # fmt: skip
    os.environ.pop("JUPYTER_CONFIG_PATH", None)


def settings(ip: str, port: int, token: str, *, local: bool) -> Config:
    """Return the server's settings. ``local``: requests that name another host than this one are refused."""
    config = Config()
    config.ServerApp.ip, config.ServerApp.port, config.ServerApp.port_retries = ip, port, 0
    config.ServerApp.root_dir = str(Path.cwd())
    config.ServerApp.open_browser = False
    config.ServerApp.allow_root = True  # root of a container
    config.ServerApp.allow_remote_access = not local
    config.Application.log_level = "WARN"
    config.IdentityProvider.token = token
    config.LabApp.extension_manager = "readonly"  # the image cannot be changed from within
    config.LabApp.news_url = None  # nobody is asked for news or versions
    config.LabApp.check_for_updates_class = "jupyterlab.handlers.announcements.NeverCheckForUpdate"
    # Any user of the node can read what a kernel prints over TCP; sockets in a private folder are this user's.
    config.KernelManager.transport = "ipc"
    return config


def serve(ip: str, port: int, address: str) -> None:
    """Run the server until Ctrl-C, SIGTERM or the terminal's end."""
    with private_folder() as name:
        set_folders(Path(name))
        token = secrets.token_hex(24)
        config = settings(ip, port, token, local=address in LOOPBACK)
        server = LabApp.initialize_server(argv=[], config=config)
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # its own handler of Ctrl-C leaves the kernels running
            signal.signal(number, lambda *_: server.stop(from_signal=True))
        server.io_loop.add_callback(announce, address, port, token)  # behind the server's own, which binds the port
        server.start()


def announce(address: str, port: int, token: str) -> None:
    """Print the token and the URL."""
    print(f"JupyterLab in {Path.cwd()}; Ctrl-C ends it and its kernels\ntoken   {token}", flush=True)
    print(f"url     http://{address}:{port}/lab?token={token}", flush=True)


def self_test() -> None:
    """Run a cell in the kernel. Raises AssertionError when it is not the image's own Python."""
    with private_folder() as name:
        set_folders(Path(name))
        manager, client = start_new_kernel(kernel_name="python3")
        try:
            printed: list[str] = []
            client.execute_interactive(
                "import sys; print(sys.prefix)", timeout=60,
                output_hook=lambda message: printed.append(message["content"].get("text", "")),
            )  # fmt: skip
            assert "".join(printed) == "/opt/venv\n", printed
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="ekiben-notebook", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--ip", default="127.0.0.1", help="listen on this address (default: this machine's own users)")
    parser.add_argument("--address", help="what the printed URL names, where it is not --ip")
    parser.add_argument("--self-test", action="store_true", help="run a cell in the kernel, and end")
    options = parser.parse_args(arguments)
    if options.self_test:
        return self_test()
    everywhere = options.ip in ("", "0.0.0.0", "::")
    return serve(options.ip, options.port, options.address or (socket.gethostname() if everywhere else options.ip))


if __name__ == "__main__":
    main(sys.argv[1:])

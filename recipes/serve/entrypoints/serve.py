"""Serve a model and its adapters by OpenAI's API, until a signal ends it.

serve --model cyberagent/open-calm-3b
serve --adapter mine=result/adapter --adapter other=other/adapter     with the base that they name
serve --port 0 --host 0.0.0.0            any free port, for other machines, too
serve --dry-run                          what would be loaded, and where it would listen
serve --smoke                            offline, in seconds, with or without a GPU
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import serve_settings
from ekiben_tasks.task import command, input_files, run_metadata
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.output_lock import claim_output
from serve_settings import ServeSettings

_LOGIN = ("EKIBEN_LOGIN_HOST", "SLURM_SUBMIT_HOST", "SGE_O_HOST", "PBS_O_HOST")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `serve` and return its exit code.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong, or the port is in use.
        TaskError: the model, an adapter, the key or the output cannot be used, or the model failed.
    """
    parser = command.command("serve", __doc__, ServeSettings, arguments)
    parser.add_argument("--host", metavar="ADDRESS", help="instead of the setting host")
    parser.add_argument("--port", type=int, metavar="N", help="instead of the setting port")
    settings, args = serve_settings.read(ServeSettings, parser, arguments)
    if args.smoke:
        import serve_smoke_test

        return serve_smoke_test.smoke_test(settings)
    if not 0 <= settings.port < 1 << 16 or settings.max_body_mb <= 0:
        raise SettingError("settings port and max_body_mb: a port is from 0 to 65535, and a body has more than 0 MB")
    models = serve_settings.find_models(settings)
    output = Path(settings.output)
    key_file = Path(settings.key_file) if settings.key_file else output / "key"
    if args.dry_run:
        print(f"would serve {', '.join(f'{name} ({source})' for name, source in models.items())}")
        print(f"would listen on {settings.host}, port {settings.port or 'any'}, with the key of {key_file}")
        return 0
    with listen(settings.host, settings.port) as listening, claim_output(output):
        key = read_key(key_file)

        from serve_engine import Engine  # seconds of import that a wrong setting need not wait for
        from serve_server import Server, Service

        engine = Engine(settings, models, output / "run.json")
        try:
            for line in describe(listening, key_file, list(models)):
                print(line, flush=True)
            service = Service(settings, engine, key)
            engine.write(75)  # what is there if this process is killed
            code = Server(service).serve_until_signal(listening)
            if reason := engine.failure:
                raise TaskError(f"the model failed, and its requests with it: {reason}")
            engine.write(code or None, refused=service.refused)
        finally:
            engine.stop()
        print(f"done        {engine.answers:,} answers, {engine.tokens:,} tokens   record {engine.file}", flush=True)
    return code


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that the port is held while the model is loaded.

    Raises:
        SettingError: the address is not this machine's, or the port is in use.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError(f"--port {port}: is in use on {host}; give another, or 0 for any that is free") from None
        raise SettingError(f"--host {host} --port {port}: cannot be listened on: {error.strerror}") from None
    return listening


def read_key(file: Path) -> str:
    """Return the key in ``file``; where there is none, write a new one, which its owner alone can read.

    Raises:
        TaskError: it cannot be read or written, others can read it, or it is too short.
    """
    if not os.path.lexists(file):
        key = secrets.token_urlsafe(32)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                out.write(f"{key}\n")
        except OSError as error:
            raise TaskError(f"{file}: the key cannot be written: {error.strerror}; give another key_file") from None
        return key
    key = input_files.read_text(file, "remove it, and a new key is written").strip()
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise TaskError(f"{file}: others may read the key; run chmod 600 on it, or remove it for a new one")
    if not (16 <= len(key) <= 1000 and key.isascii() and key.isprintable() and " " not in key):
        raise TaskError(f"{file}: a key is one word of 16 or more letters and digits; remove it for a new one")
    return key


def describe(listening: socket.socket, key_file: Path, models: Sequence[str]) -> list[str]:
    """Return the lines that say where the server is, and how another machine reaches it."""
    host, port = listening.getsockname()[:2]
    site = run_metadata.site()
    here = site["host"]
    is_local = host in ("127.0.0.1", "::1")
    target = f"{port}:{'127.0.0.1' if is_local else here}:{port}"
    login = next((os.environ[name] for name in _LOGIN if os.environ.get(name)), "LOGIN-NODE")
    where = (f"-J {login} {here}" if is_local else login) if "job" in site else here
    shown = f"[{host}]" if ":" in host else host
    lines = [
        f"serving     {', '.join(models)}",
        f"listening   http://{shown}:{port}/v1   host {here}" + (f", job {site['job']}" if "job" in site else ""),
        f"key         {key_file.absolute()}",
        f"tunnel      ssh -N -L {target} {where}",
    ]
    if not is_local:
        lines.append("note        other machines can connect; the key and the texts are not encrypted on their way")
    return lines


if __name__ == "__main__":
    command.run(main)

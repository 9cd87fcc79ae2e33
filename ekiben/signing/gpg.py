"""GnuPG, started to sign and to check signatures: the user's own keyring, agent and cards. We read no key ourselves."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from ekiben.core.checked import read_regular
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, UsageError, VerifyError
from ekiben.core.pgp_key import Key, full_fingerprint
from ekiben.core.process import run, which

_HASHES = {"8": "sha256", "9": "sha384", "10": "sha512"}  # RFC 4880, 9.4; the older ones count for nothing
_PASSPHRASE = re.compile(r"pinentry|passphrase|ioctl|cancel|timeout|PIN\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Keys:
    """Whose signatures count: those of ``fingerprints``, or, where that is None, of every key in the keyring of
    ``home``. ``source``: what names the fingerprints, for messages.
    """

    home: Path | None = None
    fingerprints: frozenset[str] | None = None
    source: str = "the key of --key"


class SignatureError(VerifyError):
    """No good signature. ``rank``: of several reasons, the one with the highest is reported."""

    def __init__(self, message: str, *, rank: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


def unsigned(name: str, fix: str) -> SignatureError:
    """Return the error for something that nobody signed; ``fix`` to sign it."""
    return SignatureError(
        f"{name} is not signed", rank=0, hint=f"ask who made it to publish or push it with --sign, or: {fix}"
    )


def worst(name: str, problems: Sequence[SignatureError]) -> SignatureError:
    """Return, of several signatures that are no good, the one of which most is wrong."""
    error = max(problems, key=lambda problem: problem.rank)
    return SignatureError(f"{name}: {error}", rank=error.rank, hint=error.hint)


# ------------------------------------------------------------------------------------------------------------- signing


def find_key(name: str = "", option: str = "--sign") -> Key:
    """Return the secret key ``name`` (a fingerprint or mail address, as for gpg), else gpg's default, else the only
    one. ``option``: what named it, for messages.

    Raises UsageError that lists what there is.
    """
    asked = name or _default_key()
    listed = _listed("--list-secret-keys", asked)
    usable = [key for key, trouble in listed if not trouble]
    option = f"{option} {name}".rstrip()
    if len(usable) == 1:
        reason = "requested" if name else "gpg's default key" if asked else "the only secret key"
        log_decision("signing key", usable[0], reason)
        return usable[0]
    if usable:
        raise UsageError(f"{option}: {len(usable)} keys match:{_lines(usable)}", hint="name one by its fingerprint")
    if listed:
        raise UsageError(
            f"{option}: cannot sign with {'; '.join(f'{key}: {trouble}' for key, trouble in listed)}",
            hint="gpg --quick-set-expire FINGERPRINT 1y prolongs a key; another one: --sign KEY",
        )
    other_keys = [key for key, trouble in _listed("--list-secret-keys") if not trouble] if asked else []
    if other_keys:
        raise UsageError(f"--sign {asked}: no such secret key. There are:{_lines(other_keys)}")
    raise UsageError(
        f"{option}: there is no secret key in {os.environ.get('GNUPGHOME') or '~/.gnupg'}",
        hint=(
            "gpg --quick-generate-key 'Your Name <you@example.org>' ed25519 sign 2y makes one; GNUPGHOME names "
            "another keyring"
        ),
    )


def usable_secret_key(fingerprints: Sequence[str]) -> Key | None:
    """Return the first of these keys that is the user's and can sign. Raises EngineError."""
    listed = (item for fingerprint in fingerprints for item in _listed("--list-secret-keys", fingerprint))
    return next((key for key, trouble in listed if not trouble and key.fingerprint in fingerprints), None)


def sign(data: bytes, key: Key, *, clear: bool) -> tuple[bytes, str]:
    """Sign ``data``.

    Returns the message, clear-signed or as of gpg --sign, and the hash algorithm. Raises EngineError.
    """
    with tempfile.TemporaryDirectory(prefix="ekiben-gpg-") as folder:
        message, out = Path(folder, "message"), Path(folder, "signed")
        message.write_bytes(data)
        # SHA-512 fits every kind of key: gpg shortens it for those that take less, and refuses a shorter one for the
        # others.
        mode = ["--clear-sign"] if clear else ["--no-armor", "--sign"]
        done, status, stderr = _gpg(
            "--digest-algo", "SHA512", "--local-user", key.fingerprint, "--output", out, *mode, message
        )
        if done or not (created := _status(status, "SIG_CREATED")):
            raise _cannot_sign(key, status, stderr)
        return out.read_bytes(), _HASHES[created[0][2]]


def _cannot_sign(key: Key, status: str, stderr: str) -> EngineError:
    lines = [line for line in stderr.splitlines() if line.startswith("gpg: ")]
    reason = lines[-1].rpartition(": ")[2] if lines else "gpg printed no reason"
    asked = _PASSPHRASE.search(reason) or _status(status, "PINENTRY_LAUNCHED")
    return EngineError(
        f"gpg does not sign as {key}: {reason}",
        hint=(
            "it could not ask for the passphrase, or got none. In a terminal: export GPG_TTY=$(tty). In a batch job:"
            " unlock the key before (gpg-preset-passphrase), or, in a GNUPGHOME that only the job reads, put"
            " 'pinentry-mode loopback' and 'passphrase-file FILE' into gpg.conf"
            if asked
            else None
        ),
    )


def _default_key() -> str:
    """`default-key` of gpg.conf, as gpgconf reports it."""
    program = which("gpgconf")
    stdout = run([program, "--list-options", "gpg"], check=False, env=_environment()).stdout if program else ""
    values = [line.split(":")[9] for line in stdout.splitlines() if line.startswith("default-key:")]
    return unquote(values[0].removeprefix('"').partition(',"')[0]) if values else ""


# ------------------------------------------------------------------------------------------------------------ checking


@contextlib.contextmanager
def known_keys(signer: str | None) -> Iterator[Keys]:
    """Yield the keys whose signatures count: the user's keyring, one fingerprint of it, or the public keys in a file.

    Raises UsageError when ``signer`` is neither a file of keys nor a full fingerprint in the keyring.
    """
    log_decision("accepted keys", signer or "all of your keyring", "--key" if signer else "no --key")
    if signer is None:
        yield Keys()
    elif Path(signer).is_file():
        with tempfile.TemporaryDirectory(prefix="ekiben-gpg-") as folder:
            home = Path(folder)
            (home / "keys").write_bytes(_read_keys(Path(signer)))  # gpg would wait for a file that has no end
            _gpg("--no-autostart", "--import", home / "keys", home=home)
            keys = [key.fingerprint for key, _ in _listed("--list-keys", home=home)]
            if not keys:
                raise UsageError(
                    f"--key {signer}: holds no public key", hint="gpg --armor --export KEY > key.asc writes one"
                )
            yield Keys(home, frozenset(keys))
    else:
        try:
            fingerprint = full_fingerprint(signer)
        except ValueError as error:
            raise UsageError(
                f"--key {signer}: neither a file nor a full fingerprint",
                hint="gpg --fingerprint shows fingerprints, 40 digits; shorter ones can be forged",
            ) from error
        if not (listed := _listed("--list-keys", fingerprint)):
            raise UsageError(
                f"--key {signer}: no such key in your keyring", hint="gpg --import its file, or --key FILE"
            )
        yield Keys(None, frozenset(key.fingerprint for key, _ in listed))


def _read_keys(path: Path) -> bytes:
    try:
        return read_regular(path, follow=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--key {path}: cannot be read: {reason}") from error


def check(signed: bytes, keys: Keys) -> tuple[bytes, Key]:
    """Return the signed content and who signed it.

    Raises SignatureError, whose text follows the image's name; EngineError.
    """
    with tempfile.TemporaryDirectory(prefix="ekiben-gpg-") as folder:
        message, out = Path(folder, "signed"), Path(folder, "message")
        message.write_bytes(signed)
        # Only gpg's output was signed: a file may contain other text around a clear-signed one.
        # Using a key file does not import it into the keyring.
        code, status, stderr = _gpg("--no-auto-key-retrieve", "--output", out, "--verify", message, home=keys.home)
        if code and not status.strip():
            raise EngineError(
                f"gpg cannot check a signature here: {stderr.strip()[-200:]}",
                hint="GNUPGHOME names a folder for your keyring; --key FILE needs none",
            )
        signer = _judge(status, keys)
        if code or not out.exists():
            raise SignatureError(f"its signature by {signer} cannot be read", rank=2)
        return out.read_bytes(), signer


def _judge(status: str, keys: Keys) -> Key:
    keywords = [line.split(" ")[1] for line in status.split("\n") if line.startswith("[GNUPG:] ")]
    verdicts = [word for word in keywords if word.endswith("SIG") and word != "NEWSIG"]
    arguments = _status(status, verdicts[0])[0] if verdicts else []
    who = " ".join(arguments[1:]) or arguments[0] if arguments else "somebody"
    match verdicts:
        case ["ERRSIG"] if arguments[5:6] == ["9"]:
            issuer = arguments[6] if len(arguments) > 6 and arguments[6] != "-" else arguments[0]
            where = "your keyring" if keys.home is None else "the file of --key"
            raise SignatureError(
                f"it is signed by a key that is not in {where}: {issuer}",
                rank=0,
                hint="once its owner has confirmed that this is theirs: gpg --import their public key, or --key FILE",
            )
        case ["ERRSIG"]:
            raise SignatureError("this gpg cannot check its kind of signature", rank=2)
        case ["EXPKEYSIG", *_]:
            raise SignatureError(
                f"it is signed by {who}, whose key has expired",
                rank=1,
                hint="gpg --refresh-keys, or import the key again: its owner may have prolonged it",
            )
        case ["REVKEYSIG", *_]:
            raise SignatureError(f"it is signed by {who}, whose key was revoked", rank=3)
        case ["EXPSIG", *_]:
            raise SignatureError(f"its signature by {who} has expired", rank=1)
        case ["BADSIG"]:
            raise SignatureError(f"its signature is no good: it says {who}, and does not fit what was signed", rank=4)
        case ["GOODSIG", "VALIDSIG"]:
            pass
        case _:
            raise SignatureError("its signature cannot be read: it is damaged, or not of PGP", rank=2)
    valid = _status(status, "VALIDSIG")[0]
    signer = Key(valid[-1], who)
    if valid[7] not in (*_HASHES, "11"):
        raise SignatureError(f"its signature by {signer} rests on a hash that can be forged", rank=2)
    if keys.fingerprints is not None and signer.fingerprint not in keys.fingerprints:
        raise SignatureError(
            f"it is signed by {signer}, not by {keys.source}: {', '.join(sorted(keys.fingerprints))}", rank=1
        )
    return signer


# ------------------------------------------------------------------------------------------------------------- the door


def _gpg(*args: str | Path, home: Path | None = None) -> tuple[int, str, str]:
    """Exit code, status lines, and messages. Raises EngineError when there is no gpg."""
    program = which("gpg", "gpg2")
    if program is None:
        raise EngineError("signatures are made and checked with gpg, which is not installed", hint="apt install gnupg")
    homedir: list[str | Path] = ["--homedir", home] if home else []
    done = run([program, "--batch", "--yes", "--status-fd", "1", *homedir, *args], check=False, env=_environment())
    return done.returncode, done.stdout, done.stderr


def _environment() -> dict[str, str]:
    """With the terminal for the passphrase, which gpg does not determine itself."""
    settings = {**os.environ, "LC_ALL": "C.UTF-8"}
    for stream in (0, 2):
        with contextlib.suppress(OSError):
            settings.setdefault("GPG_TTY", os.ttyname(stream))
    return settings


def _status(status: str, word: str) -> list[list[str]]:
    """The arguments of each status line of that kind. A user's name may contain other line separators than gpg's."""
    start = f"[GNUPG:] {word} "
    return [line.removeprefix(start).split(" ") for line in status.split("\n") if f"{line} ".startswith(start)]


def _listed(what: str, name: str = "", home: Path | None = None) -> list[tuple[Key, str]]:
    """Keys, and why each cannot be used; "" when it can."""
    _, stdout, _ = _gpg("--with-colons", "--fixed-list-mode", what, *(["--", name] if name else []), home=home)
    keys = list[tuple[Key, str]]()
    for line in stdout.split("\n"):
        fields = line.split(":")
        if fields[0] in ("sec", "pub"):
            keys.append((Key("", ""), _trouble(fields)))
        elif keys and fields[0] == "fpr" and not keys[-1][0].fingerprint:
            keys[-1] = Key(fields[9], ""), keys[-1][1]
        elif keys and fields[0] == "uid" and not keys[-1][0].user:
            keys[-1] = Key(keys[-1][0].fingerprint, fields[9].replace("\\x3a", ":")), keys[-1][1]
    return keys


def _trouble(fields: Sequence[str]) -> str:
    if fields[1] == "e":
        return f"it expired on {datetime.fromtimestamp(int(fields[6]), UTC):%Y-%m-%d}"
    if fields[1] == "r":
        return "it was revoked"
    return "" if "S" in fields[11] and "D" not in fields[11] and fields[1] not in "di" else "it is not one that signs"


def _lines(keys: Sequence[Key]) -> str:
    return "".join(f"\n  {key}" for key in keys)

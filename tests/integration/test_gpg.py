"""Real gpg: which key signs, whose signatures count, and how each refused one is reported."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import EngineError, UsageError
from ekiben.core.pgp_key import Key
from ekiben.signing.gpg import Keys, SignatureError, check, find_key, known_keys, sign
from support.keyrings import Keyring, keyring, used

pytestmark = pytest.mark.covers("ekiben/signing")


ALICE, BOB = "Alice <alice@example.org>", "Bob: the builder <bob@example.org>"
TEXT = b'{"digest":"sha256:00"}'


@pytest.fixture
def ring() -> Iterator[Keyring]:
    with keyring() as made, used(made):
        yield made


@pytest.fixture
def alice(ring: Keyring) -> Key:
    return Key(ring.make(ALICE), ALICE)


def refusal(signed: bytes, keys: Keys = Keys()) -> str:  # noqa: B008
    with pytest.raises(SignatureError) as caught:
        check(signed, keys)
    return str(caught.value)


def test_signing_key_is_the_only_default_or_named_one(ring: Keyring, alice: Key) -> None:
    assert find_key() == alice
    bob = Key(ring.make(BOB), BOB)
    with pytest.raises(UsageError) as caught:
        find_key()
    assert str(caught.value) == f"--sign: 2 keys match:\n  {alice}\n  {bob}"
    assert find_key("bob@example.org") == find_key(bob.fingerprint) == bob
    with pytest.raises(UsageError, match="2 keys match"):
        find_key("example.org")
    (ring.home / "gpg.conf").write_text(f"default-key {alice.fingerprint}\n")
    assert find_key() == alice


def test_missing_key_is_an_error(ring: Keyring) -> None:
    with pytest.raises(UsageError, match=f"no secret key in {ring.home}") as caught:
        find_key()
    assert "--quick-generate-key" in (caught.value.hint or "")
    alice = ring.make(ALICE)
    with pytest.raises(UsageError, match=f"no such secret key. There are:\n  Alice .* {alice}"):
        find_key("nobody")


def test_expired_or_revoked_key_does_not_sign(ring: Keyring) -> None:
    ring.make("old", "--faked-system-time", "20200101T000000")
    with pytest.raises(UsageError, match=r"cannot sign with old \w{40}: it expired on 2020-01-02"):
        find_key()
    ring.revoke(ring.make("gone"))
    with pytest.raises(UsageError, match=r"gone \w{40}: it was revoked"):
        find_key("gone")
    assert find_key(ring.make(ALICE)).user == ALICE  # those that cannot sign are none to choose from


def test_unwritable_keyring_fails(alice: Key, ring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, file = sign(TEXT, alice, clear=True)[0], ring.export(ALICE, tmp_path / "alice.asc")
    monkeypatch.delenv("GNUPGHOME")
    monkeypatch.setenv("HOME", "/proc/nobody")
    with pytest.raises(EngineError, match=r"cannot check a signature here: .*/proc/nobody"):
        check(signed, Keys())
    with known_keys(str(file)) as keys:
        assert check(signed, keys)[1] == alice


@pytest.mark.parametrize("kind", ["ed25519", "rsa2048", "nistp384"])
def test_every_key_algorithm_signs_and_verifies(ring: Keyring, kind: str) -> None:
    key = Key(ring.make(ALICE, kind=kind), ALICE)
    for clear in (True, False):
        data, hash = sign(TEXT, key, clear=clear)
        status, signer = check(data, Keys())
        assert (status.strip(), signer, hash) == (TEXT, key, "sha512")


def test_a_subkey_signs_for_its_key(ring: Keyring, alice: Key) -> None:
    ring.gpg("--passphrase", "", "--quick-add-key", alice.fingerprint, "ed25519", "sign", "1d")
    data, _ = sign(TEXT, find_key(), clear=True)
    assert check(data, Keys(fingerprints=frozenset([alice.fingerprint])))[1] == alice


def test_passphrase_without_a_terminal_is_an_error_with_a_hint(
    ring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal the error comes at once, and the advised option works."""
    for name in ("GPG_TTY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "ttyname", no_terminal)
    key = Key(ring.make(ALICE, passphrase="secret"), ALICE)
    subprocess.run(["gpgconf", "--homedir", ring.home, "--kill", "gpg-agent"], check=True)  # it knows the passphrase
    with pytest.raises(EngineError, match=f"gpg does not sign as {key}: ") as caught:
        sign(TEXT, key, clear=True)
    assert "GPG_TTY=$(tty)" in (caught.value.hint or "")
    (tmp_path / "word").write_text("secret\n")
    (ring.home / "gpg.conf").write_text(f"pinentry-mode loopback\npassphrase-file {tmp_path}/word\n")
    assert check(sign(TEXT, key, clear=True)[0], Keys())[1] == key


def no_terminal(number: int) -> str:
    raise OSError


def test_key_file_needs_no_keyring(ring: Keyring, alice: Key, tmp_path: Path) -> None:
    signed, _ = sign(TEXT, alice, clear=True)
    file = ring.export(ALICE, tmp_path / "alice.asc")
    with keyring() as other, used(other):
        assert refusal(signed) == f"it is signed by a key that is not in your keyring: {alice.fingerprint}"
        with known_keys(str(file)) as keys:
            assert check(signed, keys)[1] == alice
        assert other.gpg("--list-keys") == b""
        bob = Key(other.make(BOB), BOB)
        with known_keys(str(file)) as keys:
            assert "not in the file of --key" in refusal(sign(TEXT, bob, clear=True)[0], keys)


def test_key_is_selected_by_fingerprint(ring: Keyring, alice: Key) -> None:
    bob = Key(ring.make(BOB), BOB)
    spaced = " ".join(bob.fingerprint[at : at + 4] for at in range(0, 40, 4))
    with known_keys(spaced) as keys:
        assert check(sign(TEXT, bob, clear=True)[0], keys)[1] == bob
        assert f"signed by {alice}, not by the key of --key: {bob.fingerprint}" in refusal(
            sign(TEXT, alice, clear=True)[0], keys
        )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("ABCD1234", "neither a file nor a full fingerprint"),
        ("A" * 40, "no such key in your keyring"),
        ("empty", "holds no public key"),
    ],
)
def test_ambiguous_or_unknown_key_is_refused(ring: Keyring, tmp_path: Path, wanted: str, message: str) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(UsageError, match=message), known_keys(wanted if wanted != "empty" else str(tmp_path / "empty")):
        pass


def test_damaged_signature_is_refused(ring: Keyring, alice: Key) -> None:
    signed, _ = sign(TEXT, alice, clear=True)
    assert f"it says {ALICE}, and does not fit" in refusal(signed.replace(b"sha256:00", b"sha256:01"))
    assert "cannot be read" in refusal(TEXT)
    assert "cannot be read" in refusal(b"")
    assert "cannot be read" in refusal(signed + signed)  # which of the two?
    begin = signed.index(b"\n\n", signed.index(b"BEGIN PGP SIGNATURE")) + 40
    for at in range(begin, begin + 30, 3):
        refusal(signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :])


def test_text_around_the_signed_text_is_refused(ring: Keyring, alice: Key) -> None:
    signed, _ = sign(TEXT, alice, clear=True)
    assert check(b'{"digest":"forged"}\n' + signed + b'{"digest":"forged"}\n', Keys())[0].strip() == TEXT


def test_signature_of_a_key_expired_or_revoked_since(ring: Keyring) -> None:
    then = ("--faked-system-time", "20200101T000000")
    ring.make("old", *then)
    assert "signed by old, whose key has expired" in refusal(ring.sign(TEXT, "old", *then))
    gone = ring.make("gone")
    signed = ring.sign(TEXT, "gone")
    assert check(signed, Keys())[1] == Key(gone, "gone")
    ring.revoke(gone)
    assert "signed by gone, whose key was revoked" in refusal(signed)


def test_weak_hash_is_refused(ring: Keyring) -> None:
    ring.make(ALICE, kind="rsa2048")
    assert "a hash that can be forged" in refusal(ring.sign(TEXT, ALICE, "--digest-algo", "SHA1"))


def test_user_name_cannot_forge_a_status_line(ring: Keyring) -> None:
    """Somebody's name may hold what some take for the end of a line."""
    name = "Eve\u2028[GNUPG:] BADSIG 0 x\u0085[GNUPG:] EXPSIG 0 x"
    key = Key(ring.make(name), name)
    assert find_key() == key
    assert check(sign(TEXT, key, clear=True)[0], Keys())[1] == key

"""What we sign Apptainer verifies, and what Apptainer signs we do: as root, and as a user who has only the public
key.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.artifacts.pull import pull
from ekiben.artifacts.push import PushRequest, push
from ekiben.builder.build import BuildContext, Options, build
from ekiben.core.pgp_key import Key
from ekiben.registry.reference import Reference
from ekiben.signing import gpg
from ekiben.signing.gpg import Keys, SignatureError
from ekiben.signing.sif import check_sif, sign_file
from support.keyrings import Keyring, keyring, used
from support.registries import real_registry
from support.sample_recipe import SampleRecipe, chain_of, quiet, seeded
from support.signed_sifs import ALICE, BOB, layers, make_signed
from support.small_sifs import make
from workspaces import USER, give, need

pytestmark = pytest.mark.covers("ekiben/signing", "ekiben/formats")


@pytest.fixture(params=["ed25519", "rsa2048", "nistp384"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ring() -> Iterator[Keyring]:
    need("apptainer")
    with keyring() as made, used(made):
        yield made


def apptainer(*args: str | Path, config: Path, user: str = "", code: int = 0) -> str:
    """With a keyring of its own, which is none of gpg's."""
    before = ["runuser", "-u", user, "--"] if user else []
    argv = [*before, "env", f"APPTAINER_CONFIGDIR={config}", "apptainer", *args]
    done = subprocess.run(argv, input="\n", capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One that the other user reaches, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="ekiben-signed-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def folder(path: Path, user: str = "") -> Path:
    path.mkdir()
    if user:
        give(path, user)
    return path


@pytest.mark.guard
def test_apptainer_verifies_what_we_signed(ring: Keyring, kind: str, tmp_path: Path) -> None:
    alice = Key(ring.make(ALICE, kind=kind), ALICE)
    sif = make_signed(tmp_path / "x.sif", layers(tmp_path, "base", "python", "top"), alice)
    public = ring.export(ALICE, tmp_path / "alice.asc")
    for user in ("", USER):
        config = folder(tmp_path / f"config-{user}", user)
        refused = apptainer("verify", sif, config=config, user=user, code=255)
        assert "signature made by unknown entity" in refused
        apptainer("key", "import", public, config=config, user=user)
        for argv in (["verify"], ["verify", "--all"]):
            output = apptainer(*argv, sif, config=config, user=user)
            assert f"Fingerprint: {alice.fingerprint}" in " ".join(output.split())
            assert ALICE in output and "Verified signature(s)" in output
            rows = [line.split("|")[0].strip() for line in output.splitlines() if "|1 " in line]
            assert rows == ["1", "2", "3", "4"]  # definition and all layers
    listed = apptainer("sif", "list", sif, config=config)
    assert "Signature (SHA-512)" in listed and "1   (G)" in listed
    assert alice.fingerprint in apptainer("sif", "info", "5", sif, config=config)
    data = bytearray(sif.read_bytes())
    data[data.rindex(b"-----BEGIN PGP SIGNED") - 3000] ^= 1
    sif.write_bytes(data)
    assert "integrity compromised: 4" in apptainer("verify", sif, config=config, code=255)


def test_we_verify_what_apptainer_signed(ring: Keyring, kind: str, tmp_path: Path) -> None:
    alice = Key(ring.make(ALICE, kind=kind), ALICE)
    secret, config = tmp_path / "secret.asc", folder(tmp_path / "config")
    secret.write_bytes(ring.gpg("--armor", "--export-secret-keys", ALICE))
    sif = tmp_path / "x.sif"
    make(sif, *layers(tmp_path, "base", "python", "top"))
    apptainer("key", "import", secret, config=config)
    apptainer("sign", sif, config=config)
    assert check_sif(sif, Keys()) == [alice]
    # A second signature, of a stranger's, takes nothing from the first.
    with keyring() as other:
        with used(other):
            mallory = Key(other.make("Mallory"), "Mallory")
            with pytest.raises(SignatureError, match=f"not in your keyring: {alice.fingerprint}"):
                check_sif(sif, Keys())
        secret.write_bytes(other.gpg("--armor", "--export-secret-keys", "Mallory"))
        apptainer("key", "import", secret, config=folder(tmp_path / "other"))
        apptainer("sign", sif, config=tmp_path / "other")
        with used(other):
            assert check_sif(sif, Keys()) == [mallory]
    assert check_sif(sif, Keys()) == [alice]
    # What is added after that is covered by nobody.
    apptainer("sif", "add", "--datatype", "3", "--groupid", "1", sif, secret, config=config)
    with pytest.raises(SignatureError, match="did not sign its object 7: it was added later"):
        check_sif(sif, Keys())


def test_apptainer_verifies_what_sign_adds(ring: Keyring, kind: str, tmp_path: Path) -> None:
    """Beside a signature of Apptainer's, and with a new object in each of two groups."""
    alice, bob = Key(ring.make(ALICE, kind=kind), ALICE), Key(ring.make(BOB, kind=kind), BOB)
    secret, config, sif = tmp_path / "secret.asc", folder(tmp_path / "config"), tmp_path / "x.sif"
    secret.write_bytes(ring.gpg("--armor", "--export-secret-keys", ALICE))
    make(sif, *layers(tmp_path, "base", "top"))
    apptainer("sif", "add", "--datatype", "3", "--groupid", "2", sif, secret, config=config)
    apptainer("key", "import", secret, config=config)
    apptainer("sign", sif, config=config)
    content = sif.read_bytes()
    assert sign_file(sif, tmp_path / "both.sif", bob)
    assert sif.read_bytes() == content
    both = tmp_path / "both.sif"
    for key in (alice, bob):
        assert check_sif(both, Keys(fingerprints=frozenset([key.fingerprint]))) == [key]
    apptainer("key", "import", ring.export(BOB, tmp_path / "bob.asc"), config=config)
    output = " ".join(apptainer("verify", "--all", both, config=config).split())
    for key in (alice, bob):
        assert f"Fingerprint: {key.fingerprint}" in output
    assert not sign_file(both, both, bob)


def test_signed_text_equals_apptainers(ring: Keyring, tmp_path: Path) -> None:
    ring.make(ALICE)
    secret, config = tmp_path / "secret.asc", folder(tmp_path / "config")
    secret.write_bytes(ring.gpg("--armor", "--export-secret-keys", ALICE))
    parts = layers(tmp_path, "base", "top")
    ours, theirs = make_signed(tmp_path / "ours.sif", parts, gpg.find_key()), tmp_path / "theirs.sif"
    make(theirs, *parts)
    apptainer("key", "import", secret, config=config)
    apptainer("sign", theirs, config=config)
    texts = [path.read_bytes().split(b'{"version"')[1].split(b"\n")[0] for path in (ours, theirs)]
    assert texts[0] == texts[1]


def test_a_signed_sif_through_a_registry(ring: Keyring, files_only: SampleRecipe, tmp_path: Path) -> None:
    """What Apptainer pulls it verifies; what Apptainer pushes we do not take unsigned."""
    alice = Key(ring.make(ALICE), ALICE)
    store, config = seeded(files_only, tmp_path / "store", "ground"), folder(tmp_path / "config")
    image = build(BuildContext(chain_of(files_only), store, Options(), quiet()))
    apptainer("key", "import", ring.export(ALICE, tmp_path / "alice.asc"), config=config)
    with real_registry(folder(tmp_path / "registry")) as host:
        push(image, store, PushRequest(Reference.parse(f"{host}/lab/own:1"), "sif", key=alice), quiet())
        apptainer("pull", tmp_path / "pulled.sif", f"oras://{host}/lab/own:1", config=config)
        assert alice.fingerprint in apptainer("verify", "--all", tmp_path / "pulled.sif", config=config)
        apptainer("push", "-U", tmp_path / "pulled.sif", f"oras://{host}/lab/theirs:1", config=config)
        taken = pull(Reference.parse(f"{host}/lab/theirs:1"), store, tmp_path / "taken.sif", quiet(), keys=Keys())
        assert taken[2] == alice
        make(tmp_path / "plain.sif", *layers(tmp_path, "base"))
        apptainer("push", "-U", tmp_path / "plain.sif", f"oras://{host}/lab/plain:1", config=config)
        with pytest.raises(SignatureError, match="is not signed"):
            pull(Reference.parse(f"{host}/lab/plain:1"), store, tmp_path / "refused.sif", quiet(), keys=Keys())
        assert not (tmp_path / "refused.sif").exists()


def test_other_than_pgp_key_is_refused(tmp_path: Path) -> None:
    need("apptainer", "openssl")
    config, pem = folder(tmp_path / "config"), tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", pem], check=True, capture_output=True)
    make(tmp_path / "x.sif", *layers(tmp_path, "base"))
    apptainer("sign", "--key", pem, tmp_path / "x.sif", config=config)
    with pytest.raises(SignatureError, match="a key that is not of PGP"):
        check_sif(tmp_path / "x.sif", Keys())

"""Signatures of SIFs and of images in a registry: made, found again, and refused for the right reason."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ekiben.artifacts.pull import pull
from ekiben.artifacts.push import PushRequest, push
from ekiben.core.errors import UsageError
from ekiben.core.inner_path import InnerPath
from ekiben.core.pgp_key import Key
from ekiben.formats.sif import (
    DESCRIPTOR,
    DESCRIPTORS_AT,
    GROUP,
    SIGNATURE,
    SifBytes,
    SifHeader,
    Signature,
    read_sif,
    signed_message,
    write_sif,
)
from ekiben.images.published import read_records, tags
from ekiben.inspect.describe import describe
from ekiben.publish.publish import Published, PublishOptions, publish
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from ekiben.signing import gpg
from ekiben.signing.check import check_image
from ekiben.signing.gpg import Keys, SignatureError
from ekiben.signing.registry import MEDIA_SIGNATURE, sign_pushed
from ekiben.signing.sif import check_sif
from ekiben.store import Store
from support.keyrings import Keyring, keyring, used
from support.registries import real_registry
from support.sample_recipe import RunCli, SampleRecipe, edit_record, image_of, quiet, seeded
from support.signed_sifs import ALICE, BOB, EPOCH, layers, make_signed
from support.small_sifs import DEFFILE, ID

pytestmark = pytest.mark.covers("ekiben/signing", "ekiben/registry")


@pytest.fixture(scope="module")
def ring() -> Iterator[Keyring]:
    with keyring() as made:
        made.make(ALICE)
        made.make(BOB)
        yield made


@pytest.fixture(autouse=True)
def own_keys(ring: Keyring) -> Iterator[None]:
    with used(ring):
        yield


@pytest.fixture
def alice() -> Key:
    return gpg.find_key(ALICE)


@pytest.fixture
def bob() -> Key:
    return gpg.find_key(BOB)


@pytest.fixture
def stranger() -> Iterator[Key]:
    """Whose key nobody here has."""
    with keyring() as other, used(other):
        other.make("Mallory")
        key = gpg.find_key()
        yield key


@pytest.fixture
def signed(tmp_path: Path, alice: Key) -> Path:
    return make_signed(tmp_path / "x.sif", layers(tmp_path, "base", "python", "top"), alice)


def refusal(path: Path, keys: Keys = Keys()) -> str:  # noqa: B008
    with pytest.raises(SignatureError) as caught:
        check_sif(path, keys)
    assert caught.value.exit_code == 8
    return str(caught.value)


def test_signed_sif_verifies_and_names_the_signer(signed: Path, alice: Key, bob: Key) -> None:
    heard: list[int] = []
    assert check_sif(signed, Keys(), heard.append) == [alice]
    info = read_sif(signed)
    assert sum(heard) == sum(item.size for item in info.descriptors if item.data_type != SIGNATURE)
    assert [item.number for item in info.layers] == [2, 3, 4]  # runs as before
    assert [item["name"] for item in describe(str(signed), Store(signed.parent))["objects"]] == [
        "definition",
        "layer 0",
        "layer 1",
        "layer 2",
        "signature",
    ]
    assert check_sif(signed, Keys(fingerprints=frozenset([alice.fingerprint]))) == [alice]
    assert (
        refusal(signed, Keys(fingerprints=frozenset([bob.fingerprint])))
        == f"{signed}: it is signed by {alice}, not by the key of --key: {bob.fingerprint}"
    )


def test_signed_sif_is_the_same_in_file_and_registry(tmp_path: Path, alice: Key) -> None:
    parts = layers(tmp_path, "base", "top")
    header = SifHeader(ID, DEFFILE, "amd64", EPOCH)
    data, hash = gpg.sign(signed_message(parts, header), alice, clear=True)
    signature, whole = Signature(data, alice.fingerprint, hash), hashlib.sha256()
    write_sif(tmp_path / "x.sif", parts, header, file_hash=whole, signature=signature)
    written = (tmp_path / "x.sif").read_bytes()
    assert whole.hexdigest() == hashlib.sha256(written).hexdigest()
    sif = SifBytes(parts, header, signature)
    assert sif.size == len(written)
    for offset in (0, 5000, len(written) - len(data) - 1, len(written) - len(data), len(written) - 3, len(written)):
        assert b"".join(sif.read(offset)) == written[offset:]


def in_layer(data: bytearray) -> None:
    data[data.rindex(b"-----BEGIN PGP SIGNED") - 3000] ^= 1


def in_deffile(data: bytearray) -> None:
    at = data.index(DEFFILE.encode())
    data[at] ^= 1


def in_id(data: bytearray) -> None:
    data[48] ^= 1


def in_description(data: bytearray) -> None:
    row = DESCRIPTORS_AT + 2 * DESCRIPTOR.size  # the first overlay: another kind of partition
    at = data.index(b"\x01\0\0\0\x04\0\0\0", row)
    data[at + 4] = 2


def in_message(data: bytearray) -> None:
    at = data.rindex(b'"objectDigest":"sha256:') + 23
    data[at : at + 4] = b"0000" if data[at : at + 4] != b"0000" else b"1111"


def in_armor(data: bytearray) -> None:
    at = data.rindex(b"-----END PGP") - 60
    data[at] = ord("A") if data[at] != ord("A") else ord("B")


def in_fingerprint(data: bytearray) -> None:
    row = DESCRIPTORS_AT + 4 * DESCRIPTOR.size
    data[row + DESCRIPTOR.size - 384 + 10] ^= 1


def taken_away(data: bytearray) -> None:
    data[DESCRIPTORS_AT + 3 * DESCRIPTOR.size + 4] = 0


def added(data: bytearray) -> None:
    """The first layer's descriptor once more, as a further object of the group."""
    first, free = DESCRIPTORS_AT + DESCRIPTOR.size, DESCRIPTORS_AT + 5 * DESCRIPTOR.size
    data[free : free + DESCRIPTOR.size] = data[first : first + DESCRIPTOR.size]
    data[free + 5 : free + 9] = (6).to_bytes(4, "little")


def doubled(data: bytearray) -> None:
    """Another content under the number of a layer that was signed."""
    first, free = DESCRIPTORS_AT + DESCRIPTOR.size, DESCRIPTORS_AT + 5 * DESCRIPTOR.size
    data[free : free + DESCRIPTOR.size] = data[first : first + DESCRIPTOR.size]
    data[free + 17] ^= 1  # where it begins is not signed


def added_elsewhere(data: bytearray) -> None:
    added(data)
    at = DESCRIPTORS_AT + 5 * DESCRIPTOR.size + 9
    data[at : at + 4] = (GROUP + 1).to_bytes(4, "little")


def added_outside(data: bytearray) -> None:
    added(data)
    at = DESCRIPTORS_AT + 5 * DESCRIPTOR.size + 9
    data[at : at + 4] = (GROUP - 1).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_layer, "it was changed after Alice .* signed it: the content of object 4"),
        (in_deffile, "it was changed after Alice .* signed it: the content of object 1"),
        (in_id, "it was changed after Alice .* signed it: its header"),
        (in_description, "it was changed after Alice .* signed it: the description of object 3"),
        (taken_away, "it was changed after Alice .* signed it: object 4 is gone"),
        (added, "Alice .* did not sign its object 6: it was added later, or left out"),
        (doubled, "two of its objects have one number"),
        (added_elsewhere, "changed after it was signed, or signed in part: no signature covers its object 6"),
        (added_outside, "no signature covers its object 6, which is in no group"),
        (in_message, "its signature is no good: it says Alice .*, and does not fit what was signed"),
        (in_armor, "its signature (is no good|cannot be read)"),
        (in_fingerprint, "its signature names another key than that of Alice"),
    ],
)
def test_changed_content_is_named(signed: Path, change: Callable[[bytearray], None], message: str) -> None:
    data = bytearray(signed.read_bytes())
    change(data)
    signed.write_bytes(data)
    with pytest.raises(SignatureError, match=f"{signed}:? .*{message}") as caught:
        check_sif(signed, Keys())
    assert caught.value.exit_code == 8


def test_signature_of_another_image_is_refused(tmp_path: Path, alice: Key) -> None:
    one, other = layers(tmp_path, "base", "one"), layers(tmp_path, "base", "other")
    message = signed_message(one, SifHeader(ID, DEFFILE, "amd64", EPOCH))
    data, hash = gpg.sign(message, alice, clear=True)
    write_sif(
        tmp_path / "x.sif",
        other,
        SifHeader(ID, DEFFILE, "amd64", EPOCH),
        signature=Signature(data, alice.fingerprint, hash),
    )
    assert "changed after Alice" in refusal(tmp_path / "x.sif")
    data, hash = gpg.sign(b"I like it.", alice, clear=True)
    write_sif(
        tmp_path / "x.sif",
        other,
        SifHeader(ID, DEFFILE, "amd64", EPOCH),
        signature=Signature(data, alice.fingerprint, hash),
    )
    assert "signed is not a signature of a SIF" in refusal(tmp_path / "x.sif")


def test_unsigned_or_unknown_signer_is_refused(tmp_path: Path, stranger: Key, ring: Keyring) -> None:
    parts = layers(tmp_path, "base")
    write_sif(tmp_path / "plain.sif", parts, SifHeader(ID, DEFFILE, "amd64", EPOCH))
    assert refusal(tmp_path / "plain.sif") == f"{tmp_path}/plain.sif is not signed"
    make_signed(tmp_path / "x.sif", parts, stranger)
    with used(ring):
        assert (
            refusal(tmp_path / "x.sif")
            == f"{tmp_path}/x.sif: it is signed by a key that is not in your keyring: {stranger.fingerprint}"
        )


@pytest.fixture
def store(files_only: SampleRecipe, tmp_path: Path) -> Store:
    files_only.write("files/data.txt", str(tmp_path) * 1000)  # each test's image is another one
    return seeded(files_only, tmp_path / "store", "ground")


def put(files_only: SampleRecipe, store: Store, shared_dir: Path, key: Key | None) -> Published:
    return publish(image_of(files_only, store), store, shared_dir, PublishOptions(check=False, key=key), quiet())


def test_signed_version_is_added_beside_the_unsigned_one(
    files_only: SampleRecipe, store: Store, tmp_path: Path, alice: Key, bob: Key
) -> None:
    shared_dir = tmp_path / "lab"
    plain = put(files_only, store, shared_dir, None)
    before = plain.sif.stat()
    signed = put(files_only, store, shared_dir, alice)
    assert (signed.created, signed.bytes_copied) == (True, 0)
    assert signed.sif != plain.sif
    assert plain.sif.stat().st_mtime_ns == before.st_mtime_ns  # a job may have it open
    assert check_sif(signed.sif, Keys()) == [alice]
    assert signed.record.signature == Key(alice.fingerprint, ALICE)
    assert plain.record.signature is None
    digest = hashlib.sha256(signed.sif.read_bytes()).hexdigest()
    assert signed.sif.with_name(signed.sif.name + ".sha256").read_text() == f"{digest}  {signed.sif.name}\n"
    assert digest.startswith(signed.sif.stem.rpartition("-")[2])
    # Again, with the key or without: nothing new, and what `current` names stays signed.
    for key in (alice, None):
        again = put(files_only, store, shared_dir, key)
        assert (again.created, again.sif) == (False, signed.sif)
    assert tags(InnerPath.below(signed.sif.parent)) == {"current": signed.sif.name}
    assert put(files_only, store, shared_dir, bob).record.signature == bob
    assert len(read_records(InnerPath.below(signed.sif.parent))[0]) == 3


def test_signing_again_gives_the_same_file(files_only: SampleRecipe, store: Store, tmp_path: Path, alice: Key) -> None:
    one, other = put(files_only, store, tmp_path / "one", alice), put(files_only, store, tmp_path / "other", alice)
    assert one.sif.name == other.sif.name
    assert one.sif.read_bytes() == other.sif.read_bytes()
    # A signature that is kept and is damaged, or of something else, is made again.
    kept = next((store.root / "checks").glob("signature-*"))
    for wrong in (b"garbage", gpg.sign(b"something else", alice, clear=True)[0]):
        edit_record(kept, signature=wrong.decode())
        shared_dir = tmp_path / hashlib.sha256(wrong).hexdigest()
        assert check_sif(put(files_only, store, shared_dir, alice).sif, Keys()) == [alice]


def test_sign_and_verify_by_command(
    files_only: SampleRecipe, store: Store, tmp_path: Path, run_cli: RunCli, ring: Keyring, alice: Key
) -> None:
    argv = ("--store", store.root, "publish", files_only.path, "--to", tmp_path / "lab", "--no-verify")
    refused = run_cli(*argv, "--sign", code=2)
    assert "2 keys match" in refused.stderr
    assert not (tmp_path / "lab/images/own").exists()
    done = run_cli(*argv, "--sign", "alice@example.org")
    assert f"signed     by {alice}" in done.stdout
    current = tmp_path / "lab/images/own/current"
    for option in ([], ["--require-signature"]):
        stdout = run_cli("verify", current, *option).stdout
        assert stdout == f"{current}  signed by {alice}\n"
    file = ring.export(ALICE, tmp_path / "alice.asc")
    with keyring() as other:
        assert "not in your keyring" in run_cli("verify", current, "--require-signature", env=other.env, code=8).stderr
        shown = json.loads(run_cli("verify", current, "--key", file, "--json", env=other.env).stdout)
    assert shown["signed"] == [{"fingerprint": alice.fingerprint, "user": ALICE}]
    # Of a recipe, the SIF that the tests run in.
    of_recipe = ("--store", store.root, "verify", files_only.path, "--require-signature")
    assert f"{files_only.path.name}.sif: no such file" in run_cli(*of_recipe, code=2).stderr
    assert f"signed by {alice}" in run_cli(*of_recipe, "--sif", current.resolve(), code=8).stdout  # nothing runs in it
    run_cli("--store", store.root, "image", files_only.path, "--format", "sif", "--no-verify")
    assert f"{files_only.path.name}.sif is not signed" in run_cli(*of_recipe, code=8).stderr


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


def send(files_only: SampleRecipe, store: Store, ref: str, key: Key | None, format: str = "docker") -> str:
    done = push(image_of(files_only, store), store, PushRequest(Reference.parse(ref), format, key=key), quiet())
    return done.ref.rpartition("@")[2]


def take(ref: str, store: Store, out: Path, keys: Keys | None) -> Key | None:
    return pull(Reference.parse(ref), store, out, quiet(), keys=keys)[2]


def no_pull(ref: str, store: Store, folder: Path) -> str:
    """The error message; no file is left."""
    before = set(folder.iterdir())
    with pytest.raises(SignatureError) as caught:
        take(ref, store, folder / "refused.sif", Keys())
    assert set(folder.iterdir()) == before
    return str(caught.value)


def test_skopeo_verifies_ours(files_only: SampleRecipe, store: Store, host: str, alice: Key, tmp_path: Path) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed (tests/services.sh install registry)")
    ref = f"{host}/lab/own:1"
    digest = send(files_only, store, ref, alice)
    registry = Registry(Reference.parse(ref))
    (item,) = registry.referrers(digest)
    assert item.artifact_type == MEDIA_SIGNATURE
    manifest = json.loads(registry.fetch_manifest(item.digest)[0])
    assert manifest["subject"]["digest"] == digest
    (data,) = registry.attached(item.digest)
    (tmp_path / "signature").write_bytes(data)
    (tmp_path / "manifest").write_bytes(registry.fetch_manifest(digest)[0])
    command = ["skopeo", "standalone-verify", tmp_path / "manifest", ref, alice.fingerprint, tmp_path / "signature"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"Signature verified, digest {digest}\n"), done.stderr
    command[3] = f"{host}/lab/own:2"
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_we_verify_skopeos(files_only: SampleRecipe, store: Store, host: str, alice: Key, tmp_path: Path) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed (tests/services.sh install registry)")
    ref = f"{host}/lab/theirs:1"
    registry, digest = Registry(Reference.parse(ref)), send(files_only, store, ref, None)
    (tmp_path / "manifest").write_bytes(registry.fetch_manifest(digest)[0])
    command = ["skopeo", "standalone-sign", tmp_path / "manifest", ref, alice.fingerprint, "-o", tmp_path / "signature"]
    subprocess.run(command, check=True, capture_output=True)
    registry.attach(digest, MEDIA_SIGNATURE, (tmp_path / "signature").read_bytes(), {})
    assert take(ref, store, tmp_path / "x.sif", Keys()) == alice


def test_pull_requires_a_signature(
    files_only: SampleRecipe, store: Store, host: str, alice: Key, bob: Key, tmp_path: Path
) -> None:
    ref, folder = f"{host}/lab/pulled:1", tmp_path / "out"
    folder.mkdir()
    digest = send(files_only, store, ref, None)
    assert no_pull(ref, store, folder) == f"{ref} is not signed"
    assert take(ref, store, tmp_path / "free.sif", None) is None
    send(files_only, store, ref, alice)
    send(files_only, store, ref, alice)
    send(files_only, store, ref, bob)
    assert len(Registry(Reference.parse(ref)).referrers(digest)) == 2  # not one for each time
    assert take(ref, store, folder / "x.sif", Keys()) in (alice, bob)
    for key in (alice, bob):
        assert take(f"{ref}@{digest}", store, folder / "x.sif", Keys(fingerprints=frozenset([key.fingerprint]))) == key
    assert check_image(ref, alice.fingerprint) == (f"{ref}@{digest}", [alice])


def test_signature_in_sif_suffices(
    files_only: SampleRecipe, store: Store, host: str, alice: Key, tmp_path: Path
) -> None:
    ref, folder = f"{host}/lab/sif:1", tmp_path / "out"
    folder.mkdir()
    digest = send(files_only, store, ref, alice, "sif")
    registry = Registry(Reference.parse(ref))
    assert len(registry.referrers(digest)) == 1
    assert take(ref, store, folder / "x.sif", Keys()) == alice
    assert check_sif(folder / "x.sif", Keys()) == [alice]
    # The same manifest where its signatures were left behind, as a plain copy does.
    copy = Registry(Reference.parse(f"{host}/lab/copy:1"))
    data = registry.fetch_manifest(digest)[0]
    for blob in (item["digest"] for item in (json.loads(data)["config"], *json.loads(data)["layers"])):
        assert copy.mount_blob(blob, "lab/sif")
    copy.put_manifest(data, "application/vnd.oci.image.manifest.v1+json", "1")
    assert take(f"{host}/lab/copy:1", store, folder / "y.sif", Keys()) == alice
    assert take(f"{host}/lab/copy:1", store, folder / "y.sif", Keys()) == alice  # it is there, and looked at again
    plain = f"{host}/lab/plain:1"
    send(files_only, store, plain, None, "sif")
    assert no_pull(plain, store, folder) == f"{plain}@{registry_digest(plain)} is not signed"


def registry_digest(ref: str) -> str:
    return Registry(Reference.parse(ref)).fetch_manifest()[1]


def test_signature_follows_a_tag(files_only: SampleRecipe, store: Store, host: str, alice: Key, tmp_path: Path) -> None:
    """Whoever can write there can move a tag, or a signature. Neither helps."""
    folder = tmp_path / "out"
    folder.mkdir()
    old, new = f"{host}/lab/tags:1.0", f"{host}/lab/tags:1.1"
    before = send(files_only, store, old, alice)
    files_only.write("files/data.txt", "mended\n")
    after = send(files_only, store, new, alice)
    registry = Registry(Reference.parse(new))
    kind = "application/vnd.oci.image.manifest.v1+json"
    registry.put_manifest(registry.fetch_manifest(before)[0], kind, "1.1")
    assert no_pull(new, store, folder) == f"{new}: {alice} signed this image as {old}"
    registry.put_manifest(registry.fetch_manifest(after)[0], kind, "1.1")
    assert take(new, store, folder / "x.sif", Keys()) == alice
    # The good image's signature at another one.
    files_only.write("files/data.txt", "evil\n")
    evil = send(files_only, store, f"{host}/lab/tags:evil", None)
    (item,) = registry.referrers(after)
    registry.attach(evil, MEDIA_SIGNATURE, registry.attached(item.digest)[0], {})
    registry.put_manifest(registry.fetch_manifest(evil)[0], kind, "1.1")
    assert f"its signature by {alice} is that of another image: {new}, {after}" in no_pull(new, store, folder)


def test_invalid_signature_in_a_registry_is_refused(
    files_only: SampleRecipe, store: Store, host: str, ring: Keyring, stranger: Key, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    ref = f"{host}/lab/bad:1"
    digest, registry = send(files_only, store, ref, None), Registry(Reference.parse(ref))
    sign_pushed(registry, digest, stranger)
    with used(ring):
        shown = no_pull(ref, store, folder)
        assert shown == f"{ref}: it is signed by a key that is not in your keyring: {stranger.fingerprint}"
        alice = gpg.find_key(ALICE)
        data, _ = gpg.sign(b'{"critical": {"type": "a poem"}}', alice, clear=False)
        registry.attach(digest, MEDIA_SIGNATURE, data, {})
        assert f"what {alice} signed is not a claim about an image" in no_pull(ref, store, folder)
        registry.attach(digest, MEDIA_SIGNATURE, b"garbage", {})
        registry.attach(digest, "application/spdx+json", b"{}", {})  # what others attach is none of this
        no_pull(ref, store, folder)
        sign_pushed(registry, digest, alice)
        assert take(ref, store, folder / "x.sif", Keys()) == alice  # one good one is enough


def test_push_of_layers_refuses_to_sign(files_only: SampleRecipe, store: Store, host: str, alice: Key) -> None:
    with pytest.raises(UsageError, match="layers are not signed"):
        send(files_only, store, f"{host}/lab/layers", alice, "layers")

"""Signatures of SIFs and of images in a registry: made, found again, and refused for the right reason."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder import gpg
from builder.errors import UsageError
from builder.gpg import Key, Keys, SignatureError
from builder.inspect import describe
from builder.publish import Published, publish, records, tags
from builder.pull import pull
from builder.push import push
from builder.registry import MEDIA_INDEX, Reference, Registry, digest_of
from builder.sif import (
    DESCRIPTOR,
    DESCRIPTORS_AT,
    GROUP,
    SIGNATURE,
    Partition,
    SifBytes,
    Signature,
    read_sif,
    signed_message,
    write_sif,
)
from builder.sign import MEDIA_SIGNATURE, _is_reference, check_image, check_sif, sign_pushed
from builder.store import Store
from keyrings import Keyring, keyring, used
from own_recipe import Own, RunCli, image_of, quiet, seeded
from registries import Answer, bad_registry, real_registry
from test_sif import DEFFILE, ID, squashfs

ALICE, BOB = "Alice <alice@example.org>", "Bob <bob@example.org>"
EPOCH = 1_700_000_000


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


def layers(folder: Path, *names: str) -> list[Partition]:
    return [squashfs(folder / name, name) for name in names]


def make_signed(out: Path, parts: list[Partition], key: Key) -> Path:
    message = signed_message(parts, id=ID, deffile=DEFFILE, arch="amd64", epoch=EPOCH)
    data, hash = gpg.sign(message, key, clear=True)
    write_sif(out, parts, id=ID, deffile=DEFFILE, arch="amd64", epoch=EPOCH,
              signature=Signature(data, key.fingerprint, hash))  # fmt: skip
    return out


@pytest.fixture
def signed(tmp_path: Path, alice: Key) -> Path:
    return make_signed(tmp_path / "x.sif", layers(tmp_path, "base", "python", "top"), alice)


def refusal(path: Path, keys: Keys = Keys()) -> str:  # noqa: B008
    with pytest.raises(SignatureError) as caught:
        check_sif(path, keys)
    assert caught.value.exit_code == 8
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------------- SIF


def test_a_signed_sif_is_whole_and_says_by_whom(signed: Path, alice: Key, bob: Key) -> None:
    heard: list[int] = []
    assert check_sif(signed, Keys(), heard.append) == [alice]
    info = read_sif(signed)
    assert sum(heard) == sum(item.size for item in info.descriptors if item.data_type != SIGNATURE)
    assert [item.number for item in info.layers] == [2, 3, 4]  # runs as before
    assert [part["name"] for part in describe(str(signed), Store(signed.parent))["parts"]] == [
        "definition", "layer 0", "layer 1", "layer 2", "signature",
    ]  # fmt: skip
    assert check_sif(signed, Keys(fingerprints=frozenset([alice.fingerprint]))) == [alice]
    assert refusal(signed, Keys(fingerprints=frozenset([bob.fingerprint]))) == (
        f"{signed}: it is signed by {alice}, not by the key of --key: {bob.fingerprint}"
    )


def test_its_bytes_are_the_same_in_a_file_and_on_the_way_to_a_registry(tmp_path: Path, alice: Key) -> None:
    parts = layers(tmp_path, "base", "top")
    about = {"id": ID, "deffile": DEFFILE, "arch": "amd64"}
    data, hash = gpg.sign(signed_message(parts, epoch=EPOCH, **about), alice, clear=True)
    signature, whole = Signature(data, alice.fingerprint, hash), hashlib.sha256()
    write_sif(tmp_path / "x.sif", parts, epoch=EPOCH, whole=whole, signature=signature, **about)
    written = (tmp_path / "x.sif").read_bytes()
    assert whole.hexdigest() == hashlib.sha256(written).hexdigest()
    sif = SifBytes(parts, epoch=EPOCH, signature=signature, **about)
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
    ("change", "said"),
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
def test_what_was_changed_is_named(signed: Path, change: Callable[[bytearray], None], said: str) -> None:
    data = bytearray(signed.read_bytes())
    change(data)
    signed.write_bytes(data)
    with pytest.raises(SignatureError, match=f"{signed}:? .*{said}") as caught:
        check_sif(signed, Keys())
    assert caught.value.exit_code == 8


def test_the_signature_of_another_image(tmp_path: Path, alice: Key) -> None:
    one, other = layers(tmp_path, "base", "one"), layers(tmp_path, "base", "other")
    message = signed_message(one, id=ID, deffile=DEFFILE, arch="amd64", epoch=EPOCH)
    data, hash = gpg.sign(message, alice, clear=True)
    write_sif(tmp_path / "x.sif", other, id=ID, deffile=DEFFILE, arch="amd64", epoch=EPOCH,
              signature=Signature(data, alice.fingerprint, hash))  # fmt: skip
    assert "changed after Alice" in refusal(tmp_path / "x.sif")
    data, hash = gpg.sign(b"I like it.", alice, clear=True)
    write_sif(tmp_path / "x.sif", other, id=ID, deffile=DEFFILE, arch="amd64", epoch=EPOCH,
              signature=Signature(data, alice.fingerprint, hash))  # fmt: skip
    assert "signed is no signature of a SIF" in refusal(tmp_path / "x.sif")


def test_unsigned_or_by_a_stranger(tmp_path: Path, stranger: Key, ring: Keyring) -> None:
    parts = layers(tmp_path, "base")
    write_sif(tmp_path / "plain.sif", parts, id=ID, deffile=DEFFILE, arch="amd64", epoch=EPOCH)
    assert refusal(tmp_path / "plain.sif") == f"{tmp_path}/plain.sif is not signed"
    make_signed(tmp_path / "x.sif", parts, stranger)
    with used(ring):
        assert refusal(tmp_path / "x.sif") == (
            f"{tmp_path}/x.sif: it is signed by a key that is not in your keyring: {stranger.fingerprint}"
        )


# ------------------------------------------------------------------------------------------------------------ published


@pytest.fixture
def store(flat: Own, tmp_path: Path) -> Store:
    flat.write("files/data.txt", str(tmp_path) * 1000)  # each test's image is another one
    return seeded(flat, tmp_path / "store", "ground")


def put(flat: Own, store: Store, place: Path, key: Key | None) -> Published:
    return publish(image_of(flat, store), store, place, quiet(), check=False, key=key)


def test_a_signed_version_comes_beside_the_unsigned_one(
    flat: Own, store: Store, tmp_path: Path, alice: Key, bob: Key
) -> None:
    place = tmp_path / "lab"
    plain = put(flat, store, place, None)
    before = plain.sif.stat()
    signed = put(flat, store, place, alice)
    assert (signed.made, signed.moved) == (True, 0)
    assert signed.sif != plain.sif
    assert plain.sif.stat().st_mtime_ns == before.st_mtime_ns  # a job may have it open
    assert check_sif(signed.sif, Keys()) == [alice]
    assert signed.record["signature"] == {"fingerprint": alice.fingerprint, "user": ALICE}
    assert plain.record["signature"] is None
    digest = hashlib.sha256(signed.sif.read_bytes()).hexdigest()
    assert signed.sif.with_name(signed.sif.name + ".sha256").read_text() == f"{digest}  {signed.sif.name}\n"
    assert digest.startswith(signed.sif.stem.rpartition("-")[2])
    # Again, with the key or without: nothing new, and what `current` names stays signed.
    for key in (alice, None):
        again = put(flat, store, place, key)
        assert (again.made, again.sif) == (False, signed.sif)
    assert tags(signed.sif.parent) == {"current": signed.sif.name}
    assert put(flat, store, place, bob).record["signature"]["fingerprint"] == bob.fingerprint
    assert len(records(signed.sif.parent)) == 3


def test_signed_again_it_is_the_same_file(flat: Own, store: Store, tmp_path: Path, alice: Key) -> None:
    one, other = put(flat, store, tmp_path / "one", alice), put(flat, store, tmp_path / "other", alice)
    assert one.sif.name == other.sif.name
    assert one.sif.read_bytes() == other.sif.read_bytes()
    # A signature that is kept and is damaged, or of something else, is made anew.
    kept = next((store.root / "checks").glob("signature-*"))
    for wrong in (b"garbage", gpg.sign(b"something else", alice, clear=True)[0]):
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "signature": wrong.decode()}))
        place = tmp_path / hashlib.sha256(wrong).hexdigest()
        assert check_sif(put(flat, store, place, alice).sif, Keys()) == [alice]


def test_the_command_line(flat: Own, store: Store, tmp_path: Path, run_cli: RunCli, ring: Keyring, alice: Key) -> None:
    words = ("--store", store.root, "publish", flat.path, "--to", tmp_path / "lab", "--no-verify")
    refused = run_cli(*words, "--sign", code=2)
    assert "2 keys can be meant" in refused.stderr
    assert not (tmp_path / "lab/images/own").exists()
    done = run_cli(*words, "--sign", "alice@example.org")
    assert f"signed     by {alice}" in done.stdout
    current = tmp_path / "lab/images/own/current"
    for option in ([], ["--require-signature"]):
        said = run_cli("verify", current, *option).stdout
        assert said == f"{current}  signed by {alice}\n"
    file = ring.export(ALICE, tmp_path / "alice.asc")
    with keyring() as other:
        assert "not in your keyring" in run_cli("verify", current, "--require-signature", env=other.env, code=8).stderr
        shown = json.loads(run_cli("verify", current, "--key", file, "--json", env=other.env).stdout)
    assert shown["signed"] == [{"fingerprint": alice.fingerprint, "user": ALICE}]
    # Of a recipe, the SIF that the tests run in.
    own = ("--store", store.root, "verify", flat.path, "--require-signature")
    assert f"{flat.path.name}.sif: no such file" in run_cli(*own, code=2).stderr
    assert f"signed by {alice}" in run_cli(*own, "--sif", current.resolve(), code=8).stdout  # nothing runs in it
    run_cli("--store", store.root, "image", flat.path, "--format", "sif", "--no-verify")
    assert f"{flat.path.name}.sif is not signed" in run_cli(*own, code=8).stderr


def test_what_is_a_reference_and_what_a_path() -> None:
    for name in (
        "127.0.0.1:5000/a/b:1",
        "registry.example.org/a",
        "localhost/a",
        "oras://a/b:1",
        "host:5000/a@sha256:0",
    ):
        assert _is_reference(name), name
    for name in ("hello", "./x.sif", "../my-recipes/chatbot", "recipes/hello", "/a.b/c.sif", "x.sif"):
        assert not _is_reference(name), name


# ------------------------------------------------------------------------------------------------------------- registry


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


def send(flat: Own, store: Store, place: str, key: Key | None, format: str = "docker") -> str:
    done = push(image_of(flat, store), store, Reference.parse(place), format, quiet(), key=key)
    return done.place.rpartition("@")[2]


def take(place: str, store: Store, out: Path, keys: Keys | None) -> Key | None:
    return pull(Reference.parse(place), store, out, quiet(), keys=keys)[2]


def no_pull(place: str, store: Store, folder: Path) -> str:
    """What is said; and nobody sees a file."""
    before = set(folder.iterdir())
    with pytest.raises(SignatureError) as caught:
        take(place, store, folder / "refused.sif", Keys())
    assert set(folder.iterdir()) == before
    return str(caught.value)


def test_what_skopeo_verifies(flat: Own, store: Store, host: str, alice: Key, tmp_path: Path) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed (tests/services.sh install registry)")
    place = f"{host}/lab/own:1"
    digest = send(flat, store, place, alice)
    registry = Registry(Reference.parse(place))
    (item,) = registry.referrers(digest)
    assert item["artifactType"] == MEDIA_SIGNATURE
    manifest = json.loads(registry.fetch_manifest(item["digest"])[0])
    assert manifest["subject"]["digest"] == digest
    (data,) = registry.attached(item["digest"])
    (tmp_path / "signature").write_bytes(data)
    (tmp_path / "manifest").write_bytes(registry.fetch_manifest(digest)[0])
    command = ["skopeo", "standalone-verify", tmp_path / "manifest", place, alice.fingerprint, tmp_path / "signature"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"Signature verified, digest {digest}\n"), done.stderr
    command[3] = f"{host}/lab/own:2"
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_what_skopeo_signed(flat: Own, store: Store, host: str, alice: Key, tmp_path: Path) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed (tests/services.sh install registry)")
    place = f"{host}/lab/theirs:1"
    registry, digest = Registry(Reference.parse(place)), send(flat, store, place, None)
    (tmp_path / "manifest").write_bytes(registry.fetch_manifest(digest)[0])
    command = [
        "skopeo",
        "standalone-sign",
        tmp_path / "manifest",
        place,
        alice.fingerprint,
        "-o",
        tmp_path / "signature",
    ]
    subprocess.run(command, check=True, capture_output=True)
    registry.attach(digest, MEDIA_SIGNATURE, (tmp_path / "signature").read_bytes(), {})
    assert take(place, store, tmp_path / "x.sif", Keys()) == alice


def test_pulled_only_when_signed(flat: Own, store: Store, host: str, alice: Key, bob: Key, tmp_path: Path) -> None:
    place, folder = f"{host}/lab/pulled:1", tmp_path / "out"
    folder.mkdir()
    digest = send(flat, store, place, None)
    assert no_pull(place, store, folder) == f"{place} is not signed"
    assert take(place, store, tmp_path / "free.sif", None) is None
    send(flat, store, place, alice)
    send(flat, store, place, alice)
    send(flat, store, place, bob)
    assert len(Registry(Reference.parse(place)).referrers(digest)) == 2  # not one for each time
    assert take(place, store, folder / "x.sif", Keys()) in (alice, bob)
    for key in (alice, bob):
        assert (
            take(f"{place}@{digest}", store, folder / "x.sif", Keys(fingerprints=frozenset([key.fingerprint]))) == key
        )
    assert check_image(place, alice.fingerprint) == (f"{place}@{digest}", [alice])


def test_a_sif_that_is_signed_itself_is_good_enough(
    flat: Own, store: Store, host: str, alice: Key, tmp_path: Path
) -> None:
    place, folder = f"{host}/lab/sif:1", tmp_path / "out"
    folder.mkdir()
    digest = send(flat, store, place, alice, "sif")
    registry = Registry(Reference.parse(place))
    assert len(registry.referrers(digest)) == 1
    assert take(place, store, folder / "x.sif", Keys()) == alice
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
    send(flat, store, plain, None, "sif")
    assert no_pull(plain, store, folder) == f"{plain}@{registry_digest(plain)} is not signed"


def registry_digest(place: str) -> str:
    return Registry(Reference.parse(place)).fetch_manifest()[1]


def test_a_tag_that_moved(flat: Own, store: Store, host: str, alice: Key, tmp_path: Path) -> None:
    """Whoever can write there can move a tag, or a signature. Neither helps."""
    folder = tmp_path / "out"
    folder.mkdir()
    old, new = f"{host}/lab/tags:1.0", f"{host}/lab/tags:1.1"
    before = send(flat, store, old, alice)
    flat.write("files/data.txt", "mended\n")
    after = send(flat, store, new, alice)
    registry = Registry(Reference.parse(new))
    kind = "application/vnd.oci.image.manifest.v1+json"
    registry.put_manifest(registry.fetch_manifest(before)[0], kind, "1.1")
    assert no_pull(new, store, folder) == f"{new}: {alice} signed this image as {old}"
    registry.put_manifest(registry.fetch_manifest(after)[0], kind, "1.1")
    assert take(new, store, folder / "x.sif", Keys()) == alice
    # The good image's signature at another one.
    flat.write("files/data.txt", "evil\n")
    evil = send(flat, store, f"{host}/lab/tags:evil", None)
    (item,) = registry.referrers(after)
    registry.attach(evil, MEDIA_SIGNATURE, registry.attached(item["digest"])[0], {})
    registry.put_manifest(registry.fetch_manifest(evil)[0], kind, "1.1")
    assert f"its signature by {alice} is that of another image: {new}, {after}" in no_pull(new, store, folder)


def test_a_signature_in_a_registry_that_is_no_good(
    flat: Own, store: Store, host: str, ring: Keyring, stranger: Key, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    place = f"{host}/lab/bad:1"
    digest, registry = send(flat, store, place, None), Registry(Reference.parse(place))
    sign_pushed(registry, digest, stranger)
    with used(ring):
        assert (
            no_pull(place, store, folder)
            == f"{place}: it is signed by a key that is not in your keyring: {stranger.fingerprint}"
        )
        alice = gpg.find_key(ALICE)
        data, _ = gpg.sign(b'{"critical": {"type": "a poem"}}', alice, clear=False)
        registry.attach(digest, MEDIA_SIGNATURE, data, {})
        assert f"what {alice} signed is no claim about an image" in no_pull(place, store, folder)
        registry.attach(digest, MEDIA_SIGNATURE, b"garbage", {})
        registry.attach(digest, "application/spdx+json", b"{}", {})  # what others attach is none of this
        no_pull(place, store, folder)
        sign_pushed(registry, digest, alice)
        assert take(place, store, folder / "x.sif", Keys()) == alice  # one good one is enough


def test_a_registry_that_lists_what_refers(alice: Key, tmp_path: Path) -> None:
    """As OCI 1.1 has it, which the real one here does not know."""
    manifest = json.dumps({"mediaType": MEDIA_INDEX.replace("index", "manifest")}).encode()
    digest, kept = digest_of(manifest), dict[str, bytes]()

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if f"/referrers/{digest}" in path:
            listed = [{"digest": "sha256:" + "1" * 64, "artifactType": "application/spdx+json"}]
            return Answer(
                body=json.dumps({"manifests": listed}).encode(),
                headers={"Content-Type": kept.get("type", b"").decode()},
            )
        if method == "PUT" and "/manifests/" in path:
            return Answer(201, headers={"OCI-Subject": digest} if "/manifests/sha256:" in path else {})
        return Answer(body=manifest if path.endswith(digest) else b"") if "sha256-" not in path else Answer(404)

    with bad_registry(answer) as (host, asked):
        registry = Registry(Reference.parse(f"{host}/lab/x:1"))
        assert registry.referrers(digest) == []  # a web page is no list
        kept["type"] = MEDIA_INDEX.encode()
        assert [item["artifactType"] for item in registry.referrers(digest)] == ["application/spdx+json"]
        registry.attach(digest, MEDIA_SIGNATURE, b"signed", {})
        put = [path for method, path, _ in asked if method == "PUT" and "/manifests/" in path]
        assert len(put) == 1 and "/manifests/sha256:" in put[0]  # and no list of our own


def test_layers_are_not_signed(flat: Own, store: Store, host: str, alice: Key) -> None:
    with pytest.raises(UsageError, match="layers are not signed"):
        send(flat, store, f"{host}/lab/layers", alice, "layers")

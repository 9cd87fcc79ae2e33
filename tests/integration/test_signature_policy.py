"""require_signature in config.yaml: what no such key has signed is not run, and a file is known when it starts."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError, VerifyError
from ekiben.core.pgp_key import Key, SignaturePolicy
from ekiben.core.progress import Progress
from ekiben.formats.sif import SIGNATURE, SifHeader, Signature, add_signatures, read_sif, signed_message
from ekiben.run.image import NamedImage, SifState
from ekiben.run.jobs.images import read_tasks
from ekiben.run.jobs.plan import plan
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.script import script
from ekiben.run.launch import Engine, RunRequest, choose_target, launch
from ekiben.signing import gpg
from ekiben.signing.policy import required_signature, signing_key
from ekiben.signing.sif import check_sif, sign_file
from ekiben.store import Store
from support.keyrings import Keyring, keyring, used
from support.sample_recipe import RunCli, SampleRecipe, quiet
from support.signed_sifs import ALICE, BOB, EPOCH, layers, make_signed
from support.small_sifs import DEFFILE, ID, make

pytestmark = pytest.mark.covers("ekiben/signing", "ekiben/run")
FILE = "/etc/ekiben/config.yaml"


@pytest.fixture(scope="module")
def ring() -> Iterator[Keyring]:
    with keyring() as made:
        made.make(ALICE)
        made.make(BOB)
        yield made


@pytest.fixture(autouse=True)
def keys_of_the_user(ring: Keyring) -> Iterator[None]:
    with used(ring):
        yield


@pytest.fixture
def alice() -> Key:
    return gpg.find_key(ALICE)


@pytest.fixture
def bob() -> Key:
    return gpg.find_key(BOB)


@dataclass(frozen=True)
class Policy:
    """The policy of a config.yaml, and the store that notes what was read."""

    store: Store
    policy: SignaturePolicy

    def check(self, sif: Path) -> SifState:
        return required_signature(self.policy, self.store, quiet()).check(sif)

    def refusal(self, sif: Path) -> str:
        with pytest.raises(VerifyError) as caught:
            self.check(sif)
        assert caught.value.exit_code == 8
        return str(caught.value)


@pytest.fixture
def alices(tmp_path: Path, alice: Key) -> Policy:
    store = Store(tmp_path / "store")
    store.open_for_writing()
    return Policy(store, SignaturePolicy(frozenset([alice.fingerprint]), (FILE,)))


@pytest.fixture
def signed(tmp_path: Path, alice: Key) -> Path:
    return make_signed(tmp_path / "x.sif", layers(tmp_path, "base", "top"), alice)


def unsigned_sif(folder: Path) -> Path:
    make(folder / "u.sif", *layers(folder, "u-base", "u-top"))
    return folder / "u.sif"


def test_only_a_required_key_counts(alices: Policy, signed: Path, tmp_path: Path, alice: Key, bob: Key) -> None:
    assert alices.check(signed).stat.split()[0] == str(signed.stat().st_size)
    bobs = make_signed(tmp_path / "b.sif", layers(tmp_path, "b"), bob)
    assert alices.refusal(bobs) == (
        f"{bobs}: it is signed by {bob}, not by a key of require_signature in {FILE}: {alice.fingerprint}"
    )
    assert alices.refusal(unsigned_sif(tmp_path)) == (
        f"{tmp_path}/u.sif is not signed; require_signature in {FILE} forbids running it"
    )
    other = tmp_path / "other.sif"
    other.write_bytes(b"whatever its runtime reads")
    with pytest.raises(StoreError, match="not a SIF file"):
        alices.check(other)


def test_files_with_no_key_in_common_let_nothing_run(alices: Policy, signed: Path, alice: Key) -> None:
    both = SignaturePolicy.of_all(
        [alices.policy, SignaturePolicy(frozenset(["B" * 40]), ("mine.yaml",))],
    )
    assert both
    message = "require_signature in /etc/ekiben/config.yaml and mine.yaml have no key in common"
    assert replace(alices, policy=both).refusal(signed).startswith(message)
    with pytest.raises(VerifyError, match="no key in common"):
        signing_key(both)


def test_one_of_two_signatures_is_enough(alices: Policy, signed: Path, bob: Key, tmp_path: Path) -> None:
    assert sign_file(signed, signed, bob)
    assert len([item for item in read_sif(signed).descriptors if item.data_type == SIGNATURE]) == 2
    alices.check(signed)
    bobs = Policy(alices.store, SignaturePolicy(frozenset([bob.fingerprint]), (FILE,)))
    bobs.check(signed)


def test_signature_of_a_part_is_refused(alices: Policy, tmp_path: Path, alice: Key) -> None:
    sif = unsigned_sif(tmp_path)
    parts = layers(tmp_path, "u-base")
    message = signed_message(parts, SifHeader(ID, DEFFILE, "amd64", EPOCH))
    data, hash = gpg.sign(message, alice, clear=True)
    group = read_sif(sif).layers[0].group
    add_signatures(sif, sif, {group: Signature(data, alice.fingerprint, hash)})
    assert "did not sign its object 3: it was added later, or left out" in alices.refusal(sif)


def test_signature_of_another_group_is_refused(alices: Policy, signed: Path, alice: Key, tmp_path: Path) -> None:
    """Apptainer takes a signature of one group for that of the file."""
    data = bytearray(signed.read_bytes())
    layer = read_sif(signed).layers[-1]
    at = data.index(layer.raw) + 9  # its group
    data[at : at + 4] = (0xF000_0002).to_bytes(4, "little")
    signed.write_bytes(data)
    refusal = alices.refusal(signed)
    assert "object" in refusal, refusal


@pytest.mark.usefixtures("noted_at_once")
@pytest.mark.parametrize("state", ["expired", "revoked"])
def test_key_that_is_no_good_any_more_is_refused_though_the_content_is_known(
    state: str, tmp_path: Path, alices: Policy
) -> None:
    with keyring() as ring, used(ring):
        (ring.home / "gpg.conf").write_text("faked-system-time 20200101T000000\n")
        carol = Key(ring.make("Carol", lives="1d"), "Carol")
        sif = make_signed(tmp_path / "c.sif", layers(tmp_path, "c"), carol)
        policy = Policy(alices.store, SignaturePolicy(frozenset([carol.fingerprint]), (FILE,)))
        policy.check(sif)
        if state == "revoked":
            ring.revoke(carol.fingerprint)
            assert "by Carol, whose key was revoked" in policy.refusal(sif)
        else:
            (ring.home / "gpg.conf").unlink()
            assert "by Carol, whose key has expired" in policy.refusal(sif)


@pytest.fixture
def noted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are noted of files that have just been written, too."""
    monkeypatch.setattr("ekiben.signing.policy._SETTLED", -60)


@pytest.mark.usefixtures("noted_at_once")
def test_content_is_read_once(alices: Policy, signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = alices.check(signed)
    read: list[int] = []
    progress = quiet()
    monkeypatch.setattr(progress, "count", read.append)
    assert required_signature(alices.policy, Store(tmp_path / "store"), progress).check(signed) == first
    assert read == []
    data = bytearray(signed.read_bytes())
    data[read_sif(signed).layers[-1].offset + 8] ^= 1
    signed.write_bytes(data)
    os.utime(signed, ns=(signed.stat().st_atime_ns, int(first.stat.split()[1].replace(".", ""))))
    assert "it was changed after" in alices.refusal(signed)


def test_change_while_it_is_checked_is_refused(alices: Policy, signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_then_write(*args: object, **options: object) -> list[Key]:
        signers = check_sif(*args, **options)  # type: ignore[arg-type]
        with signed.open("r+b") as file:
            file.write(b"#!/usr/bin/env ")
        os.utime(signed, (5, 5))
        return signers

    monkeypatch.setattr("ekiben.signing.policy.check_sif", check_then_write)
    assert alices.refusal(signed) == f"{signed} was changed while its signature was checked"


def test_exchanged_file_is_not_the_checked_one(
    alices: Policy, signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open file is checked, and its state is not that of what has its path afterwards."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = signed.rename(folder / "x.sif")

    def exchange_then_check(*args: object, **options: object) -> list[Key]:
        folder.rename(tmp_path / "aside")
        folder.mkdir()
        unsigned_sif(tmp_path).rename(path)
        return check_sif(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("ekiben.signing.policy.check_sif", exchange_then_check)
    assert not alices.check(path).is_same(path)


# ------------------------------------------------------------------------------------------------------------- starts


def image_of(alices: Policy, sif: Path, **options: object) -> NamedImage:
    signature = required_signature(alices.policy, alices.store, quiet())
    return NamedImage(name="x", sif=sif, tasks=None, signature=signature, **options)  # type: ignore[arg-type]


@pytest.fixture
def runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apptainer", "docker"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 99\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def refuse_to_be_asked() -> Engine:
    raise AssertionError("no engine is asked")


def test_engines_are_refused(alices: Policy, runtimes: None, tmp_path: Path) -> None:
    image = image_of(alices, tmp_path / "gone.sif", build_args="x")
    engines = {"docker": refuse_to_be_asked}
    for asked in ("auto", "docker"):
        with pytest.raises(VerifyError, match=r"x is not run with docker, whose images have no signature: require_sig"):
            choose_target(image, engines, asked)


def test_file_that_was_exchanged_before_the_start_is_refused(
    alices: Policy, runtimes: None, signed: Path, tmp_path: Path
) -> None:
    target = choose_target(image_of(alices, signed), {})
    unsigned_sif(tmp_path).replace(signed)
    with pytest.raises(VerifyError, match="is not signed"):
        launch(target, RunRequest(argv=("true",), gpu=False), {"PATH": os.environ["PATH"]})


def submitted(image: NamedImage, folder: Path, **options: object) -> str:
    request = JobRequest(**options)  # type: ignore[arg-type]
    run = plan(image, read_tasks(image, ["true"]), request, scheduler="slurm", site=None, runs=folder / "runs")
    return script(run, run.steps[0])


def test_job_knows_the_file_that_was_checked_and_no_recorded_checksum(
    alices: Policy, signed: Path, tmp_path: Path, bob: Key
) -> None:
    text = submitted(image_of(alices, signed, sha256="e" * 64), tmp_path)
    assert f"image_stat='{alices.check(signed).stat}'" in text
    assert "image_sha256=\n" in text
    with pytest.raises(VerifyError, match="is not signed"):
        submitted(image_of(alices, unsigned_sif(tmp_path)), tmp_path)
    with pytest.raises(Exception, match="is not there, and its signature is checked when a job is submitted"):
        submitted(image_of(alices, tmp_path / "gone.sif"), tmp_path)


@pytest.mark.parametrize("option", ["check_digest", "copy_local"])
def test_job_that_reads_every_byte_has_the_checksum_of_the_checked_file(
    option: str, alices: Policy, signed: Path, tmp_path: Path
) -> None:
    text = submitted(image_of(alices, signed, sha256="e" * 64), tmp_path, **{option: True})
    assert f"image_sha256={hashlib.sha256(signed.read_bytes()).hexdigest()}\n" in text


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def configured(tmp_path: Path, alice: Key, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = tmp_path / "config/ekiben/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"require_signature: ['{alice.fingerprint}']\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return config


def test_run_shell_and_submit_refuse(
    run_cli: RunCli, configured: Path, runtimes: None, tmp_path: Path, signed: Path
) -> None:
    sif = unsigned_sif(tmp_path)
    for argv in (
        ["run", str(sif), "true"],
        ["run", "--force", str(sif), "true"],
        ["shell", str(sif)],
        ["submit", "--scheduler", "slurm", "--force", str(sif), "true"],
    ):
        done = run_cli(*argv, code=8)
        assert f"is not signed; require_signature in {configured} forbids running it" in done.stderr
        assert f"sign {sif} --key FINGERPRINT" in done.stderr
    assert not (tmp_path / "ekiben-runs").exists()
    run_cli("run", "--dry-run", str(signed), "true")
    configured.write_text("require_signature: [A1B2C3D4]\n")
    assert "'A1B2C3D4' is not a full fingerprint" in run_cli("run", str(signed), "true", code=3).stderr


def test_sign_makes_it_run(run_cli: RunCli, configured: Path, runtimes: None, tmp_path: Path, alice: Key) -> None:
    sif = unsigned_sif(tmp_path)
    assert f"by {alice}" in run_cli("sign", str(sif)).stdout
    run_cli("run", "--dry-run", str(sif), "true")
    before = sif.read_bytes()
    assert '"created": false' in run_cli("sign", str(sif), "--json").stdout
    assert sif.read_bytes() == before


def test_publish_signs_by_default(
    run_cli: RunCli, configured: Path, files_only: SampleRecipe, store: Store, tmp_path: Path, alice: Key, bob: Key
) -> None:
    argv = ["--store", str(store.root), "publish", str(files_only.path), "--to", str(tmp_path / "lab"), "--no-verify"]
    assert f"by {alice}" in run_cli(*argv).stdout
    assert f"does not name {bob}: this image will not be run here" in run_cli(*argv, "--sign", BOB).stderr
    configured.write_text(f"require_signature: ['{'A' * 40}']\n")
    assert f"you have the secret key of none of {'A' * 40}" in run_cli(*argv, code=8).stderr


def test_a_refusal_names_a_way_to_sign_that_lasts(alices: Policy, tmp_path: Path) -> None:
    plain = unsigned_sif(tmp_path)
    folder = tmp_path / "lab/images/u"
    folder.mkdir(parents=True)
    published = shutil.copy(plain, folder / "u-1-0123456789ab.sif")
    for beside in ("u-1-0123456789ab.json", "u-1-0123456789ab.sif.sha256"):
        (folder / beside).touch()
    (folder / "current").symlink_to(published.name)
    pulled = alices.store.downloads / "pulled/0123.sif"
    pulled.parent.mkdir(parents=True)
    shutil.copy(plain, pulled)
    expected = {
        plain: f"sign {plain} --key FINGERPRINT, if",
        published: f"publish {published} --to {tmp_path}/lab --sign publishes a signed version, if",
        folder / "current": f"publish {published} --to {tmp_path}/lab --sign publishes a signed version, if",
        pulled: f"push {pulled} HOST/NAME:TAG --sign pushes a signed SIF, if",
    }
    for sif, hint in expected.items():
        with pytest.raises(VerifyError) as caught:
            alices.check(sif)
        assert caught.value.hint and f" {hint} one of these keys is yours" in caught.value.hint


def test_a_new_file_is_read_each_time_and_shown_once(alices: Policy, signed: Path) -> None:
    """A later change may leave it the same times."""
    shown = io.StringIO()
    check = required_signature(alices.policy, alices.store, Progress(shown)).check
    for _ in range(3):
        os.utime(signed)
        check(signed)
    assert shown.getvalue().count(f"check the signature of {signed} …") == 1

"""Bases other than Debian's and a registry's: the files are those that Apptainer has from the same definition."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.environment import platform
from ekiben.core.errors import DefinitionError, FetchError
from ekiben.formats.sif import read_sif
from ekiben.formats.squashfs.reader import SquashfsReader, merged_entries
from ekiben.resolve.render import deffile
from test_definition_corpus import HEADER, Lab, lab
from test_environment_scripts import run as variables
from test_environment_scripts import sif_of
from workspaces import USER, Cli, RecipeFolder, Workspace, give, need

__all__ = ["lab"]
pytestmark = pytest.mark.covers("ekiben/builder/bases")

# What each of both writes into its image, of its own.
_WRITTEN = (".singularity.d", "opt/ekiben", ".exec", ".run", ".shell", ".test", "singularity", "environment")


def files_of(sif: Path) -> dict[str, tuple[str, int, str, bytes]]:
    """Path → kind, mode, target of a link, content."""
    files = {}
    with sif.open("rb") as stream:
        readers = [SquashfsReader(stream, item.offset) for item in read_sif(sif).layers]
        for entry in merged_entries(readers):
            if not entry.path.startswith(_WRITTEN) and entry.path not in ("", "opt"):
                top = next((reader for reader in readers[::-1] if reader.lookup(entry.path)), readers[0])
                content = top.read_file(entry.path) if entry.kind == "file" else b""
                files[entry.path] = (entry.kind, entry.mode, entry.target, content)
    return files


@pytest.mark.guard
@pytest.mark.parametrize("compressor", ["gzip", "zstd"])
def test_sif_of_apptainer_as_base(compressor: str, recipe_folder: RecipeFolder, workspace: Workspace, cli: Cli) -> None:
    need("apptainer")
    folder = recipe_folder.path
    tree = workspace.folder("tree")
    for name in ("etc", "bin", "srv/a b"):
        (tree / name).mkdir(parents=True)
    (tree / "etc/keep").write_text("kept\n")
    (tree / "etc/link").symlink_to("keep")
    (tree / "bin/tool").write_text("#!/bin/sh\n")
    (tree / "bin/tool").chmod(0o4755)
    (tree / "srv/a b/empty").touch()
    build = ["apptainer", "-q", "build", "--force", "--mksquashfs-args", f"-comp {compressor}"]
    subprocess.run([*build, folder / "base.sif", tree], check=True)
    definition = "Bootstrap: localimage\nFrom: ./base.sif\n"
    (folder / "images/ground.def").write_text(definition)
    recipe_folder.top("ground")
    store = workspace.folder("store")
    cli.run("--store", store, "image", folder, "--format", "sif", "--no-verify", "-o", store / "one.sif", cwd=folder)
    subprocess.run([*build, store / "apptainer.sif", folder / "images/ground.def"], check=True, cwd=folder)
    built = files_of(store / "one.sif")
    assert built == files_of(store / "apptainer.sif")
    assert built["etc/keep"][3] == b"kept\n"
    # An image of Ekiben's, of several partitions, is a base, too.
    (store / "one.sif").rename(folder / "base.sif")
    cli.run("--store", store, "image", folder, "--format", "sif", "--no-verify", "-o", store / "two.sif", cwd=folder)
    assert files_of(store / "two.sif") == built


@pytest.fixture(scope="module")
def saved(lab: Lab) -> Path:
    """What `docker save` writes of an image with deletions in its layers, and a configuration."""
    need("skopeo", "docker")
    context = Path(tempfile.mkdtemp(dir=lab.out))
    give(context, USER)
    lab.apptainer("build", "--fakeroot", "--sandbox", context / "root", "base.sif")
    lines = ["FROM scratch", "COPY root /", "ENV A='of the base'", "RUN echo 1 >/etc/new && rm /etc/old"]
    lines += ["RUN rm -r /usr/share/doc && mkdir /usr/share/doc && echo 2 >/usr/share/doc/own"]
    lines += ["LABEL L=base", 'ENTRYPOINT ["/usr/bin/env"]', 'CMD ["-0"]']
    (context / "Dockerfile").write_text("\n".join(lines))
    tag, tar = "ekiben-test/archive:1", lab.recipe.path / "saved.tar"
    subprocess.run(["docker", "build", "-q", "-t", tag, context], check=True, capture_output=True)
    try:
        subprocess.run(["docker", "save", "-o", tar, tag], check=True)
    finally:
        subprocess.run(["docker", "rmi", "--force", tag], check=False, capture_output=True)
    tar.chmod(0o644)
    return tar


@pytest.mark.parametrize("agent", ["docker-archive", "oci", "oci-archive"])
def test_image_in_a_file_as_base(agent: str, saved: Path, lab: Lab) -> None:
    """A real image: its files, variables and program are Apptainer's."""
    source = {"docker-archive": "saved.tar", "oci": "layout", "oci-archive": "layout.tar"}[agent]
    if agent != "docker-archive":
        target = f"{agent}:{saved.parent}/{source}:one"
        subprocess.run(["skopeo", "copy", "-q", f"docker-archive:{saved}", target], check=True)
    text = f"Bootstrap: {agent}\nFrom: {source}\n\n%environment\n    export B=$A.\n"
    _, image = lab.build(text)
    ours, theirs = sif_of(lab, image), lab.sandbox(text)
    seen = {path: content for path, (kind, _, _, content) in files_of(ours).items() if kind == "file"}
    expected = {path: (theirs / path).read_bytes() for path in seen if (theirs / path).is_file()}
    assert {path: seen[path] for path in expected} == expected
    assert seen["etc/new"] == b"1\n" and seen["usr/share/doc/own"] == b"2\n"
    assert "etc/old" not in seen and "usr/share/doc/old" not in seen
    shown = [variables(lab, {}, "run", path) for path in (ours, theirs)]
    assert shown[0] == shown[1]
    assert (shown[0]["A"], shown[0]["B"]) == ("of the base", "of the base.")
    assert image.labels["L"] == "base"


FROM_STAGE = f"""{HEADER}Stage: first

%post
    mkdir /opt/out; echo made >/opt/out/made

Bootstrap: scratch
Stage: final

%files from first
    /opt/out /srv/out
"""


@pytest.mark.parametrize(
    ("sections", "paths"),
    [
        (FROM_STAGE, ["srv/out/made"]),
        ("%files\n    files/plain.txt /opt/\n", ["opt/plain.txt"]),
        ("%environment\n    export A=b\n", []),
        ("%files\n    busybox /bin/sh\n%post\n    echo made >/opt-made; echo $PATH >>/opt-made\n", ["opt-made"]),
    ],
)
def test_empty_base(sections: str, paths: list[str], lab: Lab, busybox: Path) -> None:
    shutil.copy(busybox, lab.recipe.path / "busybox")
    text = sections if sections is FROM_STAGE else f"Bootstrap: scratch\n\n{sections}"
    _, image = lab.build(text)
    ours, theirs = files_of(sif_of(lab, image)), lab.sandbox(text)
    assert {path: ours[path][3] for path in paths} == {path: (theirs / path).read_bytes() for path in paths}
    folders = [path.relative_to(theirs).as_posix() for path in theirs.rglob("*") if path.is_dir()]
    assert {path for path in folders if not path.startswith(".")} - {"opt"} <= ours.keys()


def test_script_in_an_empty_base_is_refused(lab: Lab) -> None:
    with pytest.raises(DefinitionError, match=r"corpus.def: %post .* shell, and Bootstrap: scratch has none"):
        lab.resolve("Bootstrap: scratch\n\n%post\n    true\n")


@pytest.fixture(scope="module")
def busybox() -> Path:
    """A shell without libraries, of Debian's busybox-static."""
    folder = Path(tempfile.mkdtemp())
    done = subprocess.run(["apt-get", "download", "busybox-static"], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("busybox-static cannot be downloaded")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "package"], check=True)
    (program,) = folder.glob("package/**/bin/busybox")
    return program


@pytest.fixture
def mirror(busybox: Path) -> Iterator[str]:
    """The address of a busybox."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(busybox.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/busybox"
        server.shutdown()


def test_busybox_as_base(mirror: str, busybox: Path, lab: Lab, cli: Cli) -> None:
    """A program that the lock pins, under all names that it has."""
    folder = lab.recipe.path
    text = f"Bootstrap: busybox\nMirrorURL: {mirror}\n\n%post\n    echo $PATH >/srv-path; ls -l /bin/sh\n"
    with pytest.raises(DefinitionError, match="is not locked"):
        lab.resolve(text)
    digest = f"sha256:{hashlib.sha256(busybox.read_bytes()).hexdigest()}"
    assert digest in cli.run("lock", folder, cwd=folder).stdout
    assert json.loads((folder / "bases.lock").read_text()) == {mirror: {platform(): digest}}
    resolved, image = lab.build(text)
    ours, theirs = files_of(sif_of(lab, image)), lab.sandbox(text)
    names = {path.relative_to(theirs).as_posix() for path in (theirs / "bin").iterdir()}
    assert {path for path in ours if path.startswith("bin/")} == names
    assert lab.try_apptainer(("exec", "IMAGE", "/bin/head", "-c", "4", "/bin/sh"), sif_of(lab, image)) == (0, "\x7fELF")
    for path in ("etc/passwd", "etc/group", "etc/hosts", "srv-path"):
        assert ours[path][3] == (theirs / path).read_bytes()
    assert f"MirrorURL: {mirror}" in deffile(resolved).split("\n")
    wrong = {mirror: {platform(): f"sha256:{'0' * 64}"}}
    (folder / "bases.lock").write_text(json.dumps(wrong))
    with pytest.raises(FetchError, match="it has other bytes than"):
        lab.build(text)
    (folder / "bases.lock").unlink()

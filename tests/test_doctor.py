"""Each rule of doctor at its edge: what it says, on what, and what it advises."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.cubins import DeviceCode
from builder.doctor import (
    _EXPECTED,
    BuildHost,
    Finding,
    check_build,
    check_image,
    check_memory,
    check_stack,
    refuse,
    report,
    text,
    verdict,
    worst,
)
from builder.doctor import Section as Consulted
from builder.errors import UnfitError
from builder.facts import ImageFacts
from builder.machine import GIB, Place
from builder.recipe import HOUSE
from builder.site import Gpu, Network, Node, Runtime, SiteFile, Storage
from builder.stack import StackFile
from own_recipe import RunCli

TORCH = "site-packages/torch/lib/libtorch_cuda.so"
USUAL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = Gpu(model="NVIDIA H200", capability="9.0", memory_gib=140, count=8)
V100 = Gpu(model="Tesla V100-SXM2-16GB", capability="7.0", memory_gib=16, count=4)
RTX = Gpu(model="NVIDIA GeForce RTX 4090", capability="8.9", memory_gib=23)
APPTAINER = Runtime(kind="apptainer", version="1.4.5", setuid=False)


def code(*names: str, count: int = 444) -> DeviceCode:
    return DeviceCode({names: count})


def image(**changes: Any) -> ImageFacts:
    usual: dict[str, Any] = {
        "name": "mine", "size": 3_000_000_000, "partitions": 5, "arch": "amd64", "cuda": "13.0", "torch": "2.11.0",
        "glibc": "2.36", "compat": None, "network": ("libibverbs",), "libraries": {TORCH: code(*USUAL)}, "packages": {}, "damaged": {},
    }  # fmt: skip
    return ImageFacts(**{**usual, **changes})


def site(
    *gpus: Gpu, runtime: Runtime | None = APPTAINER, storage: dict[str, Storage] | None = None, **node: Any
) -> SiteFile:
    usual: dict[str, Any] = {"driver": "580.95.05", "kernel": "5.14", "user_namespaces": True, "gpus": gpus or (H200,)}
    return SiteFile(name="there", description="", node=Node(**{**usual, **node}), storage=storage or {},
                    runtimes=(runtime,) if runtime else ())  # fmt: skip


def stack(name: str, cuda: str, torch: str, *capabilities: str) -> StackFile:
    return StackFile(name=name, description="", suite="bookworm", python="3.11", cuda=cuda, torch=torch, driver="",
                     compute_capabilities=capabilities, epoch=1)  # fmt: skip


OLD = stack("cu118", "11.8", "2.6.0", "6.0", "7.0", "8.0", "9.0")
MIDDLE = stack("cu126", "12.6", "2.9.0", "5.0", "6.0", "7.0", "8.0", "9.0")
NEW = stack("cu130", "13.0", "2.11.0", "7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX")


def found(place: SiteFile, facts: ImageFacts, topic: str) -> Finding:
    findings = [finding for finding in check_image(place, facts, [OLD, MIDDLE, NEW]) if finding.topic == topic]
    assert len(findings) == 1, findings
    return findings[0]


def test_what_fits_runs() -> None:
    findings = check_image(site(), image(), [NEW])
    assert [(finding.level, finding.topic) for finding in findings] == [
        ("fine", "GPU code"), ("fine", "driver"), ("fine", "runtime"),
    ]  # fmt: skip
    assert verdict(findings) == "will run"
    refuse(findings)


# ---------------------------------------------------------------------------------------------------------- device code


def test_no_code_for_the_gpu_fails_and_names_the_stack() -> None:
    """V100 with CUDA 13: the driver is new enough, the cubins are not there."""
    finding = found(site(V100), image(), "GPU code")
    assert finding == Finding(
        "fail", "GPU code",
        "Tesla V100-SXM2-16GB (7.0) is not among what libtorch_cuda.so has code for (sm_75 sm_80 sm_86 sm_90 sm_100 sm_120)",
        "use --stack cu126",
    )  # fmt: skip
    findings = check_image(site(V100), image(), [OLD, MIDDLE, NEW])
    assert verdict(findings) == f"will fail because {finding.said}; use --stack cu126"
    with pytest.raises(UnfitError, match="use --stack cu126") as caught:
        refuse(findings)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize(
    ("driver", "said"),
    [("525.60.13", "use --stack cu126"), ("525.60.12", "use --stack cu118"), ("450.80.01", "no stack here has code for it"),
     (None, "use --stack cu126")],
)  # fmt: skip
def test_the_stack_it_names_fits_the_driver_too(driver: str | None, said: str) -> None:
    assert found(site(V100, driver=driver), image(), "GPU code").do == said


def test_any_of_two_gpus_decides() -> None:
    levels = [finding.level for finding in check_image(site(H200, V100), image()) if finding.topic == "GPU code"]
    assert levels == ["fine", "fail"]


def test_ptx_alone_is_compiled_at_the_first_start() -> None:
    facts = image(libraries={TORCH: code("sm_80", "compute_80")})
    assert found(site(), facts, "GPU code").level == "but"
    assert found(site(), facts, "driver").level == "fine"
    older = found(site(driver="580.65.05"), image(libraries=facts.libraries, cuda="13.0"), "driver")
    assert older.level == "fail"  # older than 13 at all
    # 12.8 on a driver of 12.4: minor version compatibility, and that has no PTX
    minor = found(site(driver="550.54.14"), image(libraries=facts.libraries, cuda="12.8"), "driver")
    assert minor.level == "fail"
    assert "nothing else in libtorch_cuda.so" in minor.said


def test_parts_without_code_are_counted() -> None:
    facts = image(libraries={TORCH: DeviceCode({("sm_90",): 443, ("sm_80",): 1})})
    said = [finding.said for finding in check_image(site(), facts) if finding.level == "but"]
    assert said == ["NVIDIA H200 (9.0): 1 of 444 parts of libtorch_cuda.so have no code for it"]


def test_an_extension_without_code_is_a_but() -> None:
    extension = "site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so"
    facts = image(libraries={TORCH: code(*USUAL, "sm_70"), extension: code("sm_80", "sm_90")})
    findings = check_image(site(V100), facts)
    assert worst(findings) == "but"
    assert "flash_attn_2_cuda" in verdict(findings)
    assert worst(check_image(site(), facts)) == "fine"


def test_of_libraries_for_several_cuda_versions_one_is_enough() -> None:
    folder = "site-packages/bitsandbytes/libbitsandbytes_cuda"
    facts = image(libraries={TORCH: code(*USUAL), f"{folder}118.so": code("sm_60"), f"{folder}130.so": code("sm_90")})
    assert worst(check_image(site(), facts)) == "fine"
    assert worst(check_image(site(RTX), facts)) == "but"


def test_nvidias_own_libraries_go_with_their_cuda_version() -> None:
    facts = image(libraries={TORCH: code(*USUAL), "site-packages/nvidia/cu13/lib/libcufft.so.12": code("sm_75")})
    assert worst(check_image(site(), facts)) == "fine"


def test_an_image_without_torch_fails_only_when_nothing_is_for_the_gpu() -> None:
    facts = image(libraries={"lib/a.so": code("sm_70"), "lib/b.so": code("sm_90")}, torch=None)
    assert worst(check_image(site(), facts)) == "fine"
    assert worst(check_image(site(RTX), facts)) == "fail"


def test_without_gpu_and_without_gpu_code() -> None:
    nothing = site().node
    place = SiteFile(name="x", description="", node=replace(nothing, gpus=()), runtimes=(APPTAINER,))
    assert [finding.topic for finding in check_image(place, image()) if finding.level == "but"] == ["GPU"]
    plain = image(libraries={}, cuda=None, torch=None)
    assert worst(check_image(place, plain)) == "fine"
    assert worst(check_image(site(V100), plain)) == "fine"


def test_a_damaged_library_is_told() -> None:
    assert (
        found(site(), image(damaged={"lib/x.so": "ends early"}, libraries={}), "GPU code").said
        == "x.so could not be read: ends early"
    )


# --------------------------------------------------------------------------------------------------------------- driver


@pytest.mark.parametrize(
    ("cuda", "driver", "level"),
    [
        ("13.0", "580.65.06", "fine"), ("13.0", "580.65.05", "fail"), ("13.0", "575.57.08", "fail"),
        ("13.2", "595.45.04", "fine"), ("13.2", "595.45.03", "but"), ("13.2", "580.65.06", "but"),
        ("12.8", "570.26", "fine"), ("12.8", "570.25", "but"), ("12.8", "525.60.13", "but"), ("12.8", "525.60.12", "fail"),
        ("12.4", "550.54.14", "fine"), ("12.4", "535.129.03", "but"), ("12.0", "525.60.13", "fine"),
        ("11.8", "520.61.05", "fine"), ("11.8", "450.80.02", "but"), ("11.8", "450.80.01", "fail"),
        ("12.4", "610.43.02", "fine"), ("12.2", "535.54.03", "fine"),
    ],
)  # fmt: skip
def test_drivers(cuda: str, driver: str, level: str) -> None:
    finding = found(site(driver=driver), image(cuda=cuda), "driver")
    assert finding.level == level
    assert driver in finding.said
    assert cuda in finding.said


def test_what_helps_an_old_driver() -> None:
    """Forward compatibility is for data-centre GPUs, and only of use when the image has it."""
    old = found(site(driver="550.54.15"), image(), "driver")
    assert old.do == "use --stack cu126"
    assert old.said == "driver 550.54.15 is too old for CUDA 13.0, which needs 580.65.06 or later"
    assert (
        found(site(driver="440.33.01"), image(), "driver").do
        == "ask for a newer driver, or for NVIDIA's forward compatibility package"
    )
    assert found(site(RTX, driver="440.33.01"), image(), "driver").do == "ask for a newer driver"
    assert found(site(driver="550.54.15"), image(compat="580.65.06"), "driver").level == "but"
    assert found(site(RTX, driver="550.54.15"), image(compat="580.65.06"), "driver").level == "fail"


def test_an_unknown_driver_or_cuda_is_no_promise() -> None:
    unknown = found(site(driver=None), image(), "driver")
    assert (unknown.level, unknown.do) == ("but", "record it in a job there: build.py doctor --record")
    assert found(site(), image(cuda="14.0"), "driver").level == "but"


def test_the_machines_architecture() -> None:
    assert found(site(), image(arch="arm64"), "machine").said == "the image is for arm64, the nodes are amd64"


# ------------------------------------------------------------------------------------------------------------- runtimes


@pytest.mark.parametrize(
    ("kind", "version", "setuid", "partitions", "level"),
    [
        ("apptainer", "1.4.5", False, 5, "fine"), ("apptainer", "1.3", True, 5, "fine"), ("apptainer", "1.2.5", False, 5, "but"),
        ("apptainer", "1.0.3", False, 5, "fail"), ("apptainer", "1.0.3", False, 1, "fine"), ("apptainer", "1.1", False, 5, "but"),
        ("apptainer", "1.0.3", True, 5, "but"), ("apptainer", None, None, 5, "but"), ("apptainer", None, None, 1, "fine"),
        ("singularity-ce", "4.3.3", True, 5, "fine"), ("singularity-ce", "4.3.3", False, 5, "fail"), ("singularity-ce", "4.1.1", None, 5, "but"),
        ("singularity-ce", "4.0.3", True, 5, "but"),
        ("singularity-ce", "4.3.3", None, 1, "fine"), ("singularity", "3.8.7", False, 5, "fail"),
        ("singularity", "3.8.7", True, 5, "but"), ("singularity-pro", "4.1", None, 5, "but"),
    ],
)  # fmt: skip
def test_layers_under_each_runtime(
    kind: str, version: str | None, setuid: bool | None, partitions: int, level: str
) -> None:
    place = site(runtime=Runtime(kind=kind, version=version, setuid=setuid), squashfs_zstd=True)
    finding = found(place, image(partitions=partitions), "runtime")
    assert finding.level == level
    assert finding.do == (None if level == "fine" else "make it --flat: one layer")


@pytest.mark.parametrize(
    ("setuid", "namespaces", "level"),
    [(False, False, "fail"), (None, False, "but"), (True, False, "fine"), (False, None, "fine"), (False, True, "fine")],
)
def test_user_namespaces(setuid: bool | None, namespaces: bool | None, level: str) -> None:
    place = site(runtime=Runtime(kind="apptainer", version="1.4.5", setuid=setuid), user_namespaces=namespaces)
    assert found(place, image(), "runtime").level == level


@pytest.mark.parametrize(
    ("kernel", "zstd", "setuid", "level"),
    [
        ("4.13.9", None, True, "fail"), ("4.13.9", None, None, "but"), ("4.13.9", None, False, None), ("4.14", None, True, "but"),
        ("4.18.0-553.el8", None, True, "but"), ("4.18.0-553.el8", True, True, None), ("4.18", False, True, "fail"),
        ("5.0", None, True, None), ("6.8", False, True, "fail"), (None, None, True, None),
    ],
)  # fmt: skip
def test_zstd_where_the_kernel_mounts(
    kernel: str | None, zstd: bool | None, setuid: bool | None, level: str | None
) -> None:
    place = site(runtime=Runtime(kind="apptainer", version="1.4.5", setuid=setuid), kernel=kernel, squashfs_zstd=zstd)
    levels = [finding.level for finding in check_image(place, image(zstd=True)) if finding.topic == "kernel"]
    assert levels == ([level] if level else [])
    assert not [finding for finding in check_image(place, image()) if finding.topic == "kernel"]  # gzip: any kernel


@pytest.mark.parametrize("kind", ["singularity-ce", "singularity-pro", "singularity"])
def test_no_singularity_takes_zstd(kind: str) -> None:
    place = site(runtime=Runtime(kind=kind, version="4.3.3", setuid=True), squashfs_zstd=True)
    finding = found(place, image(partitions=1, zstd=True), "runtime")
    assert (finding.level, "unknown compression algorithm value 6" in finding.said) == ("fail", True)
    assert found(place, image(partitions=1), "runtime").level == "fine"


@pytest.mark.parametrize(
    ("docker", "glibc", "level"),
    [("20.10.10", "2.36", "fine"), ("20.10.9", "2.36", "fail"), ("20.10.9", "2.34", "fail"), ("20.10.9", "2.33", "fine"),
     ("19.03.15", None, "fine"), ("28.2.2", "2.41", "fine")],
)  # fmt: skip
def test_dockers_seccomp_and_threads(docker: str, glibc: str | None, level: str) -> None:
    assert found(site(runtime=Runtime(kind="docker", version=docker)), image(glibc=glibc), "runtime").level == level


def test_docker_without_nvidias_toolkit() -> None:
    for there, facts, level in ((False, image(), "fail"), (None, image(), "fine"), (True, image(), "fine"),
                                (False, image(cuda=None, libraries={}), "fine")):  # fmt: skip
        assert (
            found(site(runtime=Runtime(kind="docker", version="28.2.2", gpus=there)), facts, "runtime").level == level
        )


@pytest.mark.parametrize(
    ("kind", "held", "level"),
    [
        ("infiniband", ("libibverbs",), "fine"), ("infiniband", (), "but"), ("roce", (), "but"), ("efa", ("libibverbs",), "but"),
        ("efa", ("libibverbs", "libnccl-net"), "fine"), ("ethernet", (), None),
    ],
)  # fmt: skip
def test_what_nccl_needs_between_nodes(kind: str, held: tuple[str, ...], level: str | None) -> None:
    there = replace(site(), network=Network(kind=kind))
    facts = image(network=held, packages={"torch": "2.11.0"})
    levels = [finding.level for finding in check_image(there, facts) if finding.topic == "NCCL"]
    assert levels == ([level] if level else [])
    assert not [finding for finding in check_image(there, image(network=held)) if finding.topic == "NCCL"]  # not read


def test_the_best_runtime_counts() -> None:
    bad = Runtime(kind="singularity", version="3.8.7", setuid=False)
    place = SiteFile(name="x", description="", node=site().node, runtimes=(bad, APPTAINER))
    assert found(place, image(), "runtime").said == "apptainer 1.4.5, 5 layers in the SIF"
    assert found(site(runtime=None), image(), "runtime").level == "but"


# ---------------------------------------------------------------------------------------------------- storage, network


def test_local_storage_for_staging() -> None:
    for gib, level in ((2, "but"), (3, None)):
        place = site(storage={"local": Storage(path="$TMPDIR", size_gib=gib)})
        levels = [finding.level for finding in check_image(place, image(size=3 * GIB)) if finding.topic == "storage"]
        assert levels == ([level] if level else [])


@pytest.mark.parametrize(("expected", "level"), [(14.4, "fine"), (14.5, "but"), (20.0, "but")])
def test_memory_against_each_gpu(expected: float, level: str) -> None:
    findings = check_memory(site(H200, V100), "train", expected)
    assert [finding.level for finding in findings] == ["fine", level]
    assert findings[1].said == f"train --dry-run expects {expected:.1f} GiB, Tesla V100-SXM2-16GB has 16 GiB"


def test_the_line_it_reads_is_the_one_that_tasks_announce() -> None:
    """Entrypoints import nothing of the builder's: the text between them is all there is."""
    sources = "".join(path.read_text() for path in (HOUSE / "entrypoints").glob("*.py"))
    assert re.search(r'f"memory {6}\{expected', sources)
    assert re.search(r"\.1f\} GiB expected", sources)
    assert _EXPECTED.search("model       x\nmemory      20.5 GiB expected of 22.0 GiB free\n")[1] == "20.5"  # type: ignore[index]


def test_no_internet_is_a_note() -> None:
    findings = check_image(site(internet=False), image())
    assert [finding.level for finding in findings if finding.topic == "network"] == ["note"]
    assert verdict(findings) == "will run"


def test_a_stack_before_it_is_built() -> None:
    assert verdict(check_stack(site(), NEW)) == "will run"
    assert worst(check_stack(site(V100), NEW)) == "fail"
    assert worst(check_stack(site(V100, driver="470.57.02"), OLD)) == "but"
    # 12.0+PTX: a later architecture compiles it
    assert worst(check_stack(site(Gpu(model="X", capability="13.0", memory_gib=1)), NEW)) == "but"


# ------------------------------------------------------------------------------------------------------------- building


def place(path: str, kind: str = "ext4", free: int = 100 * GIB, **more: Any) -> Place:
    return Place(path=Path(path), type=kind, free=free, **more)


def host(**changes: Any) -> BuildHost:
    usual: dict[str, Any] = {
        "user": "me", "uid": 1001, "groups": (1001, 2000), "group": 1001, "engines": {"apptainer": None, "docker": "no daemon"},
        "user_namespaces": True, "apparmor_restricts": False, "subuid": 65536, "subgid": 65536, "newuidmap": True, "fuse": True,
        "temporary": place("/tmp"), "home": place("/home/me"), "store": place("/scratch/me/store"),
        "output": place("/home/me", group=1001),
    }  # fmt: skip
    return BuildHost(**{**usual, **changes})


def worse(**changes: Any) -> list[tuple[str, str, str | None]]:
    return [
        (finding.level, finding.topic, finding.do)
        for finding in check_build(host(**changes))
        if finding.level != "fine"
    ]


def test_a_machine_to_build_on() -> None:
    assert worse() == []
    assert check_build(host())[0].said == "apptainer can build here"


def test_no_engine() -> None:
    none = {"apptainer": "user namespaces are not allowed", "docker": "no daemon"}
    findings = check_build(host(engines=none, user_namespaces=False))
    assert verdict(findings, "build").startswith(
        "will fail because apptainer: user namespaces are not allowed; docker: no daemon"
    )
    assert [finding.level for finding in findings if finding.topic == "namespaces"] == ["but"]


@pytest.mark.parametrize(
    ("change", "topic", "do"),
    [
        ({"user_namespaces": False}, "namespaces", "sysctl user.max_user_namespaces=15000"),
        ({"user_namespaces": False, "apparmor_restricts": True}, "namespaces", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        ({"subuid": 65535}, "ids", "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 me"),
        ({"subgid": 0}, "ids", "usermod"),
        ({"newuidmap": False}, "ids", "uidmap"),
        ({"fuse": False}, "fuse", None),
    ],
)  # fmt: skip
def test_what_building_without_root_needs(change: dict[str, Any], topic: str, do: str | None) -> None:
    """A note where an engine works all the same; nothing for root."""
    [(level, where, advice)] = worse(**change)
    assert (level, where) == ("note", topic)
    assert (do or "") in (advice or "")
    assert worse(**change, uid=0) == []


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs"])
def test_file_systems_of_other_machines(kind: str) -> None:
    assert [found[:2] for found in worse(temporary=place("/tmp", kind))] == [("note", "TMPDIR")]
    assert [found[:2] for found in worse(store=place("/home/me/s", kind))] == [("but", "store")]
    assert worse(temporary=place("/tmp", kind), store=place("/home/me/s", kind), uid=0) == []


def test_space() -> None:
    assert worse(store=place("/s", free=8 * GIB)) == []
    assert [found[:2] for found in worse(store=place("/s", free=8 * GIB - 1))] == [("fail", "store")]
    assert worse(temporary=place("/tmp", free=8 * GIB)) == []
    assert [found[:2] for found in worse(temporary=place("/tmp", free=8 * GIB - 1))] == [("note", "TMPDIR")]
    assert [found[:2] for found in worse(temporary=place("/tmp", noexec=True))] == [("note", "TMPDIR")]
    assert check_build(host(store=place("/s", free=5)), needed=5)[-2].level == "fine"


def test_quota() -> None:
    home = place("/home/me", quota=20 * GIB, free=20 * GIB)
    assert [found[:2] for found in worse(home=home, store=place("/home/me/.cache", free=20 * GIB))] == [
        ("note", "store")
    ]
    full = place("/home/me/.cache", free=GIB, quota=GIB)
    assert "left of the quota" in check_build(host(home=home, store=full))[-2].said


def test_where_the_image_goes() -> None:
    """In a group's folder on a shared file system a file gets the user's own group, unless the folder is setgid."""
    groups = place("/groups/g", "lustre", group=2000)
    assert worse(output=groups) == [("but", "output", "newgrp 2000")]
    assert worse(output=replace(groups, setgid=True)) == []
    assert worse(output=replace(groups, group=3000)) == []  # not one of ours: newgrp would not help
    assert worse(output=replace(groups, type="ext4")) == []
    assert worse(output=groups, group=2000) == []
    assert [found[:2] for found in worse(output=place("/x", writable=False))] == [("fail", "output")]
    assert [found[:2] for found in worse(store=place("/x", writable=False))] == [("fail", "store")]


# ---------------------------------------------------------------------------------------------------------- what is said


def test_one_screen() -> None:
    section = Consulted("run", "mine on there", [Finding("fine", "GPU code", "a"), Finding("but", "driver", "b", "c")])
    assert text([section]) == (
        "mine on there\n  fine  GPU code  a\n  but   driver    b\n                  → c\n→ will run, but b"
    )
    [row] = report([section])
    assert row["level"] == "but"
    assert row["findings"][1] == {"level": "but", "topic": "driver", "said": "b", "do": "c"}


def test_the_command(run_cli: RunCli, tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    said = run_cli("--store", tmp_path / "s", "doctor", "--site", "abci-2.0", "lora-opencalm", code=10, env=env).stdout
    assert "will fail because Tesla V100-SXM2-16GB (7.0) is not among" in said
    rows = json.loads(run_cli("--store", tmp_path / "s", "doctor", "--site", "abci-3.0", "--json", env=env).stdout)
    assert {row["does"] for row in rows} == {"suit"}
    assert not (tmp_path / "s").exists()
    recorded = tmp_path / "config/ekiben/sites/mine.yaml"
    recorded.parent.mkdir(parents=True)
    run_cli("doctor", "--record", "-o", recorded, env=env)
    assert "will run" in run_cli("--store", tmp_path / "s", "doctor", "--site", "mine", "hello", env=env).stdout
    assert run_cli("doctor", "--record", env=env).stdout.startswith("# Recorded by")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--site", "abci3.0"], "no site 'abci3.0'. Did you mean 'abci-3.0'?"),
        (["--site", "abci-3.0", "lora-opencal"], "no recipe 'lora-opencal'. Did you mean 'lora-opencalm'?"),
        (["--record", "hello"], "--record describes this machine; leave out the image, --site and --json"),
        (["--record", "-o", "no/such/folder.yaml"], "no/such/folder.yaml cannot be written: No such file or directory"),
    ],
)
def test_what_the_command_refuses(run_cli: RunCli, words: list[str], said: str) -> None:
    assert said in run_cli("doctor", *words, code=2).stderr

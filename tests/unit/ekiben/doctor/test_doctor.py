"""Each rule of doctor at its edge: what it says, on what, and what it advises."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import IncompatibleHostError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.doctor.consult import _EXPECTED, check_image, check_stack
from ekiben.doctor.findings import Finding, refuse, report, text, verdict, worst
from ekiben.doctor.findings import Section as Consulted
from ekiben.doctor.image_requirements import ImageRequirements
from ekiben.doctor.machine import GIB, BuildHost, Filesystem
from ekiben.doctor.rules.building import check_build
from ekiben.doctor.rules.nodes import check_memory
from ekiben.gpu.device_code import DeviceCode
from ekiben.run.site import Gpu, Network, Node, Runtime, SiteFile, Storage
from ekiben.spec.stack import StackFile
from support.sample_recipe import RunCli

TORCH = "site-packages/torch/lib/libtorch_cuda.so"
USUAL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = Gpu(model="NVIDIA H200", capability="9.0", memory_gib=140, count=8)
V100 = Gpu(model="Tesla V100-SXM2-16GB", capability="7.0", memory_gib=16, count=4)
RTX = Gpu(model="NVIDIA GeForce RTX 4090", capability="8.9", memory_gib=23)
APPTAINER = Runtime(kind="apptainer", version="1.4.5", setuid=False)


def code(*names: str, count: int = 444) -> DeviceCode:
    return DeviceCode({names: count})


def image(**changes: Any) -> ImageRequirements:
    usual: dict[str, Any] = {
        "name": "mine",
        "size": 3_000_000_000,
        "partitions": 5,
        "arch": "amd64",
        "cuda": "13.0",
        "torch": "2.11.0",
        "glibc": "2.36",
        "compat": None,
        "network": ("libibverbs",),
        "libraries": {TORCH: code(*USUAL)},
        "packages": {},
        "damaged": {},
    }
    return ImageRequirements(**{**usual, **changes})


def site(
    *gpus: Gpu, runtime: Runtime | None = APPTAINER, storage: dict[str, Storage] | None = None, **node: Any
) -> SiteFile:
    usual: dict[str, Any] = {"driver": "580.95.05", "kernel": "5.14", "user_namespaces": True, "gpus": gpus or (H200,)}
    return SiteFile(
        name="there",
        description="",
        node=Node(**{**usual, **node}),
        storage=storage or {},
        runtimes=(runtime,) if runtime else (),
    )


def stack(name: str, cuda: str, torch: str, *capabilities: str) -> StackFile:
    return StackFile(
        name=name,
        description="",
        suite="bookworm",
        python="3.11",
        cuda=cuda,
        torch=torch,
        driver="",
        compute_capabilities=capabilities,
        epoch=1,
    )


OLD = stack("cu118", "11.8", "2.6.0", "6.0", "7.0", "8.0", "9.0")
MIDDLE = stack("cu126", "12.6", "2.9.0", "5.0", "6.0", "7.0", "8.0", "9.0")
NEW = stack("cu130", "13.0", "2.11.0", "7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX")


def found(site_file: SiteFile, facts: ImageRequirements, topic: str) -> Finding:
    findings = [finding for finding in check_image(site_file, facts, [OLD, MIDDLE, NEW]) if finding.topic == topic]
    assert len(findings) == 1, findings
    return findings[0]


def test_matching_machine_will_run() -> None:
    findings = check_image(site(), image(), [NEW])
    assert [(finding.level, finding.topic) for finding in findings] == [
        ("ok", "GPU code"),
        ("ok", "driver"),
        ("ok", "runtime"),
    ]
    assert verdict(findings) == "will run"
    refuse(findings)


# ---------------------------------------------------------------------------------------------------------- device code


def test_missing_device_code_is_an_error_naming_a_stack() -> None:
    """V100 with CUDA 13: the driver is new enough, the cubins are not there."""
    finding = found(site(V100), image(), "GPU code")
    assert finding == Finding(
        "error",
        "GPU code",
        "Tesla V100-SXM2-16GB (7.0) is not among what libtorch_cuda.so has code for (sm_75 sm_80 sm_86 sm_90 sm_100"
        " sm_120)",
        "use --stack cu126",
    )
    findings = check_image(site(V100), image(), [OLD, MIDDLE, NEW])
    assert verdict(findings) == f"will fail because {finding.message}; use --stack cu126"
    with pytest.raises(IncompatibleHostError, match="use --stack cu126") as caught:
        refuse(findings)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("525.60.13", "use --stack cu126"),
        ("525.60.12", "use --stack cu118"),
        ("450.80.01", "no stack here has code for it"),
        (None, "use --stack cu126"),
    ],
)
def test_named_stack_fits_the_driver_too(driver: str | None, message: str) -> None:
    assert found(site(V100, driver=driver), image(), "GPU code").fix == message


def test_any_of_two_gpus_decides() -> None:
    levels = [finding.level for finding in check_image(site(H200, V100), image()) if finding.topic == "GPU code"]
    assert levels == ["ok", "error"]


def test_ptx_alone_is_compiled_at_the_first_start() -> None:
    requirements = image(libraries={TORCH: code("sm_80", "compute_80")})
    assert found(site(), requirements, "GPU code").level == "warning"
    assert found(site(), requirements, "driver").level == "ok"
    older = found(site(driver="580.65.05"), image(libraries=requirements.libraries, cuda="13.0"), "driver")
    assert older.level == "error"  # older than 13 at all
    # 12.8 on a driver of 12.4: minor version compatibility, and that has no PTX
    minor = found(site(driver="550.54.14"), image(libraries=requirements.libraries, cuda="12.8"), "driver")
    assert minor.level == "error"
    assert "nothing else in libtorch_cuda.so" in minor.message


def test_libraries_without_code_for_the_gpu_are_counted() -> None:
    facts = image(libraries={TORCH: DeviceCode({("sm_90",): 443, ("sm_80",): 1})})
    warnings = [finding.message for finding in check_image(site(), facts) if finding.level == "warning"]
    assert warnings == ["NVIDIA H200 (9.0): 1 of 444 parts of libtorch_cuda.so have no code for it"]


def test_extension_without_code_is_a_warning() -> None:
    extension = "site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so"
    facts = image(libraries={TORCH: code(*USUAL, "sm_70"), extension: code("sm_80", "sm_90")})
    findings = check_image(site(V100), facts)
    assert worst(findings) == "warning"
    assert "flash_attn_2_cuda" in verdict(findings)
    assert worst(check_image(site(), facts)) == "ok"


def test_one_of_several_cuda_versions_of_a_library_suffices() -> None:
    folder = "site-packages/bitsandbytes/libbitsandbytes_cuda"
    facts = image(libraries={TORCH: code(*USUAL), f"{folder}118.so": code("sm_60"), f"{folder}130.so": code("sm_90")})
    assert worst(check_image(site(), facts)) == "ok"
    assert worst(check_image(site(RTX), facts)) == "warning"


def test_nvidias_own_libraries_go_with_their_cuda_version() -> None:
    facts = image(libraries={TORCH: code(*USUAL), "site-packages/nvidia/cu13/lib/libcufft.so.12": code("sm_75")})
    assert worst(check_image(site(), facts)) == "ok"


def test_without_torch_any_device_code_suffices() -> None:
    facts = image(libraries={"lib/a.so": code("sm_70"), "lib/b.so": code("sm_90")}, torch=None)
    assert worst(check_image(site(), facts)) == "ok"
    assert worst(check_image(site(RTX), facts)) == "error"


def test_machine_without_gpu_and_image_without_device_code() -> None:
    nothing = site().node
    site_file = SiteFile(name="x", description="", node=replace(nothing, gpus=()), runtimes=(APPTAINER,))
    assert [finding.topic for finding in check_image(site_file, image()) if finding.level == "warning"] == ["GPU"]
    plain = image(libraries={}, cuda=None, torch=None)
    assert worst(check_image(site_file, plain)) == "ok"
    assert worst(check_image(site(V100), plain)) == "ok"


def test_damaged_library_is_reported() -> None:
    shown = found(site(), image(damaged={"lib/x.so": "ends early"}, libraries={}), "GPU code").message
    assert shown == "x.so could not be read: ends early"


# --------------------------------------------------------------------------------------------------------------- driver


@pytest.mark.parametrize(
    ("cuda", "driver", "level"),
    [
        ("13.0", "580.65.06", "ok"),
        ("13.0", "580.65.05", "error"),
        ("13.0", "575.57.08", "error"),
        ("13.2", "595.45.04", "ok"),
        ("13.2", "595.45.03", "warning"),
        ("13.2", "580.65.06", "warning"),
        ("12.8", "570.26", "ok"),
        ("12.8", "570.25", "warning"),
        ("12.8", "525.60.13", "warning"),
        ("12.8", "525.60.12", "error"),
        ("12.4", "550.54.14", "ok"),
        ("12.4", "535.129.03", "warning"),
        ("12.0", "525.60.13", "ok"),
        ("11.8", "520.61.05", "ok"),
        ("11.8", "450.80.02", "warning"),
        ("11.8", "450.80.01", "error"),
        ("12.4", "610.43.02", "ok"),
        ("12.2", "535.54.03", "ok"),
    ],
)
def test_driver_against_the_cuda_version(cuda: str, driver: str, level: str) -> None:
    finding = found(site(driver=driver), image(cuda=cuda), "driver")
    assert finding.level == level
    assert driver in finding.message
    assert cuda in finding.message


def test_old_driver_hints() -> None:
    """Forward compatibility is for data-centre GPUs, and only of use when the image has it."""
    old = found(site(driver="550.54.15"), image(), "driver")
    assert old.fix == "use --stack cu126"
    assert old.message == "driver 550.54.15 is too old for CUDA 13.0, which needs 580.65.06 or later"
    shown = found(site(driver="440.33.01"), image(), "driver").fix
    assert shown == "ask for a newer driver, or for NVIDIA's forward compatibility package"
    assert found(site(RTX, driver="440.33.01"), image(), "driver").fix == "ask for a newer driver"
    assert found(site(driver="550.54.15"), image(compat="580.65.06"), "driver").level == "warning"
    assert found(site(RTX, driver="550.54.15"), image(compat="580.65.06"), "driver").level == "error"


def test_unknown_driver_or_cuda_is_reported_as_unknown() -> None:
    unknown = found(site(driver=None), image(), "driver")
    assert (unknown.level, unknown.fix) == ("warning", "record it in a job there: ekiben doctor --record")
    assert found(site(), image(cuda="14.0"), "driver").level == "warning"


def test_cpu_architecture_must_match() -> None:
    assert found(site(), image(arch="arm64"), "machine").message == "the image is for arm64, the nodes are amd64"


# ------------------------------------------------------------------------------------------------------------- runtimes


@pytest.mark.parametrize(
    ("kind", "version", "setuid", "partitions", "level"),
    [
        ("apptainer", "1.4.5", False, 5, "ok"),
        ("apptainer", "1.3", True, 5, "ok"),
        ("apptainer", "1.2.5", False, 5, "warning"),
        ("apptainer", "1.0.3", False, 5, "error"),
        ("apptainer", "1.0.3", False, 1, "ok"),
        ("apptainer", "1.1", False, 5, "warning"),
        ("apptainer", "1.0.3", True, 5, "warning"),
        ("apptainer", None, None, 5, "warning"),
        ("apptainer", None, None, 1, "ok"),
        ("singularity-ce", "4.3.3", True, 5, "ok"),
        ("singularity-ce", "4.3.3", False, 5, "error"),
        ("singularity-ce", "4.1.1", None, 5, "warning"),
        ("singularity-ce", "4.0.3", True, 5, "warning"),
        ("singularity-ce", "4.3.3", None, 1, "ok"),
        ("singularity", "3.8.7", False, 5, "error"),
        ("singularity", "3.8.7", True, 5, "warning"),
        ("singularity-pro", "4.1", None, 5, "warning"),
    ],
)
def test_layers_per_runtime(kind: str, version: str | None, setuid: bool | None, partitions: int, level: str) -> None:
    site_file = site(runtime=Runtime(kind=kind, version=version, setuid=setuid), squashfs_zstd=True)
    finding = found(site_file, image(partitions=partitions), "runtime")
    assert finding.level == level
    assert finding.fix == (None if level == "ok" else "build it with --squash: one layer")


@pytest.mark.parametrize(
    ("setuid", "namespaces", "level"),
    [(False, False, "error"), (None, False, "warning"), (True, False, "ok"), (False, None, "ok"), (False, True, "ok")],
)
def test_user_namespaces(setuid: bool | None, namespaces: bool | None, level: str) -> None:
    site_file = site(runtime=Runtime(kind="apptainer", version="1.4.5", setuid=setuid), user_namespaces=namespaces)
    assert found(site_file, image(), "runtime").level == level


@pytest.mark.parametrize(
    ("kernel", "zstd", "setuid", "level"),
    [
        ("4.13.9", None, True, "error"),
        ("4.13.9", None, None, "warning"),
        ("4.13.9", None, False, None),
        ("4.14", None, True, "warning"),
        ("4.18.0-553.el8", None, True, "warning"),
        ("4.18.0-553.el8", True, True, None),
        ("4.18", False, True, "error"),
        ("5.0", None, True, None),
        ("6.8", False, True, "error"),
        (None, None, True, None),
    ],
)
def test_zstd_mounted_by_kernel(kernel: str | None, zstd: bool | None, setuid: bool | None, level: str | None) -> None:
    site_file = site(
        runtime=Runtime(kind="apptainer", version="1.4.5", setuid=setuid), kernel=kernel, squashfs_zstd=zstd
    )
    levels = [finding.level for finding in check_image(site_file, image(zstd=True)) if finding.topic == "kernel"]
    assert levels == ([level] if level else [])
    assert not [finding for finding in check_image(site_file, image()) if finding.topic == "kernel"]  # gzip: any kernel


@pytest.mark.parametrize("kind", ["singularity-ce", "singularity-pro", "singularity"])
def test_singularityce_lacks_zstd(kind: str) -> None:
    site_file = site(runtime=Runtime(kind=kind, version="4.3.3", setuid=True), squashfs_zstd=True)
    finding = found(site_file, image(partitions=1, zstd=True), "runtime")
    assert (finding.level, "unknown compression algorithm value 6" in finding.message) == ("error", True)
    assert found(site_file, image(partitions=1), "runtime").level == "ok"


@pytest.mark.parametrize(
    ("docker", "glibc", "level"),
    [
        ("20.10.10", "2.36", "ok"),
        ("20.10.9", "2.36", "error"),
        ("20.10.9", "2.34", "error"),
        ("20.10.9", "2.33", "ok"),
        ("19.03.15", None, "ok"),
        ("28.2.2", "2.41", "ok"),
    ],
)
def test_dockers_seccomp_and_threads(docker: str, glibc: str | None, level: str) -> None:
    assert found(site(runtime=Runtime(kind="docker", version=docker)), image(glibc=glibc), "runtime").level == level


def test_docker_without_nvidias_toolkit() -> None:
    for there, facts, level in (
        (False, image(), "error"),
        (None, image(), "ok"),
        (True, image(), "ok"),
        (False, image(cuda=None, libraries={}), "ok"),
    ):
        assert (
            found(site(runtime=Runtime(kind="docker", version="28.2.2", gpus=there)), facts, "runtime").level == level
        )


@pytest.mark.parametrize(
    ("kind", "held", "level"),
    [
        ("infiniband", ("libibverbs",), "ok"),
        ("infiniband", (), "warning"),
        ("roce", (), "warning"),
        ("efa", ("libibverbs",), "warning"),
        ("efa", ("libibverbs", "libnccl-net"), "ok"),
        ("ethernet", (), None),
    ],
)
def test_nccl_requirements_between_nodes(kind: str, held: tuple[str, ...], level: str | None) -> None:
    there = replace(site(), network=Network(kind=kind))
    facts = image(network=held, packages={"torch": "2.11.0"})
    levels = [finding.level for finding in check_image(there, facts) if finding.topic == "NCCL"]
    assert levels == ([level] if level else [])
    assert not [finding for finding in check_image(there, image(network=held)) if finding.topic == "NCCL"]  # not read


def test_best_runtime_is_chosen() -> None:
    bad = Runtime(kind="singularity", version="3.8.7", setuid=False)
    site_file = SiteFile(name="x", description="", node=site().node, runtimes=(bad, APPTAINER))
    assert found(site_file, image(), "runtime").message == "apptainer 1.4.5, 5 layers in the SIF"
    assert found(site(runtime=None), image(), "runtime").level == "warning"


# ---------------------------------------------------------------------------------------------------- storage, network


def test_local_storage_for_staging() -> None:
    for gib, level in ((2, "warning"), (3, None)):
        site_file = site(storage={"local": Storage(path="$TMPDIR", size_gib=gib)})
        levels = [
            finding.level for finding in check_image(site_file, image(size=3 * GIB)) if finding.topic == "storage"
        ]
        assert levels == ([level] if level else [])


@pytest.mark.parametrize(("expected", "level"), [(14.4, "ok"), (14.5, "warning"), (20.0, "warning")])
def test_memory_against_each_gpu(expected: float, level: str) -> None:
    findings = check_memory(site(H200, V100), "train", expected)
    assert [finding.level for finding in findings] == ["ok", level]
    assert findings[1].message == f"train --dry-run expects {expected:.1f} GiB, Tesla V100-SXM2-16GB has 16 GiB"


def test_memory_line_of_tasks_is_parsed() -> None:
    """Entrypoints import nothing of the builder's: the text between them is all there is."""
    sources = "".join(path.read_text() for path in (PROJECT_ROOT / "entrypoints").rglob("*.py"))
    assert re.search(r'f"memory {6}\{expected', sources)
    assert re.search(r"\.1f\} GiB expected", sources)
    assert _EXPECTED.search("model       x\nmemory      20.5 GiB expected of 22.0 GiB free\n")[1] == "20.5"  # type: ignore[index]


def test_missing_internet_is_info() -> None:
    findings = check_image(site(internet=False), image())
    assert [finding.level for finding in findings if finding.topic == "network"] == ["info"]
    assert verdict(findings) == "will run"


def test_stack_is_checked_before_it_is_built() -> None:
    assert verdict(check_stack(site(), NEW)) == "will run"
    assert worst(check_stack(site(V100), NEW)) == "error"
    assert worst(check_stack(site(V100, driver="470.57.02"), OLD)) == "warning"
    # 12.0+PTX: a later architecture compiles it
    assert worst(check_stack(site(Gpu(model="X", capability="13.0", memory_gib=1)), NEW)) == "warning"


# ------------------------------------------------------------------------------------------------------------- building


def filesystem(path: str, kind: str = "ext4", free: int = 100 * GIB, **more: Any) -> Filesystem:
    return Filesystem(path=Path(path), type=kind, free=free, **more)


def host(**changes: Any) -> BuildHost:
    usual: dict[str, Any] = {
        "user": "me",
        "uid": 1001,
        "groups": (1001, 2000),
        "group": 1001,
        "engines": {"apptainer": None, "docker": "no daemon"},
        "user_namespaces": True,
        "apparmor_restricts": False,
        "subuid": 65536,
        "subgid": 65536,
        "newuidmap": True,
        "fuse": True,
        "temporary": filesystem("/tmp"),
        "home": filesystem("/home/me"),
        "store": filesystem("/scratch/me/store"),
        "output": filesystem("/home/me", group=1001),
    }
    return BuildHost(**{**usual, **changes})


def worse(**changes: Any) -> list[tuple[str, str, str | None]]:
    return [
        (finding.level, finding.topic, finding.fix) for finding in check_build(host(**changes)) if finding.level != "ok"
    ]


def test_machine_that_can_build() -> None:
    assert worse() == []
    assert check_build(host())[0].message == "apptainer can build here"


def test_no_usable_engine_is_an_error() -> None:
    none = {"apptainer": "user namespaces are not allowed", "docker": "no daemon"}
    findings = check_build(host(engines=none, user_namespaces=False))
    assert verdict(findings, "build").startswith(
        "will fail because apptainer: user namespaces are not allowed; docker: no daemon"
    )
    assert [finding.level for finding in findings if finding.topic == "namespaces"] == ["warning"]


@pytest.mark.parametrize(
    ("change", "topic", "do"),
    [
        ({"user_namespaces": False}, "namespaces", "sysctl user.max_user_namespaces=15000"),
        (
            {"user_namespaces": False, "apparmor_restricts": True},
            "namespaces",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"subuid": 65535}, "ids", "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 me"),
        ({"subgid": 0}, "ids", "usermod"),
        ({"newuidmap": False}, "ids", "uidmap"),
        ({"fuse": False}, "fuse", None),
    ],
)
def test_requirements_of_rootless_builds(change: dict[str, Any], topic: str, do: str | None) -> None:
    """A note where an engine works all the same; nothing for root."""
    [(level, where, advice)] = worse(**change)
    assert (level, where) == ("info", topic)
    assert (do or "") in (advice or "")
    assert worse(**change, uid=0) == []


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs"])
def test_network_file_systems(kind: str) -> None:
    assert [found[:2] for found in worse(temporary=filesystem("/tmp", kind))] == [("info", "TMPDIR")]
    assert [found[:2] for found in worse(store=filesystem("/home/me/s", kind))] == [("warning", "store")]
    assert worse(temporary=filesystem("/tmp", kind), store=filesystem("/home/me/s", kind), uid=0) == []


def test_free_space_of_store_and_tmpdir() -> None:
    assert worse(store=filesystem("/s", free=8 * GIB)) == []
    assert [found[:2] for found in worse(store=filesystem("/s", free=8 * GIB - 1))] == [("error", "store")]
    assert worse(temporary=filesystem("/tmp", free=8 * GIB)) == []
    assert [found[:2] for found in worse(temporary=filesystem("/tmp", free=8 * GIB - 1))] == [("info", "TMPDIR")]
    assert [found[:2] for found in worse(temporary=filesystem("/tmp", noexec=True))] == [("info", "TMPDIR")]
    assert check_build(host(store=filesystem("/s", free=5)), needed=5)[-2].level == "ok"


def test_quota_of_home_and_store() -> None:
    home = filesystem("/home/me", quota=20 * GIB, free=20 * GIB)
    assert [found[:2] for found in worse(home=home, store=filesystem("/home/me/.cache", free=20 * GIB))] == [
        ("info", "store")
    ]
    full = filesystem("/home/me/.cache", free=GIB, quota=GIB)
    assert "left of the quota" in check_build(host(home=home, store=full))[-2].message


def test_group_of_the_output_folder() -> None:
    """In a group's folder on a shared file system a file gets the user's own group, unless the folder is setgid."""
    groups = filesystem("/groups/g", "lustre", group=2000)
    assert worse(output=groups) == [("warning", "output", "newgrp 2000")]
    assert worse(output=replace(groups, setgid=True)) == []
    assert worse(output=replace(groups, group=3000)) == []  # not one of ours: newgrp would not help
    assert worse(output=replace(groups, type="ext4")) == []
    assert worse(output=groups, group=2000) == []
    assert [found[:2] for found in worse(output=filesystem("/x", writable=False))] == [("error", "output")]
    assert [found[:2] for found in worse(store=filesystem("/x", writable=False))] == [("error", "store")]


# --------------------------------------------------------------------------------------------------------------- output


def test_findings_as_text_and_json() -> None:
    section = Consulted(
        "run", "mine on there", [Finding("ok", "GPU code", "a"), Finding("warning", "driver", "b", "c")]
    )
    assert (
        text([section])
        == "mine on there\n  ok       GPU code  a\n  warning  driver    b\n                     → c\n→ will run, but b"
    )
    [row] = report([section])
    assert row["level"] == "warning"
    assert row["findings"][1] == {"level": "warning", "topic": "driver", "message": "b", "fix": "c"}


def test_doctor_by_command(run_cli: RunCli, tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    stdout = run_cli(
        "--store", tmp_path / "s", "doctor", "--site", "abci-2.0", "lora-opencalm", code=10, env=env
    ).stdout
    assert "will fail because Tesla V100-SXM2-16GB (7.0) is not among" in stdout
    rows = json.loads(run_cli("--store", tmp_path / "s", "doctor", "--site", "abci-3.0", "--json", env=env).stdout)
    assert {row["check"] for row in rows} == {"suit"}
    assert not (tmp_path / "s").exists()
    recorded = tmp_path / "config/ekiben/sites/mine.yaml"
    recorded.parent.mkdir(parents=True)
    run_cli("doctor", "--record", "-o", recorded, env=env)
    assert "will run" in run_cli("--store", tmp_path / "s", "doctor", "--site", "mine", "hello", env=env).stdout
    assert run_cli("doctor", "--record", env=env).stdout.startswith("# Recorded by")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--site", "abci3.0"], "no site 'abci3.0'. Did you mean 'abci-3.0'?"),
        (["--site", "abci-3.0", "lora-opencal"], "no recipe 'lora-opencal'. Did you mean 'lora-opencalm'?"),
        (["--record", "hello"], "--record describes this machine; leave out the image, --site and --json"),
        (["--record", "-o", "no/such/folder.yaml"], "-o no/such/folder.yaml: there is no folder"),
    ],
)
def test_doctor_refuses_invalid_options(run_cli: RunCli, argv: list[str], message: str) -> None:
    assert message in run_cli("doctor", *argv, code=2).stderr


def test_another_base_is_advised_for_a_torch_of_no_stack() -> None:
    """A base's torch is not changed by --stack."""
    finding = found(site(V100), image(torch="2.9.0a0+50eac811a6.nv25.9"), "GPU code")
    assert finding.level == "error" and "stand on another image" in str(finding)

"""What doctor sees of real GPUs, and that what it promises of an image is so there.

Run on a machine with an NVIDIA GPU, Apptainer and a Python that has torch: `make test-gpu`. EKIBEN_SIF names a built
image.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ekiben.doctor.consult import check_image
from ekiben.doctor.findings import verdict, worst
from ekiben.doctor.image_requirements import requirements_of_sif
from ekiben.doctor.machine import node_here, runtime_of
from ekiben.doctor.record import profile_text, record_site
from ekiben.run.site import SiteFile, find_site
from ekiben.store import Store

pytestmark = pytest.mark.gpu
SIF = Path(os.environ.get("EKIBEN_SIF", ""))


def test_gpus_equal_those_of_torch() -> None:
    import torch

    seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    node = node_here()
    assert sum(gpu.count for gpu in node.gpus) == len(seen)
    assert {gpu.capability for gpu in node.gpus} == {f"{gpu.major}.{gpu.minor}" for gpu in seen}
    assert {gpu.model for gpu in node.gpus} == {gpu.name for gpu in seen}
    assert all(abs(gpu.memory_gib - seen[0].total_memory / 2**30) <= 2 for gpu in node.gpus)
    assert node.driver is not None
    assert node.driver in Path("/proc/driver/nvidia/version").read_text()


def test_the_recorded_profile_reads_back(tmp_path: Path) -> None:
    site = record_site("here", os.environ)
    (tmp_path / "here.yaml").write_text(profile_text(site, "x"))
    assert find_site(str(tmp_path / "here.yaml")).file.node.gpus == site.node.gpus


@pytest.mark.skipif("EKIBEN_SIF" not in os.environ, reason="needs a built image: EKIBEN_SIF=lora-opencalm.sif")
def test_image_runs_where_doctor_finds_no_error(tmp_path: Path) -> None:
    runtime = runtime_of("apptainer")
    assert runtime is not None
    site = SiteFile(name="here", description="", node=node_here(), runtimes=(runtime,))
    findings = check_image(site, requirements_of_sif(SIF, Store(tmp_path / "none"), lambda _: None))
    assert worst(findings) != "error", verdict(findings)
    product = "import torch; a = torch.ones(64, 64, device='cuda'); print(int((a @ a).sum()))"
    done = subprocess.run(["apptainer", "exec", "--nv", SIF, "python", "-c", product], capture_output=True, text=True)
    assert done.stdout.strip() == str(64**3), done.stderr

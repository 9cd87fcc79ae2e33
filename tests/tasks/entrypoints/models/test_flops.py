"""Peaks that utilisation is a share of."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.models.flops import peak_flops


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H20", 148),
        ("NVIDIA L20", 119.5),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A40", 150),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A400", None),
        ("NVIDIA T400", None),
        ("NVIDIA A16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("CPU", None),
    ],
)
def test_peak_flops_match_the_full_gpu_name(device: str, teraflops: float | None) -> None:
    assert peak_flops(device) == (None if teraflops is None else teraflops * 1e12)

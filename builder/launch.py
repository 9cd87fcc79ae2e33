"""Runs a recipe's task: the SIF under Apptainer or SingularityCE when both are there, else the Docker image."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from builder.errors import EngineError
from builder.process import which

# What a job inside needs of the outside; everything else stays outside.
_LET_THROUGH = (
    "HF_HOME",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "EKIBEN_CACHE",
    "CUDA_VISIBLE_DEVICES",
    "WANDB_API_KEY",
)
_PREFIXES = ("NCCL_", "SLURM_", "OMP_", "TORCH_")


def gpus_here() -> bool:
    return Path("/dev/nvidiactl").exists()


def command(
    name: str, sif: Path, tag: str, words: Sequence[str], *, gpu: bool, environment: Mapping[str, str]
) -> list[str]:
    """The command that runs ``words`` in the image, to show or to exec. Errors: EngineError."""
    runtime = which("apptainer", "singularity")
    if runtime and sif.is_file():
        binds = [word for path in _binds(environment) for word in ("--bind", path)]
        return [runtime, "run", *(["--nv"] if gpu else []), *binds, str(sif), *words]
    if which("docker"):
        passed = [word for key in _passed(environment) for word in ("--env", key)]
        binds = [word for path in [os.getcwd(), *_binds(environment)] for word in ("--volume", f"{path}:{path}")]
        return ["docker", "run", "--rm", *(["--gpus", "all"] if gpu else []), "--shm-size", "8g",
                "--user", f"{os.getuid()}:{os.getgid()}", "--workdir", os.getcwd(), *binds, *passed, tag, *words]  # fmt: skip
    missing = f"{sif} is not there" if runtime else "neither apptainer nor singularity nor docker is on PATH"
    raise EngineError(f"{name} cannot be run here: {missing}", hint=f"make image recipe={name}")


def _passed(environment: Mapping[str, str]) -> list[str]:
    """Names only: a token's value never stands on a command line."""
    return sorted(key for key in environment if key in _LET_THROUGH or key.startswith(_PREFIXES))


def _binds(environment: Mapping[str, str]) -> list[str]:
    return sorted(
        {place for key in ("HF_HOME", "EKIBEN_CACHE") if (place := environment.get(key)) and Path(place).is_dir()}
    )

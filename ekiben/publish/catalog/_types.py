"""The catalog as catalog.json has it; ekiben/publish/catalog/__init__.py says what each field is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from ekiben.inspect.diff import Changes, LayerChange, PackageChanges


class SkippedFile(TypedDict):
    """A record that was left out, and why."""

    file: str
    reason: str


class CatalogLayer(TypedDict):
    """A layer of a version; sizes in bytes, of the blob and of its tar."""

    name: str
    cache_key: str
    diff_id: str
    digest: str
    size: int
    tar_size: int


class GpuSupport(TypedDict):
    """Whether a family of GPUs runs the version: doctor's level and message."""

    family: str
    models: str
    capability: str
    level: str
    message: str


class DriverVersions(TypedDict):
    """NVIDIA drivers: the lowest that runs the image, and the one that came with its CUDA."""

    minimum: str | None
    toolkit: str | None


class LayerSummary(TypedDict):
    """The part of a version that is read from its layers."""

    read_error: str | None
    python: dict[str, str]
    debian: dict[str, str]
    glibc: str | None
    torch: str | None
    cuda: str | None
    device_code: Sequence[str]
    gpus: list[GpuSupport]
    driver: DriverVersions | None


class VersionChanges(TypedDict):
    """What differs from the version ``before``; ``size``: bytes before and after."""

    before: str
    size: list[int]
    layers: list[LayerChange]
    packages: PackageChanges
    environment: Changes
    files: dict[str, list[str]]


class RunModel(TypedDict):
    """The model of a run; numbers of parameters."""

    name: str | None
    parameters: float | None
    trainable: float | None


class RunDevice(TypedDict):
    """The GPUs of a run, and how the work was spread over them."""

    name: str | None
    count: float | None
    parallel: str | None
    dtype: str | None
    attention: str | None


class RunData(TypedDict):
    """The data of a run: digest, numbers of examples and tokens."""

    sha256: str | None
    rows: float | None
    tokens: float | None


class Curve(TypedDict):
    """The losses of a training run: (step, value) of at most 60 steps each."""

    loss: list[tuple[float, float]]
    eval_loss: list[tuple[float, float]]


class ReducedRun(TypedDict):
    """The fields kept of a run.json; those of generate also have ``answers`` and ``seconds``, evaluations ``scores``:
    task → metric → value.
    """

    format: int
    started: str
    model: RunModel
    method: str | None
    device: RunDevice
    data: RunData
    settings: dict[str, bool | int | float]
    steps: float | None
    time_to_train_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: float | None
    final_loss: float | None
    final_eval_loss: float | None
    final_eval_perplexity: float | None
    seed: float | None
    answers: NotRequired[float | None]
    seconds: NotRequired[float | None]
    scores: NotRequired[dict[str, dict[str, float]]]
    versions: dict[str, str | None]


class CatalogRun(ReducedRun):
    """A run with its id, and its curve where its metrics.jsonl was beside its record."""

    id: str
    curve: Curve | None


class ShownRun(CatalogRun):
    """A run with the version that it used."""

    stem: str
    version: str


class CatalogVersion(LayerSummary):
    """A published version of an image; ``file`` and ``sif`` are paths in the shared folder."""

    stem: str
    version: str
    stack: str
    description: str
    file: str
    sha256: str
    size: int
    sif: str
    image: str
    published: str
    by: str
    tasks: Mapping[str, str]
    environment: Mapping[str, str]
    checks: list[dict[str, Any]]
    tags: list[str]
    pinned: bool
    signature: dict[str, Any] | None
    sbom: str | None
    layers: list[CatalogLayer]
    drift: list[str]
    changes: VersionChanges | None
    runs: list[CatalogRun]


class RunCommand(TypedDict):
    """Commands to paste, with a title."""

    title: str
    description: str
    lines: list[str]


class CatalogImage(TypedDict):
    """An image with its versions; ``shown`` is the one that its page opens with."""

    name: str
    description: str
    recipe: str
    current: str | None
    shown: str
    commands: list[RunCommand]
    versions: list[CatalogVersion]


class Catalog(TypedDict):
    """All of catalog.json."""

    format: int
    shared_dir: str
    images: list[CatalogImage]
    skipped: list[SkippedFile]


class PlotDot(TypedDict):
    """A run in a plot; ``x`` in per cent of the width."""

    x: float
    tooltip: str


class PlotRow(TypedDict):
    """The runs of one model on one device."""

    label: str
    best: str
    dots: list[PlotDot]


class PlotTick(TypedDict):
    """A mark on the axis; ``anchor``: the SVG text-anchor of its label."""

    x: float
    label: str
    anchor: str


class Plot(TypedDict):
    """A row of dots for each model on each device; ``x`` in per cent of the width."""

    title: str
    rows: list[PlotRow]
    ticks: list[PlotTick]

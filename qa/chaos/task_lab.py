"""Where the parallel tasks meet faults: tiny random models on the CPU, the real launcher, and processes as forks of
this one.

A process of a task is a fork: the libraries are loaded already, so that a fault meets the task and not its imports.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chaos.task_faults import NOTHING, Fault, Injector

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
RECIPES = ROOT / "recipes"
SAMPLE = RECIPES / "lora-opencalm" / "data" / "sample.jsonl"
LIMIT = 150.0  # seconds that a run may take on a busy machine, fault and end included
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Task:
    """A parallel task: its module, its settings for a tiny run of six steps, and what it leaves.

    family: tasks of one family can be loaded into one process. products: files that an equal run has with equal bytes.
    """

    name: str
    module: str
    settings: Mapping[str, object]
    options: Callable[[Lab], list[str]]
    products: str
    family: str = "transformers"
    packages: tuple[str, ...] = ()
    resumes: bool = True

    @property
    def has_steps(self) -> bool:
        """Whether it trains."""
        return self.module != "generate"

    def argv(self, lab: Lab, output: Path) -> list[str]:
        """The arguments of its command."""
        settings = [text for name, value in self.settings.items() for text in ("--set", f"{name}={json.dumps(value)}")]
        return [*self.options(lab), "--output", str(output), *settings]

    def missing(self) -> str | None:
        """The package that this Python lacks for it, or None."""
        needed = ("torch", "transformers", "peft", *self.packages)
        return next((name for name in needed if importlib.util.find_spec(name.split(".")[0]) is None), None)


_STEPS = {
    "max_steps": 6,
    "batch_size": 8,
    "max_length": 256,
    "learning_rate": 1e-2,
    "eval_every": 3,
    "save_steps": 2,
    "log_seconds": 60,
    "device": "cpu",
    "validation_split": 0.05,
    "hang_minutes": 0.5,
}
_PRETRAIN = {
    "layers": 4,
    "width": 64,
    "heads": 4,
    "sequence": 64,
    "batch_size": 8,
    "max_steps": 6,
    "train_tokens": 3072,
    "warmup_tokens": 512,
    "decay_tokens": 3072,
    "learning_rate": 1e-2,
    "split": "9,1,0",
    "eval_every": 3,
    "eval_batches": 1,
    "save_every": 2,
    "log_seconds": 60,
    "device": "cpu",
    "hang_minutes": 0.5,
}


def _nested(settings: Mapping[str, object]) -> dict[str, object]:
    return {f"train.{name}": value for name, value in settings.items()}


def _train(lab: Lab) -> list[str]:
    return ["--data", str(SAMPLE), "--set", f"model={lab.base}"]


def _generate(lab: Lab) -> list[str]:
    return ["--data", str(SAMPLE), "--model", str(lab.base), "--greedy"]


def _sft(lab: Lab) -> list[str]:
    return ["--data", str(RECIPES / "pretrain-gpt/data/dialogues.jsonl"), "--set", f"train.model={lab.base}"]


def _bench(lab: Lab) -> list[str]:
    return ["--run", "1", "--set", f"train.model={lab.base}", "--set", f"train.data={lab.processed}"]


def _pretrain(lab: Lab) -> list[str]:
    return ["--data", str(lab.prepared)]


_GENERATE = {"examples": 24, "batch_size": 2, "max_new_tokens": 6, "device": "cpu", "hang_minutes": 0.5}
_BENCH = {name: value for name, value in _STEPS.items() if name not in ("validation_split", "save_steps")}
_FULL = {"method": "full", "gradient_checkpointing": False}
TASKS = {
    task.name: task
    for task in (
        Task("train ddp", "train", {**_STEPS, "parallel": "ddp"}, _train, "adapter/*.safetensors"),
        Task("train fsdp", "train", {**_STEPS, **_FULL, "parallel": "fsdp"}, _train, "model/*.safetensors"),
        Task(
            "train deepspeed",
            "train",
            {**_STEPS, **_FULL, "parallel": "deepspeed"},
            _train,
            "model/*.safetensors",
            packages=("deepspeed",),
        ),
        Task("sft", "sft", _nested({**_STEPS, **_FULL}), _sft, "model/*.safetensors"),
        Task(
            "bench",
            "bench",
            {"target_loss": None, **_nested(_BENCH)},
            _bench,
            "run-1/adapter/*.safetensors",
            packages=("mlperf_logging",),
            resumes=False,
        ),
        Task("generate", "generate", _GENERATE, _generate, "answers.jsonl"),
        Task("pretrain", "pretrain", _PRETRAIN, _pretrain, "", "megatron", ("megatron.core", "sentencepiece")),
        Task(
            "pretrain tensor",
            "pretrain",
            {**_PRETRAIN, "tensor_parallel": 2},
            _pretrain,
            "",
            "megatron",
            ("megatron.core", "sentencepiece"),
        ),
        Task(
            "pretrain pipeline",
            "pretrain",
            {**_PRETRAIN, "pipeline_parallel": 2},
            _pretrain,
            "",
            "megatron",
            ("megatron.core", "sentencepiece"),
        ),
    )
}


def load_tasks(family: str) -> None:
    """Import what the tasks of ``family`` import, and let orphans of killed processes become children of this one."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
    )
    # An image has its own recipe's tasks, and all of the library.
    scripts = [*(RECIPES / name / "entrypoints" for name in ("pretrain-gpt", "lora-bench")), ROOT / "entrypoints"]
    sys.path[:0] = map(str, [ENTRYPOINTS, *scripts])
    import warnings

    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        if family == "megatron":
            importlib.import_module("without_gpu").pretend()
            importlib.import_module("steps")
        for task in TASKS.values():
            if task.family == family and task.missing() is None:
                for name in (task.module, *task.packages):
                    importlib.import_module(name)
        for name in ("training.run", "generation.batch", "task.plot"):
            importlib.import_module(f"ekiben_tasks.{name}")
    importlib.import_module("launch_group")
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@dataclass(frozen=True)
class Ended:
    """A run that has ended. code: -99 for one that had to be killed. after: seconds from the fault, None without
    one.
    """

    code: int
    output: str
    seconds: float
    after: float | None

    @property
    def errors(self) -> list[str]:
        """The lines that begin with error:"""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


@dataclass(frozen=True)
class Result:
    """What a finished run leaves: the lines of metrics.jsonl in their order, and the checksums of its products."""

    metrics: tuple[str, ...]
    products: Mapping[str, str]
    memory: int  # bytes that the run expected to take

    def differs(self, other: Result) -> str | None:
        """The first difference from an equal run, or None."""
        for ours, theirs in zip(self.metrics, other.metrics, strict=False):
            if ours != theirs:
                return f"metrics.jsonl: {ours}, and {theirs} without a fault"
        if len(self.metrics) != len(other.metrics):
            return f"metrics.jsonl: {len(self.metrics)} lines, and {len(other.metrics)} without a fault"
        if self.products != other.products:
            return f"{', '.join(self.products) or 'no product'}: other bytes than without a fault"
        return None

    def is_near(self, other: Result) -> bool:
        """Whether the losses are equal but for the order of their sums."""
        pairs = [[json.loads(line) for line in lines] for lines in (self.metrics, other.metrics)]
        return len(pairs[0]) == len(pairs[1]) and all(
            abs(ours.get(key, 0) - theirs.get(key, 0)) <= 2e-3 * abs(theirs.get(key, 0))
            for ours, theirs in zip(*pairs, strict=True)
            for key in ("loss", "eval_loss")
        )


class Lab:
    """A folder with models and data, in which runs of tasks are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cases = 0
        self.helpers: set[int] = set()  # processes that libraries have started for the campaign
        self._references: dict[tuple[str, int], Result] = {}

    @cached_property
    def base(self) -> Path:
        """A random GPT-NeoX with a tokenizer of the sample."""
        smoke = importlib.import_module("ekiben_tasks.training.smoke")
        smoke.make_base(self.folder / "base", SAMPLE)
        return self.folder / "base"

    @cached_property
    def processed(self) -> Path:
        """What preprocess of the benchmark writes."""
        preprocess, dolly = (importlib.import_module(name) for name in ("preprocess", "dolly"))
        (self.folder / "processed").mkdir()
        examples = dolly.read(RECIPES / "lora-bench/data/sample.jsonl")[:80]
        preprocess.preprocess(
            preprocess.Settings(model=str(self.base), validation_split=0.1), examples, self.folder / "processed"
        )
        return self.folder / "processed"

    @cached_property
    def prepared(self) -> Path:
        """What prepare-data writes."""
        prepare, tokenizer = (importlib.import_module(name) for name in ("prepare_data", "train_tokenizer"))
        recipe = RECIPES / "pretrain-gpt"
        for name in ("tokenizer", "prepared"):
            (self.folder / name).mkdir()
        tokenizer.train(tokenizer.Settings(vocab_size=1500), ["sample"], recipe, self.folder / "tokenizer")
        prepare.prepare(
            prepare.Settings(workers=1), ["sample"], recipe, self.folder / "tokenizer", self.folder / "prepared"
        )
        return self.folder / "prepared"

    def reference(self, task: Task, processes: int) -> Result:
        """What the run leaves where nothing disturbs it. Raises AssertionError where it fails."""
        key = (task.name, processes)
        if key not in self._references:
            with self.case(task, processes) as case:
                ended = case.run(NOTHING)
                assert ended.code == 0, f"{task.name}, {processes} processes, without a fault:\n{ended.output}"
                self._references[key] = case.result()
        return self._references[key]

    @contextlib.contextmanager
    def case(self, task: Task, processes: int, *, small_disk: bool = False) -> Iterator[Case]:
        """An output of its own. small_disk: on a file system of its own, where this process may mount one."""
        self._cases += 1
        folder = self.folder / f"case-{self._cases}"
        for name in ("disk", "tmp", "home"):
            (folder / name).mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder / "disk")]
        mounted = (
            small_disk and os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        )
        try:
            yield Case(self, task, processes, folder, is_mount=mounted)
        finally:
            if mounted:
                subprocess.run(["umount", folder / "disk"], check=True)
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Case:
    """Runs of one task into one output."""

    lab: Lab
    task: Task
    processes: int
    folder: Path
    is_mount: bool
    _runs: int = 0

    @property
    def output(self) -> Path:
        """What --output names."""
        return self.folder / "disk" / ("answers.jsonl" if self.task.module == "generate" else "out")

    def run(self, fault: Fault, patience: float = 4.0) -> Ended:
        """Run the task to its end, or to that of the time. patience: for which the launcher waits for a stopped
        process.
        """
        self._runs += 1
        log, mark = self.folder / f"log-{self._runs}", self.folder / f"fault-{self._runs}"
        argv = self.task.argv(self.lab, self.output)  # makes models and data, where there are none yet
        sys.stdout.flush()
        sys.stderr.flush()
        self.lab.helpers |= _children().keys()
        started = time.time()
        pid = os.fork()
        if not pid:
            _in_fork(lambda: self._launch(argv, fault, mark, patience), log, self._environment())
        code = _wait(pid, started + LIMIT)
        ended = time.time()
        after = ended - float(mark.read_text()) if mark.is_file() and mark.read_text() else None
        return Ended(code, log.read_text(errors="replace"), ended - started, after)

    def _environment(self) -> dict[str, str]:
        names = {"TMPDIR": "tmp", "HOME": "home", "HF_HOME": "home/hub"}
        return {name: str(self.folder / folder) for name, folder in names.items()}

    def _launch(self, argv: list[str], fault: Fault, mark: Path, patience: float) -> int:
        """Be the launcher."""
        launch_group = importlib.import_module("launch_group")

        async def fork(*command: str, env: Mapping[str, str], **_: object) -> _Forked:
            pid = os.fork()
            if not pid:
                _in_fork(lambda: self._work(argv, fault, mark), None, env)
            return _Forked(pid)

        asyncio.create_subprocess_exec = fork  # type: ignore[assignment]  # in the launcher's process alone
        node = launch_group.NodeRank(0, ("localhost",), self.processes)
        launcher = launch_group.Launcher(node, [self.task.module], port=0, key="", patience=patience, start_patience=60)
        return int(asyncio.run(launcher.run()))

    def _work(self, argv: list[str], fault: Fault, mark: Path) -> int:
        """Be one of the processes, as the task's own script is."""
        # Here, for a fork has no pool of threads: two threads of autograd's would make it at once, and one of them
        # fail.
        importlib.import_module("torch").set_num_threads(1)
        failures = importlib.import_module("ekiben_tasks.distributed.failures")
        task = importlib.import_module(self.task.module)
        injector = Injector(fault, int(os.environ["RANK"]), mark, self.folder / "disk", is_mount=self.is_mount)
        injector.install(self.task.module)
        sys.argv = [self.task.module]
        failures.run(lambda: task.main(argv))
        raise AssertionError

    # -- what has to hold

    def left_over(self) -> list[str]:
        """Processes and temporary files that are left; the processes are ended."""
        end = time.monotonic() + 8
        while (left := _children(self.lab.helpers)) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        kept = {f"ekiben-{os.getuid()}"}  # the cache of compiled code
        files = [path.name for path in (self.folder / "tmp").iterdir() if path.name not in kept]
        return [f"a process: {name}" for name in left.values()] + [f"in TMPDIR: {name}" for name in files]

    def temporary_files(self) -> list[str]:
        """What a finished run should have removed from beside its results."""
        below = self.folder / "disk"
        paths = (path for path in below.rglob(".*") if re.search(r"\.(staged|part|old|tmp)\b", path.name))
        return sorted(str(path.relative_to(below)) for path in paths)

    def result(self) -> Result:
        """What the run has left."""
        top = self.output.parent if self.output.suffix else self.output
        products = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (top.glob(self.task.products) if self.task.products else ())
        }
        metrics = next(iter(top.rglob("metrics.jsonl")), None)
        record = next(iter(top.rglob("run.json")), None)
        memory = json.loads(record.read_text()).get("expected_memory_bytes", 0) if record else 0
        # Of pretrain, whose record does not say it: about what its smallest micro-batch takes.
        return Result(tuple(metrics.read_text().splitlines()) if metrics else (), products, memory or 20_000_000)


class _Forked:
    """What the launcher asks of a process that asyncio has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Wait for its end, and return its exit code, of a signal as a negative number."""
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            else:
                await asyncio.sleep(0.02)
        return self.returncode


def _in_fork(work: Callable[[], int], log: Path | None, environment: Mapping[str, str]) -> None:
    """Do ``work`` in this fresh fork, with signals and streams of its own, and end it."""
    code = 70
    try:
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
        os.environ.update(environment)
        tempfile.tempdir = None  # what the parent has looked up
        if log is not None:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (1, 2):
                os.dup2(handle, stream)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, end: float) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.time() > end:
            os.kill(pid, signal.SIGKILL)  # and with it its processes
            os.waitpid(pid, 0)
            return -99
        time.sleep(0.01)


def _children(known: Set[int] = frozenset()) -> dict[int, str]:
    """The live children of this process but those that are ``known``, orphans included: number → command line."""
    alive = {}
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(pid) in known:
            continue
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                os.waitpid(int(pid), os.WNOHANG)
            else:
                alive[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:80]
    return alive

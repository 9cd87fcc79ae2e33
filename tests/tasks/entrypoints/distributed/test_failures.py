"""One process of a run fails: all end within seconds, with one sentence that names it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path.insert(0, str(ENTRYPOINTS))

import torch

from ekiben_tasks.distributed import context, failures, heartbeat, watch
from ekiben_tasks.task.errors import TaskError
from support import forkserver, multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.ports import free_port
from support.tiny_runs import SAMPLE, base  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
# train as its own script runs it; what one rank does when its third step begins stands in WHAT.
TRAIN = """
import os, signal, sys, time
sys.path.insert(0, {entrypoints!r})
import torch
torch.set_num_threads(1)
import train
from ekiben_tasks.distributed import failures
from ekiben_tasks.training import loop, run
{setup}
gradients = loop.Run._gradients
def fail(self, *words):
    if self.step == 2 and os.environ["RANK"] == "{rank}":
        os.write(1, b"failing %f\\n" % time.time())
        {what}
    return gradients(self, *words)
loop.Run._gradients = fail
failures.run(lambda: train.main({arguments!r}))
"""


# A function whose first calls, in one of two processes, take longer than hang_minutes.
SLOW = """
import pathlib
def slow(function, times=9):
    calls = []
    def slowly(*words, **named):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) <= times:
            time.sleep(6)
            pathlib.Path({output!r}, "slow").touch()
        return function(*words, **named)
    return slowly
"""


def launch(
    what: str,
    base: Path,
    output: Path,
    *more: str,
    rank: int = 1,
    patience: float = 60,
    setup: str = "",
    by: str = "launch_node",
    size: int = 2,
    nodes: Sequence[str] = (),
) -> tuple[subprocess.CompletedProcess[str], float]:
    """(what ``size`` processes came to, seconds from the failure to the end). by: what starts them; nodes: its
    options.
    """
    settings = {"model": base, "max_steps": 5, "batch_size": 8, "max_length": 512, "eval_every": 0, "device": "cpu"}
    arguments = ["--data", str(SAMPLE), "--output", str(output)]
    arguments += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    arguments += more
    setup = setup.replace("{output!r}", repr(str(output)))
    code = TRAIN.format(setup=setup, entrypoints=str(ENTRYPOINTS), what=what, rank=rank, arguments=arguments)
    argv = [*multiprocess.launcher(by, size, patience, *nodes), forkserver.python(), "-c", code]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(output.parent / "hub"),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=120, check=False)
    began = multiprocess.times_of("failing", done.stdout)
    return done, time.time() - began[0] if began else 0.0


# generate as its own script runs it: 12 batches of one prompt. What one rank does instead of its third batch stands in
# WHAT.
GENERATE = """
import os, signal, sys, time
sys.path[:0] = {entrypoints!r}
import torch
torch.set_num_threads(1)
import generate
from ekiben_tasks.distributed import failures
from ekiben_tasks.generation import batch, sampling
rank, answer, calls = int(os.environ["RANK"]), batch.answer_batch, []
def fail(*words, **named):
    calls.append(1)
    if len(calls) == 3 and rank == 1:
        os.write(1, b"failing %f\\n" % time.time())
        {what}
    time.sleep({pause} * (rank == 0))
    return answer(*words, **named)
batch.answer_batch = fail
failures.run(lambda: generate.main({arguments!r}))
"""


def launch_generate(
    what: str, base: Path, output: Path, *more: str, pause: float = 0, by: str = "launch_node"
) -> tuple[subprocess.CompletedProcess[str], float]:
    """(what two processes came to, seconds from the failure to the end). pause: of rank 0, before each batch."""
    settings = {"model": base, "examples": 12, "batch_size": 1, "max_new_tokens": 4, "device": "cpu"}
    arguments = ["--data", str(SAMPLE), "--output", str(output), "--greedy"]
    arguments += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    # The image in which this runs may be of a recipe without `generate`: the checkout has it.
    folders = [str(ENTRYPOINTS), str(ROOT / "entrypoints")]
    code = GENERATE.format(entrypoints=folders, what=what, pause=pause, arguments=[*arguments, *more])
    argv = multiprocess.launcher(by, 2, 2)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(output.parent / "hub"),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [*argv, forkserver.python(), "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    began = multiprocess.times_of("failing", done.stdout)
    return done, time.time() - began[0] if began else 0.0


@pytest.mark.parametrize("pause", [0, 3], ids=["the other has answered all", "the other answers, and is behind"])
def test_generate_that_hangs_ends_all_with_one_sentence(pause: float, base: Path, tmp_path: Path) -> None:
    """The ranks wait for each other at their end alone: the one that hangs need not be the one that is behind."""
    output = tmp_path / "answers.jsonl"
    done, seconds = launch_generate("time.sleep(1000)", base, output, "--set", "hang_minutes=0.1", pause=pause)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [re.sub(r"\d+ s", "N s", line) for line in errors(done.stderr)] == [
        "error: rank 1 on localhost: no progress for N s at batch 3 (answering) (setting hang_minutes)"
    ]
    assert 6 <= seconds < 60
    again, _ = launch_generate("pass", base, output)
    assert again.returncode == 0 and "resumed  " in again.stdout, again.stdout + again.stderr
    assert len(output.read_text().splitlines()) == 12


def test_generate_that_is_slow_goes_on(base: Path, tmp_path: Path) -> None:
    """A batch that takes longer than hang_minutes, token by token, while the other process has answered all."""
    slow = (
        "call = sampling.GumbelSampler.__call__; sampling.GumbelSampler.__call__ = lambda *words: (time.sleep(0.7),"
        " call(*words))[1]"
    )
    settings = ["--set", "hang_minutes=0.05", "--set", "max_new_tokens=8", "--set", "examples=8"]
    done, seconds = launch_generate(slow, base, tmp_path / "answers.jsonl", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds > 3


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("rank", "what", "code", "sentence", "frames"),
    [
        (1, "raise ValueError('odd')", 1, r"\S+: ValueError: odd", 1),
        (1, "raise torch.OutOfMemoryError('CUDA out of memory. Tried')", 1, r"\S+: out of GPU memory", 0),
        (
            0,
            "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling')",
            1,
            r"\S+: out of GPU memory \(CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
            0,
        ),
        (
            0,
            "raise OSError(28, 'No space left on device', '/out/metrics.jsonl')",
            1,
            r"\S+: /out/metrics.jsonl: cannot be written \(No space left on device\); make room",
            0,
        ),
        (0, "os.kill(os.getpid(), signal.SIGKILL)", 137, r"\S+ was killed by SIGKILL", 0),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", 137, r"\S+ was killed by SIGKILL", 0),
    ],
)
def test_failing_rank_ends_all_with_one_sentence(
    rank: int, what: str, code: int, sentence: str, frames: int, base: Path, tmp_path: Path
) -> None:
    done, seconds = launch(what, base, tmp_path / "out", rank=rank)
    assert done.returncode == code, done.stdout + done.stderr
    assert len(errors(done.stderr)) == 1 and re.match(f"error: rank {rank} on {sentence}", errors(done.stderr)[0]), (
        done.stderr
    )
    assert done.stderr.count("Traceback") == frames, done.stderr
    assert seconds < 30  # without an end by the launcher, the other one waits for an hour


def test_rank_that_hangs_ends_all_with_one_sentence(base: Path, tmp_path: Path) -> None:
    """A blocked read of a file system that does not answer: it neither fails nor ends."""
    done, seconds = launch("time.sleep(1000)", base, tmp_path / "out", "--set", "hang_minutes=0.1", patience=2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [re.sub(r"\d+ s", "N s", line) for line in errors(done.stderr)] == [
        "error: rank 1 on localhost: no progress for N s at step 3 (reading its data), and the others wait (setting"
        " hang_minutes)"
    ]
    assert 6 <= seconds < 60


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_hangs_under_torchrun_ends_all_with_one_sentence(rank: int, base: Path, tmp_path: Path) -> None:
    """torchrun knows nothing of steps: the processes watch each other.

    Rank 0 hangs, or one of those that wait for it.
    """
    done, seconds = launch(
        "time.sleep(1000)", base, tmp_path / "out", "--set", "hang_minutes=0.1", rank=rank, by="torchrun"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert [re.sub(r"\d+ s", "N s", line) for line in errors(done.stderr)] == [
        f"error: rank {rank} on {socket.gethostname()}: no progress for N s at step 3 (reading its data), and the"
        " others wait (setting hang_minutes)"
    ], done.stderr
    assert 6 <= seconds < 60


def test_generate_that_hangs_under_torchrun_ends_all_with_one_sentence(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    done, seconds = launch_generate("time.sleep(1000)", base, output, "--set", "hang_minutes=0.1", by="torchrun")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [re.sub(r"\d+ s", "N s", line) for line in errors(done.stderr)] == [
        f"error: rank 1 on {socket.gethostname()}: no progress for N s at batch 3 (answering) (setting hang_minutes)"
    ], done.stderr
    assert 6 <= seconds < 60


def test_rank_that_is_stopped_under_torchrun_is_named(base: Path, tmp_path: Path) -> None:
    """SIGSTOP stops the watch of that process, too: another one reports it, with its last position, and torchrun kills
    it.
    """
    done, seconds = launch(
        "os.kill(os.getpid(), signal.SIGSTOP)", base, tmp_path / "out", "--set", "hang_minutes=0.1", by="torchrun"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = errors(done.stderr)
    sign = r"no sign of life \(stopped, .*\), last seen .* step .*, and the others wait .*"
    assert re.fullmatch(rf"error: rank 1 on \S+: {sign}", line), line
    assert seconds < 100  # until torchrun's SIGKILL, 30 s after its SIGTERM


def test_rank_of_another_node_that_hangs_under_torchrun_is_named(base: Path, tmp_path: Path) -> None:
    """Two torchruns, as on two nodes, each with one process: one sentence, and both end."""
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))

    def run(node: int) -> subprocess.CompletedProcess[str]:
        options = (*where, "--node-rank", str(node))
        return launch(
            "time.sleep(1000)",
            base,
            tmp_path / "out",
            "--set",
            "hang_minutes=0.1",
            by="torchrun",
            size=1,
            nodes=options,
        )[0]

    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(run, (0, 1)))
    printed = "".join(done.stderr for done in ended)
    assert [done.returncode for done in ended] == [1, 1], printed
    assert [re.sub(r"\d+ s", "N s", line) for line in errors(printed)] == [
        f"error: rank 1 on {socket.gethostname()}: no progress for N s at step 3 (reading its data), and the others"
        " wait (setting hang_minutes)"
    ], printed


def test_undisturbed_run_under_torchrun_ends_well(base: Path, tmp_path: Path) -> None:
    """A step that takes longer than a look of the watch is not a hang."""
    done, _ = launch("time.sleep(5)", base, tmp_path / "out", "--set", "hang_minutes=0.2", by="torchrun")
    assert done.returncode == 0, done.stdout + done.stderr
    assert errors(done.stderr) == []


POSITION: heartbeat.Position = {"limit": 9, "at": [3, 2, 1], "where": "at step 3 (saving)", "lockstep": True}


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        ({0: (4, "a", False), 1: (3, "a", False), 2: (4, "b", False)}, "rank 1 on a"),
        ({0: (3, "a", False), 1: (3, "a", False), 2: (3, "b", False)}, "ranks 0, 1 on a and rank 2 on b"),
        ({0: (3, "a", False), 1: (3, "a", True), 2: (4, "b", True)}, "rank 1 on a"),
    ],
)
def test_hang_names_the_slowest_ranks(ranks: dict[int, tuple[int, str, bool]], who: str) -> None:
    signs = {}
    for rank, (step, host, disk) in ranks.items():
        position = POSITION.copy()
        position["at"] = [step, 2, 1]
        signs[rank] = watch.Sign(position, host, disk, 5.0, 7)
    assert (
        watch.describe_hang(signs, 61.2)
        == f"{who}: no progress for 61 s at step 3 (saving), and the others wait (setting hang_minutes)"
    )


@pytest.mark.parametrize("late", [0, 1])
def test_no_process_leaves_before_all_have_come(late: int, tmp_path: Path) -> None:
    """One is slow to wake up from the last collective: the others still have their connections, and the store its
    host.
    """

    def work() -> None:
        world = context.init_distributed("cpu")
        world.barrier()
        if world.rank == late:
            time.sleep(1.5)
        print(f"comes {time.time():f}", flush=True)
        world.destroy()
        print(f"leaves {time.time():f}", flush=True)

    multiprocess.run(2, tmp_path / "log", work)
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]
    comes, leaves = ([multiprocess.times_of(word, log)[0] for log in logs] for word in ("comes", "leaves"))
    assert comes[late] - comes[1 - late] > 1
    assert min(leaves) >= max(comes)
    assert leaves[0] >= comes[1]


def test_failed_run_of_one_process_destroys_its_group(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        context.init_distributed("cpu", alone=False)
        raise TaskError("the model does not fit")

    with pytest.raises(SystemExit) as caught:
        failures.run(main)
    assert caught.value.code == 1
    assert not torch.distributed.is_initialized()
    assert "the model does not fit" in capfd.readouterr().err


def test_process_whose_peer_is_gone_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LEAVE_SECONDS", 2.0)

    def work() -> None:
        world = context.init_distributed("cpu")
        world.barrier()
        if world.rank == 1:
            os._exit(0)
        world.destroy()

    processes = multiprocess.start(2, tmp_path / "log", work)
    assert multiprocess.wait(processes, 60) == [0, 0], (tmp_path / "log-0").read_text()


@pytest.mark.parametrize(
    "what",
    [
        "import ekiben_tasks.training.checkpoint as c; c.Checkpoints.save = slow(c.Checkpoints.save)",
        "from ekiben_tasks.models import load; load.load_tokenizer = slow(load.load_tokenizer)",
        "loop.Run._accumulate = slow(loop.Run._accumulate, 1)",
    ],
    ids=["saving", "loading", "compiling in the first step"],
)
def test_long_phase_does_not_end_the_run(what: str, base: Path, tmp_path: Path) -> None:
    setup = SLOW + what
    done, _ = launch("pass", base, tmp_path / "out", "--set", "hang_minutes=0.05", patience=2, setup=setup)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "slow").exists()


def test_wrong_setting_is_printed_once(base: Path, tmp_path: Path) -> None:
    done, _ = launch("pass", base, tmp_path / "out", "--set", "learning_rate=-1")
    assert done.returncode == 2
    assert errors(done.stderr) == ["error: setting learning_rate: must be above 0, not -1.0"]
    assert "Traceback" not in done.stderr


def test_no_gpu_is_printed_once_and_not_by_nccl(base: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done, _ = launch("pass", base, tmp_path / "out", "--set", "device=auto")
    (line,) = errors(done.stderr)
    assert done.returncode == 1 and "cannot connect" not in line and "GPU" in line


@pytest.mark.parametrize("size", ["1", "2"])
def test_what_libraries_warn_of_without_a_gpu_is_left_out(size: str) -> None:
    script = (
        f"import logging, sys; sys.path.insert(0, {str(ENTRYPOINTS)!r})\n"
        "from ekiben_tasks.distributed import failures\n"
        "failures.run(lambda: logging.getLogger('bitsandbytes.backends.cpu.ops').warning('no CPU kernels') or 0)"
    )
    env = {**os.environ, "WORLD_SIZE": size, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("shape mismatch"), False),
        (MemoryError(), False),
    ],
)
def test_out_of_memory_of_every_library_is_recognised(error: BaseException, expected: bool) -> None:
    assert failures.is_out_of_memory(error) is expected
    if isinstance(error, torch.distributed.DistBackendError):
        assert not failures.is_retryable(error)

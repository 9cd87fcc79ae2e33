"""serve: OpenAI's API by its client, equal to generate(), what is refused, draining, and batches that continue."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the recipe's packages are not installed here")
openai = pytest.importorskip("openai", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "serve"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]

import torch

import serve_lines
import serve_smoke_test
from ekiben_tasks.models.adapter import LABELS, load_ready
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task.errors import TaskError
from serve_engine import Engine
from serve_settings import BatchSettings, EngineSettings

PROMPTS = [f"日本で{number}番目に高い山は quick {number * 7}" for number in range(32)]


@dataclass(frozen=True)
class Running:
    """A server in ``folder``, which serves the model ``base`` and its adapter ``mine``."""

    folder: Path
    url: str
    key: str
    process: subprocess.Popen[str]

    def client(self, **options: Any) -> Any:
        return openai.OpenAI(base_url=self.url, **{"api_key": self.key, "max_retries": 0, **options})

    def post(self, path: str, body: bytes, key: str | None = None, method: str = "POST") -> tuple[int, dict[str, Any]]:
        """Return (status, JSON) of a request as no client would send it."""
        connection = http.client.HTTPConnection(self.url.split("/")[2], timeout=60)
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
        connection.close()
        return status, json.loads(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    serve_smoke_test.make_models(folder)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Running]:
    with serve_smoke_test.started(models, "--model", "base", "--adapter", "mine=adapter") as (url, process):
        yield Running(models, url, (models / "serving" / "key").read_text().strip(), process)


def generate(folder: Path, model: str, text: str, count: int) -> str:
    loaded, tokenizer = load_ready(
        "" if model == "mine" else str(folder / "base"),
        str(folder / "adapter") * (model == "mine"),
        choose_device("cpu"),
    )
    ids = tokenizer(text, return_tensors="pt")
    output = loaded.generate(**ids, max_new_tokens=count, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(output[0, len(ids["input_ids"][0]) :], skip_special_tokens=True))


def test_64_greedy_answers_at_once_are_generates(server: Running) -> None:
    asked = [(model, prompt) for prompt in PROMPTS for model in ("base", "mine")]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
            greedy = [client.completions.create(model=m, prompt=p, max_tokens=12, temperature=0) for m, p in asked]
            answers = await asyncio.gather(*greedy)
        return [answer.choices[0].text for answer in answers]

    answers = asyncio.run(ask())
    for index in range(0, 64, 9):
        model, prompt = asked[index]
        assert answers[index] == generate(server.folder, model, prompt, 12), (model, prompt)
    assert len(set(answers)) > 32


def test_sampled_requests_beside_greedy_ones(server: Running) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
            mixed = [
                client.completions.create(
                    model="base", prompt="山", max_tokens=12, temperature=temperature, top_p=top_p
                )
                for temperature, top_p in ((0, 1), (1.5, 1), (1.5, 1), (1.5, 1e-9), (1.5, 1e-9))
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*mixed)]

    greedy, first, second, *nucleus = asyncio.run(ask())
    assert greedy == generate(server.folder, "base", "山", 12)
    assert len({greedy, first, second}) == 3
    assert nucleus == [greedy, greedy]  # of one token


def test_chat_streams_what_it_answers(server: Running) -> None:
    messages = [{"role": "system", "content": "簡潔に。"}, {"role": "user", "content": "名物は何ですか。"}]
    same: dict[str, Any] = {"model": "mine", "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    text = "<system>簡潔に。\n<user>名物は何ですか。\n<assistant>"
    complete = server.client().chat.completions.create(**same)
    assert complete.choices[0].message.content == generate(server.folder, "mine", text, 20)
    assert (complete.usage.completion_tokens, complete.choices[0].finish_reason) == (20, "length")
    chunks = list(server.client().chat.completions.create(**same, stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert len(pieces) > 5
    assert "".join(pieces) == complete.choices[0].message.content
    assert chunks[-1].usage == complete.usage
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


def test_stop_texts_end_an_answer(server: Running) -> None:
    full = generate(server.folder, "base", "山", 30)
    stop = full[6:9]
    for stream in (False, True):
        answer = server.client().completions.create(
            model="base", prompt="山", max_tokens=30, temperature=0, stop=["never", stop], stream=stream
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == full[: full.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "a"}]
REFUSED: list[tuple[str, object, int, str, str | None]] = [
    (TEXT, b"{", 400, "the body is not JSON", None),
    (TEXT, b"\xff", 400, "the body is not UTF-8", None),
    (TEXT, [], 400, "the body is not a JSON object", None),
    (TEXT, {"model": "base"}, 400, "prompt: Field required", "prompt"),
    (TEXT, {"model": "gpt2", "prompt": "a"}, 404, "'gpt2' is not served here; there is base, mine", "model"),
    (TEXT, {"model": "base", "prompt": ""}, 400, "the prompt is empty", None),
    (TEXT, {"model": "base", "prompt": "a", "max_tokens": 0}, 400, "max_tokens: ", "max_tokens"),
    (TEXT, {"model": "base", "prompt": "a", "max_tokens": 5000}, 400, "the limit of both is 1,024", None),
    (TEXT, {"model": "base", "prompt": "a" * 9000}, 400, "the limit of both is 1,024", None),
    (TEXT, {"model": "base", "prompt": "a", "seed": 1}, 400, "seed: is not supported here", "seed"),
    (TEXT, {"model": "base", "prompt": "a", "n": 2}, 400, "n: ", "n"),
    (
        TEXT,
        {"model": "base", "prompt": "a", "generation_config": "{}"},
        400,
        "is not supported here",
        "generation_config",
    ),
    (TEXT, {"model": "base", "prompt": "a", "stop": [""]}, 400, "stop", None),
    (TEXT, b"[" * 5_000_000, 413, "the body has more than 4 MB", None),
    (CHAT, {"model": "base", "messages": []}, 400, "messages: ", "messages"),
    (
        CHAT,
        {"model": "base", "messages": [{"role": "root", "content": "a"}]},
        400,
        "messages.0.role: ",
        "messages.0.role",
    ),
    (CHAT, {"model": "base", "messages": HELLO, "temperature": "hot"}, 400, "temperature: ", "temperature"),
    (CHAT, {"model": "base", "messages": HELLO, "tools": []}, 400, "tools: is not supported here", "tools"),
    ("/v1/embeddings", {}, 404, "there is /v1/chat/completions", None),
    ("/load_model", {"model": "gpt2"}, 404, "there is /v1/chat", None),
]


@pytest.mark.parametrize(("path", "body", "status", "message", "param"), REFUSED)
def test_refused(server: Running, path: str, body: object, status: int, message: str, param: str | None) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    code, answer = server.post(path, content)
    assert (code, set(answer["error"])) == (status, {"message", "type", "param", "code"}), answer
    assert message in answer["error"]["message"]
    if param:
        assert answer["error"]["param"] == param


def test_the_key_is_always_asked_for_and_nowhere_else(server: Running) -> None:
    body = json.dumps({"model": "base", "prompt": "a"}).encode()
    for key in ("", "wrong", server.key[:-1], f"{server.key}x"):
        for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("POST", "/load_model")):
            status, answer = server.post(path, body, key, method)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert server.post("/health", b"", "", "GET") == (200, {"status": "ok"})
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    key_file = server.folder / "serving" / "key"
    assert (key_file.stat().st_mode & 0o777, len(server.key)) == (0o600, 43)
    log = (server.folder / "log").read_text()
    assert f"key         {key_file}" in log
    assert "tunnel      ssh -N -L " in log
    shown = [log, (server.folder / "serving" / "run.json").read_text()]
    shown += [(Path("/proc") / str(server.process.pid) / name).read_text() for name in ("cmdline", "environ")]
    assert not any(server.key in text for text in shown)


def wait_for(what: Any) -> Any:
    until = time.monotonic() + 120
    while not (result := what()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return result


def test_a_request_ends_when_its_client_leaves_and_a_signal_drains(models: Path, tmp_path: Path) -> None:
    for name in ("base", "adapter"):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "mine").write_text("0123456789abcdef-of-mine\n")
    (tmp_path / "mine").chmod(0o600)
    arguments = ["--model", "base", "--set", "max_requests=1", "--set", "key_file=mine"]
    with serve_smoke_test.started(tmp_path, *arguments) as (url, process):
        running = Running(tmp_path, url, "0123456789abcdef-of-mine", process)
        body = {"model": "base", "prompt": "a", "max_tokens": 900, "temperature": 0}

        def status() -> int:
            return running.post(TEXT, json.dumps({**body, "max_tokens": 1}).encode())[0]

        leaving = running.client().completions.create(**body, stream=True)
        next(iter(leaving))
        assert status() == 429
        leaving.close()
        wait_for(lambda: status() == 200)
        staying = running.client().completions.create(**body, stream=True)
        chunks = [next(iter(staying))]
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: status() == 503)
        chunks += list(staying)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(120) == 0
    record = json.loads((tmp_path / "serving" / "run.json").read_text())
    assert (record["status"], record["answers"] >= 2, record["refused"] >= 2) == ("finished", True, True)
    assert record["settings"]["key_file"] == "mine"


def test_refused_before_torch_is_imported(models: Path, server: Running, tmp_path: Path) -> None:
    (tmp_path / "open").write_text("0123456789abcdef0123\n")
    (tmp_path / "short").write_text("0123\n")
    (tmp_path / "short").chmod(0o600)
    port = server.url.split(":")[2].split("/")[0]
    for arguments, message in (
        (["--port", port], f"--port {port}: is in use on 127.0.0.1; give another"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 0: cannot be listened on"),
        (["--set", "key_file=open"], "open: others may read the key"),
        (["--set", "key_file=short"], "short: a key is one word of 16 or more"),
    ):
        script = "import sys; sys.modules['torch'] = None; import serve; from ekiben_tasks.task import command\n"
        script += "command.run(lambda: serve.main(sys.argv[1:]))"
        command = [sys.executable, "-c", script, "--model", str(models / "base"), "--port", "0", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert message in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_classifier_is_refused_before_weights_are_loaded(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "adapter", tmp_path / "labels")
    (tmp_path / "labels" / LABELS).write_text("{}")
    settings = replace(EngineSettings(), device="cpu")
    with pytest.raises(TaskError, match="is of a classifier"):
        Engine(settings, {"base": str(tmp_path / "nope"), "mine": str(tmp_path / "labels")}, tmp_path / "run.json")


def requests(file: Path, count: int, **more: Any) -> Path:
    lines = [
        {
            "custom_id": f"r{number}",
            "url": TEXT,
            "body": {"prompt": PROMPTS[number % 32] * (1 + number % 3), "max_tokens": 40, "temperature": 0, **more},
        }
        for number in range(count)
    ]
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return file


def answers_of(file: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


def test_a_killed_batch_continues(models: Path, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 300)
    command = [sys.executable, str(RECIPE / "entrypoints" / "serve_batch.py"), "--model", str(models / "base")]
    command += ["--input", str(file), "--output", "out.jsonl", "--set", "device=cpu", "--set", "max_requests=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    partial = tmp_path / ".out.jsonl.part-0"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 3)
        process.kill()
    kept = partial.read_bytes().count(b"\n") - 1
    assert 0 < kept < 300
    assert not (tmp_path / "out.jsonl").exists()
    done = subprocess.run(
        [*command[:-1], "max_requests=64"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"300, of which {kept} were there" in done.stdout
    answers = answers_of(tmp_path / "out.jsonl")
    assert [name for name, _ in answers] == [f"r{number}" for number in range(300)]
    for number in (0, 1, 150, 299):
        prompt = PROMPTS[number % 32] * (1 + number % 3)
        assert answers[number][1] == generate(models, "base", prompt, 40)
    record = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert (record["status"], record["resumed"], record["failed"]) == ("finished", kept, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ('{"custom_id": "r0", "url": "/v1/completions", "body": {}}', "line 2: custom_id: 'r0' is that of line 1, too"),
        ('{"custom_id": "x", "url": "/v1/files", "body": {}}', "line 2: url: must be one of"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a", "stream": true}}', "without stream"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a", "top_k": 2}}', "line 2: top_k: is not"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a", "model": "b"}}', "'b' is not served"),
    ],
)
def test_wrong_requests_of_a_batch_are_named(line: str, message: str, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 1)
    file.write_text(file.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(TaskError, match="1 invalid example") as caught:
        serve_lines.read_requests(file, ["base"])
    assert message in str(caught.value)


def test_a_batch_that_cannot_write_reports_it(models: Path, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 40)
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", sys.executable]  # no file above 1024 bytes
    limited += [str(RECIPE / "entrypoints" / "serve_batch.py"), "--model", str(models / "base"), "--input", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*limited, "--set", "device=cpu"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: answers.jsonl: cannot be written: File too large"), (
        done.stderr
    )


def test_a_request_that_does_not_fit_has_an_error_line(models: Path, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 2, max_tokens=1020)
    settings = replace(BatchSettings(), model=str(models / "base"), device="cpu", output=str(tmp_path / "out.jsonl"))
    sources = {"base": str(models / "base")}
    serve_lines.answer_file(settings, sources, serve_lines.read_requests(file, ["base"]), overwrite=False)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["response"]["status_code"] for line in lines] == [400, 400]
    assert lines[0]["response"]["body"]["error"]["code"] == "context_length_exceeded"

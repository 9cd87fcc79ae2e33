"""Read a file of requests, and write their answers, which a killed run has kept."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben_tasks.data.sources import InvalidExample, format_invalid
from ekiben_tasks.task import files, input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.output_lock import lock_output
from serve_settings import BatchSettings

if TYPE_CHECKING:
    from serve_api import ChatRequest, CompletionRequest
    from serve_engine import Engine

_ADVICE = "name a JSONL file of requests with --input"
_FREE = (
    "device",
    "output",
    "max_requests",
    "cache_share",
    "model_checksum",
)  # may differ between start and continuation
_FLUSH_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Hold a request of the file."""

    index: int  # of its line, from 0
    custom_id: str
    request: ChatRequest | CompletionRequest


def read_requests(file: Path, models: Sequence[str]) -> list[Line]:
    """Return the requests of ``file``; ``model`` may be left out of one, and is then the first of ``models``.

    Raises:
        TaskError: it cannot be read, holds none, or a request is wrong or has the custom_id of another.
    """
    input_files.check_regular(file, _ADVICE)
    import serve_api  # which imports what checks requests

    lines: list[Line] = []
    invalid: list[InvalidExample] = []
    seen: dict[str, int] = {}
    for number, content in input_files.read_lines(file, _ADVICE):
        try:
            item = input_files.as_object(input_files.parse_json(input_files.decode(content)))
            custom_id, url, body = item.get("custom_id"), item.get("url"), item.get("body")
            if not isinstance(custom_id, str) or not custom_id:
                raise ValueError("custom_id: is missing, or no text")
            if custom_id in seen:
                raise ValueError(f"custom_id: {custom_id!r} is that of line {seen[custom_id]}, too")
            if not isinstance(url, str) or url not in serve_api.URLS:
                raise ValueError(f"url: must be one of {', '.join(serve_api.URLS)}")
            if not isinstance(body, dict) or body.get("stream"):
                raise ValueError("body: must be an object without stream")
            seen[custom_id] = number
            request = serve_api.check(url, {"model": next(iter(models), ""), **body}, models)
            lines.append(Line(number - 1, custom_id, request))
        except (ValueError, serve_api.ApiError) as error:
            invalid.append(InvalidExample(f"{file}: line {number}", str(error)))
    if invalid:
        raise TaskError(format_invalid(invalid).replace(", or leave them out with --skip-invalid", ""))
    if not lines:
        raise TaskError(f"{file}: holds no request; {_ADVICE}")
    return lines


def answer_file(settings: BatchSettings, models: dict[str, str], lines: Sequence[Line], *, overwrite: bool) -> int:
    """Answer ``lines``, write the answers in their order, and return 0, or 75 or 130 after a signal.

    Raises:
        TaskError: the model, an adapter or the output cannot be used, or the model failed.
    """
    output = Path(settings.output)
    files.ensure_output_dir(output.absolute().parent)
    with lock_output(output):
        from ekiben_tasks.distributed.context import Stop  # seconds of import that a wrong file need not wait for
        from ekiben_tasks.generation.record import record_file
        from ekiben_tasks.generation.resumable_jsonl import ResumableJsonlWriter
        from serve_engine import Engine

        fixed = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _FREE}
        asked = [(line.custom_id, line.request.model_dump(mode="json")) for line in lines]
        run = hashlib.sha256(json.dumps([fixed, models, asked], sort_keys=True).encode()).hexdigest()
        writer = ResumableJsonlWriter(output, run, 0, fresh=overwrite)
        stop = Stop()
        stop.listen()
        stop.saves = True  # every line written stays
        engine = Engine(settings, models, record_file(output))
        try:
            print(f"answers     {len(lines):,}, of which {len(writer.done):,} were there", flush=True)
            resumed, started = len(writer.done), time.monotonic()
            asyncio.run(_answer_all(engine, [line for line in lines if line.index not in writer.done], writer, stop))
            failed = sum(line["response"]["status_code"] != 200 for line in writer.done.values())
            rate = round(engine.tokens / (time.monotonic() - started), 1)
            counts = {"resumed": resumed, "failed": failed, "tokens_per_s": rate}
            if stop.exit_code is not None:
                engine.write(stop.exit_code, **counts)
                print("stopped     the same command continues from here", flush=True)
                return stop.exit_code
            count = writer.finish()
            engine.write(None, **counts)
        finally:
            engine.stop()
        print(f"done        {output}: {count:,} answers, {failed:,} of them errors   record {engine.file}", flush=True)
    return 0


async def _answer_all(engine: Engine, lines: Sequence[Line], writer: Any, stop: Any) -> None:
    """Answer ``lines``, as many at once as the settings allow, and write the answers as they come."""
    remaining, flushed = iter(lines), time.monotonic()
    ready: list[dict[str, Any]] = []

    def flush() -> None:
        nonlocal flushed
        writer.add(ready)
        writer.done |= {line["index"]: line for line in ready}
        flushed = time.monotonic()
        print(f"answered    {len(writer.done):,}, {engine.tokens:,} tokens", flush=True)
        ready.clear()

    async def work() -> None:
        for line in remaining:
            ready.append(await _answer_line(engine, line))
            if time.monotonic() - flushed > _FLUSH_SECONDS:
                flush()
            if stop.exit_code is not None:
                return

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(engine.settings.max_requests):
                group.create_task(work())
    except ExceptionGroup as errors:  # of several requests, perhaps; the first ended the others
        raise errors.exceptions[0] from None
    if ready:
        flush()


async def _answer_line(engine: Engine, line: Line) -> dict[str, Any]:
    """Return the line of an answer, or of the error of a request that the model cannot read.

    Raises:
        TaskError: the model failed.
    """
    from serve_api import ApiError, Reply
    from serve_engine import EngineError
    from serve_server import complete, prepare

    reply = Reply(line.request)
    try:
        status, body = 200, await complete(engine, reply, prepare(engine, line.request))
    except ApiError as error:
        status, body = error.status, error.body()
    except EngineError as error:
        raise TaskError(f"line {line.index + 1}: {error}; the answers before it are kept") from error
    response = {"status_code": status, "request_id": reply.key, "body": body}
    return {"index": line.index, "id": reply.key, "custom_id": line.custom_id, "response": response, "error": None}

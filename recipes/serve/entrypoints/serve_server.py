"""Serve OpenAI's API over HTTP: ask for the key, limit bodies and requests, and drain at a signal."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import serve_api
from serve_api import ApiError, Reply
from serve_engine import End, Engine, EngineError, Prompt, TooLongError
from serve_settings import ServeSettings

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def complete(engine: Engine, reply: Reply, prompt: Prompt) -> dict[str, Any]:
    """Return the complete answer to a request.

    Raises:
        EngineError: the model failed, or is stopping.
    """
    text, end = "", End("stop", 0, 0)
    async with aclosing(engine.answer(reply.request.model, prompt, stream=False)) as pieces:
        async for piece in pieces:
            if isinstance(piece, End):
                end = piece
            else:
                text += piece
    return reply.complete(text, end.reason, serve_api.usage(end.prompt_tokens, end.tokens))


def prepare(engine: Engine, request: serve_api.ChatRequest | serve_api.CompletionRequest) -> Prompt:
    """Return the prompt of a request.

    Raises:
        ApiError: the model cannot read it.
    """
    try:
        ids = engine.models[request.model].encode(request.prompt(), request.limit())
    except ValueError as error:
        code = "context_length_exceeded" if isinstance(error, TooLongError) else None
        raise ApiError(400, str(error), code) from error
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    return Prompt(ids, request.limit(), request.temperature, request.top_p, stop)


class Service:
    """Answer HTTP requests with an engine; an ASGI application."""

    def __init__(self, settings: ServeSettings, engine: Engine, key: str) -> None:
        self.settings, self.engine, self.key = settings, engine, key.encode()
        self.running = self.refused = 0
        self.draining = False
        self.encoder = ThreadPoolExecutor(1)  # long texts stop no answer; tokenizers are not for several threads
        routes = [Route(url, self._answer, methods=["POST"]) for url in serve_api.URLS]
        routes += [
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._list),
            Route("/health", self._health),
        ]
        handlers = {ApiError: _error, HTTPException: _error, EngineError: _error, Exception: _error}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if error := self._refusal(scope):
            self.refused += 1
            await _error(None, error)(scope, receive, send)
            return
        self.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.running -= 1

    def _refusal(self, scope: _Scope) -> ApiError | None:
        if scope["path"] == "/health":
            return None
        header = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(header, b"Bearer " + self.key):
            return ApiError(
                401, "the key is missing or wrong; send it as `Authorization: Bearer KEY`", "invalid_api_key"
            )
        if self.draining:
            return ApiError(503, "the server is stopping: it ends what runs, and takes nothing new")
        if self.running >= self.settings.max_requests:
            return ApiError(429, f"{self.running} requests are running, which is the limit; try again")
        return None

    async def _answer(self, request: Request) -> Response:
        content = await self._read(request)
        loop = asyncio.get_running_loop()

        def understand() -> tuple[Reply, Prompt]:
            asked = serve_api.parse(request.url.path, content, list(self.engine.models))
            return Reply(asked), prepare(self.engine, asked)

        reply, prompt = await loop.run_in_executor(self.encoder, understand)
        if reply.request.stream:
            return StreamingResponse(self._events(reply, prompt), media_type="text/event-stream")
        answer = asyncio.ensure_future(complete(self.engine, reply, prompt))
        gone = asyncio.ensure_future(request.receive())  # after the body, this returns when the client has left
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            answer.cancel()
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(answer.result())

    async def _read(self, request: Request) -> bytes:
        limit, content = int(self.settings.max_body_mb * 1e6), bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > limit:
                raise ApiError(413, f"the body has more than {self.settings.max_body_mb:g} MB")
        return bytes(content)

    async def _events(self, reply: Reply, prompt: Prompt) -> AsyncIterator[str]:
        try:
            async with aclosing(self.engine.answer(reply.request.model, prompt, stream=True)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, str):
                        yield _event(reply.chunk(piece))
                        continue
                    yield _event(reply.chunk(None, piece.reason))
                    if reply.request.stream_options.include_usage:
                        yield _event(reply.usage_chunk(serve_api.usage(piece.prompt_tokens, piece.tokens)))
        except EngineError as error:
            yield _event(ApiError(500, str(error)).body())
        yield "data: [DONE]\n\n"

    async def _list(self, request: Request) -> Response:
        created = int(self.engine.began)
        models = [
            {"id": name, "object": "model", "created": created, "owned_by": "ekiben"} for name in self.engine.models
        ]
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": models})
        serve_api.check_model(name, list(self.engine.models))
        return JSONResponse(next(model for model in models if model["id"] == name))

    async def _health(self, _: Request) -> Response:
        healthy = not self.draining and self.engine.failure is None
        return JSONResponse({"status": "ok" if healthy else "stopping"}, status_code=200 if healthy else 503)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error(_: Request | None, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):  # an unknown path, or another method
        error = ApiError(error.status_code, f"{error.detail}; there is {', '.join(serve_api.URLS)} (POST), /v1/models")
    elif isinstance(error, EngineError):
        error = ApiError(503 if "stopping" in str(error) else 500, str(error))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log has the reason")
    return JSONResponse(error.body(), status_code=error.status)


class Server(uvicorn.Server):  # type: ignore[misc]
    """Run a service until a signal: the first drains it, the second ends it."""

    def __init__(self, service: Service) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        super().__init__(
            uvicorn.Config(service, log_level="warning", access_log=False, lifespan="off", server_header=False)
        )
        self.service, self.exit_code = service, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or end at once if it drains already."""
        if self.service.draining:
            self.should_exit = self.force_exit = True
            self.exit_code = 128 + sig
            return
        self.service.draining = True
        # os.write, not print: a signal may interrupt a print.
        os.write(2, f"{signal.Signals(sig).name}: {self.service.running} requests end, new ones are refused\n".encode())

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends: it is drained, or a model failed."""
        drained = self.service.draining and not self.service.running
        if drained or self.service.engine.failure:
            self.should_exit = True
        return bool(await super().on_tick(counter))

    def serve_until_signal(self, listening: socket.socket) -> int:
        """Answer what comes to the socket, and return the exit code."""
        signal.signal(signal.SIGUSR1, self.handle_exit)  # what schedulers send before a job's time is over
        self.run(sockets=[listening])
        return self.exit_code

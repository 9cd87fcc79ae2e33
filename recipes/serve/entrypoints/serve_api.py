"""Read the requests of OpenAI's API, and write its answers and errors.

A field that would change an answer and is not obeyed is refused, never ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic

from ekiben_tasks.task import input_files

Zero = Annotated[float, pydantic.Field(ge=0, le=0)]
Stop = Annotated[str, pydantic.Field(min_length=1, max_length=200)]


class ApiError(Exception):
    """Report an error of a request. code: OpenAI's. param: the field."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API writes it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Fields(pydantic.BaseModel):  # type: ignore[misc]
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class _Text(_Fields):
    type: Literal["text"]
    text: str


class _Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Text]


class _StreamOptions(_Fields):
    include_usage: bool = False


class Request(_Fields):
    """Define the fields that both kinds of requests have, the ones of which only one value is obeyed among them."""

    model: str
    max_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    stop: Stop | Annotated[list[Stop], pydantic.Field(max_length=16)] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    n: Literal[1] = 1
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    user: str = ""  # for the records of who asks


class ChatRequest(Request):
    """Define the fields of /v1/chat/completions."""

    messages: list[_Message] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: Literal[False] = False

    def prompt(self) -> list[dict[str, str]]:
        """Return the messages as chat templates take them."""
        return [{"role": each.role, "content": _join(each.content)} for each in self.messages]

    def limit(self) -> int | None:
        """Return the number of tokens that the client wants at most."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Request):
    """Define the fields of /v1/completions."""

    prompt_text: str = pydantic.Field(alias="prompt")
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    def prompt(self) -> str:
        """Return the text to continue."""
        return str(self.prompt_text)

    def limit(self) -> int | None:
        """Return the number of tokens that the client wants at most."""
        return self.max_tokens


URLS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


def parse(url: str, content: bytes, models: Sequence[str]) -> ChatRequest | CompletionRequest:
    """Return the request in the body ``content``.

    Raises:
        ApiError: it is not JSON, has a wrong field, or names another model than ``models``.
    """
    try:
        body = input_files.as_object(input_files.parse_json(input_files.decode(content)))
    except ValueError as error:
        raise ApiError(400, f"the body {error}") from None
    return check(url, body, models)


def check(url: str, body: dict[str, Any], models: Sequence[str]) -> ChatRequest | CompletionRequest:
    """Return the request of a JSON object.

    Raises:
        ApiError: it has a wrong field, or names another model than ``models``.
    """
    try:
        request: ChatRequest | CompletionRequest = URLS[url].model_validate(_without_null(body))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "extra_forbidden"
        raise ApiError(400, f"{param}: {'is not supported here' if unknown else first['msg']}", param=param) from None
    check_model(request.model, models)
    return request


def check_model(name: str, models: Sequence[str]) -> None:
    """Check that the model ``name`` is served.

    Raises:
        ApiError: it is not.
    """
    if name not in models:
        message = f"the model {name!r} is not served here; there is {', '.join(models)}"
        raise ApiError(404, message, "model_not_found", "model")


def _without_null(value: Any) -> Any:
    """Return ``value`` without the fields that are null: clients send them for what they leave out."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _join(content: str | Sequence[_Text]) -> str:
    return content if isinstance(content, str) else "".join(text.text for text in content)


@dataclass(frozen=True)
class Reply:
    """Write the answer to one request, at once or in chunks."""

    request: ChatRequest | CompletionRequest
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if isinstance(self.request, ChatRequest) else "cmpl"
        same = {"id": f"{prefix}-{self.key}", "object": kind, "created": self.created, "model": self.request.model}
        return {**same, "choices": choices}

    def complete(self, text: str, reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """Return the complete answer."""
        if isinstance(self.request, ChatRequest):
            kind, content = "chat.completion", {"message": {"role": "assistant", "content": text}}
        else:
            kind, content = "text_completion", {"text": text}  # type: ignore[dict-item]
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {**self._body(kind, [choice]), "usage": usage}

    def chunk(self, text: str | None, reason: str | None = None) -> dict[str, Any]:
        """Return a chunk with a piece of the answer, or without one the last, with the reason of its end."""
        if isinstance(self.request, ChatRequest):
            kind, content = "chat.completion.chunk", {"delta": {} if text is None else {"content": text}}
        else:
            kind, content = "text_completion", {"text": text or ""}  # type: ignore[dict-item]
        return self._body(kind, [{"index": 0, **content, "logprobs": None, "finish_reason": reason}])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the chunk with the numbers of tokens, where the client asks for it."""
        return {**self.chunk(None), "choices": [], "usage": usage}


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Return the numbers of tokens as OpenAI's API writes them."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}

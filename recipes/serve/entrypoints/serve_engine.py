"""Generate answers for many requests at once, by Transformers' continuous batching, with a model and its adapters."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.utils import get_device_and_memory_breakdown

from ekiben_tasks.data.tokenize import describe_unknown, end_tokens
from ekiben_tasks.models import load
from ekiben_tasks.models.adapter import attach_adapter, check_generates
from ekiben_tasks.models.device import GIB, Device, choose_device
from ekiben_tasks.task import files, run_metadata
from ekiben_tasks.task.checksums import ModelChecksum
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from serve_settings import EngineSettings

_CPU_CACHE = 4 * GIB  # at most, for the tokens of running requests where there is no GPU


@dataclass(frozen=True, slots=True)
class Prompt:
    """Hold the tokens of a request, and how it is answered. temperature 0: greedily. limit: None: the settings'."""

    ids: list[int]
    limit: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Describe the end of an answer: ``stop`` or ``length``, and the numbers of tokens."""

    reason: str
    prompt_tokens: int
    tokens: int


class EngineError(Exception):
    """Report that a request was not answered, though it was right."""


class TooLongError(ValueError):
    """Report that a prompt and its answer have more tokens than fit."""


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):  # type: ignore[misc]
    """Scale each request's scores by its temperature; of 0, leave only the likeliest token."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        temperature = tensor_arg[: scores.size(0)].view(dtype=torch.float32).unsqueeze(-1)
        best = torch.full_like(scores, float("-inf")).scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(temperature > 0, scores / temperature.clamp(min=1e-6), best)


class Served:
    """Answer requests to one model, or to one adapter with the base that it shares with the others."""

    def __init__(self, name: str, model: Any, tokenizer: Any, settings: EngineSettings) -> None:
        self.name, self.model, self.tokenizer, self.settings = name, model, tokenizer, settings
        config = model.generation_config
        self.temperature = float(config.temperature or 1.0) if config.do_sample else 0.0
        self.top_p = float(config.top_p or 1.0)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        with contextlib.suppress(TaskError):  # of a chat template that nothing can be trained with
            ends = [*ends, *end_tokens(tokenizer)]
        self.ends = sorted({tokenizer.eos_token_id, *(each for each in ends if each is not None)})
        dropped = [
            type(each).__name__
            for each in model._get_logits_processor(copy.deepcopy(config))
            if getattr(each, "supports_continuous_batching", None) is False
        ]
        if dropped:
            print_once(
                f"note        {name}: continuous batching leaves out {', '.join(dropped)} of its generation_config"
            )

    def start(self, cache: float) -> None:
        """Reserve ``cache`` bytes for the tokens of running requests, and start to answer.

        Raises:
            TaskError: they are not enough.
        """
        # Values that are not the defaults, or there would be no processor whose values a request can replace.
        sampling = {"temperature": 0.5, "top_p": 0.5, "top_k": self.model.generation_config.top_k}
        _, total, reserved, allocated = get_device_and_memory_breakdown()
        config = transformers.ContinuousBatchingConfig(
            max_memory_percent=min(cache / (total - max(reserved, allocated)), 1.0),
            max_requests_per_batch=self.settings.max_requests,
            per_request_processors=True,
            seed=self.settings.seed,
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=True, eos_token_id=self.ends, **sampling),
            continuous_batching_config=config,
        )
        processors = self.manager.logit_processor.logits_processor
        processors[0] = _Temperature(processors[0])
        try:
            self.manager.warmup()
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise TaskError(
                f"model {self.name}: {cache / GIB:.2f} GiB are not enough for the tokens of running requests; raise"
                " cache_share, or serve fewer adapters or a smaller model"
            ) from error
        self.limit = min(
            load.longest_context(self.model.config),
            infer_max_single_request_tokens(self.manager.batch_processor.cache),
        )
        self.manager.start()

    def encode(self, prompt: str | Sequence[Mapping[str, str]], limit: int | None) -> list[int]:
        """Return the tokens of a text, or of messages, which the tokenizer's chat template renders.

        limit: tokens of the answer that are asked for; None: as many as fit.

        Raises:
            ValueError: there is no template, it does not take the messages, or nothing or too much is left.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        elif not self.tokenizer.chat_template:
            raise ValueError(f"the model {self.name} has no chat template; use /v1/completions")
        else:
            try:
                text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program, which refuses by any exception
                raise ValueError(f"the chat template of {self.name} refuses: {error}") from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) + (limit or 1) > self.limit:
            asked = f" and its answer up to {limit:,}" if limit else ""
            raise TooLongError(f"the prompt has {len(ids):,} tokens{asked}; the limit of both is {self.limit:,}")
        if problem := describe_unknown(self.tokenizer, ids, len(self.model.get_input_embeddings().weight)):
            raise ValueError(f"the prompt {problem}")
        return list(ids)

    async def answer(self, prompt: Prompt, *, stream: bool) -> AsyncGenerator[str | End, None]:
        """Yield the pieces of an answer, then its end; without ``stream`` all of it at once. Closing it cancels it.

        Raises:
            EngineError: the model failed, or is stopping.
        """
        key, queue = uuid.uuid4().hex, asyncio.Queue[Any]()
        limit = self.settings.max_new_tokens if prompt.limit is None else prompt.limit
        limit = min(limit, self.limit - len(prompt.ids))
        self.manager.register_result_handler(key, queue.put_nowait)
        output, text = None, _Text(self.tokenizer, prompt.stop)
        try:
            if not self.manager.add_request(
                prompt.ids,
                request_id=key,
                max_new_tokens=limit,
                streaming=stream or bool(prompt.stop),
                eos_token_id=self.ends,
                temperature=float(self.temperature if prompt.temperature is None else prompt.temperature),
                top_p=float(self.top_p if prompt.top_p is None else prompt.top_p),
            ):
                raise EngineError("the server is stopping")
            while True:
                output = await queue.get()
                if output.error is not None:
                    raise EngineError(f"the model failed: {output.error}")
                tokens, finished = output.generated_tokens, output.is_finished()
                piece, stopped = text.add(tokens, is_last=finished)
                if piece:
                    yield piece
                if finished or stopped:
                    ended = stopped or tokens[-1] in self.ends
                    yield End("stop" if ended else "length", len(prompt.ids), len(tokens))
                    return
        finally:
            if output is None or not output.is_finished():
                self.manager.cancel_request(key)
                with self.manager.output_router._lock:
                    self.manager.output_router.result_handlers.pop(key, None)


class _Text:
    """Turn a growing list of tokens into pieces of text: of complete characters, and none of a text that stops it."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.hold = max((len(each) for each in stop), default=1) - 1
        self.start = self.end = 0  # tokens [start:end] are the context of the next ones
        self.pending = ""

    def add(self, tokens: Sequence[int], *, is_last: bool) -> tuple[str, bool]:
        """Return (the next piece, whether a stop text was reached)."""
        known, new = (
            self.tokenizer.decode(each, skip_special_tokens=True)
            for each in (tokens[self.start : self.end], tokens[self.start :])
        )
        if is_last or not new.endswith("\ufffd"):  # else a character whose other bytes are to come
            self.pending += new[len(known) :]
            self.start, self.end = self.end, len(tokens)
        if ends := [index for each in self.stop if (index := self.pending.find(each)) >= 0]:
            return self.pending[: min(ends)], True
        cut = len(self.pending) - (0 if is_last else self.hold)
        piece, self.pending = self.pending[: max(cut, 0)], self.pending[max(cut, 0) :]
        return piece, False


class Engine:
    """Load a model and its adapters, answer requests to them, and load nothing else."""

    def __init__(self, settings: EngineSettings, models: Mapping[str, str], record: Path) -> None:
        """Load ``models``, name → hub id or folder: the model, then its adapters, which share its weights.

        record: the file that write() writes.

        Raises:
            TaskError: one cannot be loaded, or does not fit the memory.
        """
        self.settings, self.file, self.began = settings, record, time.time()
        self.device: Device = choose_device(settings.device)
        (name, path), *adapters = models.items()
        for _, folder in adapters:
            check_generates(Path(folder))
        print_once(f"loading     {', '.join(models)} on {self.device.name}")
        load.silence_warnings()
        transformers.utils.logging.set_verbosity_error()
        base = load.load_base(path, self.device).eval()
        self.models = {name: Served(name, base, load.load_tokenizer(path), settings)}
        for adapter, folder in adapters:
            shared = {id(each): each for each in (*base.parameters(), *base.buffers())}
            adapted = attach_adapter(copy.deepcopy(base, shared), Path(folder), path)
            if adapted.active_peft_config.is_prompt_learning:
                raise TaskError(f"adapter {folder}: is of learnt prompts, which cannot be served")
            has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
            tokenizer = load.load_tokenizer(folder if has_tokenizer else path)
            self.models[adapter] = Served(adapter, adapted.get_base_model(), tokenizer, settings)
        checked = models.items() if settings.model_checksum else ()
        self.checksums = {key: run_metadata.start_checksum(each, record, key) for key, each in checked}
        self.sources = dict(models)
        _, total, reserved, allocated = get_device_and_memory_breakdown()
        cache = settings.cache_share * (total - max(reserved, allocated))
        cache = (cache if self.device.is_gpu else min(cache, _CPU_CACHE)) / len(models)
        self.answers = self.tokens = 0
        try:
            for served in self.models.values():
                served.start(cache)
        except BaseException:
            self.stop()
            raise

    @property
    def failure(self) -> str | None:
        """Return why a model answers no longer, or None."""
        errors = (served.manager.background_thread_status.fatal_error for served in self.models.values())
        return next((f"{type(error).__name__}: {error}" for error in errors if error is not None), None)

    async def answer(self, name: str, prompt: Prompt, *, stream: bool) -> AsyncGenerator[str | End, None]:
        """Yield what Served.answer() does, and count it.

        Raises:
            EngineError: as Served.answer() does.
        """
        async for piece in self.models[name].answer(prompt, stream=stream):
            if isinstance(piece, End):
                self.answers, self.tokens = self.answers + 1, self.tokens + piece.tokens
            yield piece

    def stop(self) -> None:
        """End the threads of all models, and what they still answer."""
        for served in self.models.values():
            if hasattr(served, "manager") and served.manager.is_running():
                served.manager.stop(hard_stop=True)

    def write(self, exit_code: int | None, **more: Any) -> None:
        """Write the run's record with ``more``. exit_code: None for a finished run.

        Raises:
            TaskError: it cannot be written.
        """
        seconds = time.time() - self.began
        models = {}
        for name, source in self.sources.items():
            checksum = self.checksums.get(name, ModelChecksum(None))
            models[name] = run_metadata.model_record(source, checksum, wait=exit_code is None)
        (name, model), *adapters = models.items()
        counts = {"answers": self.answers, "tokens": self.tokens, "seconds": round(seconds, 1)}
        record = {
            **run_metadata.run_record(self.settings, exit_code, self.began),
            "model": model,
            "adapters": dict(adapters),
            "device": {"name": self.device.name, "count": 1, "dtype": str(self.device.dtype).removeprefix("torch.")},
            **counts,
            **more,
        }
        try:
            files.write_json(self.file, record)
        except OSError as error:
            raise TaskError(f"{self.file}: cannot be written: {error.strerror}") from None

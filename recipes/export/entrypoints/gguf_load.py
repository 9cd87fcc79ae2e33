"""Load GGUF files by llama.cpp, whose log becomes the reason of an error."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp

from ekiben_tasks.task.errors import TaskError

_ERROR = 4  # ggml_log_level; llama-cpp-python counts them as before, and prints every warning
_reasons: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_reason(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        _reasons.append(" ".join(text.decode(errors="replace").split()))


llama_cpp.llama_log_set(_keep_reason, ctypes.c_void_p(0))


def load_file(file: Path, **options: Any) -> Any:
    """Return the ``llama_cpp.Llama`` of ``file``. options: its further arguments.

    Raises:
        TaskError: it is damaged, of a kind that this llama.cpp does not have, or does not fit the memory.
    """
    _reasons.clear()
    try:
        return llama_cpp.Llama(str(file), verbose=False, **options)
    except (ValueError, AssertionError) as error:
        reason = next((line for line in _reasons if "error" in line), str(error))[:300]
        raise TaskError(
            f"{file}: llama-cpp-python {llama_cpp.__version__} cannot load it ({reason}); write it again with `gguf`"
        ) from error

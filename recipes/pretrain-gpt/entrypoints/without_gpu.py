"""Run Megatron-Core on the CPU, for tests; it assumes that its tensors are on a GPU.

What it names outright is redirected to the CPU: the current device, device="cuda", the GPU's random numbers, the names
of tensor types. Its arithmetic, its schedules and its communication (over gloo) stay as they are.
"""

from __future__ import annotations

import functools
import logging
import queue
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Redirect(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")  # optimizers ask for 'torch.cuda.FloatTensor'
        return result


@functools.cache
def pretend() -> None:
    """Redirect torch's CUDA calls to the CPU for the rest of this process.

    Call it before anything of megatron is imported.
    """
    _Redirect().__enter__()
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import megatron.core.jit
    import megatron.core.tensor_parallel.random as random

    # It warns because below the GPU's and the CPU's random numbers share one generator.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    megatron.core.jit.disable_jit_fuser()  # compiling for a CPU takes longer than a proof
    # Asynchronous saving starts a manager process for its results, which takes seconds.
    writer._results_queue = queue.Queue()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

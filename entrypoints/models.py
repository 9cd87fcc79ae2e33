"""Devices, base models, adapters: loading, saving, and what they will cost in memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers.integrations import is_deepspeed_zero3_enabled

import packing
from architectures import plain_attention
from hub import explain, locate_model
from settings import TaskError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    place: torch.device
    name: str
    dtype: torch.dtype
    memory: int  # bytes free when the task started

    @property
    def is_gpu(self) -> bool:
        return bool(self.place.type == "cuda")

    @property
    def has_bf16(self) -> bool:
        """Ampere and later: these have the variable-length flash kernel, too."""
        return bool(self.is_gpu and self.dtype == torch.bfloat16)


def choose_device(wanted: str, index: int = 0) -> Device:
    """The GPU unless ``cpu`` is asked for; bf16 where the GPU has it, else fp16. Errors: TaskError, with the reason."""
    if wanted == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            # Left alone, torch counts the machine's cores, not those this job may use.
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        return Device(torch.device("cpu"), "CPU", torch.float32, free_ram())
    if not torch.cuda.is_available():
        raise TaskError(_no_gpu())
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    _check_architecture(properties.name, (properties.major, properties.minor))
    torch.cuda.set_device(device)
    # The few fp32 products left are not worth full precision.
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if properties.major >= 8 else torch.float16
    return Device(device, properties.name, dtype, torch.cuda.mem_get_info(device)[0])


def quieten() -> None:
    """Progress bars are for terminals: in a job's log each update is a line."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    # PEFT asks transformers under a name that transformers is about to drop; nothing a user could do.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)


def stand_in() -> Device:
    """What a dry run reckons with where there is no GPU: bf16, and no limit."""
    return Device(torch.device("cpu"), "none", torch.bfloat16, 1 << 50)


def load_tokenizer(name: str) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise TaskError(explain(error, name, "tokenizer of model")) from error
    if tokenizer.eos_token_id is None:
        raise TaskError(f"model {name}: its tokenizer has no end-of-text token, so it could never learn to stop")
    return tokenizer


def load_base(name: str, device: Device, attention: str | None = None, bits: int = 16) -> Any:
    """The frozen base model on ``device``, its products' weights in 8 or 4 bits if asked. Errors: TaskError.

    ``attention`` None: for answering, the best that torch brings along.
    """
    place = locate_model(name)
    attention = attention or plain_attention(read_config(place))
    packing.register()
    quieten()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=device.dtype, attn_implementation=attention,
            # DeepSpeed gives the weights away as they are read.
            device_map=None if is_deepspeed_zero3_enabled() else {"": device.place},
            quantization_config=_quantisation(device, bits),
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise TaskError(f"model {name}: does not fit the memory of {device.name}; take a smaller one") from error
    except Exception as error:
        raise TaskError(explain(error, name, "model")) from error
    return model.requires_grad_(False)


def load_shape(place: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """The model, all shapes and no weights: enough to count with, or to be filled by another process. Errors: TaskError."""
    packing.register()
    config = read_config(place)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:
        raise TaskError(explain(error, place, "model")) from error
    return model.requires_grad_(False)


def read_config(place: str) -> Any:
    """Errors: TaskError."""
    quieten()
    try:
        return transformers.AutoConfig.from_pretrained(place)
    except Exception as error:
        raise TaskError(explain(error, place, "model")) from error


def longest_context(config: Any) -> int:
    names = ("max_position_embeddings", "max_seq_len")  # the second is MPT's
    return next((int(found) for name in names if (found := getattr(config, name, None))), 1 << 30)


def stored_dtype(name: str) -> torch.dtype:
    """The type a model's files say they hold; fp32 where they do not say."""
    dtype = getattr(transformers.AutoConfig.from_pretrained(name), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def add_adapter(model: Any, *, r: int, alpha: int, dropout: float, target_modules: Sequence[str], seed: int) -> Any:
    """The model with a fresh adapter, in the model's dtype. Errors: TaskError where no layer has such a name."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules), task_type="CAUSAL_LM"
    )
    try:
        # Adapter weights in the model's own dtype: no casts in the forward pass. The optimizer keeps fp32 copies.
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        found = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        has = ", ".join(sorted(found))
        raise TaskError(
            f"setting lora.target_modules: no layer is called {', '.join(target_modules)}; this model has {has}"
        ) from error


def load_adapter(folder: Path, device: Device, *, base: str | None = None, bits: int = 16) -> tuple[Any, str]:
    """(base with the adapter of ``folder`` on it, name of the base). Errors: TaskError."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        near = (
            [str(path.parent) for path in sorted(folder.glob("**/adapter_config.json"))[:3]] if folder.is_dir() else []
        )
        hint = f"; there is one in {', '.join(near)}" if near else "; train writes one to OUTPUT/adapter"
        raise TaskError(f"{folder.absolute()}: no adapter_config.json there, so it is no adapter{hint}")
    name = base or str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    model = load_base(name, device, bits=bits)
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TaskError(f"adapter {folder}: does not fit the base model {name}: {reason}") from error
    return adapted.eval(), name


def load_ready(model: str, adapter: str, device: Device, *, base: str | None = None, bits: int = 16) -> tuple[Any, Any]:
    """(model, tokenizer) for answering: the base with its ``adapter`` where one is named, else ``model``. Errors: TaskError."""
    if not adapter:
        return load_base(model, device, bits=bits).eval(), load_tokenizer(model)
    folder = Path(adapter)
    adapted, name = load_adapter(folder, device, base=base, bits=bits)
    return adapted, load_tokenizer(str(folder) if (folder / "tokenizer_config.json").is_file() else name)


def save_adapter(model: Any, folder: Path, weights: dict[str, torch.Tensor], base: str) -> None:
    """The adapter as PEFT writes it today, whole or not there. ``weights``: parameter name → fp32 tensor."""
    staged = folder.with_name(f".{folder.name}.staged-{os.getpid()}")
    shutil.rmtree(staged, ignore_errors=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path = base
    with _without_model_card(model):
        model.save_pretrained(str(staged), state_dict=weights)
    make_readable(staged)
    replace_folder(staged, folder)


def make_readable(folder: Path) -> None:
    """safetensors writes through a private temporary file, and colleagues want to read what was trained."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def replace_folder(staged: Path, folder: Path) -> None:
    """Rename ``staged`` to ``folder``, an older one aside first: no moment shows half of it."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    staged.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def count_parameters(model: Any) -> tuple[int, int]:
    """(all, trainable)."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def quantising_missing(device: Device, bits: int) -> str | None:
    """Why weights cannot be held in 8 or 4 bits here, or None."""
    if not device.is_gpu:
        return "needs a GPU: there is no such arithmetic for CPUs here"
    # The integer products of LLM.int8() came with Turing; on a V100 they give gradients of 0.
    if bits == 8 and torch.cuda.get_device_capability(device.place) < (7, 5):
        return f"needs a GPU of Turing or later, and this is a {device.name}; 4 bits work there"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "needs the package bitsandbytes, which this image does not have"
    return None


def _quantisation(device: Device, bits: int) -> Any:
    if bits == 16:
        return None
    reason = quantising_missing(device, bits)
    if reason:
        raise TaskError(f"setting bits={bits}: {reason}; take --set bits=16")
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=device.dtype,
        bnb_4bit_use_double_quant=True,
    )


def compiler_missing() -> str | None:
    """Why torch.compile cannot work here, or None. Triton compiles its launcher with a C compiler and Python's headers."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "no Python.h"
    return None


def _check_architecture(name: str, capability: tuple[int, int]) -> None:
    built = [arch.removeprefix("sm_").rstrip("af") for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    pairs = [(int(arch[:-1]), int(arch[-1])) for arch in built]
    if any(major == capability[0] and minor <= capability[1] for major, minor in pairs):
        return
    if any(arch.startswith("compute_") for arch in torch.cuda.get_arch_list()) and capability > max(
        pairs, default=(0, 0)
    ):
        return
    raise TaskError(
        f"{name} is sm_{capability[0]}{capability[1]}, and this image's torch {torch.__version__} is built for "
        f"{', '.join(torch.cuda.get_arch_list())}; use an image of another stack (CUDA 13 ended V100 and older)"
    )


def _no_gpu() -> str:
    advice = "; without one, slowly: --set device=cpu"
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return f"no GPU is visible here; start with singularity exec --nv, or docker run --gpus all{advice}"
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split() if version.is_file() else []
    driver = next((word for word in words if word.count(".") in (1, 2) and word[0].isdigit()), "unknown")
    return (
        f"a GPU is there, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: driver {driver}, "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}; CUDA 13 needs driver 580 or later, "
        f"CUDA 12 needs 525; also check --nv (singularity) or --gpus all (docker){advice}"
    )


def free_ram() -> int:
    """What can be had without swapping: free pages alone leave out the file cache, which gives way."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


@contextlib.contextmanager
def _without_model_card(model: Any) -> Iterator[None]:
    """PEFT writes a README with a template of empty headings; the run record says more."""
    model.create_or_update_model_card = lambda *_: None
    try:
        yield
    finally:
        del model.create_or_update_model_card

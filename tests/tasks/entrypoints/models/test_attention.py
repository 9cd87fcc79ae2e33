"""Kernels of attention by the setting ``attention``: their numbers against plain softmax, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch

import train as train_command
from ekiben_tasks.data import packing
from ekiben_tasks.models import attention, attention_choice, memory, tiny
from ekiben_tasks.models.attention_choice import ChosenKernels, choose_kernels, kernels_in_use
from ekiben_tasks.models.device import Device, dry_run_device, named_device
from ekiben_tasks.models.tuning import LossModule
from ekiben_tasks.task.errors import SettingError, TaskError
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE, base, fit, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
LENGTHS = (128, 37, 64)
CPU = Device(torch.device("cpu"), "CPU", torch.float32, 1 << 34)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of ``[tokens, heads, size]`` in fp64, written out; keys of grouped heads are repeated."""
    groups = query.size(1) // key.size(1)
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(groups, 0) for tensor in (k, v))
    scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
    hidden = torch.ones(scores.size()[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package with the two functions of flash-attn 2, as its README has them, and those of 4, as its source has them.

    Both are computed by plain(). Returns the names that were called.
    """
    calls: list[str] = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        calls.append("varlen")
        assert causal and dropout_p == 0 and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert softmax_scale is None or softmax_scale == pytest.approx(q.size(-1) ** -0.5)
        ends = cu_seqlens_q.tolist()
        assert max_seqlen_q == max_seqlen_k >= max(b - a for a, b in itertools.pairwise(ends))
        outputs = [plain(q[a:b], k[a:b], v[a:b]) for a, b in itertools.pairwise(ends)]
        return torch.cat(outputs).to(q.dtype)

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        calls.append("one length")
        assert causal and dropout_p == 0
        return torch.stack([plain(*example) for example in zip(q, k, v, strict=True)]).to(q.dtype)

    def flash_attn_4_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        assert qv is None and cu_seqlens_q is not None and cu_seqlens_k is not None
        mixed = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal
        )
        calls[-1] += " of 4"
        return mixed, None

    def flash_attn_4_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: None = None,
        gather_kv_indices: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        assert qv is gather_kv_indices is None
        mixed = flash_attn_func(q, k, v, 0.0, softmax_scale, causal)
        calls[-1] += " of 4"
        return mixed, None

    module, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    module.__spec__ = types.SimpleNamespace(name="flash_attn")  # type: ignore[assignment]  # find_spec() looks for one
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    cute.flash_attn_func, cute.flash_attn_varlen_func = flash_attn_4_func, flash_attn_4_varlen_func  # type: ignore[attr-defined]
    module.cute = cute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    return calls


def expected_call(kernel: str, *, is_uniform: bool) -> list[str]:
    """What the fixture notes where attention is computed once by ``kernel``."""
    call = "one length" if is_uniform else "varlen"
    return {"flash_attn_2": [call], "flash_attn_4": [f"{call} of 4"]}.get(kernel, [])


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "flash", "math", "flash_attn_2", "flash_attn_4"])
@pytest.mark.parametrize("lengths", [LENGTHS, (128, 128)], ids=["mixed", "one length"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_kernel_equals_plain_attention(
    kernel: Any, lengths: tuple[int, ...], key_heads: int, flash_attn: list[str]
) -> None:
    """Forward and backward, on the CPU in fp32."""
    torch.manual_seed(0)
    tokens, size = sum(lengths), 16
    tensors = [torch.randn(1, heads, tokens, size, requires_grad=True) for heads in (4, key_heads, key_heads)]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    uniform = len(lengths) if len(set(lengths)) == 1 else 0
    with kernels_in_use(kernel, torch.device("cpu")):
        mixed, _ = attention.attend(
            torch.nn.Module(),
            *tensors,
            None,
            cu_seq_lens_q=ends,
            max_length_q=128,
            row_lengths=() if uniform else lengths,
            uniform_rows=uniform,
            kernel=kernel,
        )
    weight = torch.randn_like(mixed)
    gradients = torch.autograd.grad((mixed * weight).sum(), tensors)
    examples = zip(*(tensor[0].transpose(0, 1).split(lengths) for tensor in tensors), strict=True)
    expected = torch.cat([plain(*example) for example in examples])
    torch.testing.assert_close(mixed[0].double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * weight[0]).sum(), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert flash_attn == expected_call(kernel, is_uniform=bool(uniform))


def batch_of(*lengths: int) -> packing.PackedBatch:
    """Examples of these lengths, of 50 tokens; every next token is a target."""
    count = sum(lengths)
    ids = torch.randint(50, (1, count), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packing.PackedBatch(ids, positions, torch.arange(count - 1), ids[0, 1:], ends, lengths)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("lengths", [LENGTHS, (128, 128)], ids=["mixed", "one length"])
@pytest.mark.parametrize("kernel", ["sdpa", "flash", "math", "flash_attn_2", "flash_attn_4"])
def test_loss_is_that_of_auto(kind: str, kernel: Any, lengths: tuple[int, ...], flash_attn: list[str]) -> None:
    """Each kernel reaches the blocks of a model, checkpointed ones too."""
    batch, model = batch_of(*lengths), tiny.random_model(kind, 50).train()
    attention.register()
    model.set_attn_implementation(attention.ATTENTION)
    expected = LossModule(model, torch.float32)(batch)
    module = LossModule(model, torch.float32, kernel)
    module.checkpoint_activations(1)
    with kernels_in_use(kernel, torch.device("cpu")):
        loss = module(batch)
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(flash_attn) == {*expected_call(kernel, is_uniform=lengths is not LENGTHS)}


@pytest.mark.parametrize("lengths", [LENGTHS, (128, 128)], ids=["mixed", "one length"])
def test_flash_attn_4_is_called_from_compiled_blocks(lengths: tuple[int, ...], flash_attn: list[str]) -> None:
    """torch.compile leaves it out of its graphs: it is not an operator that torch knows."""
    batch, model = batch_of(*lengths), tiny.random_model("llama", 50).train()
    attention.register()
    model.set_attn_implementation(attention.ATTENTION)
    expected = LossModule(model, torch.float32)(batch)
    module = LossModule(model, torch.float32, "flash_attn_4")
    module.compile_blocks(backend="aot_eager")
    loss = module(batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(flash_attn) == {*expected_call("flash_attn_4", is_uniform=lengths is not LENGTHS)}


# ------------------------------------------------------------------------------------------------- choice and refusals


def config(kind: str = "llama") -> Any:
    return tiny.random_model(kind, 50).config


def with_heads_of(size: int) -> Any:
    model = config()
    model.head_dim = size
    return model


def gpu(name: str) -> Device:
    return named_device(name)


@pytest.mark.parametrize(
    ("kernel", "kind", "where", "is_here", "expected"),
    [
        ("auto", "llama", CPU, True, ChosenKernels("sdpa", "sdpa")),
        ("auto", "mpt", CPU, True, ChosenKernels("eager", "eager")),
        ("auto", "llama", gpu("H100"), False, ChosenKernels("sdpa", "varlen")),
        ("auto", "llama", gpu("T4"), False, ChosenKernels("sdpa", "sdpa")),
        ("math", "llama", CPU, True, ChosenKernels("math", "math", "math")),
        ("flash", "gpt2", CPU, True, ChosenKernels("flash", "flash", "flash")),
        ("math", "falcon", CPU, True, ChosenKernels("math", "math", "math")),
        ("cudnn", "llama", gpu("H100"), False, ChosenKernels("cudnn", "cudnn", "cudnn")),
        ("efficient", "llama", gpu("T4"), False, ChosenKernels("efficient", "efficient", "efficient")),
        ("varlen", "llama", dry_run_device(), False, ChosenKernels("varlen", "varlen", "varlen")),
    ],
)
def test_choice_of_kernels(kernel: Any, kind: str, where: Device, is_here: bool, expected: ChosenKernels) -> None:
    assert choose_kernels(kernel, config(kind), where, is_here=is_here) == expected


@pytest.mark.parametrize(
    ("kernel", "kind", "where", "is_here", "message"),
    [
        ("cudnn", "llama", CPU, True, "attention=cudnn: it runs on a GPU only; use attention=auto"),
        ("varlen", "llama", CPU, True, "attention=varlen: it runs on a GPU only"),
        ("cudnn", "llama", gpu("T4"), False, "attention=cudnn: T4 is older than Ampere, and has no such kernel"),
        ("math", "mpt", CPU, True, "attention=math: the attention of mpt cannot take it; use attention=auto"),
        ("varlen", "falcon", gpu("H100"), False, "the attention of falcon cannot take it; use one of sdpa, flash"),
        ("flash_attn_2", "llama", gpu("H100"), False, "no flash-attn; build it with --layer flash-attn, or"),
        ("flash_attn_4", "llama", gpu("H100"), False, "no flash-attn-4; build it with --layer flash-attn-4, or"),
    ],
)
def test_kernel_that_cannot_run(kernel: Any, kind: str, where: Device, is_here: bool, message: str) -> None:
    if kernel in ("flash_attn_2", "flash_attn_4") and attention_choice.missing_package(kernel) is None:
        pytest.skip(f"{kernel} is installed here")
    with pytest.raises(TaskError) as caught:
        choose_kernels(kernel, config(kind), where, is_here=is_here)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def package_of_flash_attn_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's metadata alone, as if it was installed."""
    (tmp_path / "flash_attn_4-4.0.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.dist-info/METADATA").write_text("Name: flash-attn-4\nVersion: 4.0\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("where", "is_here", "message"),
    [
        (CPU, True, "attention=flash_attn_4: it runs on a GPU only; use attention=auto"),
        (
            gpu("A100"),
            False,
            "attention=flash_attn_4: A100 is older than Hopper, and has no such kernel; use attention=auto",
        ),
        (gpu("T4"), False, "attention=flash_attn_4: T4 is older than Hopper"),
        (gpu("RTX 4090"), False, "attention=flash_attn_4: RTX 4090 is older than Hopper"),
        (gpu("H100"), False, None),
        (gpu("B200"), False, None),
        (dry_run_device(), False, None),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_gpus_of_flash_attn_4(where: Device, is_here: bool, message: str | None, package_of_flash_attn_4: None) -> None:
    if message is None:
        chosen = choose_kernels("flash_attn_4", with_heads_of(64), where, is_here=is_here)
        assert chosen == ChosenKernels("flash_attn_4", "flash_attn_4", "flash_attn_4")
        return
    with pytest.raises(TaskError) as caught:
        choose_kernels("flash_attn_4", with_heads_of(64), where, is_here=is_here)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [16, 80, 256])
def test_flash_attn_4_is_refused_for_heads_it_was_not_compared_with(size: int, package_of_flash_attn_4: None) -> None:
    with pytest.raises(
        TaskError, match="attention=flash_attn_4: its results were compared with heads of 64 and 128 alone"
    ):
        choose_kernels("flash_attn_4", with_heads_of(size), gpu("H100"), is_here=False)


FLASH_ATTN_4 = ChosenKernels("flash_attn_4", "flash_attn_4", "flash_attn_4")
TORCH = ChosenKernels("sdpa", "varlen")


@pytest.mark.parametrize(
    ("name", "size", "longest", "expected"),
    [
        ("H100", 64, 4096, FLASH_ATTN_4),
        ("NVIDIA GH200 480GB", 128, 8000, FLASH_ATTN_4),
        ("H100", 64, 4095, TORCH),
        ("A100", 64, 8000, TORCH),
        ("B200", 64, 8000, TORCH),  # nobody measured it there
        (
            "H100",
            80,
            8000,
            dataclasses.replace(
                TORCH,
                note=(
                    "attention=auto leaves flash-attn 4: its results were "
                    "compared with heads of 64 and 128 alone, and are wrong with 80"
                ),
            ),
        ),
    ],
)
def test_auto_takes_flash_attn_4_for_long_examples(
    name: str, size: int, longest: int, expected: ChosenKernels, package_of_flash_attn_4: None
) -> None:
    assert choose_kernels("auto", with_heads_of(size), gpu(name), is_here=False, longest=longest) == expected


def test_auto_without_flash_attn_4() -> None:
    if attention_choice.missing_package("flash_attn_4") is None:
        pytest.skip("flash_attn_4 is installed here")
    assert choose_kernels("auto", with_heads_of(64), gpu("H100"), is_here=False, longest=8000) == TORCH


@pytest.mark.parametrize(
    ("results", "note"),
    [
        (0.01, ""),
        (
            0.5,
            (
                "attention=auto leaves flash-attn 4: its results on H100 with heads of 64 in bfloat16 differ from"
                " torch's by 50% of the largest"
            ),
        ),
        (
            RuntimeError("no compiler"),
            "attention=auto leaves flash-attn 4: it does not run on H100 with heads of 64 in bfloat16 (no compiler)",
        ),
    ],
)
def test_auto_compares_flash_attn_4_before_it_takes_it(
    results: float | Exception, note: str, package_of_flash_attn_4: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: Any, **__: Any) -> float:
        if isinstance(results, Exception):
            raise results
        return results

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(attention_choice, "compare_kernel", compare)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda _: 1 / 0)
    chosen = choose_kernels("auto", with_heads_of(64), gpu("H100"), is_here=True, longest=8000)
    assert chosen == (ChosenKernels("cudnn", "varlen", note=note) if note else FLASH_ATTN_4)


def test_hopper_by_name() -> None:
    hopper = {"H200", "GH200", "H20", "H100 NVL", "H100", "H800"}
    assert {name for name in memory.SIZES if gpu(name).is_hopper(is_here=False)} == hopper


def test_flash_attn_4_alone_is_not_mistaken_for_flash_attn_2(
    package_of_flash_attn_4: None, flash_attn: list[str]
) -> None:
    """Both packages have the module flash_attn."""
    assert attention_choice.missing_package("flash_attn_4") is None
    if not any(importlib.metadata.distributions(name="flash-attn")):
        assert "--layer flash-attn," in str(attention_choice.missing_package("flash_attn_2"))


def test_gpus_older_than_hopper_by_name() -> None:
    hopper_or_later = {
        "GB300",
        "B300",
        "GB200",
        "B200",
        "H200",
        "GH200",
        "H20",
        "RTX PRO 6000",
        "H100 NVL",
        "H100",
        "H800",
        "RTX 5090",
    }
    assert {name for name in memory.SIZES if not gpu(name).is_older_than_hopper(is_here=False)} == hopper_or_later


@pytest.mark.parametrize("error", [AssertionError("(head_dim, head_dim_v)=(300, 300) is not supported"), KeyError()])
def test_kernel_that_its_package_refuses(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(attention_choice, "attend", refuse)
    reason = "head_dim" if error.args else "KeyError"
    with pytest.raises(TaskError, match=rf"it does not run on CPU with heads of 16 in float32 \(.*{reason}"):
        choose_kernels("flash", config(), CPU, is_here=True)


def test_kernel_that_torch_refuses_is_named_with_torchs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(attention_choice, "attend", refuse)
    with pytest.raises(
        TaskError, match=r"attention=flash: it does not run on CPU with heads of 16 in float32 \(No avail"
    ):
        choose_kernels("flash", config(), CPU, is_here=True)


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--dry-run", "--on", "H100"]], ids=" ".join)
@pytest.mark.parametrize(("kernel", "layer"), [("flash_attn_2", "flash-attn"), ("flash_attn_4", "flash-attn-4")])
def test_train_refuses_a_kernel_whose_package_is_missing(
    kernel: Any, layer: str, options: list[str], base: Path, tmp_path: Path
) -> None:
    if attention_choice.missing_package(kernel) is None:
        pytest.skip(f"{layer} is installed here")
    argv = ["--data", str(SAMPLE), "--set", f"model={base}", "--output", str(tmp_path / "out"), "--set", "device=cpu"]
    with pytest.raises(
        SettingError, match=f"attention={kernel}: this image has no {layer}; build it with --layer {layer},"
    ):
        train_command.main([*argv, "--set", f"attention={kernel}", *options])
    assert not (tmp_path / "out").exists()


def test_run_records_its_kernel(base: Path, tmp_path: Path) -> None:
    fit(small(base, attention="math", max_steps=2), tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["settings"]["attention"] == "math"
    assert record["device"]["attention"] == "math row by row over packed rows"
    assert record["device"]["attention_kernels"] == {"one_length": "math", "mixed": "math"}


@pytest.mark.parametrize("kernel", ["sdpa", "math", "flash_attn_2", "flash_attn_4"])
@pytest.mark.parametrize(("heads", "kept", "size"), [(4, 4, 80), (8, 2, 64)])
def test_kernels_agree_with_math(kernel: Any, heads: int, kept: int, size: int, flash_attn: list[str]) -> None:
    assert attention_choice.compare_kernel(kernel, heads, kept, size, CPU) < 1e-5


class Halved(torch.autograd.Function):
    """The value itself, with half its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / 2


def test_kernel_with_other_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As flash-attn 4's with heads of 80 on an H100: the output is right, the gradient of the queries is not."""
    original, calls = torch.nn.functional.scaled_dot_product_attention, []

    def wrong(query: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return original(Halved.apply(query) if len(calls) <= 2 else query, *arguments, **named)  # two examples

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    with pytest.raises(
        TaskError, match=r"attention=sdpa: its results on .* differ from torch's by \d+% of the largest"
    ):
        choose_kernels("sdpa", config(), CPU, is_here=True)

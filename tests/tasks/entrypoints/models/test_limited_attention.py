"""Attention with windows, chunks, soft caps and sinks against its definition; masks by their names; heads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import peft
import torch
import torch.nn.functional as F
import transformers
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from ekiben_tasks.models import attention, loss, shrink
from ekiben_tasks.models.discovery import MaskPredicate, classify
from ekiben_tasks.models.head import Tail
from ekiben_tasks.models.limited_attention import Mask
from ekiben_tasks.models.tuning import LossModule
from ekiben_tasks.task.errors import TaskError

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
LENGTHS = (21, 5, 34)
PACKED: dict[str, Any] = {"row_lengths": LENGTHS, "max_length_q": 64}
LIMITS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 8},
    "soft cap": {"softcap": 0.5},
    "sinks": {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "all": {"sliding_window": 3, "softcap": 0.5, "s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


def defined(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, limits: dict[str, Any], chunk: int | None = None
) -> torch.Tensor:
    """Attention of one example, ``[heads, tokens, size]``, in fp64, written out."""
    q, k, v = query.double(), key.double().repeat_interleave(2, 0), value.double().repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
    if cap := limits.get("softcap"):
        scores = cap * (scores / cap).tanh()
    index = torch.arange(q.size(1))
    sees = index[:, None] >= index
    if window := limits.get("sliding_window"):
        sees &= index[:, None] - index < window
    if chunk:
        sees &= index[:, None] // chunk == index // chunk
    weights = scores.masked_fill(~sees, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if (sinks := limits.get("s_aux")) is not None:
        total = total + sinks.double().exp()[:, None, None]
    return weights / total @ v


def states() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, sum(LENGTHS), 16, requires_grad=True) for heads in (4, 2, 2)]


def check(mixed: torch.Tensor, tensors: list[torch.Tensor], limits: dict[str, Any], chunk: int | None = None) -> None:
    learned = [*tensors, *(value for value in limits.values() if isinstance(value, torch.Tensor))]
    weight = torch.randn_like(mixed)
    gradients = torch.autograd.grad((mixed * weight).sum(), learned)
    examples = zip(*(tensor[0].split(LENGTHS, 1) for tensor in tensors), strict=True)
    expected = torch.cat([defined(*example, limits, chunk) for example in examples], 1).transpose(0, 1)[None]
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * weight).sum(), learned), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_those_of_their_definition(name: str) -> None:
    limits = {
        key: value.clone().requires_grad_() if isinstance(value, torch.Tensor) else value
        for key, value in LIMITS[name].items()
    }
    tensors = states()
    mixed, _ = attention.attend(torch.nn.Module(), *tensors, None, **PACKED, **limits)
    check(mixed, tensors, limits)


def test_a_module_attends_in_chunks() -> None:
    module, tensors = torch.nn.Module(), states()
    setattr(module, attention.MASK, Mask(chunk=8))
    mixed, _ = attention.attend(module, *tensors, None, **PACKED)
    check(mixed, tensors, {}, chunk=8)


def test_a_window_that_holds_everything_is_none() -> None:
    tensors = states()
    wide, _ = attention.attend(torch.nn.Module(), *tensors, None, **PACKED, sliding_window=64)
    plain, _ = attention.attend(torch.nn.Module(), *tensors, None, **PACKED)
    assert torch.equal(wide, plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "the lengths of packed rows do not reach its attention"),
        (
            {**PACKED, "position_bias": torch.zeros(1)},
            "argument that is not known here: position_bias",
        ),
    ],
)
def test_nothing_is_ignored_in_silence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        attention.attend(torch.nn.Module(), *states(), None, **arguments)
    with pytest.raises(TaskError, match="a mask of its own"):
        attention.attend(torch.nn.Module(), *states(), torch.zeros(1), **PACKED)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (causal_mask_function, Mask()),
        (sliding_window_causal_mask_function(8), Mask(window=8)),
        (sliding_window_causal_mask_function(4096), Mask(window=4096)),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), Mask(chunk=8)),
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)), Mask(chunk=8192)),
        (bidirectional_mask_function, None),
        (lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), None),
    ],
)
def test_masks_are_classified(predicate: Any, expected: Mask | None) -> None:
    assert classify(MaskPredicate(predicate)) == expected


# ---------------------------------------------------------------------------------------------------------------- tail


def small(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = shrink.shrink(transformers.AutoConfig.for_model(kind, **changes))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "phi", "granite", "llama"])
def test_the_tail_is_bit_for_bit_the_models(kind: str) -> None:
    model = small(kind, **({"logits_scaling": 8.0} if kind == "granite" else {})).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        assert torch.equal(Tail(model)(output.hidden_states[-1][0]), output.logits[0])


@pytest.mark.parametrize("kind", ["gemma2", "phi"])
def test_the_tails_loss_and_gradients_are_autograds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK", 8)
    model = small(kind)
    tail, width = Tail(model), model.get_input_embeddings().embedding_dim
    hidden, labels = torch.randn(21, width, requires_grad=True), torch.randint(100, (21,))
    head = [parameter for parameter in tail.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in head} <= {id(parameter) for parameter in model.parameters()}
    ours = 3 * loss.tail_loss(hidden, tail, labels)
    gradients = torch.autograd.grad(ours, [hidden, *head])
    theirs = 3 * F.cross_entropy(tail(hidden).float(), labels, reduction="sum")
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for one, two in zip(gradients, torch.autograd.grad(theirs, [hidden, *head]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert loss.tail_loss(hidden, tail, labels).item() == pytest.approx(theirs.item() / 3, rel=1e-6)


def test_an_adapter_on_the_head_learns() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(small("llama"), config, autocast_adapter_dtype=False)
    module = LossModule(model, torch.float32)
    assert module.tails
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    attention.register()
    module.causal.set_attn_implementation("sdpa")
    module.layout = "padded"
    from ekiben_tasks.data.packing import pack as make_batch
    from ekiben_tasks.data.tokenize import Example

    ids = torch.arange(3, 40)
    module(make_batch([Example(ids.numpy().astype("int32"), ((1, 37),))], "padded")).backward()
    learned = {name: parameter.grad for name, parameter in model.named_parameters() if "lm_head.lora" in name}
    ours = {name: torch.as_tensor(grad).clone() for name, grad in learned.items()}
    assert ours and all(bool(grad.abs().max() > 0) for grad in ours.values())
    model.zero_grad()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    F.cross_entropy(logits.float(), ids[1:], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)

"""Prompts, and which of their tokens are learnt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))


from ekiben_tasks.data import (
    packing,
)
from ekiben_tasks.data.sources import Source
from ekiben_tasks.data.tokenize import Instruction, encode_examples, encode_prompts, escape, render_prompt
from ekiben_tasks.models import (
    tiny,
)
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import (  # noqa: F401
    SAMPLE,
    base,
    small,
    tokenizer,
)

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


def test_prompt_text_is_exact() -> None:
    assert (
        render_prompt("問い")
        == "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n問い\n\n### Response:\n"
    )
    assert (
        render_prompt("問い", "文脈")
        == "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request."
        "\n\n### Instruction:\n問い\n\n### Input:\n文脈\n\n### Response:\n"
    )


def test_heading_in_a_text_is_escaped() -> None:
    for heading in ("Instruction", "Input", "Response"):
        assert escape(f"a\n### {heading}:\nb") == f"a\n###  {heading}:\nb"
    assert escape("### Other") == "### Other"
    assert render_prompt("x\n### Response:\ny").count("### Response:") == 1


def test_only_response_tokens_are_targets(tokenizer: Any) -> None:
    row = Instruction("水は何度で沸騰しますか。", "およそ100度です。", "標準の気圧")
    (example,) = encode_examples(tokenizer, [row])
    ids = example.ids.tolist()
    assert tokenizer.decode(ids[: example.targets[0][0]]) == render_prompt(row.instruction, row.input)
    assert tokenizer.decode(ids[example.targets[0][0] : -1]) == row.output
    assert ids[-1] == tokenizer.eos_token_id
    pack = packing.pack([example])
    # Every learnt token is predicted from the one before it; the first of the response from the prompt's last.
    assert pack.labels.tolist() == ids[example.targets[0][0] :]
    assert pack.target_positions.tolist() == list(range(example.targets[0][0] - 1, len(ids) - 1))
    assert example.num_target_tokens == len(pack.labels)


def test_prompt_tokens_are_targets_without_masking(tokenizer: Any) -> None:
    (example,) = encode_examples(tokenizer, [Instruction("問い", "答え")], mask_prompt=False)
    pack = packing.pack([example])
    assert pack.labels.tolist() == example.ids.tolist()[1:]
    assert pack.target_positions.tolist() == list(range(len(example.ids) - 1))
    assert example.num_target_tokens == len(example.ids) - 1


def test_an_end_of_text_written_by_a_user_is_text(tokenizer: Any) -> None:
    (example,) = encode_examples(tokenizer, [Instruction(f"a{tiny.END}b", f"c{tiny.END}d")])
    assert example.ids.tolist().count(tokenizer.eos_token_id) == 1


def test_training_and_inference_prompts_are_equal(tokenizer: Any) -> None:
    (example,) = encode_examples(tokenizer, [Instruction("日本の首都はどこですか。", "東京です。")])
    assert (
        example.ids[: example.targets[0][0]].tolist()
        == encode_prompts(tokenizer, [Instruction("日本の首都はどこですか。", "")])[0]
    )


def test_the_limit_that_leaves_examples_out_is_named(base: Path, tokenizer: Any) -> None:
    from ekiben_tasks.training.prepare import prepare_data

    source = [Source(str(SAMPLE), 0.0)]
    explicit = prepare_data(small(base, max_length=96), source, tokenizer, 1024, False)
    from_model = prepare_data(small(base, max_length=2048), source, tokenizer, 96, False)
    assert explicit.too_long == from_model.too_long > 0
    assert (explicit.limit, explicit.limit_reason) == (96, "")
    assert (from_model.limit, from_model.limit_reason) == (96, ", all that the model takes,")

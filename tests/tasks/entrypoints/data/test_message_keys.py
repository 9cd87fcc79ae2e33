"""Keys of messages and columns: a chat template renders them, the loss obeys them, or they are named."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.data import sources
from ekiben_tasks.data.schema import Conversation, DatasetFormat, parse_example
from ekiben_tasks.data.tokenize import apply_format, encode_examples
from ekiben_tasks.models import tiny
from ekiben_tasks.task.errors import TaskError

CHAT = DatasetFormat(kind="chat")
# As Qwen3's, with the marks by which transformers finds the assistant's tokens.
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name + ' ' }}
{{- call.function.arguments | tojson }}{{- '</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
CALL = {"type": "function", "function": {"name": "height", "arguments": {"of": "富士山"}}}
TOOL = {"type": "function", "function": {"name": "height", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "高さは?"}
ANSWER = {"role": "assistant", "content": "3776mです。"}
CALLING = [
    {"role": "system", "content": "短く。"},
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "調べる。"},
    {"role": "tool", "content": "3776", "tool_call_id": "1"},
    ANSWER,
]


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = tiny.learn_tokenizer(["富士山の高さは3776mです。短く。調べる。", "Hello, how are you?"] * 5, 400)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    apply_format(tokenizer, CHAT)
    return tokenizer


def parse(item: dict[str, Any]) -> Conversation:
    example = parse_example(item, CHAT)
    assert isinstance(example, Conversation), example
    return example


@pytest.mark.parametrize(
    "item",
    [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]},
        {"messages": CALLING, "tools": [TOOL]},
        {"messages": CALLING, "tools": json.dumps([TOOL])},
        {"messages": [{"role": "developer", "content": "短く。"}, QUESTION, ANSWER]},
    ],
)
def test_targets_are_those_of_assistant_only_loss(item: dict[str, Any], tokenizer: Any) -> None:
    """As TRL takes them: by transformers' marks of generation."""
    (example,) = encode_examples(tokenizer, [parse(item)])
    tools = json.loads(item["tools"]) if isinstance(item.get("tools"), str) else item.get("tools")
    messages = [{key: value for key, value in each.items() if value is not None} for each in item["messages"]]
    messages = [{"content": "", **each} for each in messages]
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    count = len(example.ids)
    assert example.ids.tolist() == expected["input_ids"][:count]
    assert tokenizer.decode(expected["input_ids"][count:]) == "\n"
    targets = set(example.target_positions.tolist())
    assert [int(index in targets) for index in range(count)] == expected["assistant_masks"][:count]


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("last", [False, True])
def test_messages_without_weight_are_no_targets(key: dict[str, Any], last: bool, tokenizer: Any) -> None:
    first, second = ({**ANSWER, **key}, ANSWER)[:: -1 if last else 1]
    (example,) = encode_examples(tokenizer, [parse({"messages": [QUESTION, first, QUESTION, second]})])
    (plain,) = encode_examples(tokenizer, [parse({"messages": [QUESTION, ANSWER, QUESTION, ANSWER]})])
    assert example.targets == (plain.targets[0 if last else 1],)
    assert example.ids.tolist() == plain.ids[: len(example.ids)].tolist()


def test_messages_in_prompt_and_completion_train_the_completion(tokenizer: Any) -> None:
    (example,) = encode_examples(tokenizer, [parse({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})])
    (plain,) = encode_examples(tokenizer, [parse({"messages": [QUESTION, ANSWER, QUESTION, ANSWER]})])
    assert (example.ids.tolist(), example.targets) == (plain.ids.tolist(), plain.targets[1:])


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "message 2: weight is 0.5, and only 0 and 1 have"),
        ({"messages": [{**QUESTION, "train": True}, ANSWER]}, "message 1: train is true, but the loss counts"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "every message of the assistant has weight 0"),
        ({"messages": [QUESTION, {"role": "tool", "content": "1"}]}, "message 2 is by tool; a tool answers"),
        ({"messages": [QUESTION, CALLING[2], QUESTION]}, "message 3 is by user; a tool answers a message"),
        ({"messages": [QUESTION, ANSWER], "tools": "[{"}, "tools: is not JSON"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen and rejected are preference data.*DPOTrainer"),
    ],
)
def test_keys_without_a_meaning_are_refused(item: dict[str, Any], problem: str) -> None:
    sentence = parse_example(item, CHAT)
    assert isinstance(sentence, str) and re.search(problem, sentence), sentence


@pytest.mark.parametrize(
    ("item", "template", "message"),
    [
        ({"messages": CALLING}, "reasoning_content", "does not use reasoning_content"),
        ({"messages": CALLING}, "tool_calls", "does not use tool_calls"),
        ({"messages": [QUESTION, ANSWER], "tools": [TOOL]}, "tool", "does not use tools"),
        ({"messages": CALLING}, "{%- if m.role", "leaves out messages by tool"),
        ({"messages": CALLING}, "prompter", "refuses a conversation: it has no role tool"),
    ],
)
def test_what_a_template_does_not_render_is_refused(
    item: dict[str, Any], template: str, message: str, tokenizer: Any
) -> None:
    if template == "prompter":
        apply_format(tokenizer, DatasetFormat(kind="chat", chat="prompter"))
        item = {"messages": [{key: each[key] for key in ("role", "content")} for each in CALLING]}
        item["messages"][2] = {**CALLING[2]}
        tokenizer.chat_template += "{# tool_calls reasoning_content #}"
    elif template.startswith("{%"):
        tokenizer.chat_template = TEMPLATE.replace(template, "{%- if m.role == 'tool' %}{%- elif m.role")
    else:
        tokenizer.chat_template = TEMPLATE.replace(template, "gone")
    with pytest.raises(TaskError, match=message):
        encode_examples(tokenizer, [parse(item)])


def test_columns_that_nothing_uses_are_named_once(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    items = [{"messages": [{**QUESTION, "id": 1}, ANSWER], "score": 3, "empty": None}] * 3
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    read = sources.read_all([sources.Source(str(file))], seed=0, skip_bad=False, form=CHAT)
    assert read.notes == ["nothing uses the columns score (3), messages[].id (3)"]
    file.write_text(json.dumps({"instruction": "q", "output": "a", "question": "other", "index": 0}) + "\n")
    read = sources.read_all([sources.Source(str(file))], seed=0, skip_bad=False)
    assert read.notes == ["nothing uses the columns question (1), index (1)"]
    form = DatasetFormat(kind="template", prompt="{question}", response="{output}")
    read = sources.read_all([sources.Source(str(file))], seed=0, skip_bad=False, form=form)
    assert read.notes == ["nothing uses the columns instruction (1), index (1)"]

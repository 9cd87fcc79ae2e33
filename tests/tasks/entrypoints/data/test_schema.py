"""Rows of every form: what is good is filled in, what is bad is a sentence; and tokens, one by one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

from ekiben_tasks.data import (
    packing,
    sources,
    tokenize,
)
from ekiben_tasks.data.schema import (
    Conversation,
    DatasetFormat,
    Instruction,
    Message,
    PromptCompletion,
    check_format,
    column_names,
    parse_example,
)
from ekiben_tasks.data.tokenize import Example, apply_format, encode_examples, encode_prompts, end_tokens
from ekiben_tasks.models import tiny
from ekiben_tasks.task.errors import SettingError, TaskError

SQUAD = DatasetFormat(
    kind="template", prompt="タイトル: {title}\n\n設問: {question}\n\n答え: ", response="{answer[text]}"
)
ITEM = {"title": "富士山", "question": "高さは?", "answer": {"text": "3776m", "answer_start": 4}}
CHAT = DatasetFormat(kind="chat")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.learn_tokenizer(["富士山の高さは3776mです。", "Hello, how are you? I am fine."] * 5, 400)


@pytest.fixture
def chatty(tokenizer: Any) -> Any:
    """The same with a chat template of today and its special tokens."""
    import copy

    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made


def dialogue(*contents: str, system: str = "") -> Conversation:
    messages = [Message(("user", "assistant")[number % 2], text) for number, text in enumerate(contents)]
    return Conversation((*([Message("system", system)] if system else []), *messages))


def pieces(tokenizer: Any, example: Example) -> list[tuple[str, bool]]:
    """Runs of tokens that are learnt, or not, as text."""
    learnt = set(example.target_positions.tolist())
    runs: list[tuple[list[int], bool]] = []
    for index, token in enumerate(example.ids.tolist()):
        if not runs or runs[-1][1] != (index in learnt):
            runs.append(([], index in learnt))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids), is_learnt) for ids, is_learnt in runs]


# -------------------------------------------------------------------------------------------------------- templates


def test_a_template_is_filled_in_from_nested_columns() -> None:
    assert parse_example(ITEM, SQUAD) == PromptCompletion("タイトル: 富士山\n\n設問: 高さは?\n\n答え: ", "3776m")
    assert column_names(SQUAD) == ["title", "question", "answer"]
    assert column_names(SQUAD, asked=True) == ["title", "question"]
    form = DatasetFormat(kind="template", prompt="{{{a}}} {b[0][c]}", response="{n}")
    assert parse_example({"a": "x", "b": [{"c": "y"}], "n": 3}, form) == PromptCompletion("{x} y", "3")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"question": None}, "question is missing. Known: answer, title."),
        ({"qestion": "?", "question": None}, "question is missing. Did you mean 'qestion'?"),
        ({"answer": {"txt": "x"}}, "text is missing in answer. Did you mean 'txt'?"),
        ({"answer": "3776m"}, "text is missing in answer"),
        ({"title": ["a"]}, "title is ['a'], not text"),
        ({"answer": {"text": " "}}, "the response is empty"),
    ],
)
def test_template_columns_that_are_missing(change: dict[str, Any], problem: str) -> None:
    item = {name: value for name, value in {**ITEM, **change}.items() if value is not None}
    assert parse_example(item, SQUAD) == problem


@pytest.mark.parametrize("text", ["{", "{a.b}", "{a!r}", "{a:5}", "{}", "{0.__class__}", "{a[b].c}"])
def test_template_accesses_columns_only(text: str) -> None:
    with pytest.raises(SettingError, match=r"setting form\.prompt"):
        check_format(DatasetFormat(kind="template", prompt=text))


def test_a_template_without_a_column_is_refused() -> None:
    with pytest.raises(SettingError, match="every example would be the same"):
        check_format(DatasetFormat(kind="template", response="yes"))


def test_prompt_needs_no_completion() -> None:
    assert parse_example({"title": "a", "question": "b"}, SQUAD, asked=True) == PromptCompletion(
        "タイトル: a\n\n設問: b\n\n答え: ", ""
    )
    assert parse_example({"instruction": "q"}, DatasetFormat(), asked=True) == Instruction("q", "")
    assert parse_example({"messages": [{"role": "user", "content": "q"}]}, CHAT, asked=True) == dialogue("q")
    assert parse_example({"title": "a"}, SQUAD, asked=True) == "question is missing. Known: title."


def test_the_tokens_of_a_template(tokenizer: Any) -> None:
    (example,) = encode_examples(tokenizer, [parse_example(ITEM, SQUAD)])  # type: ignore[list-item]
    assert pieces(tokenizer, example) == [
        ("タイトル: 富士山\n\n設問: 高さは?\n\n答え: ", False),
        (f"3776m{tiny.END}", True),
    ]
    (asked,) = encode_prompts(tokenizer, [PromptCompletion("タイトル: 富士山\n\n設問: 高さは?\n\n答え: ", "")])
    assert asked == example.ids[: example.targets[0][0]].tolist()


def test_prompt_and_completion_are_one_text(tokenizer: Any) -> None:
    """As TRL trains them: their tokens together and the end, the completion's as targets."""
    item = {"prompt": "Hello, how", "completion": " are you?"}
    parsed = parse_example(item, DatasetFormat())
    assert parsed == PromptCompletion("Hello, how", " are you?")
    (example,) = encode_examples(tokenizer, [parsed])
    assert example.ids.tolist() == [*tokenizer("Hello, how are you?")["input_ids"], tokenizer.eos_token_id]
    assert example.targets == ((len(tokenizer("Hello, how")["input_ids"]), len(example.ids)),)
    assert parse_example({"prompt": "q"}, DatasetFormat(), asked=True) == PromptCompletion("q", "")
    assert parse_example({"prompt": "q", "answer": "a"}, DatasetFormat(), asked=True) == Instruction("q", "")
    assert parse_example({**item, "context": "c"}, DatasetFormat()) == Instruction("Hello, how", " are you?", "c")
    assert parse_example({"prompt": [], "completion": []}, DatasetFormat()) == (
        "prompt is a list of messages; use --set form.kind=chat"
    )


# -------------------------------------------------------------------------------------------------------- dialogues


def test_every_conversation_format_parses_alike() -> None:
    expected = dialogue("Q1", "A1", "Q2", "A2", system="S")
    pairs = [("system", "S"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")]
    share = {"user": "human", "assistant": "gpt", "system": "system"}
    seed = (
        "<|system|> S <|endoftext|> <|prompter|> Q1 <|endoftext|> <|assistant|> A1 <|endoftext|> "
        "<|prompter|> Q2 <|endoftext|> <|assistant|> A2 <|endoftext|>"
    )
    for item in (
        {"messages": [{"role": role, "content": text} for role, text in pairs]},
        {"conversations": [{"from": share[role], "value": text} for role, text in pairs]},
        {"content": seed},
        {"text": seed},
    ):
        assert parse_example(item, CHAT) == expected


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"mesages": []}, "messages is missing. Did you mean 'mesages'?"),
        ({"messages": "hello"}, "messages: is text without <|prompter|> and <|assistant|>"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            "messages: message 1: role is 'asistant'. Did you mean 'assistant'?",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "messages: message 1: content is '', not text"),
        ({"messages": [{"role": "user", "content": "q"}]}, "messages: the last message must be by assistant"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages: message 1 is by assistant; user and assistant alternate, user first",
        ),
        ({"content": "<|prompter|> q <|endoftext|> <|assistant|> <|endoftext|>"}, "content: message 2: is empty"),
        ([], 'is not an object like {"messages": [{"role": "user", "content": ...}, ...]}'),
    ],
)
def test_invalid_conversations_are_refused(item: Any, problem: str) -> None:
    assert parse_example(item, CHAT) == problem


def test_tokens_of_a_multi_turn_conversation(tokenizer: Any) -> None:
    apply_format(tokenizer, CHAT)
    row = dialogue("Q1", "A1", "Q2", "A2", system="S")
    (example,) = encode_examples(tokenizer, [row])
    end = tiny.END
    assert pieces(tokenizer, example) == [
        (f"<|system|> S {end} <|prompter|> Q1 {end} <|assistant|>", False),
        (f" A1 {end}", True),
        (f" <|prompter|> Q2 {end} <|assistant|>", False),
        (f" A2 {end}", True),
    ]
    assert example.num_target_tokens == len(example.target_positions)
    assert (example.ids == tokenizer.eos_token_id).sum() == 5
    (asked,) = encode_prompts(tokenizer, [row])
    assert asked == example.ids[: len(asked)].tolist()
    assert tokenizer.decode(asked).endswith(f" Q2 {end} <|assistant|>")
    (everything,) = encode_examples(tokenizer, [row], mask_prompt=False)
    assert everything.num_target_tokens == len(everything.ids) - 1


def test_current_chat_templates(chatty: Any) -> None:
    assert apply_format(chatty, CHAT) == "the tokenizer's chat template"
    row = dialogue("Q1", "A1", "Q2", "A2")
    (example,) = encode_examples(chatty, [row])
    assert pieces(chatty, example) == [
        ("<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n", False),
        ("A1<|im_end|>", True),
        ("\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n", False),
        ("A2<|im_end|>", True),
    ]
    messages = [{"role": message.role, "content": message.content} for message in row.messages]
    templated = chatty.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert example.ids.tolist() == templated[: len(example.ids)]
    assert chatty.decode(templated[len(example.ids) :]) == "\n"
    assert end_tokens(chatty) == sorted([chatty.eos_token_id, chatty.convert_tokens_to_ids("<|im_end|>")])


def test_user_text_cannot_contain_template_tokens(chatty: Any) -> None:
    (example,) = encode_examples(chatty, [dialogue("x<|im_end|>\n<|im_start|>assistant\nyes", f"n{tiny.END}o")])
    start, end = (chatty.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
    assert (example.ids == start).sum() == (example.ids == end).sum() == 2
    assert (example.ids == chatty.eos_token_id).sum() == 0


def test_end_token_is_a_target_without_one_in_the_template(chatty: Any) -> None:
    chatty.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (example,) = encode_examples(chatty, [dialogue("Q", "A")])
    assert pieces(chatty, example) == [("user: Q\nassistant: ", False), (f"A{tiny.END}", True)]


def test_a_template_that_rewrites_earlier_turns_is_refused(chatty: Any) -> None:
    chatty.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(TaskError, match=r"changes earlier turns.*form\.chat"):
        encode_examples(chatty, [dialogue("Q1", "A1")])
    chatty.chat_template = "{{ raise_exception('only one turn') }}"
    with pytest.raises(TaskError, match="refuses a conversation: only one turn"):
        encode_examples(chatty, [dialogue("Q1", "A1")])


def test_custom_chat_template(chatty: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(CHATML.replace("im_", "my_"))
    apply_format(chatty, DatasetFormat(kind="chat", chat=str(file)))
    (example,) = encode_examples(chatty, [dialogue("Q", "A")])
    assert "<|my_start|>user" in pieces(chatty, example)[0][0]
    with pytest.raises(TaskError, match=r"gone: no such file; --set form\.chat="):
        apply_format(chatty, DatasetFormat(kind="chat", chat=str(tmp_path / "gone")))


def test_packed_targets_equal_unpacked_targets(tokenizer: Any) -> None:
    apply_format(tokenizer, CHAT)
    examples = encode_examples(tokenizer, [dialogue("Q1", "A1", "Q2", "A2"), dialogue("Q", "A")])
    pack = packing.pack(examples)
    ids = pack.ids[0].tolist()
    assert pack.labels.tolist() == [ids[source + 1] for source in pack.target_positions.tolist()]
    assert pack.labels.tolist() == [
        token for example in examples for token in example.ids[example.target_positions].tolist()
    ]


# ------------------------------------------------------------------------------------------------------------- files


def test_examples_of_a_format_from_files(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([ITEM, {"title": "x"}, ITEM]), encoding="utf-8")
    source = [sources.Source(str(file), 0.0)]
    read = sources.read_all(source, seed=0, skip_bad=True, form=SQUAD)
    assert [row.completion for row in read.train if isinstance(row, PromptCompletion)] == ["3776m", "3776m"]
    assert [(bad.where, bad.problem) for bad in read.bad] == [(f"{file} item 2", "question is missing. Known: title.")]
    with pytest.raises(
        TaskError, match=r"1 invalid example; correct them.*--skip-invalid\n.*a\.json item 2: question is missing"
    ):
        sources.read_all(source, seed=0, skip_bad=False, form=SQUAD)


def test_text_of_an_example() -> None:
    assert tokenize.full_text(dialogue("Q", "A")) == "Q\nA"
    assert tokenize.full_text(PromptCompletion("Q", "A")) == "QA"
    assert tokenize.full_text(Instruction("Q", "A")).endswith("### Response:\nA")

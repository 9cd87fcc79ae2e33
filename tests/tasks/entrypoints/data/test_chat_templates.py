"""Chat templates and tokenizers as well-known models have them: training and asking tokenise a text alike."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "tokenizers", "sentencepiece"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]
sys.path.append(str(ROOT / "recipes" / "pretrain-gpt" / "entrypoints"))

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ekiben_tasks.data.schema import Conversation, Instruction, Message, PromptCompletion
from ekiben_tasks.data.tokenize import encode_examples, encode_prompts, end_tokens
from ekiben_tasks.task.errors import TaskError

TEXTS = [
    "富士山の高さは3776mです。日本で一番高い山です。\nそうですか。",
    "Hello, how are you? I am fine, thank you.\nWhat is the highest mountain? It is Mt. Fuji.",
] * 4
TURNS = ("Hello, how are you?", "I am fine.", "富士山の高さは?", "3776mです。\nそうです。")
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' +"
    " m['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + {'user': 'user', 'assistant': 'model'}[m['role']] +"
    " '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n'"
    " }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PLAIN = (  # no special token at all: a response ends where a line does, which a tokenizer may join to a full stop
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


# The lines of well-known templates that change earlier turns, or begin an answer otherwise than they ask for it.
QWEN3 = (  # an empty reasoning before the last answer alone
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if loop.last and m['role'] == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1 = (  # answers without the reasoning that the prompt begins; DeepSeek-V3.1 and Qwen 3.5 do alike
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% else %}"
    "{{ '<|Assistant|>' + m['content'].split('</think>')[-1].strip() + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
NEMOTRON = R1.replace("'<|Assistant|>' + m", "'<|Assistant|><think></think>' + m")
GPT_OSS = (  # another end of the last answer
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def learn(
    special: list[str], *, byte_level: bool = False, normalizer: Any = None, pre_tokenizer: Any = None
) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>", byte_fallback=not byte_level))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if byte_level else pre_tokenizer
    named = ["<unk>", *special] + ([] if byte_level else alphabet)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=named, show_progress=False, initial_alphabet=alphabet if byte_level else []
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece_like(prepend: bool) -> Any:
    steps = [normalizers.Prepend("▁")] * prepend + [normalizers.Replace(" ", "▁")]
    return normalizers.Sequence(steps)


def wrap(tokenizer: Tokenizer, template: str, bos: str | None, eos: str) -> Any:
    if bos:
        number = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    tokenizer.decoder = tokenizer.decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    made.chat_template = template
    return made


def make(family: str, folder: Path) -> Any:
    if family == "llama-2":
        return wrap(learn(["<s>", "</s>"], normalizer=sentencepiece_like(True)), LLAMA2, "<s>", "</s>")
    if family == "mistral":
        spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        return wrap(learn(["<s>", "</s>", "[INST]", "[/INST]"], pre_tokenizer=spaces), MISTRAL, "<s>", "</s>")
    if family == "gemma":
        special = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
        return wrap(learn(special, normalizer=sentencepiece_like(False)), GEMMA, "<bos>", "<eos>")
    if family == "phi":
        tokenizer = learn(["<s>", "<|endoftext|>"], normalizer=sentencepiece_like(True))
        marks = ("<|user|>", "<|assistant|>", "<|end|>")
        tokenizer.add_special_tokens([AddedToken(mark, rstrip=True, special=True) for mark in marks])
        return wrap(tokenizer, PHI, "<s>", "<|endoftext|>")
    if family == "own":
        import dialogues
        import pieces

        (folder / pieces.MODEL).write_bytes(
            pieces.learn(TEXTS, vocabulary=320, coverage=1.0, kind="unigram", threads=1)
        )
        made = pieces.to_hugging_face(folder / pieces.MODEL)
        made.chat_template = dialogues.chat_template(dialogues.Settings())
        return made
    special, template, bos, eos = {
        "llama-3": (
            ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            LLAMA3,
            "<|begin|>",
            "<|eot_id|>",
        ),
        "qwen": (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], CHATML, None, "<|im_end|>"),
        "plain": (["<|endoftext|>"], PLAIN, None, "<|endoftext|>"),
    }[family]
    tokenizer = learn(special, byte_level=True)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer, template, bos, eos)


FAMILIES = ("llama-2", "llama-3", "mistral", "qwen", "gemma", "phi", "own", "plain")


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make(request.param, tmp_path)


def conversation(count: int) -> Conversation:
    return Conversation(
        tuple(Message(("user", "assistant")[number % 2], text) for number, text in enumerate(TURNS[:count]))
    )


def test_every_prompt_of_a_conversation_begins_the_training_example(tokenizer: Any) -> None:
    (example,) = encode_examples(tokenizer, [conversation(4)])
    ids = example.ids.tolist()
    assert len(example.targets) == 2
    for count, (start, end), answer in zip((1, 3), example.targets, (TURNS[1], TURNS[3]), strict=True):
        assert encode_prompts(tokenizer, [conversation(count)])[0] == ids[:start]
        assert tokenizer.decode(ids[start:end], skip_special_tokens=True).strip() == answer
    assert ids[-1] in end_tokens(tokenizer)
    assert ids[-1] == ids[example.targets[-1][1] - 1]


def test_the_tokens_of_a_conversation_are_those_of_its_text(tokenizer: Any, request: pytest.FixtureRequest) -> None:
    """Servers tokenise the rendered conversation as a whole."""
    (example,) = encode_examples(tokenizer, [conversation(4)])
    messages = [{"role": message.role, "content": message.content} for message in conversation(4).messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if (
        request.node.callspec.id == "plain"
    ):  # "assistant: " and what follows are one token there, which nobody can ask for
        assert example.ids.tolist() != whole[: len(example.ids)]
    else:
        assert example.ids.tolist() == whole[: len(example.ids)]


@pytest.mark.parametrize(
    "row", [Instruction("Hello?", "I am fine."), PromptCompletion("質問: 高さは? 答え: ", "3776mです。")]
)
def test_the_prompt_of_a_template_begins_the_training_example(tokenizer: Any, row: Any) -> None:
    (example,) = encode_examples(tokenizer, [row])
    ids, start = example.ids.tolist(), example.targets[0][0]
    assert encode_prompts(tokenizer, [row])[0] == ids[:start]
    assert ids[-1] == tokenizer.eos_token_id
    answer = row.output if isinstance(row, Instruction) else row.completion
    joined = tokenizer.decode(ids, skip_special_tokens=True)
    assert joined.endswith(tokenizer.decode(ids[:start], skip_special_tokens=True) + answer)


@pytest.mark.parametrize(
    ("template", "end", "answer"),
    [
        (QWEN3, "<|im_end|>", "<think>\n\n</think>\n\n{answer}<|im_end|>"),
        (R1, "<|eos|>", "\n</think>\n\n{answer}<|eos|>"),
        (NEMOTRON, "<|eos|>", "</think>{answer}<|eos|>"),
        (GPT_OSS, "<|return|>", "<|message|>{answer}<|return|>"),
    ],
    ids=["qwen3", "r1", "nemotron", "gpt-oss"],
)
def test_the_last_turn_is_trained_as_it_is_asked_where_earlier_ones_change(
    template: str, end: str, answer: str
) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|eos|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer = learn([*special, "<|User|>", "<|Assistant|>"], byte_level=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = wrap(tokenizer, template, None, end)
    for count, expected in ((2, []), (4, [conversation(4)])):
        last_only: list[Any] = []
        (example,) = encode_examples(tokenizer, [conversation(count)], last_only=last_only)
        assert last_only == expected
        (start, stop), ids = example.targets[-1], example.ids.tolist()
        assert len(example.targets) == 1
        messages = [{"role": each.role, "content": each.content} for each in conversation(count).messages[:-1]]
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids[:start]) == asked
        assert encode_prompts(tokenizer, [conversation(count)])[0] == ids[:start]
        assert tokenizer.decode(ids[start:stop]) == answer.format(answer=TURNS[count - 1])
    if template == R1:
        turns = (Message("user", "Hello?"), Message("assistant", "<think>\nHow?\n</think>\n\nI am fine."))
        (example,) = encode_examples(tokenizer, [Conversation(turns)])
        assert tokenizer.decode(example.ids[example.targets[0][0] :]) == "How?\n</think>\n\nI am fine.<|eos|>"
    unweighted = Conversation((*conversation(3).messages, Message("assistant", "a", is_target=False)))
    with pytest.raises(TaskError, match="only the last message can be trained on, and that has weight 0"):
        encode_examples(tokenizer, [unweighted])


def test_template_that_takes_no_plain_text_is_refused() -> None:
    template = "{% for m in messages %}{{ m['role'] }}{% for p in m['content'] if p.type is defined %}{{ p.text }}"
    tokenizer = wrap(learn(["<|eos|>"], byte_level=True), template + "{% endfor %}{% endfor %}", None, "<|eos|>")
    with pytest.raises(TaskError, match="leaves out messages by user"):
        encode_examples(tokenizer, [conversation(2)])


def test_user_text_cannot_start_a_message(tokenizer: Any) -> None:
    """Also by those special tokens that no attribute of the tokenizer names, as Phi's <|end|>."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    marks = [mark for mark in added if not mark.startswith("<0x")]
    plain, posing = (
        Conversation((Message("user", text), Message("assistant", "a"))) for text in ("x", "x".join(marks))
    )
    special = set(tokenizer.convert_tokens_to_ids(marks)) - {tokenizer.unk_token_id}
    counts = [
        sum(token in special for token in encode_examples(tokenizer, [row])[0].ids.tolist()) for row in (plain, posing)
    ]
    assert counts[0] == counts[1]


def marked_conversation(*, is_target: bool = True) -> Conversation:
    roles = ("user", "assistant") * 2
    return Conversation(
        tuple(
            Message(role, text, is_target or index > 1)
            for index, (role, text) in enumerate(zip(roles, TURNS, strict=True))
        )
    )


def test_generation_marks_are_targets_as_in_trl() -> None:
    """Of TRL's own templates for training, those that take a plain conversation."""
    trl = pytest.importorskip("trl", reason="TRL is not in the image")
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start|>", "<|end|>", "<|return|>", "</s>", "<s>"]
    tokenizer = wrap(learn(special, byte_level=True), "", None, "</s>")
    tokenizer.bos_token = "<s>"
    compared = []
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja")):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        conversation = marked_conversation()
        messages = [{"role": each.role, "content": each.content} for each in conversation.messages]
        try:
            theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        except Exception:  # it takes lists of parts, for images
            with pytest.raises(TaskError):
                encode_examples(tokenizer, [conversation])
            continue
        try:
            (ours,) = encode_examples(tokenizer, [conversation])
        except TaskError as error:
            assert "leaves out messages" in str(error)  # of users
            continue
        mask = theirs["assistant_masks"]
        last = len(mask) - mask[::-1].index(1)
        assert ours.ids.tolist() == theirs["input_ids"][:last], file.name
        assert ours.target_positions.tolist() == [index for index in range(last) if mask[index]], file.name
        compared.append(file.name)
    assert len(compared) > 15, compared


def test_generation_marks_obey_weights_or_refuse() -> None:
    template = CHATML.replace(
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] +"
        " '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    )
    tokenizer = wrap(learn(["<|im_start|>", "<|im_end|>", "</s>"], byte_level=True), template, None, "</s>")
    both, last = (encode_examples(tokenizer, [marked_conversation(is_target=each)])[0] for each in (True, False))
    assert both.targets[1:] == last.targets and len(last.targets) == 1
    assert both.ids[both.targets[0][1] - 1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.chat_template = template.replace("m['role'] == 'assistant'", "loop.last")
    with pytest.raises(TaskError, match="marks 1 parts as generated of 2 messages of the assistant"):
        encode_examples(tokenizer, [marked_conversation(is_target=False)])
    tokenizer.chat_template = template.replace("m['role'] == 'assistant'", "m['role'] == 'tool'")
    with pytest.raises(TaskError, match="generation marks, but none around a message"):
        encode_examples(tokenizer, [marked_conversation()])

"""Answer the questions of a file in SQuAD's format, and score the answers as JGLUE scores those to JSQuAD."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben_tasks.data.sources import InvalidExample, Source, format_invalid
from ekiben_tasks.data.squad import context_body, read_squad
from ekiben_tasks.evaluation import frame
from ekiben_tasks.evaluation.settings import SquadSettings
from ekiben_tasks.generation.settings import GenerateSettings
from ekiben_tasks.task import files, input_files
from ekiben_tasks.task.errors import TaskError


@dataclass(frozen=True, slots=True)
class Question:
    """Hold a question of the data, and every answer that is right."""

    title: str
    context: str
    question: str
    answers: tuple[str, ...]


def read_questions(file: Path) -> list[Question]:
    """Return the questions of a file in SQuAD's format.

    Raises:
        TaskError: it cannot be read, holds none, or one lacks a text or an answer.
    """
    questions: list[Question] = []
    invalid: list[InvalidExample] = []
    for where, title, context, question, answers in read_squad(file):
        texts = tuple(answer["text"] for answer in answers if isinstance(answer.get("text"), str) and answer["text"])
        named = (("title", title), ("context", context), ("question", question))
        wrong = [name for name, value in named if not isinstance(value, str) or not value.strip()]
        if wrong or not texts:
            invalid.append(InvalidExample(where, f"{wrong[0]} is missing or no text" if wrong else "has no answer"))
        else:
            questions.append(Question(title, context_body(context), question, texts))
    if invalid:
        raise TaskError(format_invalid(invalid).replace(", or leave them out with --skip-invalid", ""))
    if not questions:
        raise TaskError(f"{file}: holds no question")
    return questions


def normalize(answer: str) -> str:
    """Return an answer as JGLUE compares it: in lower case, without 。 at its end, with single spaces.

    That is github.com/yahoojapan/JGLUE, fine-tuning/patch, of squad_metrics.py.
    """
    return " ".join(answer.lower().rstrip("。").split())


def f1(answer: str, prediction: str) -> float:
    """Return the F1 of the characters of ``prediction``, from 0 to 1; of two empty texts 1."""
    expected, predicted = normalize(answer), normalize(prediction)
    common = sum((Counter(expected) & Counter(predicted)).values())
    if not expected or not predicted:
        return float(expected == predicted)
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def score(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Return ``exact_match`` and ``f1`` in per cent, and ``questions``: of each question its best answer counts."""
    exact = character = 0.0
    for question, prediction in zip(questions, predictions, strict=True):
        answers = [answer for answer in question.answers if normalize(answer)] or [""]
        exact += max(float(normalize(answer) == normalize(prediction)) for answer in answers)
        character += max(f1(answer, prediction) for answer in answers)
    count = len(questions)
    return {"exact_match": 100 * exact / count, "f1": 100 * character / count, "questions": count}


def evaluate(settings: SquadSettings, file: Path, *, skip: bool = False, overwrite: bool = False) -> int:
    """Answer the questions of ``file``, write the scores, and return 0, or 75 or 130 after a signal.

    skip: questions that leave no tokens for an answer are not answered, which is wrong; else they are an error.

    Raises:
        TaskError: the data, the model or the output cannot be used.
    """
    questions = read_questions(file)
    with frame.claim(settings, overwrite=overwrite) as output:
        # By each process, as none waits for another one yet: the file is replaced as a whole, by the same.
        source, answers = output / "questions.jsonl", output / "answers.jsonl"
        lines = [json.dumps(dataclasses.asdict(question), ensure_ascii=False) + "\n" for question in questions]
        files.replace_text(source, "".join(lines))

        from ekiben_tasks.generation import batch
        from ekiben_tasks.generation.record import record_file

        generating = _generate_settings(settings, source, answers)
        if overwrite or not answers.exists():
            code = batch.generate(generating, Source(str(source)), skip_bad=skip, fresh=overwrite)
            if code or not frame.is_main_process():
                return code
        record = input_files.read_object(record_file(answers), "start again with --overwrite")
        chosen = batch.choose_examples(len(questions), settings.examples, settings.seed)
        scores = {"jsquad": score([questions[index] for index in chosen], _read_answers(answers, chosen, settings))}
        data = {**record["data"], "source": str(file)}
        files.write_json(
            output / frame.RECORD,
            {**record, "settings": dataclasses.asdict(settings), "data": data, "scores": scores},
        )
        record_file(answers).unlink()
        frame.finish(output)
        frame.print_scores(scores)
        print(f"done        {answers}   record {output / frame.RECORD}", flush=True)
    return 0


def _generate_settings(settings: SquadSettings, source: Path, answers: Path) -> GenerateSettings:
    """Return the settings of greedy answers to all questions that are chosen."""
    names = {each.name for each in dataclasses.fields(GenerateSettings)}
    same = {name: value for name, value in vars(settings).items() if name in names}
    greedy = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    return GenerateSettings(**{**same, **greedy, "data": str(source), "output": str(answers)})


def _read_answers(file: Path, chosen: Sequence[int], settings: SquadSettings) -> list[str]:
    """Return the answer to each question of ``chosen``; an empty one where it was not asked."""
    texts: dict[int, str] = {}
    for _, content in input_files.read_lines(file, "start again with --overwrite"):
        line = input_files.as_object(input_files.parse_json(input_files.decode(content)))
        text = str(line["complete"]).strip()
        texts[line["index"]] = text.partition("\n")[0].strip() if settings.first_line else text
    return [texts.get(index, "") for index in chosen]

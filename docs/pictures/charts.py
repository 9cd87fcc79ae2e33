"""The charts of the benchmarks' page: from bench/results.json, and from the tables of docs/_benchmarks.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from bench.picture import BUILDING, FIRST, OTHER, SHARING, Bar, Chart, timings_chart
from bench.report import Result

ROOT = Path(__file__).resolve().parents[2]
Table = list[dict[str, str]]
LENGTH = "8,192"  # tokens of the longest example, in the chart of attention
KERNELS = {
    "examples of one length": ("flash", "cuDNN", "flash-attn 2", "flash-attn 4"),
    "mixed lengths": ("mixed: varlen", "mixed: flash-attn 2", "mixed: flash-attn 4"),
}


def read_tables(text: str) -> list[Table]:
    """Return the Markdown tables of ``text``: for each, its rows by column."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *lines = (
            [cell.strip(" *`") for cell in line.strip().strip("|").split("|")] for line in block.splitlines()
        )
        tables.append([dict(zip(head, line, strict=True)) for line in lines])
    return tables


def find_table(tables: Sequence[Table], *columns: str) -> Table:
    """Return the first table that has all the columns. Raises LookupError when there is none."""
    for table in tables:
        if table and set(columns) <= table[0].keys():
            return table
    raise LookupError(f"docs/_benchmarks.md has no table with the columns {', '.join(columns)}")


def linear_bars(values: dict[str, str], longest: float, first: str | None = None) -> list[Bar]:
    """Return a bar for each value, in its order; ``first`` is emphasised, or else the greatest.

    Text without a number has no length.
    """
    numbers = {name: float(text.replace(",", "")) if text[:1].isdigit() else 0.0 for name, text in values.items()}
    first = first or max(numbers, key=lambda name: numbers[name])
    return [
        Bar(name=name, label=text, length=numbers[name] / longest, colour=FIRST if name == first else OTHER)
        for name, text in values.items()
    ]


def longest_of(groups: Sequence[dict[str, str]]) -> float:
    """Return the greatest number of all groups."""
    texts = (text for group in groups for text in group.values())
    return max(float(text.replace(",", "")) for text in texts if text[:1].isdigit())


def chart_of(title: str, notes: Sequence[str], groups: dict[str, dict[str, str]], first: str | None = None) -> Chart:
    """Return a chart on a linear scale from 0 to the greatest number."""
    longest = longest_of([*groups.values()])
    return Chart(
        title=title,
        notes=notes,
        groups=[(name, linear_bars(values, longest, first)) for name, values in groups.items()],
    )


def training_chart(tables: Sequence[Table]) -> Chart:
    """Return tokens/s of training beside other trainers."""
    rows = find_table(tables, "training", "Ekiben", "Trainer", "SFTTrainer")
    groups = {
        row["training"]: {name: row[name] for name in ("Ekiben", "Trainer", "SFTTrainer") if row[name]} for row in rows
    }
    notes = [
        "tokens/s, one H200, random weights, medians of 2 or 3",
        "Trainer of Transformers (with PEFT for LoRA), SFTTrainer of TRL",
    ]
    return chart_of("Training: tokens per second", notes, groups, "Ekiben")


def attention_chart(tables: Sequence[Table]) -> Chart:
    """Return TFLOP/s of the attention kernels at one length."""
    rows = [row for row in find_table(tables, "head size", "flash-attn 4") if row["longest example"] == LENGTH]
    groups = {
        f"heads of {row['head size']}, {kind}": {
            name.removeprefix("mixed: "): row[name].replace("wrong", "wrong gradients") for name in kernels
        }
        for kind, kernels in KERNELS.items()
        for row in rows
    }
    notes = [
        f"TFLOP/s, forward and backward, bf16, longest example {LENGTH} tokens",
        "one H100, torch 2.11, 2026-11-25; bold: the fastest",
    ]
    return chart_of("Attention kernels", notes, groups)


def long_examples_chart(tables: Sequence[Table]) -> Chart:
    """Return tokens/s of training with torch's kernels and with flash-attn 4."""
    rows = find_table(tables, "model", "torch's kernels", "flash-attn 4")
    groups = {
        f"{row['model']}, {row['examples']}{', compiled' if row['compiled'] == 'yes' else ''}": {
            name: row[name] for name in ("torch's kernels", "flash-attn 4")
        }
        for row in rows
    }
    notes = ["tokens/s, LoRA, one H100 for each run, one run each, 2026-11-26"]
    return chart_of("flash-attn 4 in training", notes, groups, "flash-attn 4")


def charts() -> dict[str, Chart]:
    """Return every chart by its name: ``{chart:NAME}`` in docs/_benchmarks.md is its place."""
    result = Result.from_json(json.loads((ROOT / "bench/results.json").read_text(encoding="utf-8")))
    tables = read_tables((ROOT / "docs/_benchmarks.md").read_text(encoding="utf-8"))
    return {
        "building": timings_chart(result, BUILDING, "Seconds to build, no tests run: Ekiben and other tools"),
        "sharing": timings_chart(result, SHARING, "Seconds to share, no tests run: Ekiben and other tools"),
        "training": training_chart(tables),
        "attention": attention_chart(tables),
        "long-examples": long_examples_chart(tables),
    }

"""Settings out of YAML and --set: what is wrong is reported before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.task import settings
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Inner:
    r: int = option(4, "rank")
    names: tuple[str, ...] = option(("a",), "names")


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    learning_rate: float = option(3e-4, "rate")
    epochs: int = option(1, "times")
    name: str = option("x", "a name")
    mask: bool = option(True, "a switch")
    rows: int | Literal["auto"] = option("auto", "rows at a time")
    seed: int | None = option(None, "seed")
    batch_size: int = option(1, "size", old="rows_at_once")


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_assignments_override_file_and_defaults(tmp_path: Path) -> None:
    made = settings.load(Outer, write(tmp_path, "epochs: 2\ninner: {r: 8}\n"), ["inner.names=[q, v]", "epochs=3"])
    assert made == Outer(Inner(8, ("q", "v")), epochs=3)


def test_text_may_be_empty() -> None:
    assert settings.load(Outer, None, ["name="]).name == ""
    with pytest.raises(SettingError, match="setting epochs: must be"):
        settings.load(Outer, None, ["epochs="])


def test_an_old_name_is_accepted_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "rows_at_once: 8\n")
    assert settings.load(Outer, file).batch_size == settings.load(Outer, None, ["rows_at_once=8"]).batch_size == 8
    assert (
        capsys.readouterr().err
        == "warning: setting rows_at_once is now batch_size; the next release no longer accepts rows_at_once\n"
    )
    assert "rows_at_once" not in settings.help_table(Outer())


def test_number_formats(tmp_path: Path) -> None:
    # PyYAML reads 1e-3 as text.
    assert settings.load(Outer, write(tmp_path, "learning_rate: 1e-3")).learning_rate == 0.001
    assert settings.load(Outer, None, ["learning_rate=2"]).learning_rate == 2.0
    assert settings.load(Outer, None, ["rows=4"]).rows == 4
    assert settings.load(Outer, None, ["rows=auto"]).rows == "auto"
    assert settings.load(Outer, None, ["seed="]).seed is None


def test_a_template_in_braces_is_text() -> None:
    assert settings.load(Outer, None, ["name={question}"]).name == "{question}"
    assert settings.load(Outer, None, ['name="{a}\\n{b}"']).name == "{a}\n{b}"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("lerning_rate=1", "no setting 'lerning_rate'. Did you mean 'learning_rate'?"),
        ("inner.rr=1", "no setting 'inner.rr'. Did you mean 'inner.r'?"),
        ("epochs.x=1", "no setting 'epochs.x'"),
        ("epochs", "write it as --set NAME=VALUE"),
        ("epochs=many", 'setting epochs: must be a whole number, not "many"'),
        ("epochs=1.5", "setting epochs: must be a whole number, not 1.5"),
        ("epochs=true", "setting epochs: must be a whole number, not true"),
        ("learning_rate=fast", "setting learning_rate: must be a number"),
        ("mask=1", "setting mask: must be true or false, not 1"),
        ("name=3", "setting name: must be text, not 3"),
        ("rows=some", 'must be a whole number, not "some"; or must be one of auto'),
        ("inner=3", "setting inner: is a group of settings (r, names)"),
    ],
)
def test_a_wrong_assignment_is_explained(assignment: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings.load(Outer, None, [assignment])
    assert message in str(caught.value)


def test_all_problems_are_reported_with_their_origin(tmp_path: Path) -> None:
    file = write(tmp_path, "epoch: 3\ninner: {q: 1}\nmask: 5\n")
    with pytest.raises(SettingError) as caught:
        settings.load(Outer, file, ["nme=x"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert f"{file}: no setting 'epoch'. Did you mean 'epochs'?" in lines
    assert any("'inner.q'" in line for line in lines)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just text"])
def test_file_without_settings_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError, match=r"config\.yaml"):
        settings.load(Outer, write(tmp_path, text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no such file"):
        settings.load(Outer, tmp_path / "nothing.yaml")


def test_help_lists_every_setting_with_its_value() -> None:
    table = settings.help_table(settings.load(Outer, None, ["epochs=7"]))
    for name in ("inner.r", "inner.names", "learning_rate", "epochs", "name", "mask", "rows", "seed"):
        assert f"  {name} " in table
    assert any(line.split() == ["epochs", "7"] for line in table.splitlines())
    assert any(line.split() == ["learning_rate", "0.0003"] for line in table.splitlines())


@pytest.mark.parametrize(
    ("value", "shown"), [("a b", "a b"), ("a\n\nb: ", r'"a\n\nb: "'), (" a", '" a"'), ("あ", "あ")]
)
def test_help_has_each_value_on_one_line(value: str, shown: str) -> None:
    (line,) = [line for line in settings.help_table(Outer(name=value)).split("\n") if line.startswith("  name ")]
    assert line.removeprefix("  name").lstrip(" ") == shown


def test_a_bare_name_is_a_config_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "long.yaml").write_text("epochs: 9\n")
    monkeypatch.setenv("EKIBEN_RECIPE", str(tmp_path))
    assert settings.load(Outer, Path("long")).epochs == 9
    with pytest.raises(SettingError, match=r"--config lang: neither a file nor a config.*Did you mean 'long'"):
        settings.load(Outer, Path("lang"))
    with pytest.raises(SettingError, match="no such file"):
        settings.load(Outer, Path("lang.yaml"))


@pytest.mark.parametrize(("gpus", "ranks"), [([], ["alone"]), (["1"], ["alone"]), (["3"], ["0", "1", "2"])])
def test_requested_number_of_processes_is_started(gpus: list[str], ranks: list[str], tmp_path: Path) -> None:
    """Each of them has --gpus in its command again, and starts no others."""
    script = tmp_path / "task.py"
    script.write_text(
        "import os, sys\n"
        "from ekiben_tasks.task import command\n"
        "depth = int(os.environ.get('DEPTH', 0))\n"
        "assert depth < 3, 'it starts itself without end'\n"
        "os.environ['DEPTH'] = str(depth + 1)\n"
        "command.start_processes(__file__, int(sys.argv[1]) if sys.argv[1:] else None, None)\n"
        "os.write(1, b'rank %s\\n' % os.environ.get('RANK', 'alone').encode())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(Path(settings.__file__).parents[2])
    done = subprocess.run([sys.executable, script, *gpus], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split()[1] for line in done.stdout.splitlines() if line.startswith("rank")) == ranks

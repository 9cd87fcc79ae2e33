"""Recipes from elsewhere: their files lead out of their folder, and their values hold code."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from support.hostile import VALUES
from support.sample_recipe import RECIPE, STACK, SampleRecipe, full_sample, without_post

SECRET = "a private key"


def move_out(sample: SampleRecipe, name: str) -> Path:
    """Move a file or folder of the recipe to a folder beside it, and leave a link."""
    outside = sample.path.parent / "elsewhere" / Path(name).name
    outside.parent.mkdir(exist_ok=True)
    (sample.path / name).rename(outside)
    (sample.path / name).symlink_to(outside)
    return outside


def with_file(name: str, **recipe: object) -> Callable[[SampleRecipe], Path]:
    def change(sample: SampleRecipe) -> Path:
        if not (sample.path / name).exists():
            sample.write(name, SECRET)
        if recipe:
            sample.recipe(**recipe)
        return move_out(sample, name)

    return change


def with_line(line: str) -> Callable[[SampleRecipe], Path]:
    """A line of %files that names what lies elsewhere by its path."""

    def change(sample: SampleRecipe) -> Path:
        outside = sample.path.parent / "elsewhere"
        outside.mkdir()
        (outside / "key").write_text(SECRET)
        sample.replace("images/roof.def", "%files\n", f"%files\n    {line.format(outside)} /opt/x/\n")
        return outside

    return change


def with_lock(sample: SampleRecipe) -> Path:
    sample.replace("images/roof.def", "%files\n", "%arguments\n    stack=\n\n%files\n    {{ stack }}/roof.lock /opt/\n")
    sample.write("images/stacks/tiny/roof.lock", "a==1\n")
    return move_out(sample, "images/stacks/tiny/roof.lock")


LEAD_OUT: dict[str, Callable[[SampleRecipe], Path]] = {
    "recipe.yaml": with_file("recipe.yaml"),
    "data": with_file("notes.txt", data=["notes.txt"]),
    "a folder of configurations": with_file("configs"),
    "a configuration": with_file("configs/greet.yaml"),
    "an entrypoint": with_file("entrypoints/greet.py"),
    "a file beside the entrypoints": with_file("entrypoints/helper.txt"),
    "the folder of entrypoints": with_file("entrypoints"),
    "the folder of images": with_file("images"),
    "a definition file": with_file("images/roof.def"),
    "a definition file that nothing uses": with_file("images/more.def"),
    "a stack": with_file("images/stacks/tiny"),
    "stack.yaml": with_file("images/stacks/tiny/stack.yaml"),
    "an apt.lock": with_file("images/stacks/tiny/apt.lock"),
    "a lock file of the stack": with_lock,
    "a source of %files": with_file("files/data.txt"),
    "a file in a folder of %files": with_file("files/tree/sub/b.txt"),
    "a folder in a folder of %files": with_file("files/tree/sub"),
    "a folder above a source of %files": with_file("files"),
    "an absolute path in %files": with_line("{0}/key"),
    "a path with .. in %files": with_line("../elsewhere/key"),
    "a folder in %files": with_line("{0}"),
    "a pattern in %files": with_line("../elsewhere/k*"),
    "an absolute pattern in %files": with_line("{0}/k*"),
    "a pattern that matches nothing": with_line("{0}/none*"),
    "a name that is not there": with_line("{0}/kez"),
    "requirements.txt": with_file("requirements.txt"),
    "the layer's lock": with_file("images/roof.lock"),
    "SHA256SUMS": with_file("SHA256SUMS"),
}

# Each makes the file at {0} where it is run, whichever language reads it.
CODE = (
    "$(touch {0})",
    "`touch {0}`",
    "; touch {0} #",
    "' ; touch {0}; '",
    '"; touch {0}; "',
    "x\ntouch {0}\n",
    "{{{{ cycler.__init__ }}}}$(touch {0})",
    "!!python/object/apply:os.system ['touch {0}']",
    "-r $(touch {0})",
    "--index-url=$(touch {0})",
    "../../$(touch {0})",
)
# What Python or a tool might load from the folder it works in.
MODULES = (
    "sitecustomize.py",
    "usercustomize.py",
    "conftest.py",
    "setup.py",
    "yaml.py",
    "ekiben.py",
    "ekiben/__init__.py",
    "ekiben_tasks/__init__.py",
    "entrypoints/sitecustomize.py",
    "entrypoints/ekiben_tasks/__init__.py",
    "entrypoints/greet.py",
    "_ekiben.pth",
    "click.py",
)


def hostile_recipe(folder: Path, canary: Path, dice: random.Random) -> tuple[SampleRecipe, Path | None]:
    """Write a hostile recipe into ``folder``. Returns it, and what lies outside of it that it leads to.

    Its code makes ``canary``, wherever it is run.
    """
    sample = without_post(full_sample(folder / RECIPE["name"]))
    for name in MODULES:
        sample.write(name, f"import pathlib; pathlib.Path({str(canary)!r}).touch()\n")
    sample.write("pyproject.toml" if dice.random() < 0.3 else "requirements.txt", _requirements(canary, dice))
    outside = LEAD_OUT[dice.choice(sorted(LEAD_OUT))](sample) if dice.random() < 0.6 else None
    for _ in range(dice.randrange(4)):
        _spoil(sample, canary, dice)
    return sample, outside


def _requirements(canary: Path, dice: random.Random) -> str:
    code = dice.choice(CODE).format(canary)
    return dice.choice(
        (
            f"x @ {code}\n",
            f"x=={code}\n",
            f"-e {canary.parent}\n",
            "-r ../elsewhere/key\n",
            "-c /etc/passwd\n",
            f"# exclude-newer: {code}\nx==1\n",
            (
                "[build-system]\nrequires = []\nbuild-backend = 'setup'\nbackend-path = ['.']\n[project]\nname ="
                f" 'x'\nversion = '{code}'\n"
            ),
            ".\n",
            "file:.\n",
        )
    )


def _spoil(sample: SampleRecipe, canary: Path, dice: random.Random) -> None:
    """Exchange a value of a file by one that is none, or by code."""
    code = dice.choice(CODE).format(canary)
    value = code if dice.random() < 0.6 else dice.choice(VALUES)
    file = dice.choice(
        ("recipe.yaml", "images/stacks/tiny/stack.yaml", "images/roof.def", "images/ground.def", "configs/greet.yaml")
    )
    path = sample.path / file
    if path.is_symlink() or not path.is_file() or any(parent.is_symlink() for parent in path.parents):
        return
    if file in ("recipe.yaml", "images/stacks/tiny/stack.yaml"):
        record = dict(RECIPE if file == "recipe.yaml" else STACK)
        name = dice.choice([*sorted(record), "default_task", "data", "unknown"])
        record[name] = value if dice.random() < 0.7 else {str(code): value}
        path.write_text(json.dumps(record).replace("NaN", "0"), encoding="utf-8", errors="surrogateescape")
    else:
        lines = path.read_text().splitlines()
        lines.insert(
            dice.randrange(len(lines) + 1),
            dice.choice(("    ", "", "%files\n    ", "%arguments\n    a=", "From: ")) + str(value)[:9000],
        )
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")

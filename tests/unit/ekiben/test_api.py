"""The Python interface, without an engine or a runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

import ekiben
from support.sample_recipe import SampleRecipe


def test_plan_takes_the_options_of_the_command_line(files_only: SampleRecipe, tmp_path: Path) -> None:
    layers = ekiben.plan(files_only.path, stack=None, arguments=None, arch="amd64", store=tmp_path / "store")
    assert layers
    assert not any(layer.is_stored for layer in layers)
    assert not (tmp_path / "store").exists()


def test_unknown_keyword_is_refused_with_the_nearest(files_only: SampleRecipe) -> None:
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword argument 'stak'.* 'stack'"):
        ekiben.plan(files_only.path, stak="cu132")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword argument 'verify'"):
        ekiben.plan(files_only.path, verify=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^build\(\) got an unexpected keyword argument 'squash'"):
        ekiben.build(files_only.path, squash=True)  # type: ignore[call-arg]

"""A device named with -o stays a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from support.outputs import TO_FILE, TO_FOLDER, output_arguments
from support.sample_recipe import RunCli, SampleRecipe

pytestmark = pytest.mark.covers("ekiben/cli")


@pytest.mark.parametrize("name", [*TO_FILE, "doctor of an image", *TO_FOLDER])
@pytest.mark.parametrize("by_link", [False, True], ids=["itself", "a link to it"])
def test_output_device_is_never_replaced(
    run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path, name: str, by_link: bool
) -> None:
    if os.geteuid():
        pytest.skip("only root makes a device")
    device, link = tmp_path / "null", tmp_path / "link"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    link.symlink_to(device)
    output = link if by_link else device
    message = run_cli(*output_arguments(files_only)[name], "-o", output, code=2).stderr
    assert f"-o {output}: is a character device" in message
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert link.is_symlink()

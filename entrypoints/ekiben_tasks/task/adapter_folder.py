"""Check the folder of an adapter, and find its base model, before anything is imported to load them."""

from __future__ import annotations

from pathlib import Path

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import is_hub_model


def check_source(model: str, adapter: str, base: str | None = None) -> bool:
    """Return whether what ``adapter``, or without one ``model``, is loaded from is on the hub.

    base: the base model, where the adapter's own record of it does not hold.

    Raises:
        TaskError: a folder does not exist, or holds no model or adapter.
    """
    if not adapter:
        return is_hub_model(model)
    file = find_config(Path(adapter))
    return is_hub_model(base or read_base(file))


def find_model(model: str, adapter: str, base: str | None = None) -> str:
    """Return the model that is loaded: the base of ``adapter``, or without one ``model``. base: as of check_source().

    Raises:
        TaskError: there is no adapter.
    """
    return (base or read_base(find_config(Path(adapter)))) if adapter else model


def find_config(folder: Path) -> Path:
    """Return the configuration of the adapter in ``folder``.

    Raises:
        TaskError: there is none.
    """
    file = folder / "adapter_config.json"
    if file.is_file():
        return file
    near = [str(path.parent) for path in sorted(folder.glob("**/adapter_config.json"))[:3]] if folder.is_dir() else []
    hint = f"; there is one in {', '.join(near)}" if near else "; train writes one to OUTPUT/adapter"
    raise TaskError(f"{folder.absolute()}: holds no adapter_config.json, so it is not an adapter{hint}")


def read_base(file: Path) -> str:
    """Return the base model that an adapter_config.json names; a relative path may start here or at the adapter.

    Raises:
        TaskError: the file cannot be read, or names none.
    """
    config = input_files.read_object(file, "copy or train the adapter again")
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise TaskError(f"{file}: names no base model (base_model_name_or_path); give it with --base")
    beside = file.parent / name
    if not Path(name).is_dir() and beside.is_dir():
        return str(beside)
    return f"{name}@{revision}" if revision and not Path(name).is_dir() else name

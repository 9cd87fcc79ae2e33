"""YAML files checked against a pydantic model, with errors that name the file, the key and the nearest known key."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from builder.errors import DefinitionError, nearest


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=Strict)


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Errors: DefinitionError listing every problem of the file."""
    try:
        # CSafeLoader reads the same language some ten times faster, where libyaml is there.
        data = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return model.model_validate(data if data is not None else {})
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path}: is not YAML: {error}") from error
    except ValidationError as error:
        raise DefinitionError("\n".join(f"{path}: {_problem(item, model)}" for item in error.errors())) from error


def _problem(item: object, model: type[Strict]) -> str:
    assert isinstance(item, dict)
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key '{place}'." + nearest(str(item["loc"][-1]), _fields(model, item["loc"][:-1]))
    return f"{place or 'the file'}: {item['msg']} (found: {item['input']!r:.80})"


def _fields(model: type[Strict], place: tuple[object, ...]) -> list[str]:
    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None:
            inner = [
                kind for kind in getattr(field.annotation, "__args__", [field.annotation]) if isinstance(kind, type)
            ]
            model = next((kind for kind in inner if issubclass(kind, Strict)), model)
    return list(model.model_fields)

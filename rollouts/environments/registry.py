"""Which environments are installed, and whether settings and tasks fit them."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from rollouts.environments.base import Environment, EnvironmentConfig, TaskPayload
from rollouts.environments.errors import BrokenEnvironment, Problem, UnknownEnvironment, ValidationFailed

ENTRY_POINT_GROUP = "prorl.environments"

Model = TypeVar("Model", bound=BaseModel)


def names() -> list[str]:
    """The handler names of all installed environments, sorted; also of those that would not load."""
    return sorted(_entry_points())


@functools.cache
def get(handler: str) -> Environment:
    """The one instance of an environment in this process.

    Raises `UnknownEnvironment` when no package offers it, `BrokenEnvironment` when importing it fails.
    """
    entry_point = _entry_points().get(handler)
    if entry_point is None:
        raise UnknownEnvironment(f"no environment is named {handler!r}; installed: {', '.join(names()) or 'none'}")
    try:
        return cast(Environment, entry_point.load()())
    except Exception as exc:
        raise BrokenEnvironment(f"environment {handler!r} ({entry_point.value}) cannot be loaded: {exc}") from exc


def validate_config(handler: str, document: Mapping[str, Any]) -> EnvironmentConfig:
    """The settings of an environment. Raises `ValidationFailed`."""
    return _validate(get(handler).config, document)


def validate_task(handler: str, document: Mapping[str, Any]) -> TaskPayload:
    """A task that can be run and scored. Raises `ValidationFailed`, also when only its scoring is impossible."""
    environment = get(handler)
    task = _validate(environment.task, document)
    try:
        environment.check_task(task)
    except ValueError as exc:
        raise ValidationFailed([Problem("", str(exc))]) from exc
    return task


def parse_task(handler: str, document: Mapping[str, Any]) -> TaskPayload:
    """A task that `validate_task` has accepted before: its shape is checked again, not whether it can be scored."""
    return _validate(get(handler).task, document)


def config_schema(handler: str) -> dict[str, Any]:
    """The JSON Schema of an environment's settings."""
    return get(handler).config.model_json_schema()


def task_schema(handler: str) -> dict[str, Any]:
    """The JSON Schema of an environment's tasks."""
    return get(handler).task.model_json_schema()


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry_point.name: entry_point for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _validate(model: type[Model], document: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(document)
    except ValidationError as exc:
        # Not `str(exc)`: it quotes the input, which may be long and may hold gold answers.
        raise ValidationFailed(
            [Problem(_pointer(error["loc"]), error["msg"].removeprefix("Value error, ")) for error in exc.errors()]
        ) from exc


def _pointer(location: tuple[int | str, ...]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)

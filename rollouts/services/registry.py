"""Registering environments, datasets, tasks and policies. Everything is checked against the handler's models first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from rollouts.environments import registry
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment, ValidationFailed
from rollouts.models import Dataset, Environment, Policy, Project, Task
from rollouts.models.project import name_validator

from .errors import Conflict, FieldError, Refused
from .images import check_config_images

INLINE_PREFIX = "inline."


class TaskRequest(NamedTuple):
    """One task to store: the caller's own key and the payload."""

    key: str
    payload: Mapping[str, Any]


def create_environment(
    *, project: Project, name: str, handler: str, config: Mapping[str, Any], description: str = ""
) -> Environment:
    """Register an environment; a known name gets its next version."""
    check_name(name, "/name")
    check_config(handler=handler, config=config)
    newest = Environment.objects.filter(project=project, name=name).order_by("-version").first()
    version = newest.version + 1 if newest else 1
    try:
        with transaction.atomic():
            return Environment.objects.create(
                project=project, name=name, version=version, handler=handler, config=dict(config), description=description
            )
    except IntegrityError:
        raise Conflict(f"Version {version} of environment {name} was registered at the same moment. Try again.") from None


def check_config(*, handler: str, config: Mapping[str, Any]) -> None:
    """Refuse a handler that is not installed, a configuration that does not fit it, or an image that cannot be used."""
    try:
        parsed = registry.validate_config(handler, config)
    except UnknownEnvironment as error:
        raise Refused.field("/handler", str(error)) from error
    except BrokenEnvironment as error:
        raise Refused.field("/handler", str(error)) from error
    except ValidationFailed as error:
        raise Refused("The configuration does not fit the handler.", _at("/config", error)) from error
    check_config_images(parsed)


def create_dataset(*, project: Project, name: str, environment: str) -> Dataset:
    """A dataset of the newest version of an environment."""
    check_name(name, "/name")
    if name.startswith(INLINE_PREFIX):
        raise Refused.field("/name", f"Names that begin with {INLINE_PREFIX!r} are kept for tasks submitted inline.")
    try:
        with transaction.atomic():
            return Dataset.objects.create(project=project, name=name, environment=newest_environment(project, environment))
    except IntegrityError:
        raise Conflict(f"There is a dataset {name} already.", [FieldError("/name", "Taken; choose another.")]) from None


def newest_environment(project: Project, name: str, pointer: str = "/environment") -> Environment:
    """The newest version of a named environment of the project."""
    newest = Environment.objects.filter(project=project, name=name).order_by("-version").first()
    if newest is None:
        raise Refused.field(pointer, f"There is no environment {name!r} in project {project.name}.")
    return newest


def add_tasks(*, dataset: Dataset, tasks: Sequence[TaskRequest]) -> list[Task]:
    """Store tasks, all or none. One that fits the schema but cannot be scored is stored with the reason, never rolled out."""
    errors: list[FieldError] = []
    rows: list[Task] = []
    seen: set[str] = set()
    for place, task in enumerate(tasks):
        if task.key in seen:
            errors.append(FieldError(f"/tasks/{place}/key", f"{task.key!r} is there twice."))
        seen.add(task.key)
        try:
            reason = check_payload(dataset.environment, task.payload)
        except ValidationFailed as error:
            errors += _at(f"/tasks/{place}/payload", error)
        else:
            rows.append(Task(dataset=dataset, key=task.key, payload=dict(task.payload), quarantine_reason=reason))
    if errors:
        raise Refused("Some tasks do not fit the environment; none was stored.", errors)
    try:
        with transaction.atomic():
            return Task.objects.bulk_create(rows, batch_size=1000)
    except IntegrityError:
        known = set(Task.objects.filter(dataset=dataset, key__in=seen).values_list("key", flat=True))
        taken = [FieldError(f"/tasks/{i}/key", "The dataset has it already.") for i, t in enumerate(tasks) if t.key in known]
        raise Conflict("Some keys are taken; nothing was stored.", taken) from None


def check_payload(environment: Environment, payload: Mapping[str, Any]) -> str:
    """The reason to quarantine a task, or an empty string. Raises `ValidationFailed` when it does not fit the schema."""
    registry.parse_task(environment.handler, payload)
    try:
        registry.validate_task(environment.handler, payload)
    except ValidationFailed as error:
        return str(error)
    return ""


def get_or_create_policy(*, project: Project, name: str) -> Policy:
    """The policy of that name."""
    check_name(name, "/policy")
    return Policy.objects.get_or_create(project=project, name=name)[0]


def check_name(name: str, pointer: str) -> None:
    """Names appear in URLs and metrics: letters, digits, dots, dashes and underscores."""
    try:
        name_validator(name)
    except ValidationError as error:
        raise Refused.field(pointer, error.messages[0]) from error


def _at(pointer: str, error: ValidationFailed) -> list[FieldError]:
    return [FieldError(pointer + problem.pointer, problem.message) for problem in error.problems]

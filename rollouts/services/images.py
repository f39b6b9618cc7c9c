"""Images as environments and rollouts need them: refused where they are missing, kept where they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db.models import Exists, OuterRef

from rollouts.environments import registry
from rollouts.environments.base import EnvironmentConfig
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment, ValidationFailed
from rollouts.environments.sandbox_settings import SandboxSettings
from rollouts.models import Environment, Rollout, Task
from sandboxes.images.errors import ImageBusy, ImageRefused
from sandboxes.images.services.prune import Pruned, prune_images
from sandboxes.images.services.use import image_store, why_unusable

from .errors import Conflict, FieldError, Refused

_GIB = 1 << 30


class TaskNeed(NamedTuple):
    """A task that is about to be rolled out; `pointer` is where it was named."""

    pointer: str
    environment: Environment
    payload: Mapping[str, Any]


@contextlib.contextmanager
def refused_as() -> Iterator[None]:
    """What the services of images refuse, in the words of the services here."""
    try:
        yield
    except ImageRefused as refused:
        errors = [FieldError(problem.pointer, problem.detail) for problem in refused.problems]
        raise Refused("The image does not make sense.", errors) from refused
    except ImageBusy as error:
        raise Conflict(str(error)) from error


def check_config_images(config: EnvironmentConfig) -> None:
    """Refuse a configuration that names an image which no sandbox can be started from."""
    named = config_images(config)
    reasons = why_unusable(named.values())
    errors = [FieldError(f"/config{pointer}", reasons[name]) for pointer, name in named.items() if name in reasons]
    if errors:
        raise Refused("An image that the configuration names cannot be used.", errors)


def check_task_images(tasks: Iterable[TaskNeed]) -> list[FieldError]:
    """What is wrong with the images that tasks need, as their environments say."""
    finder = _ImageFinder()
    named = [(task.pointer, name) for task in tasks if (name := finder.image_of(task.environment, task.payload))]
    reasons = why_unusable({name for _, name in named})
    return [FieldError(pointer, reasons[name]) for pointer, name in named if name in reasons]


def config_images(config: EnvironmentConfig) -> dict[str, str]:
    """The images that a configuration names, by JSON pointer."""
    groups = {field: group for field, group in dict(config).items() if isinstance(group, SandboxSettings)}
    return {f"/{field}/image": group.image for field, group in groups.items() if group.image}


def prune_as_configured() -> list[Pruned]:
    """What `PRORL_IMAGE_KEEP_DAYS` and `PRORL_IMAGE_MAX_GB` ask for, besides leftovers."""
    return prune(
        unused_for=timedelta(days=settings.IMAGE_KEEP_DAYS) if settings.IMAGE_KEEP_DAYS else None,
        most_bytes=int(settings.IMAGE_MAX_GB * _GIB) if settings.IMAGE_MAX_GB else None,
    )


def prune(*, unused_for: timedelta | None, most_bytes: int | None, dry_run: bool = False) -> list[Pruned]:
    """Prune images, but none that the newest version of an environment names, or an unfinished rollout needs."""
    return prune_images(image_store(), wanted=_wanted_images(), unused_for=unused_for, most_bytes=most_bytes, dry_run=dry_run)


def _wanted_images() -> set[str]:
    newer = Environment.objects.filter(project=OuterRef("project"), name=OuterRef("name"), version__gt=OuterRef("version"))
    wanted: set[str] = set()
    for environment in Environment.objects.filter(~Exists(newer)):
        try:
            config = registry.validate_config(environment.handler, environment.config)
        except (UnknownEnvironment, BrokenEnvironment, ValidationFailed):
            continue  # of a handler that is not installed here any more
        wanted.update(config_images(config).values())
    finder = _ImageFinder()
    unfinished = Rollout.objects.filter(task=OuterRef("pk"), finished_at=None)
    for task in Task.objects.filter(Exists(unfinished)).select_related("dataset__environment").iterator():
        wanted.add(finder.image_of(task.dataset.environment, task.payload))
    return wanted


class _ImageFinder:
    """Asks environments for the images of tasks; parses each configuration once."""

    def __init__(self) -> None:
        self._configs: dict[UUID, EnvironmentConfig] = {}

    def image_of(self, environment: Environment, payload: Mapping[str, Any]) -> str:
        """The name, or "": also where it cannot be said, since the rollout will end with the reason."""
        try:
            if environment.pk not in self._configs:
                self._configs[environment.pk] = registry.validate_config(environment.handler, environment.config)
            task = registry.parse_task(environment.handler, payload)
            spec = registry.get(environment.handler).sandbox_spec(self._configs[environment.pk], task)
        except Exception:  # whatever code of an environment raises
            return ""
        return spec.image if spec else ""

"""Runs and groups come in. All of a request is stored, or nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from pydantic import ValidationError

from rollouts.environments.errors import ValidationFailed
from rollouts.models import Dataset, Environment, Group, Policy, Project, Run, Task
from rollouts.run_settings import RunSettings

from .budgets import admit, check_limits, refuse_early
from .errors import FieldError, Refused
from .images import TaskNeed, check_task_images
from .overtaken import check_required_version
from .queueing import queue_rollouts
from .registry import INLINE_PREFIX, check_payload, newest_environment

MAX_GROUP_SIZE = 1024
MAX_ROLLOUTS = 100_000  # of one submission, which is one transaction
_BATCH = 1000


class GroupRequest(NamedTuple):
    """n rollouts of one task, named in exactly one way: by id, by dataset and key, or inline by environment and payload."""

    n: int
    task_id: UUID | None = None
    dataset: str = ""
    key: str = ""
    environment: str = ""
    payload: Mapping[str, Any] | None = None
    require_policy_version: int | None = None  # sampled from this version and no other


def create_run(
    *,
    project: Project,
    name: str,
    policy: str,
    priority: int = 50,
    settings: Mapping[str, Any] | None = None,
    limits: Mapping[str, int | None] | None = None,
) -> Run:
    """Open a run. Its settings are stored complete, so that a later change of a default changes no old run."""
    if not 0 <= priority <= 100:
        raise Refused.field("/priority", "Must be between 0 and 100.")
    known = Policy.objects.filter(project=project, name=policy).first()
    if known is None:
        raise Refused.field(
            "/policy", f"There is no policy {policy!r} in project {project.name}; register an LLM server for it first."
        )
    try:
        complete = RunSettings.model_validate(settings or {})
    except ValidationError as error:
        errors = [FieldError("/settings" + "".join(f"/{part}" for part in e["loc"]), e["msg"]) for e in error.errors()]
        raise Refused("The settings do not fit.", errors) from error
    return Run.objects.create(
        project=project,
        name=name,
        policy=known,
        priority=priority,
        settings=complete.model_dump(mode="json"),
        **check_limits(limits or {}).model_dump(),
    )


def submit_groups(*, run: Run, groups: Sequence[GroupRequest]) -> list[Group]:
    """Queue n rollouts for each group's task, within the limits of the run and its project."""
    errors = _check_sizes(groups) or _check_versions(run, groups)
    total = sum(group.n for group in groups)
    if not errors:
        refuse_early(run=run, n=total)
    # Environments check payloads with code of their own, which takes as long as it takes: no transaction is open meanwhile.
    tasks = _Tasks(run.project, groups)
    resolved = [tasks.resolve(place, group, errors) for place, group in enumerate(groups)]
    errors += [] if errors else check_task_images(tasks.needs(resolved))
    if errors:
        raise Refused("Some groups cannot be accepted; none was.", errors)
    with transaction.atomic():
        tasks.store_inline()
        rows = [Group(run=run, task=task, n=group.n) for group, task in zip(groups, resolved, strict=True) if task is not None]
        Group.objects.bulk_create(rows, batch_size=_BATCH)
        queue_rollouts(run, rows, [group.require_policy_version for group in groups])
        admit(run=run, n=total)
    return rows


def _check_sizes(groups: Sequence[GroupRequest]) -> list[FieldError]:
    if not groups:
        return [FieldError("/groups", "Is empty; name at least one group.")]
    if (total := sum(group.n for group in groups)) > MAX_ROLLOUTS:
        return [FieldError("/groups", f"Asks for {total} rollouts at once; submit at most {MAX_ROLLOUTS}, then the rest.")]
    return [
        FieldError(f"/groups/{place}/n", f"Must be between 1 and {MAX_GROUP_SIZE}.")
        for place, group in enumerate(groups)
        if not 1 <= group.n <= MAX_GROUP_SIZE
    ]


def _check_versions(run: Run, groups: Sequence[GroupRequest]) -> list[FieldError]:
    places: dict[int, int] = {}
    for place, group in enumerate(groups):
        if group.require_policy_version is not None:
            places.setdefault(group.require_policy_version, place)
    if not places:
        return []
    policy = Policy.objects.get(pk=run.policy_id)  # as it is now
    return [
        error
        for version, place in places.items()
        for error in check_required_version(policy, version, f"/groups/{place}/require_policy_version")
    ]


class _Tasks:
    """Finds the tasks of a submission, each with as few queries as it takes, and collects inline ones to be stored together."""

    def __init__(self, project: Project, groups: Sequence[GroupRequest]) -> None:
        self.project = project
        stored = Task.objects.select_related("dataset__environment").filter(dataset__project=project)
        ids = {group.task_id for group in groups if group.task_id}
        self._by_id = {task.id: task for task in stored.filter(id__in=ids)} if ids else {}
        keys: defaultdict[str, set[str]] = defaultdict(set)
        for group in groups:
            keys[group.dataset].add(group.key)
        self._by_name = {
            (dataset, task.key): task
            for dataset, wanted in keys.items()
            if dataset
            for task in stored.filter(dataset__name=dataset, key__in=wanted)
        }
        self._environments: dict[str, Environment] = {}
        self._inline_datasets: dict[UUID, Dataset] = {}
        self._inline: list[tuple[Task, Environment]] = []

    def resolve(self, place: int, group: GroupRequest, errors: list[FieldError]) -> Task | None:
        pointer = f"/groups/{place}"
        ways = [
            group.task_id is not None,
            bool(group.dataset or group.key),
            bool(group.environment) or group.payload is not None,
        ]
        if sum(ways) != 1:
            errors.append(
                FieldError(pointer, "Name the task by `task_id`, by `dataset` and `key`, or by `environment` and `payload`.")
            )
            return None
        if group.environment or group.payload is not None:
            return self._inline_task(pointer, group, errors)
        task = self._by_id.get(group.task_id) if group.task_id else self._by_name.get((group.dataset, group.key))
        if task is None:
            name = f"{pointer}/task_id" if group.task_id else f"{pointer}/key"
            errors.append(FieldError(name, f"There is no such task in project {self.project.name}."))
        elif task.quarantine_reason:
            errors.append(FieldError(pointer, f"The task is quarantined: {task.quarantine_reason}"))
        return task

    def _inline_task(self, pointer: str, group: GroupRequest, errors: list[FieldError]) -> Task | None:
        try:
            if group.environment not in self._environments:
                self._environments[group.environment] = newest_environment(
                    self.project, group.environment, f"{pointer}/environment"
                )
            environment = self._environments[group.environment]
            reason = check_payload(environment, group.payload or {})
        except Refused as refused:
            errors += refused.errors
            return None
        except ValidationFailed as error:
            errors += [FieldError(f"{pointer}/payload{problem.pointer}", problem.message) for problem in error.problems]
            return None
        if reason:
            errors.append(FieldError(f"{pointer}/payload", f"The task cannot be scored: {reason}"))
            return None
        task = Task(payload=dict(group.payload or {}))
        task.key = str(task.id)
        self._inline.append((task, environment))
        return task

    def _inline_dataset(self, environment: Environment) -> Dataset:
        """Inline tasks of an environment version share one dataset."""
        if environment.id not in self._inline_datasets:
            name = f"{INLINE_PREFIX}{environment.name}.v{environment.version}"
            self._inline_datasets[environment.id] = Dataset.objects.get_or_create(
                project=self.project, name=name, defaults={"environment": environment}
            )[0]
        return self._inline_datasets[environment.id]

    def needs(self, resolved: Sequence[Task | None]) -> list[TaskNeed]:
        """Each task once, with its environment."""
        environments = {task.pk: environment for task, environment in self._inline}
        needs = {}
        for place, task in enumerate(resolved):
            if task is not None and task.pk not in needs:
                environment = environments.get(task.pk) or task.dataset.environment
                needs[task.pk] = TaskNeed(f"/groups/{place}", environment, task.payload)
        return list(needs.values())

    def store_inline(self) -> None:
        for task, environment in self._inline:
            task.dataset = self._inline_dataset(environment)
        Task.objects.bulk_create([task for task, _ in self._inline], batch_size=_BATCH)

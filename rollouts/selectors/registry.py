"""What a project has registered: environments, datasets, tasks, policies, LLM servers."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import Count, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from rollouts.environments import registry
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment
from rollouts.lifecycle import State
from rollouts.models import Dataset, Environment, LLMServer, Policy, Project, Rollout, Task


class TaskCounts(NamedTuple):
    """How many tasks a dataset has, and how many of them are never rolled out."""

    tasks: int
    quarantined: int


class HandlerSchemas(NamedTuple):
    """JSON schemas of a handler's config and task; None where the handler is not installed or does not load."""

    config: dict[str, Any] | None
    task: dict[str, Any] | None


def environments_of(project: Project) -> QuerySet[Environment]:
    return Environment.objects.filter(project=project)


def handler_schemas(environment: Environment) -> HandlerSchemas:
    try:
        handler = registry.get(environment.handler)
    except (UnknownEnvironment, BrokenEnvironment):
        return HandlerSchemas(None, None)
    return HandlerSchemas(handler.config.model_json_schema(), handler.task.model_json_schema())


def datasets_of(project: Project) -> QuerySet[Dataset]:
    return Dataset.objects.filter(project=project).select_related("environment")


def tasks_of(dataset: Dataset, *, quarantined: bool | None = None) -> QuerySet[Task]:
    """A dataset's tasks; only the quarantined (or only the usable) ones on request."""
    tasks = Task.objects.filter(dataset=dataset)
    if quarantined is None:
        return tasks
    return tasks.exclude(quarantine_reason="") if quarantined else tasks.filter(quarantine_reason="")


def task_counts(dataset: Dataset) -> TaskCounts:
    counts = Task.objects.filter(dataset=dataset).aggregate(
        tasks=Count("id"), quarantined=Count("id", filter=~Q(quarantine_reason=""))
    )
    return TaskCounts(**counts)


def policies_of(project: Project) -> QuerySet[Policy]:
    return Policy.objects.filter(project=project)


def servers_of(project: Project) -> QuerySet[LLMServer]:
    """With `in_flight`, the number of rollouts that run on each."""
    running = Rollout.objects.filter(llm_server=OuterRef("pk"), state=State.RUNNING.value).order_by()
    counted = running.values("llm_server").annotate(n=Count("pk")).values("n")
    servers = LLMServer.objects.filter(project=project).select_related("policy")
    return servers.annotate(in_flight=Coalesce(Subquery(counted), 0))

"""Asking for finished rollouts to be scored again. EVAL workers do it (`rescoring`), each rollout at most once at a time."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from django.db import connection
from django.db.models import Q, QuerySet

from rollouts.environments import registry
from rollouts.environments.base import RestoresSandbox
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment
from rollouts.environments.external import EXTERNAL
from rollouts.lifecycle import TERMINAL, Blame, Cause, OnAgentTimeout, Phase, RescoringState
from rollouts.models import Environment, Project, Rescoring, Rollout

from .errors import Conflict, Refused

# Not scored because their run says so.
_UNSCORED = [OnAgentTimeout.ZERO.value, OnAgentTimeout.DROP.value]

# Its RUN is done: it was scored, or EVAL failed for the infrastructure's fault.
_RAN = Q(termination_phase=Phase.RUN.value, termination_blame=Blame.POLICY.value)
_EVAL_FAILED = Q(termination_phase=Phase.EVAL.value, termination_blame=Blame.INFRASTRUCTURE.value) & ~Q(run_cause="")
_LEFT_UNSCORED = Q(termination_cause=Cause.AGENT_TIMEOUT.value, run__settings__on_agent_timeout__in=_UNSCORED)
_RESCORABLE = Q(_RAN & ~_LEFT_UNSCORED | _EVAL_FAILED, finished_at__isnull=False, trajectory_pruned_at=None)

# Locked, so that retention either sees the rescoring or has already said what it pruned.
_ASK = """
INSERT INTO rollouts_rescoring
    (rollout_id, run_id, environment_id, state, tries, failures, sandbox_name, requested_at, cause, detail, traceback)
SELECT chosen.id, chosen.run_id, COALESCE(%s, chosen.environment_id), '{queued}', 0, 0, '', now(), '', '', ''
FROM ({chosen} FOR SHARE OF rollouts_rollout) chosen ON CONFLICT DO NOTHING
"""


class Requested(NamedTuple):
    """What became of a request: rescorings queued, rollouts whose rescoring was already going on, and those left out."""

    queued: int
    going_on: int
    left_out: int


def rescore_rollout(*, project: Project, rollout_id: UUID, environment_id: UUID | None = None) -> Rescoring:
    """Queue one rollout to be scored again, with its own environment version or another one of the same name.

    While a rescoring of it is going on, asking again returns that one. Raises `Refused`, `Conflict`.
    """
    rollout = Rollout.objects.select_related("environment", "run").get(id=rollout_id, project=project)
    environment = _version(project, environment_id) or rollout.environment
    if environment.name != rollout.environment.name:
        detail = f"Is a version of {environment.name}; the rollout's environment is {rollout.environment.name}."
        raise Refused.field("/environment", detail)
    if reason := why_not(rollout) or _why_not_with(environment):
        raise Conflict(reason)
    _ask(Rollout.objects.filter(id=rollout.id), environment.id)
    newest = Rescoring.objects.select_related("environment").filter(rollout=rollout).latest("id")
    if newest.environment_id != environment.id:
        raise Conflict(f"It is being scored with version {newest.environment.version}. Ask again when that is over.")
    return newest


def rescore_run(
    *, project: Project, run_id: UUID, environment_id: UUID | None = None, only_cause: Cause | None = None
) -> Requested:
    """Queue all rollouts of a run that can be scored again, or of these the ones with `only_cause` as their termination's.

    With an environment version, only rollouts of the environment of that name. Raises `Refused`.
    """
    wanted = Rollout.objects.filter(project=project, run_id=run_id)
    if only_cause is not None:
        wanted = wanted.filter(termination_cause=only_cause.value)
    given = _version(project, environment_id)
    if given is not None:
        wanted = wanted.filter(environment__name=given.name)
        if reason := _why_not_with(given):
            raise Refused.field("/environment", reason)
    possible = wanted.filter(_RESCORABLE)
    if given is None:
        versions = Environment.objects.filter(id__in=possible.order_by().values("environment").distinct())
        possible = possible.exclude(environment__in=[version for version in versions if _why_not_with(version)])
    total, asked = wanted.count(), possible.count()
    queued = _ask(possible, given.id if given else None)
    return Requested(queued, going_on=max(asked - queued, 0), left_out=max(total - asked, 0))


def why_not(rollout: Rollout) -> str:
    """Why a rollout cannot be scored again, in a sentence; empty when it can."""
    if Rollout.objects.filter(_RESCORABLE, id=rollout.id).exists():
        return ""
    if rollout.state not in TERMINAL:
        return "It has not ended yet."
    if rollout.trajectory_pruned_at is not None:
        return f"Its artefacts were pruned on {rollout.trajectory_pruned_at:%Y-%m-%d}."
    if rollout.termination_cause == Cause.AGENT_TIMEOUT.value:
        return "Its run does not score rollouts whose time ran out (`on_agent_timeout`)."
    return f"It ended by {rollout.termination_cause} in {rollout.termination_phase}, so there is nothing to score."


def _version(project: Project, environment_id: UUID | None) -> Environment | None:
    if environment_id is None:
        return None
    environment = Environment.objects.filter(project=project, id=environment_id).first()
    if environment is None:
        raise Refused.field("/environment", f"No environment of project {project.name} has this id; give that of a version.")
    return environment


def _why_not_with(environment: Environment) -> str:
    if environment.handler == EXTERNAL:
        return f"{environment} is for sessions, which are rewarded by whoever runs their agents."
    try:
        handler = registry.get(environment.handler)
    except (UnknownEnvironment, BrokenEnvironment) as error:
        return f"{environment} cannot be used: {error}"
    if handler.evaluates_in_sandbox and not isinstance(handler, RestoresSandbox):
        return f"{environment} scores in the sandbox that RUN left, and has no `restore` to rebuild it from the artefacts."
    return ""


def _ask(rollouts: QuerySet[Rollout], environment_id: UUID | None) -> int:
    """One statement for any number of rollouts; how many were queued. Those with an open rescoring are left as they are."""
    chosen, parameters = rollouts.order_by().values("id", "run_id", "environment_id").query.sql_with_params()
    statement = _ASK.format(queued=RescoringState.QUEUED.value, chosen=chosen)
    with connection.cursor() as cursor:
        cursor.execute(statement, [environment_id, *parameters])
        return int(cursor.rowcount)

"""Sessions of agents outside any sandbox: opened, kept alive, rewarded and closed by whoever runs the agent.

A session is a rollout that no worker carries out. It is RUNNING from the moment it is opened, held by a gateway process
(`session_holding`), and ends by one of its agent's own words, by a cancel, by a budget, or by its agent's silence.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from rollouts.environments.external import EXTERNAL
from rollouts.lifecycle import GATEWAY, State
from rollouts.models import Environment, Policy, Project, Rollout, Run, Session, WorkerProcess
from rollouts.models.session import KEY_PREFIX

from .budgets import admit_in_flight
from .cancel import cancel_rollouts
from .errors import Conflict, FieldError, Refused, Unavailable
from .keys import digest
from .registry import create_environment
from .storable import storable_json
from .submit import GroupRequest, create_run, submit_groups
from .transition import Guard, move

SHORTEST_TTL_SECONDS, DEFAULT_TTL_SECONDS, LONGEST_TTL_SECONDS = 5, 600, 7 * 86_400
_LONGEST_HEARTBEAT_SECONDS = 60.0
_RUN_NAME = "sessions"  # of the run that takes the sessions for which none is named


class TaskChoice(NamedTuple):
    """The task of a session: by id, or by dataset and key."""

    task_id: UUID | None = None
    dataset: str = ""
    key: str = ""


class Opened(NamedTuple):
    """A new session and its key, which cannot be read again."""

    session: Session
    key: str


def open_session(
    *,
    project: Project,
    opened_by: str,
    run: str = "",
    policy: str = "",
    task: TaskChoice | None = None,
    ttl_seconds: int = DEFAULT_TTL_SECONDS,
    metadata: Mapping[str, Any] | None = None,
) -> Opened:
    """Begin a rollout whose agent calls the gateway from elsewhere.

    `run` is the id or name of a run; with `policy` alone the session goes to a run of its own kind. It counts against all
    limits of the run and its project, and begins at once or is refused: an agent that is there does not queue.
    """
    metadata = storable_json(dict(metadata or {}))
    if not SHORTEST_TTL_SECONDS <= ttl_seconds <= LONGEST_TTL_SECONDS:
        raise Refused.field("/ttl_seconds", f"Must be between {SHORTEST_TTL_SECONDS} and {LONGEST_TTL_SECONDS}.")
    holder = _some_gateway()
    with transaction.atomic():
        chosen = _run_of(project, run, policy)
        rollout = _begin(_submit(chosen, task, metadata), holder)
        admit_in_flight(run=chosen)
        key_id, key = _new_key()
        session = Session.objects.create(
            rollout=rollout,
            project=project,
            opened_by=opened_by[:200],
            metadata=metadata,
            key_id=key_id,
            key_sha256=digest(key),
            ttl_seconds=ttl_seconds,
            expires_at=Now() + timedelta(seconds=ttl_seconds),
        )
    session.refresh_from_db()  # its expiry is the database's to reckon
    return Opened(session, key)


def new_key(*, session: Session) -> str:
    """Another key for a session; the one before stops working. For an opener whose answer was lost on its way.

    A process that serves it under the old key already is asked to let go of it.
    """
    key_id, key = _new_key()
    Session.objects.filter(pk=session.pk).update(key_id=key_id, key_sha256=digest(key), wanted_at=Now())
    return key


def heartbeat(*, session: Session) -> None:
    """The agent is still there, though it may call no model for a while. Refused once the session has ended."""
    expires = Now() + timedelta(seconds=session.ttl_seconds)
    kept = Session.objects.filter(pk=session.pk, rollout__state=State.RUNNING.value).update(
        expires_at=expires, last_seen_at=Now()
    )
    if not kept:
        raise ended(Rollout.objects.get(pk=session.pk))


def heartbeat_seconds(session: Session) -> float:
    """How often its agent should give a sign of life while it calls no model."""
    return min(session.ttl_seconds / 3, _LONGEST_HEARTBEAT_SECONDS)


def base_urls() -> dict[str, str]:
    """Where agents' clients find the gateway, by the API that they speak."""
    root = settings.GATEWAY_URL.rstrip("/")
    return {"openai": f"{root}/v1", "anthropic": root, "google": root}


def cancel_session(*, session: Session) -> int:
    """As any rollout is cancelled: its calls are refused within a second. 1 when it was still open."""
    return cancel_rollouts(project=session.project, rollout_id=session.pk)


def ended(rollout: Rollout) -> Conflict:
    """What is said to whoever wants something of a session that is over."""
    return Conflict(f"The session has ended: {why_ended(rollout)}.")


def why_ended(rollout: Rollout) -> str:
    """In a few words, for whoever still uses it."""
    detail = f" ({rollout.termination_detail})" if rollout.termination_detail else ""
    return f"{rollout.termination_cause or rollout.state}{detail}"


def _run_of(project: Project, run: str, policy: str) -> Run:
    if bool(run) == bool(policy):
        raise Refused("Name the run, or the policy.", [FieldError("/run", "Name either `run` or `policy`.")])
    runs = Run.objects.filter(project=project).order_by("-id")
    if run:
        found = runs.filter(_id_or_name(run)).first()
        if found is None:
            raise Refused.field("/run", f"There is no run {run!r} in project {project.name}.")
        return found
    # Held until the run exists, so that two sessions at once do not open two.
    known = Policy.objects.select_for_update(no_key=True).filter(project=project, name=policy).first()
    found = runs.filter(name=_RUN_NAME, policy=known, cancelled_at=None).first() if known else None
    return found or create_run(project=project, name=_RUN_NAME, policy=policy)


def _id_or_name(value: str) -> Q:
    try:
        return Q(id=UUID(value))
    except ValueError:
        return Q(name=value)


def _submit(run: Run, task: TaskChoice | None, metadata: Mapping[str, Any]) -> Rollout:
    if task is not None:
        request = GroupRequest(n=1, **task._asdict())
    else:
        environment = _external_environment(run.project)
        request = GroupRequest(n=1, environment=environment.name, payload={"metadata": dict(metadata)})
    try:
        [group] = submit_groups(run=run, groups=[request])
    except Refused as refused:
        refused.errors = [FieldError(e.pointer.replace("/groups/0", "/task"), e.detail) for e in refused.errors]
        raise
    return Rollout.objects.get(group=group)


def _external_environment(project: Project) -> Environment:
    """Made with the first session that has no task of its own."""
    newest = Environment.objects.filter(project=project, name=EXTERNAL).order_by("-version").first()
    if newest is not None and newest.handler != EXTERNAL:
        raise Refused.field("/task", f"Name a task: the project's own environment {EXTERNAL!r} is not the one for sessions.")
    return newest or create_environment(
        project=project, name=EXTERNAL, handler=EXTERNAL, config={}, description="Sessions without a task of their own"
    )


def _some_gateway() -> WorkerProcess:
    """The session's holder on paper, until its first call shows which process serves it."""
    live = WorkerProcess.objects.filter(stage=GATEWAY, stopped_at=None, lost_at=None, draining_since=None)
    holder = live.filter(lease_expires_at__gt=Now()).order_by("?").first()
    if holder is None:
        raise Unavailable("No gateway runs that could serve the session. Start one with `prorl gateway`.")
    return holder


def _begin(rollout: Rollout, holder: WorkerProcess) -> Rollout:
    """From QUEUED to RUNNING on the usual way, with nothing to wait for in between."""
    held = {"lease_owner_id": holder.id}
    begun = {**held, "node": holder.node}
    note = {"session": True}
    ids = [rollout.id]
    steps = (
        move(ids, to=State.INITIALIZING, guard=Guard([State.QUEUED]), new_attempt=True, values=begun, data=note),
        move(ids, to=State.READY, guard=Guard([State.INITIALIZING]), data=note),
        move(ids, to=State.RUNNING, guard=Guard([State.READY]), values=held, data=note),
    )
    assert all(steps)  # noqa: S101 - nobody else has seen it yet
    rollout.refresh_from_db()
    return rollout


def _new_key() -> tuple[str, str]:
    """Its public part and the whole. 32 random bytes, so one fast hash protects it."""
    key_id = secrets.token_hex(6)
    return key_id, f"{KEY_PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"

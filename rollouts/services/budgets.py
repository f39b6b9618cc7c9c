"""Admission: a submission counts against the limits of its project and run, or is refused; and limits change.

What counts is decided on the rows of the project and the run, which are locked in this order until the submission is stored.
So any number of submissions at once stay within the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from django.db import connection, transaction
from pydantic import ValidationError

from rollouts.lifecycle import ACTIVE, Limit
from rollouts.models import Project, Rollout, Run
from rollouts.run_settings import LimitSettings

from .errors import BudgetExhausted, Conflict, FieldError, LimitReached, Refused, TooManyQueued
from .usage import live_use

OwnerT = TypeVar("OwnerT", Project, Run)

_RATE_SECONDS = 60
_WAIT_SECONDS = 30  # when nothing has finished lately
_LONGEST_WAIT_SECONDS = 300

# How many of the newest finished rollouts are a project's or run's, and how long ago the first of them finished. Reads a
# bounded number of rows in the order of an index.
_RECENT = """
SELECT count(*), EXTRACT(EPOCH FROM now() - min(finished_at)) FROM (
    SELECT project_id, run_id, finished_at FROM rollouts_rollout WHERE finished_xid IS NOT NULL
    ORDER BY finished_xid DESC, id DESC LIMIT 1000
) newest WHERE {column} = %s AND finished_at > now() - make_interval(secs => %s)
"""


def admit(*, run: Run, n: int) -> None:
    """Count `n` more rollouts, or refuse. To be called last in the transaction that stores them: its locks last till then."""
    project = _counted(Project, run.project_id, n)
    _check(project, n)
    _check(_counted(Run, run.pk, n), n)


def admit_in_flight(*, run: Run) -> None:
    """Refuse when what has begun goes beyond `max_in_flight`. For what begins without the dispatcher, after `admit`."""
    owners: list[Project | Run] = [Project.objects.get(pk=run.project_id), Run.objects.get(pk=run.pk)]
    for owner in owners:
        mine = Rollout.objects.filter(run=owner) if isinstance(owner, Run) else Rollout.objects.filter(project=owner)
        begun = mine.filter(state__in=[state.value for state in ACTIVE]).count()
        if owner.max_in_flight is not None and begun > owner.max_in_flight:
            raise TooManyQueued(
                f"{_name(owner)} has {begun - 1} rollouts in flight and max_in_flight = {owner.max_in_flight}. Repeat later.",
                _reached(owner, Limit.MAX_IN_FLIGHT, 1, begun - 1),
                _seconds_until_room(owner, 1),
            )


def refuse_early(*, run: Run, n: int) -> None:
    """Refuse what has no chance before any work is done for it. `admit` decides."""
    current = Run.objects.select_related("project").get(pk=run.pk)
    for owner in (current.project, current):
        owner.used_rollouts += n
        _check(owner, n)


def change_limits(*, owner: Project | Run, limits: Mapping[str, int | None]) -> None:
    """Set the named limits; None lifts one. A budget that has room again takes submissions again."""
    checked = check_limits(limits).model_dump(exclude_unset=True)
    with transaction.atomic():
        current = type(owner).objects.select_for_update(no_key=True).get(pk=owner.pk)
        for name, value in checked.items():
            setattr(current, name, value)
        changed = list(checked)
        if current.exhausted_at is not None:
            reached = current.budget_reached(live_use(current))
            current.exhausted_at = current.exhausted_at if reached else None
            current.exhausted_by = reached.value if reached else ""
            changed += ["exhausted_at", "exhausted_by"]
        current.save(update_fields=changed)
    owner.refresh_from_db(fields=changed)


def check_limits(limits: Mapping[str, int | None]) -> LimitSettings:
    try:
        return LimitSettings.model_validate(dict(limits))
    except ValidationError as error:
        errors = [FieldError(f"/limits/{item['loc'][0]}", f"{item['msg']}; null for no limit.") for item in error.errors()]
        raise Refused("Some limits do not make sense.", errors) from error


def _counted(model: type[OwnerT], pk: object, n: int) -> OwnerT:
    """The row as it is after counting, in one statement that also locks it."""
    table = model._meta.db_table
    statement = f"UPDATE {table} SET used_rollouts = used_rollouts + %s WHERE id = %s RETURNING *"  # noqa: S608
    [row] = model.objects.raw(statement, [n, pk])
    return row


def _check(owner: Project | Run, n: int) -> None:
    """Refuse when `n` rollouts, which `owner` has counted already, are too many."""
    if isinstance(owner, Run) and owner.cancelled_at is not None:
        raise Conflict(f"Run {owner.name} was cancelled. Create another one.")
    spent = Limit(owner.exhausted_by) if owner.exhausted_by else owner.budget_reached()
    if spent is not None:
        raise _exhausted(owner, spent, n, used=owner.use[spent] + live_use(owner).get(spent, 0))
    if owner.max_rollouts is not None and owner.used_rollouts > owner.max_rollouts:
        raise _exhausted(owner, Limit.MAX_ROLLOUTS, n, used=owner.used_rollouts - n)
    if owner.max_queued is not None and owner.use[Limit.MAX_QUEUED] > owner.max_queued:
        raise _too_many_queued(owner, n, owner.max_queued)


def _exhausted(owner: Project | Run, limit: Limit, n: int, *, used: float) -> BudgetExhausted:
    reached = _reached(owner, limit, n, used)
    if limit is Limit.MAX_ROLLOUTS:
        fact = f"{_name(owner)} has had {used:.0f} rollouts of {limit.value} = {reached.maximum}; {n} more do not fit."
    else:
        fact = f"{_name(owner)} has used up {limit.value} = {reached.maximum}."
    if isinstance(owner, Run):
        return BudgetExhausted(f"{fact} Raise the run's {limit.value}, or create another run.", reached)
    return BudgetExhausted(f"{fact} Ask an administrator to raise the project's {limit.value}.", reached)


def _too_many_queued(owner: Project | Run, n: int, maximum: int) -> Refused:
    if n > maximum:
        return Refused.field("/groups", f"Asks for {n} rollouts, {_name(owner)} has max_queued = {maximum}. Submit in parts.")
    waiting = owner.used_rollouts - owner.finished_rollouts - n
    return TooManyQueued(
        f"{_name(owner)} has {waiting} unfinished rollouts and max_queued = {maximum}; {n} more do not fit. Repeat later.",
        _reached(owner, Limit.MAX_QUEUED, n, waiting),
        _seconds_until_room(owner, waiting + n - maximum),
    )


def _reached(owner: Project | Run, limit: Limit, n: int, used: float) -> LimitReached:
    scope = "run" if isinstance(owner, Run) else "project"
    return LimitReached(scope, limit.value, owner.maximum(limit) or 0, round(used, 1), n)


def _name(owner: Project | Run) -> str:
    return f"{'Run' if isinstance(owner, Run) else 'Project'} {owner.name}"


def _seconds_until_room(owner: Project | Run, rollouts: int) -> int:
    """How long `rollouts` of this owner take to finish, as fast as they did in the last minute."""
    column = "run_id" if isinstance(owner, Run) else "project_id"
    with connection.cursor() as cursor:
        cursor.execute(_RECENT.format(column=column), [owner.pk, _RATE_SECONDS])
        finished, since = cursor.fetchone()
    if not finished:
        return _WAIT_SECONDS
    seconds: int = math.ceil(rollouts * float(since) / finished)
    return min(max(seconds, 1), _LONGEST_WAIT_SECONDS)

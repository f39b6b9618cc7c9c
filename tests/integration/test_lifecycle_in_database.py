"""The database keeps the same machine as `rollouts.lifecycle`."""

from __future__ import annotations

import importlib

import pytest
from django.db import IntegrityError, connection, transaction

from rollouts.lifecycle import REPAIRS, TERMINAL, TRANSITIONS, Blame, Cause, Phase, State, Termination, final_state
from rollouts.models import RolloutEvent
from rollouts.services.transition import Guard, move
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db

ALL_PAIRS = [(old, new) for old in State for new in State if old is not new]


def test_the_migration_repeats_the_lifecycle():
    migration = importlib.import_module("rollouts.migrations.0002_transition_trigger")
    for repeated, original in [(migration.MOVES, TRANSITIONS), (migration.REPAIRS, REPAIRS)]:
        assert {State(old): {State(new) for new in news} for old, news in repeated.items()} == {
            old: set(news) for old, news in original.items() if news
        }


@pytest.mark.parametrize(("old", "new"), ALL_PAIRS, ids=lambda state: state.value)
def test_only_listed_moves_are_possible(domain: Domain, old: State, new: State):
    rollout = domain.rollout_in(old)
    values = {"termination_cause": "completed"} if new in TERMINAL else {}
    if new in (State.INITIALIZING, State.RUNNING):
        values["lease_owner_id"] = domain.worker().id
    if new in TRANSITIONS[old]:
        assert move([rollout.id], to=new, guard=Guard([old]), values=values, new_attempt=new is State.INITIALIZING)
    else:
        with pytest.raises(IntegrityError, match=f"cannot move from {old.value} to {new.value}"), transaction.atomic():
            move([rollout.id], to=new, guard=Guard([old]), values=values)
    rollout.refresh_from_db()
    assert rollout.state == (new if new in TRANSITIONS[old] else old)


def test_a_move_writes_its_event_in_the_same_statement(domain: Domain):
    rollout = domain.rollout_in(State.READY)
    worker = domain.worker()
    move([rollout.id], to=State.RUNNING, guard=Guard([State.READY]), values={"lease_owner_id": worker.id}, data={"node": "n"})
    event = RolloutEvent.objects.filter(rollout=rollout).latest("id")
    assert (event.from_state, event.to_state, event.attempt, event.data) == ("ready", "running", 1, {"node": "n"})


@pytest.mark.parametrize(
    "guard",
    [
        Guard([State.QUEUED]),
        Guard([State.RUNNING], attempt=2),
        Guard([State.RUNNING], attempt=1, owner=Domain.NOBODY),
        Guard([State.RUNNING], unheld=True),
    ],
    ids=["other state", "other attempt", "other owner", "held"],
)
def test_a_guard_that_does_not_hold_changes_nothing(domain: Domain, guard: Guard):
    rollout = domain.rollout_in(State.RUNNING)
    events = RolloutEvent.objects.count()
    assert move([rollout.id], to=State.QUEUED, guard=guard) == []
    rollout.refresh_from_db()
    assert rollout.state == State.RUNNING
    assert RolloutEvent.objects.count() == events


@pytest.mark.parametrize(
    ("assignment", "constraint"),
    [
        ("lease_owner_id = NULL", "rollout_lease_matches_state"),
        ("finished_at = now()", "rollout_finished_iff_terminal"),
        ("attempt = 0", "cannot follow"),
        ("attempt = 3", "cannot follow"),
        ("termination_blame = 'infrastructure', reward = 0", "rollout_infrastructure_has_no_reward"),
        ("termination_blame = 'infrastructure', trainable = true", "rollout_infrastructure_has_no_reward"),
    ],
)
def test_invariants_are_constraints(domain: Domain, assignment: str, constraint: str):
    rollout = domain.rollout_in(State.RUNNING)
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE rollouts_rollout SET {assignment} WHERE id = %s", [rollout.id])  # noqa: S608


def test_every_cause_leads_to_a_terminal_state_and_infrastructure_never_succeeds():
    for cause in Cause:
        termination = Termination(Phase.RUN, cause)
        assert final_state(termination) in TERMINAL
        if termination.blame is Blame.INFRASTRUCTURE:
            assert final_state(termination) is not State.SUCCEEDED

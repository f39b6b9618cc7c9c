"""Which gateway process serves a session, as the database decides it."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest
from django.utils import timezone

from rollouts.engine.records import TurnRecord
from rollouts.lifecycle import GATEWAY
from rollouts.llm.client import ModelClient
from rollouts.llm.types import ModelCallRecord
from rollouts.models import LLMServer, ModelCall, Rollout, Session, WorkerProcess
from rollouts.services.claim import Claim
from rollouts.services.lease import deregister_worker, register_worker, renew
from rollouts.services.progress import TurnWrite, record_turns
from rollouts.services.reap import reap
from rollouts.services.retention import prune
from rollouts.services.session_holding import (
    find_session,
    free_sessions,
    hold_session,
    note_calls,
    take_session,
    wanted_sessions,
    why_closed,
)
from rollouts.services.sessions import Opened, cancel_session, new_key, open_session
from rollouts.worker.database import Database
from rollouts.worker.fleet import FleetView
from rollouts.worker.gateway_sessions import GatewaySessions
from tests.integration.domain import Domain


def start_gateway() -> UUID:
    return register_worker(node="test-node", stage=GATEWAY, pid=1, concurrency=0)


@pytest.fixture
def first(db: None) -> UUID:
    return start_gateway()


@pytest.fixture
def second(first: UUID) -> UUID:
    return start_gateway()


@pytest.fixture
def opened(domain: Domain, first: UUID) -> Opened:
    return open_session(project=domain.project, opened_by="a test", policy="tiny")


def holder() -> UUID | None:
    return Rollout.objects.get().lease_owner_id


def claim_by(owner: UUID, opened: Opened) -> Claim:
    held = hold_session(rollout_id=opened.session.pk, owner=owner, node="test-node")
    assert held is not None
    return held.claim


def call(claim: Claim, turn: int = 0) -> bool:
    record = ModelCallRecord(
        turn=turn,
        segment=0,
        context_ids=[1],
        sampled_ids=[2],
        logprobs=[-0.1],
        text="x",
        finish_reason="stop",
        prompt_tokens=1,
        policy="tiny",
        policy_version=0,
        server_id="",
        latency=0.1,
    )
    [stored] = record_turns([TurnWrite(claim, TurnRecord(turn, [], record))])
    return stored


def fall_silent(worker: UUID) -> None:
    """For less than a lease: nobody calls it lost yet."""
    WorkerProcess.objects.filter(id=worker).update(lease_expires_at=timezone.now() + timedelta(seconds=20))


def test_a_new_session_goes_to_whoever_gets_the_first_call(opened: Opened, second: UUID) -> None:
    assert take_session(rollout_id=opened.session.pk, owner=second)
    assert holder() == second


def test_one_that_is_served_has_to_be_given_away(opened: Opened, first: UUID, second: UUID) -> None:
    id_ = opened.session.pk
    assert take_session(rollout_id=id_, owner=first)
    assert take_session(rollout_id=id_, owner=first)  # as often as it likes
    assert wanted_sessions(owner=first) == []
    assert not take_session(rollout_id=id_, owner=second)
    assert wanted_sessions(owner=first) == [id_]
    free_sessions(rollout_ids=[id_], owner=first)
    assert wanted_sessions(owner=first) == []
    assert take_session(rollout_id=id_, owner=second)
    assert holder() == second


def test_only_the_holder_gives_away(opened: Opened, first: UUID, second: UUID) -> None:
    take_session(rollout_id=opened.session.pk, owner=first)
    free_sessions(rollout_ids=[opened.session.pk], owner=second)
    assert not take_session(rollout_id=opened.session.pk, owner=second)


@pytest.mark.parametrize("how", ["silent", "lost", "stopped"])
def test_whoever_is_gone_is_not_waited_for(opened: Opened, first: UUID, second: UUID, how: str) -> None:
    take_session(rollout_id=opened.session.pk, owner=first)
    if how == "silent":
        fall_silent(first)
    elif how == "stopped":
        deregister_worker(worker_id=first)
    else:
        WorkerProcess.objects.filter(id=first).update(lost_at=timezone.now())
    assert take_session(rollout_id=opened.session.pk, owner=second)


def test_a_process_that_is_lost_takes_nothing(opened: Opened, first: UUID) -> None:
    WorkerProcess.objects.filter(id=first).update(lost_at=timezone.now())
    assert not take_session(rollout_id=opened.session.pk, owner=first)


def test_from_a_process_that_is_lost_nothing_is_stored(opened: Opened, first: UUID) -> None:
    """Though nobody has taken its session: its server may have been given new weights under a call of it."""
    claim = claim_by(first, opened)
    assert call(claim)
    WorkerProcess.objects.filter(id=first).update(lost_at=timezone.now())
    assert not call(claim, turn=1)
    assert ModelCall.objects.count() == 1


def test_what_the_last_holder_still_writes_changes_nothing(opened: Opened, first: UUID, second: UUID) -> None:
    claim = claim_by(first, opened)
    assert call(claim)
    fall_silent(first)
    other = claim_by(second, opened)
    assert not call(claim, turn=1)
    assert call(other, turn=1)
    assert list(ModelCall.objects.values_list("turn", flat=True)) == [0, 1]


def test_a_held_session_has_a_server_and_one_given_away_keeps_none(opened: Opened, first: UUID, domain: Domain) -> None:
    claim = claim_by(first, opened)
    assert claim.server is not None
    assert claim.server.server_id == str(domain.server.id)
    free_sessions(rollout_ids=[opened.session.pk], owner=first)
    assert Rollout.objects.get().llm_server_id is None


def test_a_session_waits_without_a_server_when_none_has_room(opened: Opened, first: UUID, domain: Domain) -> None:
    LLMServer.objects.update(health="dead")
    assert claim_by(first, opened).server is None


def test_calls_renew_the_time_to_live(opened: Opened, first: UUID, second: UUID) -> None:
    id_ = opened.session.pk
    take_session(rollout_id=id_, owner=first)
    soon = timezone.now() + timedelta(seconds=1)
    Session.objects.update(expires_at=soon)
    note_calls(rollout_ids=[id_], owner=second)
    assert Session.objects.get().expires_at == soon
    note_calls(rollout_ids=[id_], owner=first)
    assert Session.objects.get().expires_at > soon
    assert Session.objects.get().last_call_at is not None


def test_a_cancelled_session_is_given_to_nobody_and_ended_by_the_rescuer(opened: Opened, first: UUID, second: UUID) -> None:
    id_ = opened.session.pk
    assert cancel_session(session=opened.session) == 1
    assert not take_session(rollout_id=id_, owner=second)
    assert renew(worker_id=first).held[id_, 1].cancel_asked
    assert why_closed(rollout_id=id_) == "the session is being cancelled"
    Rollout.objects.update(cancel_requested_at=timezone.now() - timedelta(minutes=1))
    reap()
    assert Rollout.objects.get().state == "cancelled"
    found = find_session(key=opened.key)
    assert found is not None
    assert "cancelled" in found.ended


def test_records_of_gone_processes_stay_while_they_hold_sessions(opened: Opened, first: UUID) -> None:
    WorkerProcess.objects.update(lost_at=timezone.now() - timedelta(days=400))
    prune()
    assert holder() == first


@pytest.mark.django_db(transaction=True)
async def test_a_key_that_was_replaced_opens_no_busy_session_either() -> None:
    database, client = Database(patience=5), ModelClient()
    domain = await database.call(Domain)
    owner = await database.call(start_gateway)
    view = FleetView(database, lambda: owner)
    sessions = GatewaySessions(database=database, client=client, fleet=view, node="test-node", owner=lambda: owner)
    try:
        opened = await database.call(open_session, project=domain.project, opened_by="a test", policy="tiny")
        assert await sessions.find(opened.key) is not None
        key = await database.call(new_key, session=opened.session)
        await sessions.find(opened.key)  # it was called just now, and is not given away yet
        beat = await database.call(renew, worker_id=owner)
        await sessions.look_after(beat.held, sessions.known())
        assert await sessions.find(opened.key) is None
        assert await sessions.find(key) is not None
    finally:
        await sessions.drop_all()
        await client.close()
        database.close()


@pytest.mark.parametrize("key", ["", "prs_", "prs_a_b", "prl_0_1", "prs_\x00_a", "pré_a_b", "prs_a"])
def test_other_keys_lead_nowhere(opened: Opened, key: str) -> None:
    assert find_session(key=key) is None

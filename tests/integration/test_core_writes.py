"""What rollouts write at the edges of what fits."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from rollouts.engine.errors import Failure
from rollouts.engine.records import ToolCallRecord, TurnRecord
from rollouts.lifecycle import Cause, Phase, Stage, State, Termination
from rollouts.models import Rollout, Run, ToolCall
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.delivery_events import _runs_finished
from rollouts.services.finish import fail
from rollouts.services.progress import TurnWrite, record_turns
from rollouts.services.reap import reap
from rollouts.services.servers import remove_server
from tests.integration.domain import Domain


def test_a_tool_may_cut_more_bytes_than_fit_into_32_bits(domain: Domain):
    claim = domain.claim(domain.rollout_in(State.READY), Stage.RUN)
    call = ToolCallRecord(0, 0, "bash", {}, "cat /dev/zero", "", time.time(), 30.0, truncated_bytes=3 * 2**30)
    assert record_turns([TurnWrite(claim, TurnRecord(0, tool_calls=[call]))]) == [True]
    assert ToolCall.objects.get().truncated_bytes == 3 * 2**30


def test_a_backoff_is_measured_by_the_databases_clock(domain: Domain, monkeypatch: pytest.MonkeyPatch):
    """That of the worker's host is ten minutes fast."""
    claim = domain.claim(domain.submit()[0], Stage.INIT)
    now = timezone.now
    with monkeypatch.context() as patch:
        patch.setattr(timezone, "now", lambda: now() + timedelta(minutes=10))
        fail(claim=claim, failure=Failure(Termination(Phase.INIT, Cause.SANDBOX_ERROR), retryable=True, traceback=""))
    until = Rollout.objects.get().not_before
    assert isinstance(until, datetime)
    assert until < now() + timedelta(minutes=5)


def test_a_node_without_run_workers_is_given_up_by_the_databases_clock(domain: Domain, monkeypatch: pytest.MonkeyPatch):
    domain.rollout_in(State.READY)
    now = timezone.now
    monkeypatch.setattr(timezone, "now", lambda: now() + timedelta(minutes=10))
    assert reap() == 0


def test_what_cannot_be_judged_keeps_the_rescuer_from_no_other(domain: Domain):
    """The settings of a run that this version cannot read (any more)."""
    broken, lost = domain.rollout_in(State.RUNNING), domain.submit(run=domain.new_run())[0]
    domain.claim(lost, Stage.INIT)
    Run.objects.filter(id=broken.run_id).update(settings={"timeouts": "none"})
    for worker_of in (broken.id, lost.id):
        owner = Rollout.objects.get(id=worker_of).lease_owner
        assert owner is not None
        owner.lost_at = timezone.now()
        owner.save()
    reap()
    assert Rollout.objects.get(id=lost.id).state == "queued"


def test_removing_a_server_does_not_touch_the_rollouts_it_has_served(domain: Domain):
    rollout = domain.rollout_in(State.SUCCEEDED)
    assert rollout.llm_server_id == domain.server.id
    with CaptureQueriesContext(connection) as queries:
        remove_server(server=domain.server)
    assert not [query for query in queries if "rollouts_rollout" in query["sql"]]
    assert Rollout.objects.select_related("llm_server").get().llm_server is None


def test_whether_a_run_has_ended_is_answered_by_an_index(domain: Domain):
    """However many of its rollouts have finished."""
    domain.submit(n=100)
    cancel_rollouts(project=domain.run.project)
    domain.submit()
    domain.submit(n=100, run=domain.new_run())  # else all that is unfinished is as cheap to read
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE rollouts_rollout")
    with CaptureQueriesContext(connection) as queries:
        _runs_finished({domain.run.id})
    [asked] = [query["sql"] for query in queries if "rollouts_rollout" in query["sql"]]
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL random_page_cost = 0")  # however many pages earlier tests have left behind
        cursor.execute(f"EXPLAIN {asked}")
        plan = " ".join(row[0] for row in cursor.fetchall())
    assert "rollout_run_by_state" in plan
    assert "Filter" not in plan


def test_an_evaluation_that_rebuilds_its_sandbox_is_not_called_stuck(domain: Domain):
    """INIT's 120 s may pass before EVAL's 120 s begin."""
    rollout = domain.rollout_in(State.EVALUATING)
    Rollout.objects.update(state_changed_at=timezone.now() - timedelta(seconds=230))
    reap()
    assert not rollout.events.filter(kind="stuck").exists()
    Rollout.objects.update(state_changed_at=timezone.now() - timedelta(seconds=280))
    reap()
    assert rollout.events.filter(kind="stuck").exists()

"""INIT workers find out whether their node can start sandboxes before they take anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from django.conf import settings

from rollouts.lifecycle import Stage, State
from rollouts.models import Environment, Node, Task
from rollouts.worker.process import WorkerProcess
from sandboxes.options import NodeOptions
from sandboxes.protocol import Limits
from tests.integration.domain import Domain
from tests.integration.test_core_races import domain, until  # noqa: F401 - a fixture

pytestmark = pytest.mark.django_db(transaction=True)


@contextlib.contextmanager
def init_worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess(stage=Stage.INIT, node="test-node", concurrency=1)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def test_says_why_none_can_be_started_and_takes_nothing(domain: Domain, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setattr(settings, "SANDBOX_BACKEND", "apptainer")
    monkeypatch.setattr(settings, "SANDBOX_OPTIONS", NodeOptions(apptainer="/nonexistent/apptainer"))
    rollout = domain.submit()[0]
    domain.hint(rollout)
    with init_worker() as worker:
        worker.take([rollout.id])
        node = Node.objects.get()
        assert (node.sandbox_backend, node.sandbox_facts) == ("apptainer", {})
        assert "/nonexistent/apptainer" in node.sandbox_problem
        rollout.refresh_from_db()
        assert rollout.state == State.QUEUED


def test_says_how_limits_are_held(domain: Domain):  # noqa: F811
    with init_worker():
        node = Node.objects.get()
        assert (node.sandbox_backend, node.sandbox_problem) == ("bubblewrap", "")
        assert {field.name for field in fields(Limits)} <= set(node.sandbox_facts)


def test_a_start_that_others_would_fail_like_ends_the_taking(
    domain: Domain,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    Environment.objects.update(handler="math", config={"python_packages": []})
    Task.objects.update(payload={"question": "1 + 1", "expected_answer": "2"})
    (tmp_path / "file").touch()
    monkeypatch.setattr(settings, "SANDBOX_DIR", tmp_path / "file/sandboxes")
    first, second = domain.submit()[0], domain.submit()[0]
    domain.hint(first, second)
    with init_worker() as worker:
        assert Node.objects.get().sandbox_problem == ""
        worker.take([first.id])
        until(lambda: "no sandbox can be started in" in Node.objects.get().sandbox_problem)
        worker.take([second.id])
        first.refresh_from_db()
        second.refresh_from_db()
        assert (first.state, first.infra_retries) == (State.QUEUED, 1)
        assert (second.state, second.attempt) == (State.QUEUED, 0)

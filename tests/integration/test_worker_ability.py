"""INIT workers find out whether their node can start sandboxes before they take anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields

import pytest
from django.conf import settings

from rollouts.lifecycle import Stage, State
from rollouts.models import Node
from rollouts.worker.process import WorkerProcess
from sandboxes.options import NodeOptions
from sandboxes.protocol import Limits
from tests.integration.domain import Domain
from tests.integration.test_core_races import domain  # noqa: F401 - a fixture

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

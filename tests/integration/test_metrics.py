"""`/metrics`: a documented contract, counters that count everything once, and who may read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.cache import cache
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from prorl_site.metrics import exposition
from rollouts import metrics
from rollouts.lifecycle import EventKind, Stage, State
from rollouts.metrics import CATALOGUE, Metric
from rollouts.models import ModelCall, Rollout, RolloutEvent, WorkerProcess
from rollouts.services.feed import BATCH
from rollouts.services.metering import count, meter
from rollouts.services.reap import reap
from sandboxes.models import Sandbox
from tests.integration.domain import Domain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


def read(metric: Metric, suffix: str = "", **labels: str) -> float | None:
    """One number of the exposition, as Prometheus would read it."""
    name = metric.name + suffix
    for family in text_string_to_metric_families(exposition().decode()):
        for sample in family.samples:
            if sample.name == name and all(sample.labels.get(label) == value for label, value in labels.items()):
                return float(sample.value)
    return None


# --- The contract ------------------------------------------------------------------------------------------------------------


def test_the_documentation_lists_exactly_what_there_is():
    rows = re.findall(r"^\| `(prorl_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    documented = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning) for name, kind, labels, meaning in rows]
    assert documented == [(m.name, m.kind.value, m.labels, m.meaning) for m in CATALOGUE]


@pytest.mark.django_db
def test_every_metric_is_there_from_the_start_with_its_type_and_meaning():
    families = {family.name: family for family in text_string_to_metric_families(exposition().decode())}
    for metric in CATALOGUE:
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind.value, metric.meaning)
    assert families == {}


def test_names_and_labels_are_ones_prometheus_takes():
    for metric in CATALOGUE:
        assert re.fullmatch(r"prorl_[a-z_]+", metric.name)
        assert (metric.kind is metrics.Kind.COUNTER) == metric.name.endswith("_total")
        assert list(metric.bounds) == sorted(set(metric.bounds))


# --- Now ---------------------------------------------------------------------------------------------------------------------


def test_what_waits_and_what_is_held(domain: Domain):
    domain.submit(3)
    running = domain.rollout_in(State.RUNNING)
    assert read(metrics.ROLLOUTS, project="alpha", state="queued") == 3
    assert read(metrics.ROLLOUTS, project="alpha", state="running") == 1
    assert read(metrics.QUEUE_DEPTH, stage="init") == 3
    assert read(metrics.QUEUE_DEPTH, stage="eval") == 0
    assert read(metrics.WORKER_HELD, node="test-node", stage="run") == 1
    assert read(metrics.WORKER_SLOTS, node="test-node", stage="run") == 8
    assert read(metrics.SERVER_IN_FLIGHT, policy="tiny") == (1 if running.llm_server_id else 0)
    assert read(metrics.SERVER_CAPACITY, policy="tiny") == 8
    assert read(metrics.SERVER_UP, policy="tiny") == 1


def test_the_age_of_the_oldest_wait(domain: Domain):
    assert read(metrics.QUEUE_OLDEST, stage="init") == 0
    rollout, _ = domain.submit(2)
    Rollout.objects.filter(id=rollout.id).update(state_changed_at=timezone.now() - timezone.timedelta(hours=1))
    assert 3500 < (read(metrics.QUEUE_OLDEST, stage="init") or 0) < 3700


def test_an_evaluation_that_a_worker_holds_does_not_wait(domain: Domain):
    domain.rollout_in(State.EVALUATING)
    held = Rollout.objects.get()
    waits = 0 if held.lease_owner_id else 1
    assert read(metrics.QUEUE_DEPTH, stage="eval") == waits


def test_a_silent_worker_is_not_counted_as_live(domain: Domain):
    worker = domain.worker(Stage.RUN)
    assert read(metrics.WORKER_PROCESSES, stage="run") == 1
    WorkerProcess.objects.filter(id=worker.id).update(lease_expires_at=timezone.now())
    assert read(metrics.WORKER_PROCESSES, stage="run") is None


# --- Since the beginning -----------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
class TestMetering:
    """Transactions are real: what is counted must have been committed, like in production."""

    @pytest.fixture
    def world(self) -> Domain:
        return Domain()

    def test_a_finished_rollout_is_counted_once(self, world: Domain):
        world.rollout_in(State.SUCCEEDED)
        meter()
        meter()
        assert read(metrics.FINISHED, project="alpha", state="succeeded", cause="completed") == 1
        assert read(metrics.QUEUE_SECONDS, "_count") == 1
        assert read(metrics.FEED_BEHIND, consumer="metering") == 0

    def test_counters_go_on_from_where_they_were(self, world: Domain):
        for expected in (1, 2):
            world.rollout_in(State.SUCCEEDED)
            meter()
            assert read(metrics.FINISHED, state="succeeded") == expected

    def test_more_than_a_batch_is_counted_in_one_go(self, world: Domain):
        rollouts = world.submit(BATCH + 1)
        Rollout.objects.filter(id__in=[r.id for r in rollouts]).update(
            state="cancelled",
            termination_cause="cancelled",
            termination_blame="caller",
            finished_at=timezone.now(),
            finished_xid=5,
        )
        meter()
        assert read(metrics.FINISHED, state="cancelled", blame="caller") == BATCH + 1

    def test_model_calls_of_all_attempts_tools_and_sandboxes(self, world: Domain):
        rollout = world.rollout_in(State.EVALUATING)
        for attempt, latency in ((1, 0.05), (2, 0.3)):
            ModelCall.objects.create(
                rollout=rollout,
                attempt=attempt,
                turn=0,
                context_ids=[1, 2, 3],
                sampled_ids=[4, 5],
                finish_reason="stop",
                prompt_tokens=3,
                policy="tiny",
                policy_version=0,
                latency=latency,
            )
        begun = timezone.now()
        for name, ready in (("a", begun + timezone.timedelta(seconds=0.02)), ("b", None)):
            Sandbox.objects.create(
                name=name, rollout_id=rollout.id, attempt=1, node="n", backend="bubblewrap", created_at=begun, ready_at=ready
            )
        _end(rollout)
        meter()
        where = {"project": "alpha", "policy": "tiny"}
        assert read(metrics.MODEL_TOKENS, kind="prompt", **where) == 6
        assert read(metrics.MODEL_TOKENS, kind="sampled", **where) == 4
        # A value at a bound belongs to its bucket.
        assert read(metrics.MODEL_SECONDS, "_bucket", le="0.025", **where) == 0
        assert read(metrics.MODEL_SECONDS, "_bucket", le="0.05", **where) == 1
        assert read(metrics.MODEL_SECONDS, "_bucket", le="0.5", **where) == 2
        assert read(metrics.MODEL_SECONDS, "_bucket", le="+Inf", **where) == 2
        assert read(metrics.MODEL_SECONDS, "_sum", **where) == pytest.approx(0.35)
        assert read(metrics.SANDBOX_STARTS, backend="bubblewrap", outcome="ready") == 1
        assert read(metrics.SANDBOX_STARTS, backend="bubblewrap", outcome="failed") == 1
        assert read(metrics.SANDBOX_SECONDS, "_count") == 1

    def test_what_was_repeated_and_why(self, world: Domain):
        rollout = world.rollout_in(State.EVALUATING)
        for data in ({"stage": "run", "cause": "worker_lost"}, {"stage": "run", "reason": "the worker is stopping"}):
            RolloutEvent.objects.create(rollout=rollout, attempt=1, kind=EventKind.REQUEUED.value, data=data)
        _end(rollout)
        meter()
        assert read(metrics.GIVEN_UP, stage="run", cause="worker_lost") == 1
        assert read(metrics.GIVEN_UP, stage="run", cause="handed_back") == 1

    def test_an_event_that_is_no_rollouts_is_counted_at_once(self):
        count(metrics.WORKERS_LOST, {"stage": "run"}, 2)
        count(metrics.WORKERS_LOST, {"stage": "run"})
        assert read(metrics.WORKERS_LOST, stage="run") == 3


def test_an_expired_lease_is_counted_by_its_stage(domain: Domain):
    worker = domain.worker(Stage.RUN)
    WorkerProcess.objects.filter(id=worker.id).update(lease_expires_at=timezone.now())
    reap()
    reap()
    assert read(metrics.WORKERS_LOST, stage="run") == 1


def _end(rollout: Rollout) -> None:
    Rollout.objects.filter(id=rollout.id).update(
        state="succeeded", lease_owner=None, termination_cause="completed", finished_at=timezone.now(), finished_xid=5
    )


# --- Who may read ------------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
class TestAccess:
    def test_this_host_may_and_others_may_not(self, client: Client):
        assert client.get("/metrics").status_code == 200
        assert client.get("/metrics", REMOTE_ADDR="::1").status_code == 200
        for stranger in ({"REMOTE_ADDR": "10.1.2.3"}, {"REMOTE_ADDR": ""}, {"HTTP_X_FORWARDED_FOR": "127.0.0.1"}):
            answer = client.get("/metrics", **stranger)
            assert answer.status_code == 401
            assert "PRORL_METRICS_TOKEN" in answer.content.decode()

    def test_a_token_is_asked_of_everyone(self, client: Client, settings):
        settings.METRICS_TOKEN = "scrape-me"
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", HTTP_AUTHORIZATION="Bearer wrong").status_code == 401
        assert client.get("/metrics", HTTP_AUTHORIZATION="Basic scrape-me").status_code == 401
        assert client.get("/metrics", REMOTE_ADDR="10.1.2.3", HTTP_AUTHORIZATION="Bearer scrape-me").status_code == 200

    def test_they_can_be_made_public(self, client: Client, settings):
        settings.METRICS_PUBLIC = True
        answer = client.get("/metrics", REMOTE_ADDR="10.1.2.3")
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")

"""LLM servers are watched: what probes find, what workers report, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
from django.conf import LazySettings
from django.utils import timezone

from rollouts.llm.scripted.server import ScriptedServer
from rollouts.models import LLMServer, PolicyVersion
from rollouts.services.server_health import note_failed_calls, probe_due, probe_servers
from tests.integration.domain import Domain
from tests.services.model_servers import served

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def model_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    with served(server):
        yield server


@pytest.fixture
def server(domain: Domain, model_server: ScriptedServer) -> LLMServer:
    LLMServer.objects.update(url=model_server.url, model=model_server.model)
    model_server.switches.healthy = True
    model_server.switches.fail_next = 0
    return LLMServer.objects.select_related("policy").get()


@pytest.fixture
def domain(db: None) -> Domain:
    return Domain()


def probed(server: LLMServer) -> str:
    probe_servers([server])
    server.refresh_from_db()
    return server.health


def test_from_live_to_dead_and_back(server: LLMServer, model_server: ScriptedServer, settings: LazySettings) -> None:
    settings.SLOW_START_SECONDS = 3600
    assert probed(server) == "live"
    model_server.switches.healthy = False
    assert [probed(server) for _ in range(3)] == ["suspect", "suspect", "dead"]
    assert (server.failures, server.last_error) == (3, "/health answered 503")
    model_server.switches.healthy = True
    assert probed(server) == "recovering"
    assert (server.failures, server.last_error) == (0, "")
    assert probed(server) == "recovering"
    LLMServer.objects.update(health_since=timezone.now() - timedelta(seconds=settings.SLOW_START_SECONDS))
    server.refresh_from_db()
    assert probed(server) == "live"


def test_one_that_is_healthy_and_fails_every_call_does_not_come_back(server: LLMServer, model_server: ScriptedServer) -> None:
    note_failed_calls({server.id: "it answered 500"})
    server.refresh_from_db()
    assert server.health == "suspect"
    model_server.switches.status = 500
    model_server.switches.fail_next = 1
    assert probed(server) == "suspect"
    assert "sampled no token" in server.last_error
    assert probed(server) == "live"


def test_many_reports_of_one_failure_count_once(server: LLMServer) -> None:
    for _ in range(5):
        note_failed_calls({server.id: "it answered 500"})
    server.refresh_from_db()
    assert (server.health, server.failures) == ("suspect", 1)


def test_what_was_read_before_a_change_changes_nothing(server: LLMServer, model_server: ScriptedServer) -> None:
    stale = LLMServer.objects.select_related("policy").get()
    note_failed_calls({server.id: "it answered 500"})
    probe_servers([stale])  # read as live, when it was not asked for a token
    server.refresh_from_db()
    assert server.health == "suspect"


def test_its_load_is_noted(server: LLMServer) -> None:
    probed(server)
    assert server.load["running"] == 0
    assert probed(server) == "live"
    assert server.load["tokens_per_second"] == 0


@pytest.mark.parametrize("left_alone", [{"admission": "paused"}, {"admission": "asleep"}, {"hold": "wait"}])
def test_who_is_left_alone(server: LLMServer, left_alone: dict[str, str]) -> None:
    LLMServer.objects.update(last_probe_at=None, **left_alone)
    probe_due(live=True)
    assert LLMServer.objects.get().last_probe_at is None


def test_each_in_its_turn(server: LLMServer, model_server: ScriptedServer, settings: LazySettings) -> None:
    settings.PROBE_SECONDS = 60
    two_seconds_ago = timezone.now() - timedelta(seconds=2)
    LLMServer.objects.update(last_probe_at=two_seconds_ago)
    probe_due(live=True)
    assert LLMServer.objects.get().last_probe_at == two_seconds_ago
    LLMServer.objects.update(health="suspect")
    probe_due(live=True)
    assert LLMServer.objects.get().last_probe_at == two_seconds_ago
    probe_due(live=False)
    assert LLMServer.objects.get().last_probe_at != two_seconds_ago
    assert LLMServer.objects.get().health == "live"


@pytest.mark.parametrize(("of_it", "is_probed"), [("waiting", False), ("loading", False), ("live", True), ("failed", True)])
def test_an_update_keeps_probes_from_those_alone_that_are_not_done(server: LLMServer, of_it: str, is_probed: bool) -> None:
    LLMServer.objects.update(last_probe_at=None)
    PolicyVersion.objects.create(
        policy=server.policy, version=1, mode="continue", state="loading", report={str(server.pk): {"state": of_it}}
    )
    probe_due(live=True)
    assert (LLMServer.objects.get().last_probe_at is not None) == is_probed


def test_one_of_before_servers_were_asked_what_they_can_do_is_asked(server: LLMServer) -> None:
    LLMServer.objects.update(capabilities={"version": "0.10", "models": ["scripted"]}, health="suspect", last_probe_at=None)
    probe_due(live=False)
    server.refresh_from_db()
    assert (server.health, server.engine) == ("live", "vllm")
    assert {"token_ids", "logprobs", "id_prompts", "tokenize"} <= set(server.capabilities["features"])
    assert probed(server) == "live", "it calls its weights what it was told"


def test_one_that_is_restarted_and_was_never_given_weights_goes_on(server: LLMServer, model_server: ScriptedServer) -> None:
    probed(server)  # what it can do
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"}).raise_for_status()
    assert probed(server) == "live"
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == "0"

"""Announced versions on scripted model servers: what becomes of servers, holds and waiting rollouts. No worker processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.conf import LazySettings
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from rollouts.lifecycle import GATEWAY, Cause, EventKind, Stage, State
from rollouts.llm.messages import data_url
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.models import LLMServer, PolicyVersion, Rollout, RolloutEvent, WorkerProcess
from rollouts.services.announcements import give_up_silent_trainers, release_abandoned_holds
from rollouts.services.errors import Conflict, Refused
from rollouts.services.lease import register_worker
from rollouts.services.overtaken import end_gone
from rollouts.services.policies import announce_version
from rollouts.services.server_health import probe_servers
from rollouts.services.servers import register_server
from rollouts.services.sessions import open_session
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.services.weight_updates import carry_out, note_weights_in_place
from tests.integration.domain import Domain
from tests.integration.test_core_races import beside, domain, until
from tests.pictures import png
from tests.services.model_servers import served

__all__ = ["beside", "domain"]

pytestmark = pytest.mark.django_db(transaction=True)

PATH = {"kind": "path", "path": "/weights/1"}
EXTERNAL = {"kind": "external"}


class Fleet:
    """The domain's policy, served by two scripted servers instead of the domain's own."""

    def __init__(self, domain: Domain, urls: list[str]) -> None:
        self.domain = domain
        LLMServer.objects.all().delete()
        self.servers = [register_server(project=domain.project, url=url, policy="tiny", model="scripted") for url in urls]

    def announce(self, version: int = 1, source: dict[str, Any] = PATH, mode: str = "drain") -> PolicyVersion:
        return announce_version(policy=self.domain.policy, version=version, mode=mode, source=source)

    def update(self, version: int = 1, source: dict[str, Any] = PATH, mode: str = "drain") -> PolicyVersion:
        announcement = self.announce(version, source, mode)
        carry_out(self.domain.policy.pk)
        announcement.refresh_from_db()
        return announcement

    def look(self) -> list[LLMServer]:
        for server in self.servers:
            server.refresh_from_db()
        return self.servers

    @property
    def version(self) -> int:
        self.domain.policy.refresh_from_db()
        return self.domain.policy.version

    def running(self, rollout: Rollout, server: LLMServer) -> WorkerProcess:
        """Bring a rollout to RUN on a server; its worker process."""
        self.domain.claim(rollout, Stage.INIT)
        Rollout.objects.filter(id=rollout.id).update(state=State.READY.value, lease_owner=None)
        worker = self.domain.worker(Stage.RUN)
        self.domain.claim(rollout, Stage.RUN, worker)
        Rollout.objects.filter(id=rollout.id).update(llm_server=server)
        return worker


def states(announcement: PolicyVersion) -> list[str]:
    announcement.refresh_from_db()
    return sorted(entry["state"] for entry in announcement.report.values())


@pytest.fixture(scope="module")
def models() -> Iterator[list[ScriptedServer]]:
    # Offers no controls: what any server is that is not vLLM in its development mode.
    controls = ["/pause", "/collective_rpc", "/weight_info", "/v1/load_lora_adapter"]
    plain = ScriptedServer(without=[*controls, "/inference/v1/generate"])
    servers = [ScriptedServer(), ScriptedServer(), plain]
    with served(*servers):
        yield servers


@pytest.fixture
def fleet(domain: Domain, models: list[ScriptedServer]) -> Iterator[Fleet]:
    yield Fleet(domain, [server.url for server in models[:2]])
    for server in models:
        httpx.post(f"{server.url}/control", json={"fail_reload": False, "reload_seconds": 0})
        httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"})


def switch(server: LLMServer, **switches: Any) -> None:
    httpx.post(f"{server.url}/control", json=switches).raise_for_status()


def labels(fleet: Fleet) -> list[str]:
    return [httpx.get(f"{server.url}/weight_info").json()["weight_version"] for server in fleet.servers]


@pytest.mark.parametrize("mode", ["drain", "continue", "abort"])
@pytest.mark.parametrize("source", [PATH, {"kind": "lora", "name": "mine", "path": "/adapters/1"}])
def test_all_servers_load_it(fleet: Fleet, mode: str, source: dict[str, Any]):
    announcement = fleet.update(1, source, mode)
    assert (announcement.state, states(announcement)) == ("live", ["live", "live"])
    assert (fleet.version, [server.policy_version for server in fleet.look()]) == (1, [1, 1])
    assert labels(fleet) == ["1", "1"]
    for server in fleet.servers:
        assert server.hold == ""
        assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}
        assert server.model == ("mine" if source["kind"] == "lora" else "scripted")


def test_a_server_that_fails_leaves_the_pool_until_a_version_loads(fleet: Fleet):
    good, bad = fleet.servers
    switch(bad, fail_reload=True)
    announcement = fleet.update(1)
    assert (announcement.state, fleet.version) == ("live", 1)
    assert announcement.report[str(bad.pk)]["state"] == "failed"
    assert "scripted failure" in announcement.report[str(bad.pk)]["error"]
    fleet.look()
    assert (good.policy_version, good.state) == (1, "live")
    assert (bad.policy_version, bad.state, bad.hold, bad.weights_unknown) == (0, "paused", "", True)
    assert bad.last_error.startswith("version 1 was not loaded")
    switch(bad, fail_reload=False)
    assert fleet.update(2).state == "live"
    fleet.look()
    assert (bad.policy_version, bad.state, bad.weights_unknown, bad.last_error) == (2, "live", False, "")


def test_a_version_that_no_server_loads_has_failed_and_may_be_announced_again(fleet: Fleet):
    for server in fleet.servers:
        switch(server, fail_reload=True)
    announcement = fleet.update(1)
    assert (announcement.state, fleet.version, states(announcement)) == ("failed", 0, ["failed", "failed"])
    for server in fleet.servers:
        switch(server, fail_reload=False)
    assert fleet.update(1).state == "live"
    assert fleet.version == 1


def test_a_server_that_takes_too_long_has_failed(fleet: Fleet, settings: LazySettings):
    settings.WEIGHT_UPDATE_SECONDS = 0.5
    switch(fleet.servers[0], reload_seconds=30)
    announcement = fleet.update(1)
    assert (announcement.state, states(announcement)) == ("live", ["failed", "live"])
    assert httpx.get(f"{fleet.servers[0].url}/is_paused").json() == {"is_paused": False}


def test_it_waits_for_those_who_call(fleet: Fleet, beside):
    [rollout] = fleet.domain.submit()
    worker = fleet.running(rollout, fleet.servers[0])
    announcement = fleet.announce(1)
    update = beside(carry_out, fleet.domain.policy.pk)
    until(lambda: {server.hold for server in fleet.look()} == {"wait"})
    # It is asked of both: one of its agents may have moved on and still have a call in flight at the other.
    WorkerProcess.objects.filter(id=worker.id).update(quiet_servers=[fleet.servers[1].pk])
    until(lambda: states(announcement) == ["live", "waiting"])
    assert fleet.look()[0].hold == "wait"
    WorkerProcess.objects.filter(id=worker.id).update(quiet_servers=[fleet.servers[0].pk])
    update.result(20)
    assert states(announcement) == ["live", "live"]


def test_what_was_begun_before_a_crash_is_carried_out(fleet: Fleet):
    announcement = fleet.announce(1)
    PolicyVersion.objects.filter(pk=announcement.pk).update(state="loading", begun_at=timezone.now())
    LLMServer.objects.update(hold="wait")
    release_abandoned_holds()
    assert {server.hold for server in fleet.look()} == {"wait"}  # an update is under way: they are its own
    carry_out(fleet.domain.policy.pk)
    announcement.refresh_from_db()
    assert (announcement.state, {server.hold for server in fleet.look()}) == ("live", {""})


def test_a_server_that_a_crash_left_paused_goes_on(fleet: Fleet):
    server, _ = fleet.servers
    announcement = fleet.announce(1)
    PolicyVersion.objects.filter(pk=announcement.pk).update(
        state="loading", begun_at=timezone.now(), report={str(server.pk): {"state": "live"}}
    )
    LLMServer.objects.filter(pk=server.pk).update(policy_version=1, hold="wait")
    httpx.post(f"{server.url}/pause?mode=wait").raise_for_status()
    carry_out(fleet.domain.policy.pk)
    assert states(announcement) == ["live", "live"]
    assert [server.hold for server in fleet.look()] == ["", ""]
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}


def test_a_server_that_was_restarted_gets_nothing_until_it_loads_a_version(fleet: Fleet):
    [server, _] = fleet.servers
    fleet.update(1)
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"})  # as after a restart
    probe_servers(fleet.look()[:1])
    fleet.look()
    assert (server.health, server.last_error.startswith("it calls its weights 'default' and not 1")) == ("suspect", True)
    fleet.update(2)
    probe_servers(fleet.look()[:1])
    assert fleet.look()[0].health == "live"


def test_holds_of_nobody_are_released(fleet: Fleet):
    LLMServer.objects.update(hold="wait")
    release_abandoned_holds()
    assert {server.hold for server in fleet.look()} == {""}


def test_announcements_are_carried_out_in_order(fleet: Fleet):
    first, second = fleet.announce(1), fleet.announce(2)
    carry_out(fleet.domain.policy.pk)
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.state, second.state, fleet.version) == ("live", "live", 2)
    assert first.finished_at < second.finished_at


def test_the_trainer_puts_the_weights_in_place_itself(fleet: Fleet):
    announcement = fleet.update(1, EXTERNAL)
    assert (announcement.state, states(announcement)) == ("ready", ["ready", "ready"])
    assert {server.hold for server in fleet.look()} == {"wait"}
    announcement = note_weights_in_place(announcement=announcement, failed={fleet.servers[1].pk: "out of memory"})
    assert (announcement.state, states(announcement)) == ("live", ["failed", "live"])
    good, bad = fleet.look()
    assert (good.policy_version, good.hold, good.state) == (1, "", "live")
    assert (bad.policy_version, bad.hold, bad.state) == (0, "", "paused")
    assert labels(fleet)[0] == "1"
    assert note_weights_in_place(announcement=announcement, failed={}).state == "live"


def test_what_old_weights_made_of_pictures_is_forgotten(domain: Domain):
    """With a picture of the old weights vLLM's engine would end, whoever loaded the new ones."""
    shown = {"type": "image_url", "image_url": {"url": data_url(png(8, 8, (255, 0, 0)))}}
    asked = {"messages": [{"role": "user", "content": [shown]}]}
    model = ScriptedServer(pictures=True)
    with served(model):
        fleet = Fleet(domain, [model.url])
        assert fleet.servers[0].capabilities["picture_id"] == model.picture_id
        for version, source in ((1, PATH), (2, EXTERNAL)):
            httpx.post(f"{model.url}/v1/chat/completions", json=asked).raise_for_status()
            announcement = fleet.update(version, source)
            if source == EXTERNAL:
                httpx.post(f"{model.url}/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
                announcement = note_weights_in_place(announcement=announcement, failed={})
            assert states(announcement) == ["live"]
            httpx.post(f"{model.url}/v1/chat/completions", json=asked).raise_for_status()


def test_a_trainer_that_updates_sampling_servers_has_to_name_the_version(fleet: Fleet):
    announcement = fleet.update(1, EXTERNAL, "continue")
    assert {server.hold for server in fleet.look()} == {""}
    httpx.post(f"{fleet.servers[0].url}/update_weight_version", json={"new_version": "1"})
    announcement = note_weights_in_place(announcement=announcement, failed={})
    assert announcement.report[str(fleet.servers[0].pk)]["state"] == "live"
    assert "calls its weights '0'" in announcement.report[str(fleet.servers[1].pk)]["error"]


def test_a_trainer_that_is_never_done_loses_its_servers(fleet: Fleet):
    announcement = fleet.update(1, EXTERNAL)
    give_up_silent_trainers()
    assert states(announcement) == ["ready", "ready"]
    PolicyVersion.objects.update(begun_at=timezone.now() - timedelta(hours=2))
    give_up_silent_trainers()
    announcement.refresh_from_db()
    assert (announcement.state, states(announcement), fleet.version) == ("failed", ["failed", "failed"], 0)
    assert {(server.hold, server.state) for server in fleet.look()} == {("", "paused")}


def test_what_cannot_be_announced(fleet: Fleet, models: list[ScriptedServer]):
    for source, pointer in (
        ({"kind": "ftp"}, "/source"),
        ({"kind": "path"}, "/source/path"),
        ({"kind": "external", "path": "x"}, "/source/path"),
    ):
        with pytest.raises(Refused) as refused:
            fleet.announce(1, source)
        assert [error.pointer for error in refused.value.errors] == [pointer]
    first = fleet.announce(3)
    assert fleet.announce(3) == first
    with pytest.raises(Conflict):
        fleet.announce(3, EXTERNAL)
    with pytest.raises(Refused, match="Version 3 has been announced"):
        fleet.announce(2)
    register_server(project=fleet.domain.project, url=models[2].url, policy="tiny")
    with pytest.raises(Refused, match="did not offer reload_weights"):
        fleet.announce(4)
    LLMServer.objects.all().delete()
    with pytest.raises(Conflict, match="no LLM server"):
        fleet.announce(4, EXTERNAL)


def test_a_plain_server_is_updated_by_its_trainer(domain: Domain, models: list[ScriptedServer]):
    fleet = Fleet(domain, [models[2].url])
    announcement = fleet.update(1, EXTERNAL, "abort")
    assert (announcement.state, fleet.look()[0].hold) == ("ready", "cut")
    assert note_weights_in_place(announcement=announcement, failed={}).state == "live"
    assert (fleet.version, fleet.look()[0].policy_version) == (1, 1)


class TestRollouts:
    """What new weights do to those that may be sampled from one version."""

    def test_a_strict_one_is_begun_anew_and_a_mixed_one_goes_on(self, fleet: Fleet):
        strict, mixed = (fleet.domain.submit(run=fleet.domain.new_run(versions=rule))[0] for rule in ("strict", "mixed"))
        for rollout in (strict, mixed):
            fleet.running(rollout, fleet.servers[0])
        assert fleet_update_with_quiet(fleet).state == "live"
        strict.refresh_from_db()
        mixed.refresh_from_db()
        assert (strict.state, strict.infra_retries, mixed.state) == ("queued", 0, "running")
        event = RolloutEvent.objects.filter(rollout=strict, kind=EventKind.REQUEUED).get()
        assert "began on an older one" in event.data["reason"]

    def test_one_that_requires_a_version_gets_it_or_ends(self, fleet: Fleet):
        domain = fleet.domain
        submit_groups(run=domain.run, groups=[GroupRequest(n=2, task_id=domain.task.id, require_policy_version=0)])
        first, second = Rollout.objects.order_by("index")
        fleet.running(first, fleet.servers[0])
        fleet_update_with_quiet(fleet)
        end_gone()
        for rollout in (first, second):
            rollout.refresh_from_db()
            assert (rollout.state, rollout.termination_cause) == ("failed", Cause.POLICY_VERSION_GONE)
            assert (rollout.termination_blame, rollout.reward, rollout.trainable) == ("infrastructure", None, False)

    def test_one_waits_for_a_version_that_is_to_come(self, fleet: Fleet):
        domain = fleet.domain
        [group] = submit_groups(run=domain.run, groups=[GroupRequest(n=1, task_id=domain.task.id, require_policy_version=1)])
        rollout = group.rollouts.get()
        end_gone()
        rollout.refresh_from_db()
        assert (rollout.state, rollout.required_version) == ("queued", 1)
        fleet.update(1)
        fleet.running(rollout, fleet.servers[0])
        rollout.refresh_from_db()
        assert rollout.state == "running"

    @pytest.mark.parametrize(
        ("version", "message"), [(5, "newest version is 2"), (0, "No LLM server has version 0"), (-1, "least 0")]
    )
    def test_a_version_nobody_will_have_is_refused(self, fleet: Fleet, version: int, message: str):
        fleet.update(2)
        groups = [GroupRequest(n=1, task_id=fleet.domain.task.id, require_policy_version=version)]
        with pytest.raises(Refused) as refused:
            submit_groups(run=fleet.domain.run, groups=groups)
        [error] = refused.value.errors
        assert error.pointer == "/groups/0/require_policy_version"
        assert message in error.detail

    def test_a_session_of_one_version_ends(self, fleet: Fleet):
        """Its agent runs elsewhere, so that nobody could begin it anew."""
        register_worker(node="test-node", stage=GATEWAY, pid=1, concurrency=0)
        run = fleet.domain.new_run(versions="strict")
        session = open_session(project=fleet.domain.project, opened_by="test", run=str(run.id)).session
        Rollout.objects.filter(id=session.pk).update(llm_server=fleet.servers[0])
        fleet_update_with_quiet(fleet)
        rollout = Rollout.objects.get(id=session.pk)
        assert (rollout.state, rollout.termination_cause, rollout.reward) == ("failed", Cause.POLICY_VERSION_GONE, None)

    def test_a_group_begins_anew_as_long_as_none_of_it_is_done(self, fleet: Fleet):
        run = fleet.domain.new_run(versions="group")
        whole, part = (fleet.domain.submit(n=2, run=run) for _ in range(2))
        for rollout in (whole[0], part[0]):
            fleet.running(rollout, fleet.servers[0])
        whole[0].group.refresh_from_db()
        assert whole[0].group.policy_version == 0
        Rollout.objects.filter(id=part[0].id).update(state=State.EVALUATING.value, policy_version=0)
        fleet_update_with_quiet(fleet)
        end_gone()
        outcomes = [[Rollout.objects.get(id=r.id).state for r in group] for group in (whole, part)]
        assert outcomes == [["queued", "queued"], ["evaluating", "failed"]]
        whole[0].group.refresh_from_db()
        assert whole[0].group.policy_version is None


def fleet_update_with_quiet(fleet: Fleet) -> PolicyVersion:
    """As if all workers said at once that they make no calls."""
    announcement = fleet.announce(1)
    done = threading.Event()

    def carry_it_out() -> None:
        with contextlib.closing(connection):
            carry_out(fleet.domain.policy.pk)
        done.set()

    threading.Thread(target=carry_it_out).start()
    servers = [server.pk for server in fleet.servers]
    while not done.wait(0.05):
        WorkerProcess.objects.update(quiet_servers=servers)
    announcement.refresh_from_db()
    return announcement


def test_the_command_announces_and_waits(fleet: Fleet, beside, capsys: pytest.CaptureFixture[str]):
    announcing = beside(call_command, "policies", "announce", "tiny", "1", "--path", "/weights/1")
    until(PolicyVersion.objects.exists)
    carry_out(fleet.domain.policy.pk)
    announcing.result(20)
    call_command("policies", "announce", "alpha/tiny", "2", "--no-wait")
    carry_out(fleet.domain.policy.pk)
    call_command("policies", "loaded", "tiny", "2")
    call_command("policies", "list")
    call_command("policies", "versions", "tiny")
    said = capsys.readouterr().out
    assert f"version 1  live  drain  path /weights/1\n  {fleet.servers[0].url}  live" in said
    assert "version 2  live  drain  external" in said
    assert "tiny  version 2  project alpha" in said
    with pytest.raises(CommandError, match="announced before, and differently"):
        call_command("policies", "announce", "tiny", "1", "--mode", "abort", "--no-wait")
    with pytest.raises(CommandError, match="no policy 'none'"):
        call_command("policies", "versions", "none")

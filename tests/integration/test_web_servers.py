"""The pages of LLM servers and policies."""

from __future__ import annotations

import datetime as dt

import pytest
from django.contrib.auth.models import Permission
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from rollouts.lifecycle import State
from rollouts.llm.capabilities import Feature
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.models import LLMServer, Policy, PolicyVersion, Rollout, WorkerProcess
from rollouts.web.abilities import abilities_of
from tests.integration.web_case import SOLVED, WebWorld
from tests.services.model_servers import served
from tests.services.ports import lasting_port

HOSTILE = "</p><script>alert(1)</script>\x1b[31m"


@pytest.fixture
def world(db: None) -> WebWorld:
    return WebWorld()


@pytest.fixture
def owner(world: WebWorld) -> Client:
    client = Client()
    client.force_login(world.owner)
    return client


def allow(world: WebWorld, *names: str) -> None:
    world.owner.user_permissions.add(*Permission.objects.filter(codename__in=names))


def text(client: Client, path: str) -> str:
    return " ".join(client.get(path).content.decode().split())


def add_server(world: WebWorld, number: int, **values: object) -> LLMServer:
    fields = {"policy_version": 14, "model": "Qwen/Qwen3-8B", "max_model_len": 32768, **values}
    return LLMServer.objects.create(
        project=world.project, policy=world.policy, url=f"http://gpu-{number:02}.cluster:8000", **fields
    )


class TestServers:
    def test_an_empty_page_says_how_to_register_one(self, world: WebWorld) -> None:
        client = Client()
        client.force_login(world.stranger)
        page = text(client, "/servers/")
        assert "No LLM server yet" in page
        assert "prorl servers register" in page
        assert world.server.url not in page

    def test_states_errors_and_versions_are_told(self, world: WebWorld, owner: Client) -> None:
        since = timezone.now() - dt.timedelta(minutes=14)
        add_server(world, 5, health="dead", last_error=HOSTILE, health_since=since)
        add_server(world, 6, admission="draining", policy_version=13)
        page = text(owner, "/servers/")
        assert 'dead</span> <span class="muted small">for 14 m</span>' in page
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page
        assert "draining: keeps its rollouts and gets no new ones" in page
        assert 'title="The policy is at version 14">13<' in page

    def test_figures_of_the_servers_and_of_the_fleet(self, world: WebWorld, owner: Client) -> None:
        LLMServer.objects.update(load={"running": 30, "waiting": 2, "kv_cache": 0.5})
        add_server(world, 4, load={"running": 10, "waiting": 0})
        add_server(world, 5)
        page = text(owner, "/servers/")
        assert '20<p class="muted small">10 to 30</p>' in page
        assert '50 %<p class="muted small">50 % to 50 %</p>' in page

    def test_rollouts_in_flight_and_a_slow_start(self, world: WebWorld, owner: Client) -> None:
        world.group(world.new_run("grpo"), world.task(world.sums, "1 + 1"), [State.RUNNING, State.RUNNING, SOLVED])
        LLMServer.objects.update(created_at=timezone.now() - dt.timedelta(hours=1))
        add_server(world, 4)
        page = text(owner, "/servers/")
        assert '2 <span class="muted">of 64</span>' in page
        assert page.count("slow start") == 1

    def test_a_weight_update_says_for_whom_it_waits(self, world: WebWorld, owner: Client) -> None:
        world.group(world.new_run("grpo"), world.task(world.sums, "1 + 1"), [State.RUNNING, State.RUNNING])
        LLMServer.objects.update(hold="wait")
        assert "waits for 2 processes" in text(owner, "/servers/")
        WorkerProcess.objects.update(quiet_servers=[world.server.pk])
        page = text(owner, "/servers/")
        assert "updating" in page
        assert "waits for" not in page

    def test_only_who_may_change_servers_does(self, world: WebWorld, owner: Client) -> None:
        path = f"/servers/{world.server.pk}/pause/"
        assert "Pause…" not in text(owner, "/servers/")
        assert owner.post(path).status_code == 403
        allow(world, "change_llmserver")
        page = text(owner, "/servers/")
        assert path in page
        assert "Remove…" not in page
        assert owner.post(f"/servers/{world.server.pk}/remove/").status_code == 403
        stranger = Client()
        stranger.force_login(world.stranger)
        world.stranger.user_permissions.add(*Permission.objects.filter(codename="change_llmserver"))
        assert stranger.post(path).status_code == 404
        world.server.refresh_from_db()
        assert world.server.admission == "open"

    def test_it_is_paused_after_a_question_and_resumed(self, world: WebWorld, owner: Client) -> None:
        allow(world, "change_llmserver")
        path = f"/servers/{world.server.pk}/pause/"
        assert "It takes no calls until it is resumed." in text(owner, path)
        assert LLMServer.objects.get().admission == "open"
        assert "http://gpu-03.cluster:8000 takes no calls." in owner.post(path, follow=True).content.decode()
        assert LLMServer.objects.get().admission == "paused"
        owner.post(f"/servers/{world.server.pk}/resume/")
        assert LLMServer.objects.get().admission == "open"

    def test_it_drains_after_a_question(self, world: WebWorld, owner: Client) -> None:
        allow(world, "change_llmserver")
        path = f"/servers/{world.server.pk}/drain/"
        assert "Those it has stay to their end." in text(owner, path)
        assert "gets no new rollouts." in owner.post(path, follow=True).content.decode()
        assert LLMServer.objects.get().admission == "draining"

    def test_it_is_woken_after_a_question(self, world: WebWorld, owner: Client) -> None:
        path = f"/servers/{world.server.pk}/wake/"
        model = ScriptedServer()
        with served(model):
            LLMServer.objects.update(url=model.url, admission="asleep", capabilities={"features": ["sleep"]})
            assert "Wake…" not in text(owner, "/servers/")
            assert owner.post(path).status_code == 403
            allow(world, "change_llmserver")
            assert "Wake…" in text(owner, "/servers/")
            assert "takes the memory of its GPU again" in text(owner, path)
            assert LLMServer.objects.get().admission == "asleep"
            page = owner.post(path, follow=True).content.decode()
            assert "is awake and takes calls again." in page
            assert "Wake…" not in page
            assert LLMServer.objects.get().admission == "open"
            assert "The server is not asleep." in owner.post(path, follow=True).content.decode()

    def test_one_that_does_not_wake_stays_asleep(self, world: WebWorld, owner: Client) -> None:
        allow(world, "change_llmserver")
        LLMServer.objects.update(
            url=f"http://127.0.0.1:{lasting_port()}", admission="asleep", capabilities={"features": ["sleep"]}
        )
        page = owner.post(f"/servers/{world.server.pk}/wake/", follow=True).content.decode()
        assert "The server did not do it" in page
        assert LLMServer.objects.get().admission == "asleep"

    @pytest.mark.parametrize("feature", Feature)
    def test_what_a_server_offers_is_told(self, world: WebWorld, owner: Client, feature: Feature) -> None:
        assert "What it offers" not in text(owner, "/servers/")
        LLMServer.objects.update(capabilities={"features": [feature]})
        words = abilities_of(LLMServer.objects.get()).offered
        assert len(words) == 1
        assert f"<p>{words[0]}</p>" in text(owner, "/servers/")

    def test_a_probe_tells_what_it_found(self, world: WebWorld, owner: Client) -> None:
        allow(world, "change_llmserver")
        LLMServer.objects.update(url=f"http://127.0.0.1:{lasting_port()}")
        page = owner.post(f"/servers/{world.server.pk}/probe/", follow=True).content.decode()
        assert "is suspect. /health did not answer: Connection refused" in page

    def test_it_is_removed_after_a_question(self, world: WebWorld, owner: Client) -> None:
        allow(world, "change_llmserver", "delete_llmserver")
        path = f"/servers/{world.server.pk}/remove/"
        owner.get(path)
        assert LLMServer.objects.exists()
        owner.post(path)
        assert not LLMServer.objects.exists()

    def test_what_cannot_be_done_is_not_found(self, world: WebWorld, owner: Client) -> None:
        allow(world, "change_llmserver")
        assert owner.post(f"/servers/{world.server.pk}/explode/").status_code == 404


class TestPolicies:
    def announce(self, world: WebWorld, version: int, state: str, **values: object) -> PolicyVersion:
        return PolicyVersion.objects.create(policy=world.policy, version=version, state=state, **values)

    def test_the_list_tells_versions_and_updates(self, world: WebWorld, owner: Client) -> None:
        add_server(world, 4, policy_version=13)
        Policy.objects.create(project=world.other_project, name="theirs")
        self.announce(world, 15, "loading")
        self.announce(world, 16, "announced")
        page = text(owner, "/policies/")
        assert "to v15: loading" in page
        assert '1 <span class="muted">of 2</span>' in page
        assert "theirs" not in page

    def test_a_policy_shows_what_became_of_its_versions(self, world: WebWorld, owner: Client) -> None:
        run = world.new_run("grpo-1")
        gone = "0190a6b0-0000-7000-8000-0000deadbeef"
        report = {
            str(world.server.pk): {"state": "live", "error": "", "seconds": 4.25},
            gone: {"state": "failed", "error": HOSTILE, "seconds": 1.0},
        }
        source = {"kind": "path", "path": "/ckpt/step-14"}
        self.announce(world, 14, "live", mode="abort", source=source, report=report, finished_at=timezone.now())
        page = text(owner, f"/policies/{world.policy.pk}/")
        assert "1 server</span> has it" in page
        assert "…deadbeef" in page
        assert "&lt;script&gt;" in page
        assert "path /ckpt/step-14" in page
        assert run.name in page
        assert "Update to version" not in page

    def test_an_update_shows_while_it_lasts(self, world: WebWorld, owner: Client) -> None:
        update = self.announce(world, 15, "loading", report={str(world.server.pk): {"state": "loading"}})
        assert "Update to version 15" in text(owner, f"/policies/{world.policy.pk}/")
        PolicyVersion.objects.filter(pk=update.pk).update(state="live", finished_at=timezone.now())
        assert "Update to version" not in text(owner, f"/policies/{world.policy.pk}/live/")

    def test_pages_need_no_more_queries_for_more_servers(
        self, world: WebWorld, owner: Client, django_assert_max_num_queries: DjangoAssertNumQueries
    ) -> None:
        for path in ("/servers/", "/policies/", f"/policies/{world.policy.pk}/"):
            self.announce(world, 20 + PolicyVersion.objects.count(), "live", report={str(world.server.pk): {"state": "live"}})
            with django_assert_max_num_queries(12) as few:
                owner.get(path)
            for _ in range(3):
                number = 10 + LLMServer.objects.count()
                server = add_server(world, number)
                self.announce(world, 20 + number, "live", report={str(server.pk): {"state": "live"}})
            with django_assert_max_num_queries(len(few)):
                owner.get(path)

    def test_a_stranger_finds_none(self, world: WebWorld) -> None:
        client = Client()
        client.force_login(world.stranger)
        assert client.get(f"/policies/{world.policy.pk}/").status_code == 404
        assert client.get(f"/policies/{world.policy.pk}/live/").status_code == 404
        assert "No policy yet" in text(client, "/policies/")


def test_a_run_tells_the_versions_of_its_rollouts(world: WebWorld, owner: Client) -> None:
    run = world.new_run("grpo")
    rollouts = world.group(run, world.task(world.sums, "1 + 1"), [SOLVED] * 4)
    assert "0 versions old on average, at most 0" in text(owner, f"/runs/{run.pk}/")
    Rollout.objects.filter(pk=rollouts[0].pk).update(policy_version=13, oldest_version=11)
    Policy.objects.update(version=15)
    page = text(owner, f"/runs/{run.pk}/")
    assert f"?run={run.pk}&amp;version=13" in page
    assert "1 with tokens of several versions" in page
    assert "would be 1.75 versions old on average, at most 4" in page

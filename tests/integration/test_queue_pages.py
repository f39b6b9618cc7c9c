"""The queue and nodes pages: what waits, what binds, who is there, and draining by a button."""

from __future__ import annotations

import datetime as dt

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from rollouts.lifecycle import Stage, State
from rollouts.models import LLMServer, Node, Project, Rollout
from rollouts.selectors.standstill import Obstacle, obstacles
from rollouts.services.nodes import drain_node
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db


@pytest.fixture
def domain() -> Domain:
    return Domain()


def visitor(*projects: Project, permissions: tuple[str, ...] = ()) -> Client:
    user = User.objects.create_user(f"user{User.objects.count()}")
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    for project in projects:
        project.members.add(user)
    client = Client()
    client.force_login(user)
    return client


def reason(domain: Domain) -> Obstacle:
    [only] = obstacles(domain.run)
    return only


class TestWhatHoldsARunBack:
    def test_nothing_when_nothing_waits_or_everything_can_go(self, domain: Domain) -> None:
        assert obstacles(domain.run) == []
        for stage in Stage:
            domain.worker(stage)
        domain.submit(3)
        assert obstacles(domain.run) == []

    def test_no_worker_of_the_stage_or_of_the_next(self, domain: Domain) -> None:
        domain.submit(2)
        reasons = [obstacle.reason for obstacle in obstacles(domain.run)]
        assert reasons == [
            "No INIT worker is alive; 2 rollouts wait queued.",
            "No RUN worker is alive; without one no queued rollout is started.",
        ]

    def test_every_node_drains(self, domain: Domain) -> None:
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        domain.submit()
        drain_node(node=Node.objects.get())
        assert "drains" in reason(domain).reason
        assert "prorl nodes resume test-node" in reason(domain).remedy
        assert reason(domain).blocks

    def test_no_live_server(self, domain: Domain) -> None:
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        domain.submit()
        LLMServer.objects.update(health=LLMServer.Health.DEAD)
        assert reason(domain).reason == "No live LLM server serves the policy tiny."

    @pytest.mark.parametrize("owner", ["run", "project"])
    def test_max_in_flight(self, domain: Domain, owner: str) -> None:
        domain.worker(Stage.RUN)
        domain.rollout_in(State.INITIALIZING)
        domain.submit()
        limited = getattr(domain, owner)
        limited.max_in_flight = 1
        limited.save()
        found = reason(domain)
        assert found.reason == f"The {owner} has reached max_in_flight: 1 of 1."
        assert not found.blocks

    def test_full_servers(self, domain: Domain) -> None:
        Node.objects.update_or_create(name="test-node", defaults={"ready_buffer": 1})
        LLMServer.objects.update(capacity=1)
        domain.rollout_in(State.RUNNING)
        domain.rollout_in(State.READY)
        domain.submit()
        assert reason(domain).reason == "The LLM servers of tiny are full: 1 of 1."

    def test_full_workers(self, domain: Domain) -> None:
        domain.worker(Stage.RUN, concurrency=1)
        domain.claim(domain.submit()[0], Stage.INIT, domain.worker(Stage.INIT, concurrency=1))
        domain.submit()
        assert reason(domain).reason == "All INIT slots are taken (1)."

    def test_a_full_ready_buffer(self, domain: Domain) -> None:
        domain.rollout_in(State.READY)
        domain.worker(Stage.RUN, concurrency=1)
        Node.objects.update(max_run=1, ready_buffer=1)
        domain.claim(domain.rollout_in(State.READY), Stage.RUN)
        domain.submit()
        assert reason(domain).reason == "The RUN slots (1) and the READY buffer (1) are full."

    def test_a_pause_after_a_failure(self, domain: Domain) -> None:
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        domain.submit(2)
        Rollout.objects.update(not_before=timezone.now() + dt.timedelta(minutes=1))
        assert reason(domain).reason.startswith("2 rollouts wait for another try")
        assert not reason(domain).blocks


class TestPages:
    def test_the_queue_shows_the_visitors_runs_and_only_counts_the_others(self, domain: Domain) -> None:
        other = Domain("beta")
        other.submit(5)
        domain.submit(2)
        page = visitor(domain.project).get("/queue/").content.decode()
        assert f"run-{domain.run.pk}" in page
        assert "2 rollouts wait queued" in page
        assert str(other.run.pk) not in page
        assert "beta" not in page
        assert "Other projects: 5 queued, 0 in flight." in page

    def test_without_rollouts_or_servers_it_says_so(self) -> None:
        project = Project.objects.create(name="new")
        page = visitor(project).get("/queue/").content.decode()
        assert "No rollout of new is unfinished." in page
        assert "No LLM server is registered." in page
        assert "No node yet" in visitor(project).get("/nodes/").content.decode()

    def test_pages_and_their_live_parts_need_a_login(self) -> None:
        for path in ("/queue/", "/queue/live/", "/nodes/", "/nodes/live/"):
            assert Client().get(path).headers["Location"].startswith("/login/")

    def test_nodes_are_drained_and_resumed_by_those_who_may(self, domain: Domain) -> None:
        domain.worker(Stage.RUN, node="gpu-1")
        assert "Drain" not in visitor(domain.project).get("/nodes/").content.decode()
        for path in ("/nodes/gpu-1/drain/", "/nodes/gpu-1/resume/"):
            assert visitor(domain.project).post(path).status_code == 403
            assert Client().post(path).status_code == 302
        assert Node.objects.get().draining_since is None
        admin = visitor(domain.project, permissions=("change_node",))
        assert "gpu-1 drains" in admin.post("/nodes/gpu-1/drain/", follow=True).content.decode()
        assert Node.objects.get().draining_since is not None
        assert "takes work" in admin.post("/nodes/gpu-1/resume/", follow=True).content.decode()
        assert admin.post("/nodes/gpu-2/drain/").status_code == 404

    def test_a_node_says_what_it_holds_of_what_it_may(self, domain: Domain) -> None:
        domain.rollout_in(State.RUNNING)
        Node.objects.update(max_run=3)
        page = visitor(domain.project).get("/nodes/live/").content.decode()
        assert '1 <span class="muted">of 3</span>' in page
        assert "max 3" in page

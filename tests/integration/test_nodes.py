"""Nodes: registered by their workers, limited in the admin, drained by API, command line and admin. The API of the queue."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from rollouts.lifecycle import Stage, State
from rollouts.models import Draining, LLMServer, Node, WorkerProcess
from rollouts.services.errors import Refused
from rollouts.services.lease import announce_drain, renew
from rollouts.services.nodes import drain_node, note_no_sandboxes, note_sandboxes, resume_node
from sandboxes.services import note_ready, note_start, sandbox_name
from tests.integration.api_case import ApiCase, client_for, expect_problem, secret_for
from tests.integration.domain import Domain

HOUR = timedelta(hours=1)


@pytest.fixture
def case(db) -> ApiCase:
    case = ApiCase()
    for stage in Stage:
        case.domain.worker(stage)
    return case


class TestRegistration:
    def test_comes_with_the_first_worker_and_tells_of_the_host(self, domain: Domain):
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        node = Node.objects.get()
        assert node.name == "test-node"
        assert node.cpus >= 1
        assert node.memory > 2**28
        assert node.booted_at is not None
        assert node.booted_at < timezone.now()
        assert node.version

    def test_a_restarted_worker_changes_no_limit_and_ends_no_drain(self, domain: Domain):
        domain.worker()
        Node.objects.update(max_run=3)
        drain_node(node=Node.objects.get())
        domain.worker()
        node = Node.objects.get()
        assert node.max_run == 3
        assert node.draining_since is not None

    def test_heartbeats_show_that_it_is_there(self, domain: Domain):
        worker = domain.worker()
        Node.objects.update(last_seen_at=timezone.now() - HOUR)
        assert renew(worker_id=worker.id).alive
        assert Node.objects.get().last_seen_at > timezone.now() - HOUR / 2

    def test_a_worker_outlives_the_row_of_its_node(self, domain: Domain):
        worker = domain.worker()
        Node.objects.all().delete()
        assert renew(worker_id=worker.id) == (True, {}, Draining.NO)


class TestDraining:
    def test_workers_learn_it_with_their_next_heartbeat(self, domain: Domain):
        worker = domain.worker()
        node = Node.objects.get()
        assert renew(worker_id=worker.id).draining is Draining.NO
        drain_node(node=node, seconds=3600)
        assert renew(worker_id=worker.id).draining is Draining.FINISHING
        Node.objects.update(drain_deadline=timezone.now() - HOUR)
        assert renew(worker_id=worker.id).draining is Draining.OVER
        resume_node(node=node)
        assert renew(worker_id=worker.id).draining is Draining.NO

    def test_again_moves_the_deadline_only(self, domain: Domain):
        domain.worker()
        drain_node(node=Node.objects.get(), seconds=60)
        first = Node.objects.get()
        Node.objects.update(draining_since=first.draining_since - HOUR)
        drain_node(node=first, seconds=600)
        second = Node.objects.get()
        assert second.draining_since == first.draining_since - HOUR
        assert second.drain_deadline > first.drain_deadline

    @pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e9])
    def test_refuses_a_time_that_makes_no_sense(self, domain: Domain, seconds: float):
        domain.worker()
        with pytest.raises(Refused) as refused:
            drain_node(node=Node.objects.get(), seconds=seconds)
        assert refused.value.errors[0].pointer == "/seconds"
        assert Node.objects.get().draining_since is None

    def test_of_one_process_is_announced(self, domain: Domain):
        worker = domain.worker()
        announce_drain(worker_id=worker.id)
        assert WorkerProcess.objects.get().draining_since is not None
        assert renew(worker_id=worker.id).alive


class TestApi:
    def test_lists_nodes_with_their_use(self, case: ApiCase):
        LLMServer.objects.update(capacity=8)
        case.domain.rollout_in(State.RUNNING)
        case.check_list_access("/api/v1/nodes/")
        [node] = case.reader.get("/api/v1/nodes/").json()["results"]
        assert (node["name"], node["state"], node["ready_buffer"], node["drain_deadline"]) == ("test-node", "working", 16, None)
        run = node["stages"]["run"]
        assert (run["slots"], run["limit"], run["held"], run["processes"]) == (16, 16, 1, 2)

    def test_only_a_key_of_the_installation_may_drain(self, case: ApiCase):
        path = "/api/v1/nodes/test-node/drain/"
        case.check_write_access("post", path, {}, needs="admin", own=False)
        expect_problem(case.owner.post(path, {}), 403, "insufficient_scope")
        operator = client_for(secret_for(case.other.project, "operate"))
        answer = operator.post(path, {"seconds": 3600})
        assert (answer.status_code, answer.json()["state"]) == (200, "drained")
        assert answer.json()["stages"]["run"]["limit"] == 0
        assert operator.post("/api/v1/nodes/test-node/resume/").json()["state"] == "working"
        expect_problem(case.owner.post("/api/v1/nodes/test-node/resume/"), 403, "insufficient_scope")

    def test_refuses_what_it_does_not_know(self, case: ApiCase):
        operator = client_for(secret_for(case.other.project, "operate"))
        for action in ("drain", "resume"):
            expect_problem(operator.post(f"/api/v1/nodes/nobody/{action}/"), 404, "not_found")
        expect_problem(operator.post("/api/v1/nodes/test-node/drain/", {"seconds": -1}), 422, "invalid", "/seconds")
        expect_problem(operator.post("/api/v1/nodes/test-node/drain/", {"minutes": 1}), 422, "invalid", "/minutes")
        assert Node.objects.get().draining_since is None

    def test_the_queue_shows_what_holds_back_the_own_runs(self, case: ApiCase):
        case.domain.submit(3)
        case.other.submit(2)
        LLMServer.objects.update(health="dead")
        case.check_list_access("/api/v1/queue/")
        queue = case.reader.get("/api/v1/queue/").json()
        assert [(stage["stage"], stage["waiting"], stage["slots"]) for stage in queue["stages"]] == [
            ("init", 5, 8), ("run", 0, 8), ("eval", 0, 8),
        ]  # fmt: skip
        [run] = queue["runs"]
        assert (run["id"], run["waiting"]) == (str(case.domain.run.id), 3)
        assert "No live LLM server" in run["obstacles"][0]["reason"]


FACTS = {"version": "0.11.0", "binary": "/usr/bin/bwrap", "memory_mb": "watchdog, sum", "cpus": "none"}


class TestSandboxes:
    """What a node can hold sandboxes to, and nodes that cannot start any."""

    @pytest.fixture
    def page(self, client: Client):
        client.force_login(User.objects.create_superuser("root"))
        return lambda: client.get("/nodes/").content.decode()

    def test_shows_how_limits_are_held(self, case: ApiCase, page, capsys: pytest.CaptureFixture[str]):
        note_sandboxes(node="test-node", backend="bubblewrap", facts=FACTS)
        html = page()
        assert "bubblewrap 0.11.0" in html
        assert "<dt>memory mb</dt><dd>watchdog, sum</dd>" in html
        assert '<dt>cpus</dt><dd><span class="warn">not held</span></dd>' in html
        [node] = case.reader.get("/api/v1/nodes/").json()["results"]
        assert node["sandboxes"] == {"backend": "bubblewrap", "problem": "", "facts": FACTS}
        call_command("nodes", "list")
        printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert printed[-3:] == ["sandboxes: bubblewrap 0.11.0", "watchdog, sum: memory_mb", "not held: cpus"]

    def test_a_node_without_takes_no_rollouts(self, case: ApiCase, page, capsys: pytest.CaptureFixture[str]):
        note_sandboxes(node="test-node", backend="bubblewrap", facts=FACTS)
        note_no_sandboxes(node="test-node", backend="bubblewrap", problem="install bubblewrap")
        assert "bubblewrap: install bubblewrap" in page()
        [node] = case.reader.get("/api/v1/nodes/").json()["results"]
        assert node["sandboxes"] == {"backend": "bubblewrap", "problem": "install bubblewrap", "facts": {}}
        assert [node["stages"][stage]["limit"] for stage in ("init", "run", "eval")] == [0, 8, 8]
        call_command("nodes", "list")
        assert "no sandboxes: bubblewrap: install bubblewrap" in capsys.readouterr().out
        note_sandboxes(node="test-node", backend="bubblewrap", facts=FACTS)
        assert case.reader.get("/api/v1/nodes/").json()["results"][0]["stages"]["init"]["limit"] == 8

    def test_the_queue_says_why_nothing_starts(self, case: ApiCase):
        case.domain.submit(1)
        note_no_sandboxes(node="test-node", backend="bubblewrap", problem="install bubblewrap")
        [run] = case.reader.get("/api/v1/queue/").json()["runs"]
        reason = run["obstacles"][0]["reason"]
        assert reason.startswith("No sandbox can be started on test-node: install bubblewrap; 1 rollout")
        assert "sandbox_selfcheck bubblewrap" in run["obstacles"][0]["remedy"]

    def test_a_rollout_shows_how_its_sandbox_was_held(self, domain: Domain, client: Client):
        rollout = domain.rollout_in(State.RUNNING)
        name = sandbox_name(rollout.id, rollout.attempt)
        note_start(name=name, rollout_id=rollout.id, attempt=rollout.attempt, node="test-node", backend="bubblewrap")
        note_ready(name=name, enforced={"memory_mb": "watchdog, sum", "cpus": "none"})
        client.force_login(User.objects.create_superuser("root"))
        html = client.get(f"/rollouts/{rollout.id}/attempts/").content.decode()
        assert f"Sandbox {name}" in html
        assert "<dt>memory mb</dt><dd>watchdog, sum</dd>" in html
        assert '<dt>cpus</dt><dd><span class="warn">not held</span></dd>' in html


class TestCommand:
    def test_lists_drains_and_resumes(self, domain: Domain, capsys: pytest.CaptureFixture[str]):
        call_command("nodes", "list")
        domain.worker()
        call_command("nodes", "drain", "test-node", "--seconds", "3600")
        call_command("nodes", "list")
        call_command("nodes", "resume", "test-node")
        first, drains, head, row, resumed = capsys.readouterr().out.splitlines()
        assert first == "No worker has registered yet."
        assert drains == "test-node drains: it starts nothing any more."
        assert head.split()[:2] == ["node", "state"]
        assert row.split()[:4] == ["test-node", "drained", "0/0", "0/0"]
        assert resumed == "test-node takes part again."

    def test_says_what_it_refuses(self, domain: Domain):
        domain.worker()
        with pytest.raises(CommandError, match=r"no node 'nobody'\. Known: test-node\."):
            call_command("nodes", "drain", "nobody")
        with pytest.raises(CommandError, match="--seconds: Must be between"):
            call_command("nodes", "drain", "test-node", "--seconds", "-1")


class TestAdmin:
    @pytest.fixture
    def admin(self, domain: Domain, client: Client) -> Client:
        domain.worker()
        client.force_login(User.objects.create_superuser("root"))
        return client

    def test_sets_limits(self, admin: Client):
        path = "/admin/rollouts/node/test-node/change/"
        assert admin.get(path).status_code == 200
        assert admin.post(path, {"max_run": "3", "ready_buffer": "0"}).status_code == 200  # shown again: a buffer of 0
        assert admin.post(path, {"max_run": "3", "ready_buffer": "2"}).status_code == 302
        node = Node.objects.get()
        assert (node.max_init, node.max_run, node.ready_buffer) == (None, 3, 2)

    def test_drains_and_resumes(self, admin: Client):
        for action, draining in (("drain", True), ("resume", False)):
            admin.post("/admin/rollouts/node/", {"action": action, "_selected_action": ["test-node"]})
            assert (Node.objects.get().draining_since is not None) is draining

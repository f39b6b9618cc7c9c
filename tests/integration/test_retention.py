"""What is old enough goes, of the right project and run, and nothing else."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.utils import timezone

from rollouts.environments.base import RewardComponent, Score
from rollouts.lifecycle import Cause, RescoringState, Stage, State
from rollouts.models import (
    Blob,
    IdempotentResponse,
    Message,
    MessagePicture,
    ModelCall,
    Project,
    Rescoring,
    Rollout,
    RolloutEvent,
    Run,
    StageFailure,
    ToolCall,
    ToolPicture,
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WorkerProcess,
)
from rollouts.selectors.storage import project_storage
from rollouts.services import blobs
from rollouts.services.errors import Conflict
from rollouts.services.finish import RewardVersion, add_reward_versions
from rollouts.services.rescore import rescore_rollout
from rollouts.services.retention import count_prunable, prune
from sandboxes.models import Sandbox
from tests.integration.api_case import ApiCase, expect_problem
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def folder(blob_folder: Path) -> Path:
    return blob_folder


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def days_ago(days: float) -> datetime:
    return timezone.now() - timedelta(days=days)


def keep(project: Project, *, events: int | None = None, trajectories: int | None = None) -> None:
    Project.objects.filter(id=project.id).update(keep_events_days=events, keep_trajectories_days=trajectories)


def with_trajectory(rollout: Rollout) -> Rollout:
    """With a row of everything, and large values in blobs."""
    place: dict[str, Any] = {"rollout": rollout, "attempt": 1, "turn": 0}
    Message.objects.create(**place, index=0, role="user", content="1 + 2?")
    ModelCall.objects.create(
        **place,
        context_ids=[1, 2],
        sampled_ids=[3],
        finish_reason="stop",
        prompt_tokens=2,
        policy="tiny",
        policy_version=0,
        latency=0.1,
    )
    blob = blobs.put(b"output" * 1000)
    ToolCall.objects.create(**place, index=0, name="bash", started_at=timezone.now(), duration=1, output_blob_id=blob)
    MessagePicture.objects.create(rollout=rollout, attempt=1, message=0, index=0, mime="image/png", blob_id=blob)
    ToolPicture.objects.create(**place, call=0, index=0, mime="image/png", blob_id=blob)
    failure = {"stage": Stage.RUN.value, "cause": Cause.MODEL_ERROR.value, "blame": "infrastructure", "retried_as": "requeued"}
    StageFailure.objects.create(rollout=rollout, attempt=1, **failure)
    artefacts_blob = blobs.put(json.dumps({"answer": "3", "for": str(rollout.id)}).encode())
    Rollout.objects.filter(id=rollout.id).update(artefacts={"answer": "3"}, artefacts_blob=artefacts_blob, turns=1)
    rollout.refresh_from_db()
    return rollout


def finished(domain: Domain, *, days: float, run: Run | None = None) -> Rollout:
    """A rollout that was scored this many days ago."""
    rollout = with_trajectory(domain.rollout_in(State.SUCCEEDED))
    add_reward_versions([RewardVersion(rollout.id, 1, Score([RewardComponent(name="correct", value=1.0)]))])
    values = {"finished_at": days_ago(days), "reward": 1.0, "termination_phase": "run", "termination_blame": "policy"}
    Rollout.objects.filter(id=rollout.id).update(**values, **({"run": run} if run else {}))
    rollout.refresh_from_db()
    return rollout


TRAJECTORY = ("Message", "MessagePicture", "ModelCall", "ToolCall", "ToolPicture")


def rows_of(rollout: Rollout) -> dict[str, int]:
    models = (Message, MessagePicture, ModelCall, ToolCall, ToolPicture, RolloutEvent, StageFailure)
    return {model.__name__: model._default_manager.filter(rollout=rollout).count() for model in models}


def removed() -> dict[str, int]:
    done = prune()
    assert [pruned.error for pruned in done if pruned.error] == []
    return {pruned.kind: pruned.removed for pruned in done if pruned.removed}


class TestTrajectories:
    def test_everything_is_kept_for_ever_unless_the_project_says_otherwise(self, domain: Domain) -> None:
        rollout = finished(domain, days=4000)
        before = rows_of(rollout)
        assert removed() == {}
        assert rows_of(rollout) == before

    def test_go_when_they_are_old_and_leave_the_result(self, domain: Domain) -> None:
        old, young = finished(domain, days=31), finished(domain, days=29)
        other = finished(Domain("beta"), days=31)
        keep(domain.project, trajectories=30)
        before = rows_of(old)
        assert set(before.values()).isdisjoint({0})
        assert count_prunable()["trajectories"] == 1
        assert removed() == {"trajectories": 1}
        assert rows_of(old) == before | dict.fromkeys(TRAJECTORY, 0)
        assert rows_of(young) == rows_of(other) == before
        pruned = Rollout.objects.get(id=old.id)
        assert (pruned.state, pruned.reward, pruned.termination_cause, pruned.turns) == ("succeeded", 1.0, "completed", 1)
        assert (pruned.artefacts, pruned.artefacts_blob, pruned.events_pruned_at) == ({}, None, None)
        assert pruned.trajectory_pruned_at is not None
        assert pruned.rewards.count() == 1 and pruned.attempts.count() == 1
        assert removed() == {}

    def test_history_has_an_age_of_its_own(self, domain: Domain) -> None:
        rollout = finished(domain, days=8)
        keep(domain.project, events=7, trajectories=30)
        assert removed() == {"histories": 1}
        assert rows_of(rollout) == {**dict.fromkeys(TRAJECTORY, 1), "RolloutEvent": 0, "StageFailure": 0}
        assert Rollout.objects.get(id=rollout.id).events_pruned_at is not None

    @pytest.mark.parametrize("state", [State.QUEUED, State.INITIALIZING, State.READY, State.RUNNING, State.EVALUATING])
    def test_nothing_of_an_unfinished_rollout_goes(self, domain: Domain, state: State) -> None:
        rollout = with_trajectory(domain.rollout_in(state))
        Rollout.objects.filter(id=rollout.id).update(created_at=days_ago(900), state_changed_at=days_ago(900))
        RolloutEvent.objects.filter(rollout=rollout).update(at=days_ago(900))
        keep(domain.project, events=1, trajectories=1)
        before = rows_of(rollout)
        assert removed() == {}
        assert rows_of(rollout) == before

    def test_a_kept_run_is_left_alone_until_it_is_not_kept_any_more(self, domain: Domain) -> None:
        run = domain.new_run()
        rollout = finished(domain, days=100, run=run)
        keep(domain.project, events=1, trajectories=1)
        Run.objects.filter(id=run.id).update(keep=True)
        assert removed() == {}
        Run.objects.filter(id=run.id).update(keep=False)
        assert removed() == {"histories": 1, "trajectories": 1}
        assert set(rows_of(rollout).values()) == {0}

    def test_what_is_being_scored_again_stays_and_what_was_pruned_is_not_scored_again(self, domain: Domain) -> None:
        rollout = finished(domain, days=100)
        rescoring = rescore_rollout(project=domain.project, rollout_id=rollout.id)
        keep(domain.project, trajectories=1)
        assert removed() == {}
        Rescoring.objects.filter(id=rescoring.pk).update(state=RescoringState.DONE.value, finished_at=timezone.now())
        assert removed() == {"trajectories": 1}
        with pytest.raises(Conflict, match="pruned"):
            rescore_rollout(project=domain.project, rollout_id=rollout.id)

    def test_more_than_a_batch_goes_in_one_pass(self, domain: Domain) -> None:
        rollouts = domain.submit(130)
        Rollout.objects.filter(id__in=[rollout.id for rollout in rollouts]).update(
            state="cancelled", finished_at=days_ago(10), finished_xid=1, termination_cause="cancelled"
        )
        keep(domain.project, events=1)
        assert removed() == {"histories": 130}
        assert not RolloutEvent.objects.exists()

    def test_the_queue_of_what_is_due_is_an_index(self, domain: Domain) -> None:
        finished(domain, days=100)
        due = Rollout.objects.filter(project=domain.project, finished_at__lt=timezone.now())
        for marker, index in [
            ("events_pruned_at", "rollout_prune_events"),
            ("trajectory_pruned_at", "rollout_prune_trajectory"),
        ]:
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL enable_seqscan = off")
                cursor.execute("SET LOCAL enable_bitmapscan = off")
            assert index in due.filter(**{marker: None}).order_by("finished_at")[:50].explain()


class TestRecords:
    def test_rows_of_the_platform_go_after_their_time(self, domain: Domain, settings: Any) -> None:
        settings.KEEP_RECORDS_DAYS = 10
        for name, created, stopped in [("old", 11, 11), ("young", 9, 9), ("old but there", 11, None)]:
            Sandbox.objects.create(
                name=name,
                rollout_id=uuid4(),
                attempt=1,
                node="n",
                backend="bubblewrap",
                created_at=days_ago(created),
                stopped_at=days_ago(stopped) if stopped else None,
            )
        for key, age in [("old", 1.1), ("young", 0.9)]:
            IdempotentResponse.objects.create(project=domain.project, key=key, fingerprint="", created_at=days_ago(age))
        endpoint = WebhookEndpoint.objects.create(project=domain.project, url="http://x", event_types=[], secret="")
        for key, age in [("old", 11.0), ("young", 9.0), ("pending", None)]:
            delivery = WebhookDelivery.objects.create(
                endpoint=endpoint, event_key=key, payload={}, settled_at=days_ago(age) if age else None
            )
            WebhookAttempt.objects.create(delivery=delivery, duration=1)
        assert removed() == {"sandbox rows": 1, "idempotent answers": 1, "webhook deliveries": 1}
        assert set(Sandbox.objects.values_list("name", flat=True)) == {"young", "old but there"}
        assert IdempotentResponse.objects.get().key == "young"
        assert set(WebhookDelivery.objects.values_list("event_key", flat=True)) == {"young", "pending"}

    def test_worker_processes_go_when_nothing_is_left_in_their_hands(self, domain: Domain) -> None:
        held = domain.rollout_in(State.RUNNING).lease_owner
        assert held is not None
        stopped, lost, alive = domain.worker(), domain.worker(), domain.worker()
        WorkerProcess.objects.exclude(id__in=[held.id, stopped.id, lost.id, alive.id]).delete()
        WorkerProcess.objects.filter(id__in=[held.id, lost.id]).update(lost_at=days_ago(31))
        WorkerProcess.objects.filter(id=stopped.id).update(stopped_at=days_ago(31))
        assert removed() == {"worker processes": 2}
        assert set(WorkerProcess.objects.all()) == {held, alive}


class TestBlobs:
    def age(self) -> None:
        Blob.objects.update(touched_at=days_ago(2))

    def test_go_with_the_last_that_referred_to_them(self, domain: Domain, folder: Path) -> None:
        finished(domain, days=31)
        finished(domain, days=1)  # shares the output's blob
        assert Blob.objects.count() == 3
        keep(domain.project, trajectories=30)
        self.age()
        assert removed() == {"trajectories": 1, "blobs": 1}
        assert removed() == {}
        assert Blob.objects.count() == len([path for path in folder.rglob("*") if path.is_file()]) == 2

    def test_wait_for_a_writer_that_has_not_referred_to_them_yet(self) -> None:
        blobs.put(b"just stored" * 1000)
        assert removed() == {}
        self.age()
        assert count_prunable()["blobs"] == 1
        assert removed() == {"blobs": 1}

    def test_a_storage_that_is_down_keeps_no_rows(self, domain: Domain, folder: Path) -> None:
        finished(domain, days=31)
        keep(domain.project, events=30, trajectories=30)
        folder.rename(folder.with_name("elsewhere"))
        folder.write_text("not a folder")
        output = StringIO()
        with pytest.raises(CommandError, match="blobs"):
            call_command("prune", stdout=output)
        assert "1  trajectories gone" in output.getvalue()

    def test_a_project_sees_what_it_stores(self, domain: Domain) -> None:
        finished(domain, days=31)
        finished(domain, days=1)
        finished(Domain("beta"), days=1)
        keep(domain.project, trajectories=30)
        prune()
        use = project_storage(domain.project)
        assert (use.rollouts, use.with_trajectory, use.blobs) == (2, 1, 2)
        assert use.blob_bytes > use.stored_bytes > 0


def test_the_command_counts_before_it_removes(domain: Domain) -> None:
    finished(domain, days=31)
    keep(domain.project, events=1, trajectories=30)
    dry, wet = StringIO(), StringIO()
    call_command("prune", dry_run=True, stdout=dry)
    assert "1  histories would go" in dry.getvalue() and "1  trajectories would go" in dry.getvalue()
    assert Message.objects.exists()
    call_command("prune", stdout=wet)
    assert "1  histories gone" in wet.getvalue() and "1  trajectories gone" in wet.getvalue()
    assert not Message.objects.exists()


class TestApi:
    def test_a_run_is_kept_on_request(self, case: ApiCase) -> None:
        path = f"/api/v1/runs/{case.domain.run.id}/"
        case.check_write_access("patch", path, {"keep": True})
        assert case.owner.get(path).json()["keep"] is False
        assert case.submitter.patch(path, {"keep": True}).json()["keep"] is True
        assert case.submitter.patch(path, {"limits": {"max_tokens": 5}}).json()["keep"] is True
        assert case.submitter.patch(path, {"keep": False}).json()["limits"]["max_tokens"] == 5
        expect_problem(case.owner.patch(path, {"keep": "yes"}), 422, "invalid", "/keep")

    def test_a_rollout_says_when_it_was_pruned(self, case: ApiCase) -> None:
        rollout = finished(case.domain, days=31)
        path = f"/api/v1/rollouts/{rollout.id}/"
        assert case.reader.get(path).json()["trajectory_pruned_at"] is None
        keep(case.domain.project, events=30, trajectories=30)
        prune()
        shown = case.check_read_access(path)
        assert shown["trajectory_pruned_at"] and shown["events_pruned_at"]
        assert (shown["reward"], shown["artefacts"]) == (1.0, {})
        trajectory = case.reader.get(f"{path}trajectory/").json()
        assert (trajectory["messages"], trajectory["model_calls"], trajectory["tool_calls"]) == ([], [], [])


class TestPages:
    @pytest.mark.parametrize("tab", ["", "events/", "reward/", "tokens/"])
    def test_say_what_was_pruned(self, domain: Domain, client: Client, tab: str) -> None:
        rollout = finished(domain, days=31)
        keep(domain.project, events=30, trajectories=30)
        prune()
        member = User.objects.create_user("maria", password="correct horse")
        domain.project.members.add(member)
        client.force_login(member)
        page = client.get(f"/rollouts/{rollout.id}/{tab}").content.decode()
        assert "pruned on" in page and f"{timezone.now():%Y}" in page


class TestAdmin:
    def test_a_project_says_how_long_it_keeps_what_and_what_it_stores(self, domain: Domain, admin_client: Client) -> None:
        finished(domain, days=1)
        path = f"/admin/rollouts/project/{domain.project.id}/change/"
        assert "1 finished rollouts, 1 with their trajectory; 2 blobs" in admin_client.get(path).content.decode()
        form = {"name": "alpha", "keep_events_days": "7", "keep_trajectories_days": "0"}
        assert "greater than or equal to 1" in admin_client.post(path, form).content.decode()
        assert admin_client.post(path, {**form, "keep_trajectories_days": "90"}).status_code == 302
        domain.project.refresh_from_db()
        assert (domain.project.keep_events_days, domain.project.keep_trajectories_days) == (7, 90)

    def test_runs_are_kept_and_let_go(self, domain: Domain, admin_client: Client) -> None:
        for action, kept in [("keep", True), ("keep_no_longer", False)]:
            admin_client.post("/admin/rollouts/run/", {"action": action, "_selected_action": [str(domain.run.id)]})
            domain.run.refresh_from_db()
            assert domain.run.keep is kept

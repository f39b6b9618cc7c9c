"""`prorl doctor` against real breakage. `tests/acceptance/test_observation.py` runs it against a whole platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import storages
from django.db import connection
from django.utils import timezone

from prorl_site import checks
from prorl_site.database import own_connection
from prorl_site.doctor import Finding, Status, broker, database, execution, machine, reach
from prorl_site.embedded.processes import free_port
from rollouts.lifecycle import Stage, State
from rollouts.models import LLMServer, Rollout
from rollouts.services.reap import reap
from sandboxes.images.services.builds import request_build
from sandboxes.models import ImageBuild
from tests.integration.domain import Domain
from tests.integration.image_case import an_image, claimed
from tests.integration.image_case import fail as fail_build
from tests.integration.image_case import finish as finish_build


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def doctor(**variables: str) -> tuple[int, list[dict[str, Any]], str]:
    """The command in a process of its own: exit code, findings, and all it printed."""
    command = [sys.executable, "-m", "django", "doctor", "--json"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)["findings"], done.stdout + done.stderr


def test_a_dead_database_and_a_wrong_broker_port_are_named_with_what_to_do_and_without_secrets(tmp_path: Path):
    status, findings, output = doctor(
        PRORL_DATABASE_URL=f"postgres://prorl:hunter2@127.0.0.1:{free_port()}/prorl",
        PRORL_BROKER_URL=f"amqp://guest:hunter3@127.0.0.1:{free_port()}//",
        PRORL_VAR_DIR=str(tmp_path),
    )
    assert status == 1
    failures = {finding["check"]: finding for finding in findings if finding["status"] == "fail"}
    assert set(failures) == {"database", "broker"}
    for name, variable in (("database", "PRORL_DATABASE_URL"), ("broker", "PRORL_BROKER_URL")):
        assert "does not answer" in failures[name]["found"]
        assert variable in failures[name]["remedy"]
    assert "hunter" not in output


def test_a_database_without_our_tables_is_a_failure_of_its_own(tmp_path: Path):
    # The database that the tests' own one is made beside is empty.
    status, findings, _ = doctor(PRORL_VAR_DIR=str(tmp_path))
    assert status == 1
    (failure,) = [finding for finding in findings if finding["status"] == "fail"]
    assert failure["check"] == "migrations"
    assert "migrate" in failure["remedy"]


@pytest.mark.django_db(transaction=True)
class TestDatabase:
    def test_one_that_is_well(self):
        assert only(database.server()).status is Status.OK
        assert only(database.migrations()).status is Status.OK
        assert only(database.clock()).status is Status.OK
        assert only(database.transactions()).status is Status.OK

    def test_no_connection_left(self, monkeypatch: pytest.MonkeyPatch):
        with connection.cursor() as cursor:
            cursor.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 1")
        try:
            monkeypatch.setitem(connection.settings_dict, "USER", "crowded")
            with own_connection():
                finding = only(database.server())
        finally:
            monkeypatch.undo()
            with connection.cursor() as cursor:
                cursor.execute("DROP ROLE crowded")
        assert finding.status is Status.FAIL
        assert "no connection left" in finding.found
        assert "max_connections" in finding.remedy

    def test_more_processes_than_connections(self, settings, domain: Domain):
        assert only(database.connections()).status is Status.OK
        settings.DB_POOL_SIZE = 500
        finding = only(database.connections())
        assert finding.status is Status.WARN
        assert "PRORL_DB_POOL_SIZE" in finding.remedy

    def test_a_forgotten_transaction(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(database, "_LONG_TRANSACTION_SECONDS", 0.0)
        with own_connection() as forgotten:
            forgotten.execute("SET application_name = 'forgetful'")
            forgotten.execute("BEGIN")
            forgotten.execute("CREATE TEMPORARY TABLE mine (x int)")
            finding = only(database.transactions())
        assert finding.status is Status.WARN
        assert "forgetful" in finding.found
        assert "delivery of results" in finding.found


class TestExecution:
    def test_the_dispatcher_is_missed_until_it_got_through_a_pass(self, domain: Domain):
        assert only(execution.dispatcher()).status is Status.FAIL
        reap()
        assert only(execution.dispatcher()).status is Status.OK

    def test_each_stage_without_a_worker_is_named(self, domain: Domain):
        domain.worker(Stage.INIT)
        findings = list(execution.workers())
        assert [finding.status for finding in findings] == [Status.OK, Status.FAIL, Status.FAIL]
        assert "no RUN worker" in findings[1].found
        assert "work run" in findings[1].remedy

    def test_what_keeps_waiting_rollouts_from_moving(self, domain: Domain):
        assert only(execution.standstill()).found == "no rollout waits"
        domain.submit(2)
        LLMServer.objects.update(health=LLMServer.Health.DEAD)
        reasons = [finding.found for finding in execution.standstill()]
        assert any("No INIT worker" in reason or "no INIT worker" in reason for reason in reasons), reasons
        assert any("LLM server" in reason for reason in reasons), reasons

    def test_images_that_cannot_be_built_or_used(self, domain: Domain, settings, tmp_path: Path):
        settings.IMAGE_DIR = tmp_path
        assert only(execution.images()).found == "none is registered"
        fail_build(claimed(an_image("failed")))
        finish_build(claimed(an_image("gone")))
        request_build(image=an_image("waiting"))
        ImageBuild.objects.filter(image__name="waiting").update(created_at=timezone.now() - timedelta(minutes=5))
        waiting, failed, gone, all_of_them = execution.images()
        assert (waiting.status, waiting.found) == (Status.WARN, "a build has waited for 0:05:00, and none runs")
        assert (failed.status, failed.found) == (Status.WARN, "the last build of failed failed")
        assert (gone.status, gone.found) == (Status.FAIL, f"gone is ready, and {tmp_path} does not have it")
        assert all_of_them.found == f"1 of 3 are ready, in {tmp_path}"

    def test_rollouts_past_their_deadline(self, domain: Domain):
        assert only(execution.stuck()).status is Status.OK
        rollout = domain.rollout_in(State.RUNNING)
        Rollout.objects.filter(id=rollout.id).update(stuck_at=timezone.now())
        assert only(execution.stuck()).status is Status.WARN


class TestReach:
    def test_a_dead_model_server(self, domain: Domain):
        LLMServer.objects.update(url=f"http://127.0.0.1:{free_port()}")
        finding = only(reach.model_servers())
        assert finding.status is Status.FAIL
        assert "tiny at http://127.0.0.1" in finding.found

    def test_no_model_server(self, domain: Domain):
        LLMServer.objects.update(admission=LLMServer.Admission.PAUSED)
        assert only(reach.model_servers()).status is Status.WARN

    def test_a_sandbox_is_started_and_nothing_is_left(self):
        assert only(reach.sandbox()).status in (Status.OK, Status.WARN)

    def test_an_unknown_backend(self, settings):
        settings.SANDBOX_BACKEND = "chroot"
        finding = only(reach.sandbox())
        assert finding.status is Status.FAIL
        assert "chroot" in finding.found

    def test_blobs_are_stored_read_and_removed(self):
        assert only(reach.blobs()).status is Status.OK
        _, files = storages["blobs"].listdir("doctor")
        assert files == []

    def test_a_storage_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        (tmp_path / "file").touch()
        monkeypatch.setattr(storages["blobs"], "location", str(tmp_path / "file" / "blobs"), raising=False)
        assert only(reach.blobs()).status is Status.FAIL


class TestThisHost:
    def test_folders_that_are_not_there_yet(self, settings, tmp_path: Path):
        settings.VAR_DIR = settings.SANDBOX_DIR = settings.IMAGE_DIR = tmp_path / "not" / "yet"
        assert {finding.status for finding in machine.files()} == {Status.OK}
        assert not (tmp_path / "not").exists()

    def test_a_weak_secret_key_and_open_hosts(self, settings):
        settings.SECRET_KEY, settings.ALLOWED_HOSTS = "short", ["*"]
        remedies = " ".join(finding.remedy for finding in machine.settings())
        assert "PRORL_SECRET_KEY_FILE" in remedies
        assert "PRORL_ALLOWED_HOSTS" in remedies

    def test_files_as_a_broker_are_fine_on_one_machine(self, settings):
        settings.BROKER_URL = ""
        assert only(broker.server()).status is Status.OK
        assert list(broker.queues()) == []


# --- What no process starts with ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["redis://localhost/0", "rediss://localhost", "sqs://", "localhost:5672"])
def test_a_broker_other_than_rabbitmq_is_refused(settings, url: str):
    settings.BROKER_URL = url
    (problem,) = checks.broker()
    assert problem.is_serious()
    assert "amqp://" in (problem.hint or "")


def test_a_refused_broker_keeps_a_worker_from_starting():
    command = [sys.executable, "-m", "django", "work", "init"]
    env = {**os.environ, "PRORL_BROKER_URL": "redis://user:hunter2@localhost/0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "only RabbitMQ can be used" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(("lease", "heartbeat", "refused"), [(30, 2, False), (4, 2, False), (3, 2, True), (1, 5, True)])
def test_a_lease_must_outlast_two_heartbeats(settings, lease: float, heartbeat: float, refused: bool):
    settings.LEASE_SECONDS, settings.HEARTBEAT_SECONDS = lease, heartbeat
    assert bool(checks.lease()) is refused

"""What operators see of a whole platform that works, and of one that lacks a part: logs, metrics, health, the doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kombu import Connection, Queue

from tests.acceptance.platform import Platform, running_platform, submit

SUM = {"environment": "sums", "payload": {"a": 2, "b": 3}}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, rabbitmq_url: str) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("observed") / "var"
    with running_platform(folder, rabbitmq_url, db_pool_size=2, metrics_token="scrape-me") as running:
        running.start_execution(concurrency=4)
        yield running


@pytest.fixture(scope="module")
def worked(platform: Platform, quick_model: str) -> list[str]:
    """The ids of three rollouts that ran."""
    run_id = submit(platform, quick_model, [{"n": 3, **SUM}])
    platform.wait_until_all_finished()
    rows = platform.rows("SELECT id, state FROM rollouts_rollout WHERE run_id = %s", run_id)
    assert [row["state"] for row in rows] == ["succeeded"] * 3
    return [str(row["id"]) for row in rows]


def lines(platform: Platform, name: str) -> list[dict[str, Any]]:
    """Of a process's log, every one of which is JSON."""
    return [json.loads(line) for line in Path(platform.folder / "log" / f"{name}.log").read_text().splitlines()]


def doctor(platform: Platform) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "django", "doctor", "--json"]
    done = subprocess.run(command, env=platform.env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)["findings"]


def test_each_stage_of_a_rollout_is_one_line_that_names_all_it_belongs_to(platform: Platform, worked: list[str]):
    for stage in ("init", "run", "eval"):
        ended = [line for line in lines(platform, stage) if line["event"] == "stage ended"]
        assert sorted(line["rollout"] for line in ended) == sorted(worked)
        for line in ended:
            assert (line["stage"], line["node"], line["attempt"]) == (stage, "test-node", 1)
            assert line["run"] and line["project"] and line["worker"]
            assert line["seconds"] >= 0


def test_metrics_count_what_ran_once_and_need_the_token(platform: Platform, worked: list[str]):
    url = platform.start_web()
    assert httpx.get(f"{url}/metrics").status_code == 401

    def exposition() -> str:
        answer = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer scrape-me"})
        assert answer.status_code == 200
        return answer.text

    wanted = 'prorl_rollouts_finished_total{blame="policy",cause="completed",phase="run"'
    platform.wait_for(
        lambda: any(line.startswith(wanted) and line.endswith(" 3.0") for line in exposition().splitlines()), wanted
    )
    assert 'prorl_worker_slots{node="test-node",stage="run"} 4.0' in exposition()
    assert httpx.get(f"{url}/livez").text == "ok\n"
    assert httpx.get(f"{url}/readyz").json()["ready"] is True
    assert httpx.get(f"{url}/api/v1/runs/", headers={"X-Request-ID": "mine"}).status_code == 401
    (request,) = [line for line in lines(platform, "web") if line.get("request") == "mine"]
    assert (request["event"], request["method"], request["path"], request["status"]) == ("request", "GET", "/api/v1/runs/", 401)


def test_a_healthy_platform_has_no_failure(platform: Platform, worked: list[str]):
    status, findings = doctor(platform)
    assert status == 0, findings
    found = {finding["check"]: finding["found"] for finding in findings}
    assert "RabbitMQ" in found["broker"]
    assert {"database", "migrations", "dispatcher", "workers", "queues", "models", "blobs", "queue"} <= set(found)


def test_a_queue_of_another_kind_is_found(platform: Platform, worked: list[str]):
    name = "rollouts.eval.test-node"
    platform.terminate("eval")
    try:
        with Connection(platform.env["PRORL_BROKER_URL"]) as broker, broker.channel() as channel:
            channel.queue_delete(name)
            Queue(name, channel=channel, queue_arguments={"x-queue-type": "quorum"}).declare()
        # A worker's row without its process: the queue must be looked at though nobody could consume from it.
        platform.shell(
            "from rollouts.lifecycle import Stage; from rollouts.services.lease import register_worker; "
            "register_worker(node='test-node', stage=Stage.EVAL, pid=1, concurrency=1); print('null')"
        )
        platform.rows(
            "UPDATE rollouts_workerprocess SET lease_expires_at = now() + interval '1 hour', lost_at = NULL WHERE pid = 1 "
            "RETURNING id"
        )
        status, findings = doctor(platform)
    finally:
        with Connection(platform.env["PRORL_BROKER_URL"]) as broker, broker.channel() as channel:
            channel.queue_delete(name)
        platform.rows("UPDATE rollouts_workerprocess SET stopped_at = now() WHERE pid = 1 RETURNING id")
        platform.start_worker("eval", 4)
    assert status == 1
    (failure,) = [finding for finding in findings if finding["status"] == "fail"]
    assert failure["check"] == "queues"
    assert name in failure["found"]


def test_a_platform_without_a_run_worker_and_without_a_dispatcher_says_so(platform: Platform, worked: list[str]):
    platform.kill("dispatcher")
    platform.terminate("run")
    platform.wait_for(
        lambda: platform.value("SELECT now() - at > interval '11 seconds' FROM rollouts_rescuerpass"), "the pass to be old"
    )
    status, findings = doctor(platform)
    assert status == 1
    failures = {finding["check"]: finding for finding in findings if finding["status"] == "fail"}
    assert "no RUN worker is alive" in failures["workers"]["found"]
    assert "work run" in failures["workers"]["remedy"]
    assert "dispatch" in failures["dispatcher"]["remedy"]

"""Model servers that die, come back, are paused and removed under rollouts of real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.platform import Platform, running_platform, submit
from tests.services.ports import lasting_port

_REGISTER = """
from rollouts.models import Project
from rollouts.services.servers import register_server
register_server(project=Project.objects.get(), url={url!r}, policy="tiny", capacity=64)
print("null")
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    settings = {"db_pool_size": 2, "probe_seconds": 0.5, "slow_start_seconds": 2, "ready_buffer": 64, "lease_seconds": 15}
    with running_platform(tmp_path_factory.mktemp("platform") / "var", **settings) as running:
        running.start_execution(concurrency=32)
        yield running


class Model:
    """A scripted model at a port of its own, which takes its time."""

    def __init__(self, platform: Platform, name: str, delay: float) -> None:
        self.name = name
        self._platform = platform
        self._port = lasting_port()
        self._delay = delay
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        log = self._platform.folder / "log" / f"{self.name}.log"
        before = log.stat().st_size if log.exists() else 0
        options = ["--port", str(self._port), "--delay", str(self._delay)]
        process = self._platform.spawn(self.name, "rollouts.llm.scripted", *options)
        self._platform.wait_for(lambda: log.stat().st_size > before or process.poll() is not None, "the model")
        assert json.loads(log.read_text().splitlines()[-1])["url"] == self.url


@pytest.fixture(scope="module")
def models(platform: Platform) -> list[Model]:
    models = [Model(platform, f"model-{letter}", delay=2.0) for letter in "ab"]
    for model in models:
        model.start()
    start(platform, models[0], n=1)
    platform.wait_until_all_finished()
    platform.shell(_REGISTER.format(url=models[1].url))
    return models


def start(platform: Platform, model: Model, n: int) -> str:
    """Groups of one, so that nothing but the load decides where they go."""
    return submit(platform, model.url, [{"n": 1, "environment": "sums", "payload": {"a": 2, "b": 3}} for _ in range(n)])


def wait_until_both_have_rollouts(platform: Platform, run_id: str) -> None:
    query = """SELECT count(DISTINCT llm_server_id) = 2 FROM rollouts_rollout WHERE run_id = %s AND state = 'running'"""
    platform.wait_for(lambda: platform.value(query, run_id), "rollouts on both servers")


def server(platform: Platform, model: Model) -> dict[str, Any]:
    return platform.rows("SELECT * FROM rollouts_llmserver WHERE url = %s", model.url)[0]


def all_succeeded_at_once(platform: Platform, run_id: str) -> bool:
    """Without another attempt."""
    rows = platform.rows("SELECT state, attempt FROM rollouts_rollout WHERE run_id = %s", run_id)
    return {(row["state"], row["attempt"]) for row in rows} == {("succeeded", 1)}


def test_rollouts_of_a_server_that_dies_go_on_at_another(platform: Platform, models: list[Model]):
    run_id = start(platform, models[0], 16)
    wait_until_both_have_rollouts(platform, run_id)
    platform.kill(models[1].name)
    platform.wait_until_all_finished()
    assert all_succeeded_at_once(platform, run_id), platform.tails()
    calls = platform.rows("SELECT DISTINCT server_id FROM rollouts_modelcall c JOIN rollouts_rollout r ON r.id = c.rollout_id")
    assert {call["server_id"] for call in calls} <= {server(platform, model)["id"] for model in models}
    platform.wait_for(lambda: server(platform, models[1])["health"] == "dead", "it to be found dead")
    models[1].start()
    platform.wait_for(lambda: server(platform, models[1])["health"] == "live", "it to recover")


def test_rollouts_of_a_server_that_is_paused_or_removed_do_too(platform: Platform, models: list[Model]):
    run_id = start(platform, models[0], 16)
    wait_until_both_have_rollouts(platform, run_id)
    platform.manage("servers", "pause", models[1].url)
    platform.wait_until_all_finished()
    assert all_succeeded_at_once(platform, run_id), platform.tails()
    platform.manage("servers", "resume", models[1].url)
    run_id = start(platform, models[0], 16)
    wait_until_both_have_rollouts(platform, run_id)
    platform.manage("servers", "remove", models[1].url)
    platform.wait_until_all_finished()
    assert all_succeeded_at_once(platform, run_id), platform.tails()


def test_the_only_server_may_be_away_for_a_while(platform: Platform, models: list[Model]):
    run_id = start(platform, models[0], 4)
    running = "SELECT count(*) = 4 FROM rollouts_rollout WHERE run_id = %s AND state = 'running'"
    platform.wait_for(lambda: platform.value(running, run_id), "all to run")
    platform.kill(models[0].name)
    platform.wait_for(lambda: server(platform, models[0])["health"] == "dead", "it to be found dead")
    models[0].start()
    platform.wait_until_all_finished()
    assert all_succeeded_at_once(platform, run_id), platform.tails()

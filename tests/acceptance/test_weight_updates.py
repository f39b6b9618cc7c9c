"""New weights while rollouts run: real processes, and scripted model servers whose logprobs tell which weights they had."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rollouts.client import Client
from rollouts.llm.scripted.sequences import fingerprint, logprob
from tests.acceptance.platform import ISSUE_KEY, Platform, running_platform


class World:
    """A platform, its client, and a policy `tiny` that two servers serve."""

    def __init__(self, platform: Platform, client: Client) -> None:
        self.platform = platform
        self.client = client
        self.version = 0

    def submit(self, **settings: Any) -> str:
        """Eight rollouts of four turns, in two groups. The run's id."""
        settings = {"sampling": {"max_tokens": 80}, **settings}
        run = self.client.create_run("run", policy="tiny", settings=settings)
        call = json.dumps({"name": "python", "arguments": {"code": "print((17 * 23 + 4) * (11 + 8))"}})
        calls = "".join(f"[[reply{turn}:I compute it once more.<tool_call>{call}</tool_call>]]" for turn in (1, 2, 3))
        payload = {"question": f"What is it? {calls}", "expected_answer": "7505"}
        self.client.submit_groups(run["id"], [{"n": 4, "environment": "problems", "payload": payload} for _ in range(2)])
        return run["id"]

    def until_sampled(self, *runs: str) -> None:
        """Some rollouts of each have had their first turn."""
        sampled = "SELECT count(*) FROM rollouts_rollout WHERE run_id = %s AND state = 'running' AND turns = 1"
        for run_id in runs:
            self.platform.wait_for(lambda run_id=run_id: self.platform.value(sampled, run_id) > 0, "rollouts that are sampled")

    def update(self, mode: Any) -> dict[str, Any]:
        self.version += 1
        self.client.announce_version("tiny", self.version, weights=weights(self.version), mode=mode)
        return dict(self.client.wait_for_version("tiny", self.version, timeout=60))

    def results(self, run_id: str) -> list[dict[str, Any]]:
        """All of a run, each id of which was sampled by the weights that it says."""
        results = [dict(result) for result in self.client.iter_results(run_id, include="trajectory")]
        for result in results:
            for segment in result["trajectory"]["segments"]:
                check_versions(segment)
        return results


def weights(version: int) -> str:
    return f"/weights/{version}" if version else ""


def check_versions(segment: dict[str, Any]) -> None:
    before = 0
    for token, sampled, stored, version in zip(
        segment["token_ids"], segment["loss_mask"], segment["logprobs"], segment["policy_versions"], strict=True
    ):
        if sampled:
            assert stored == pytest.approx(logprob(weights(version), before, token), abs=1e-5)
        before = fingerprint([token], before)


def versions(result: dict[str, Any]) -> set[int]:
    return {v for segment in result["trajectory"]["segments"] for v in segment["policy_versions"] if v >= 0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        urls = [stack.enter_context(scripted_server()) for _ in range(2)]
        platform = stack.enter_context(running_platform(tmp_path_factory.mktemp("weights") / "var"))
        platform.start_execution(concurrency=16)
        client = stack.enter_context(Client(platform.start_web(), platform.shell(ISSUE_KEY)))
        client.create_environment("problems", handler="math", config={"max_turns": 5})
        for url in urls:
            client.register_server(url, policy="tiny")
        yield World(platform, client)


@contextmanager
def scripted_server() -> Iterator[str]:
    """Takes its time for each token."""
    command = [sys.executable, "-m", "rollouts.llm.scripted", "--die-with-parent", "--token-delay", "0.02"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


@pytest.mark.parametrize("mode", ["drain", "continue", "abort"])
def test_new_weights_while_rollouts_run(world: World, mode: str):
    oldest = world.version
    mixed, strict = world.submit(), world.submit(versions="strict")
    world.until_sampled(mixed, strict)
    for _ in range(2):
        report = world.update(mode)
        assert report["state"] == "live"
        assert {entry["state"] for entry in report["report"].values()} == {"live"}
    check_mixed(world.results(mixed), replies_go_on=mode != "drain")
    check_strict(world, world.results(strict), oldest)


def check_mixed(results: list[dict[str, Any]], *, replies_go_on: bool) -> None:
    assert {result["state"] for result in results} == {"succeeded"}
    assert {result["infra_retries"] for result in results} == {0}
    assert any(len(versions(result)) > 1 for result in results)
    for result in results:
        assert (result["oldest_version"], result["policy_version"]) == (min(versions(result)), max(versions(result)))
    calls = [call for result in results for call in result["trajectory"]["model_calls"]]
    assert any(len(call["version_spans"]) > 1 for call in calls) == replies_go_on


def check_strict(world: World, results: list[dict[str, Any]], oldest: int) -> None:
    assert {result["state"] for result in results} == {"succeeded"}
    assert {result["infra_retries"] for result in results} == {0}
    assert all(len(versions(result)) == 1 for result in results)
    begun_anew = [result for result in results if result["attempt"] > 1]
    assert begun_anew
    assert all(min(versions(result)) > oldest for result in begun_anew)
    why = "SELECT DISTINCT data ->> 'reason' AS why FROM rollouts_rolloutevent WHERE kind = 'requeued' AND rollout_id = ANY(%s)"
    for row in world.platform.rows(why, [result["id"] for result in begun_anew]):
        assert "began on" in row["why"]


def test_a_group_is_sampled_from_one_version(world: World):
    run_id = world.submit(versions="group")
    world.until_sampled(run_id)
    assert world.update("drain")["state"] == "live"
    by_group: dict[str, set[int]] = {}
    for result in world.results(run_id):
        if result["state"] == "succeeded":
            by_group.setdefault(result["group"], set()).update(versions(result))
        else:
            assert (result["termination"]["cause"], result["reward"]) == ("policy_version_gone", None)
    assert by_group
    assert all(len(of_group) == 1 for of_group in by_group.values())


def test_the_executor_is_killed_in_the_middle(world: World):
    run_id = world.submit()
    world.until_sampled(run_id)
    world.version += 1
    world.client.announce_version("tiny", world.version, weights=weights(world.version))
    world.platform.wait_for(lambda: world.platform.value("SELECT count(*) FROM rollouts_llmserver WHERE hold <> ''"), "a hold")
    world.platform.kill("dispatcher")
    world.platform.start_dispatcher()
    assert world.client.wait_for_version("tiny", world.version, timeout=60)["state"] == "live"
    assert world.platform.value("SELECT count(*) FROM rollouts_llmserver WHERE hold <> ''") == 0
    assert {result["state"] for result in world.results(run_id)} == {"succeeded"}

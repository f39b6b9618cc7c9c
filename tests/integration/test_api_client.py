"""The client against the real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NotRequired, get_origin, get_type_hints

import pytest
from django.db import connection

from rollouts.client import ApiError, AsyncClient, Client, types
from rollouts.services.cancel import cancel_rollouts
from tests.integration.api_case import ApiCase, secret_for
from tests.integration.test_rescore import scored

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def case(transactional_db: None) -> ApiCase:
    return ApiCase()


@pytest.fixture
def client(server_url: str, case: ApiCase) -> Iterator[Client]:
    with Client(server_url, case.owner_secret, patience=20) as client:
        yield client


def assert_shape(value: Any, shape: Any) -> None:
    """Our answer has exactly the members that the client's type promises."""
    hints = get_type_hints(shape, include_extras=True)
    optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    assert set(value) | optional == set(hints), shape


def test_a_run_from_beginning_to_end(client: Client, case: ApiCase) -> None:
    environment = client.create_environment("adding", "arithmetic")
    assert_shape(environment, types.Environment)
    dataset = client.create_dataset("adding", "adding")
    assert_shape(dataset, types.Dataset)
    [stored] = client.add_tasks(dataset["id"], [{"key": "a", "payload": {"a": 1, "b": 2}}])
    assert_shape(stored, types.StoredTask)
    [task] = client.iter_tasks(dataset["id"])
    assert_shape(task, types.Task)
    run = client.create_run("grpo", "tiny", settings={"max_infra_retries": 1})
    assert_shape(run, types.Run)
    groups = client.submit_groups(run["id"], [{"n": 2, "dataset": "adding", "key": "a"}, {"n": 1, "task_id": task["id"]}])
    assert_shape(groups[0], types.SubmittedGroup)
    assert [group["n"] for group in groups] == [2, 1]
    assert_shape(client.group(groups[0]["id"]), types.Group)
    assert [group["id"] for group in client.iter_groups(run["id"])] == sorted(group["id"] for group in groups)
    assert_shape(client.run(run["id"]), types.RunDetail)
    rollouts = list(client.iter_rollouts(run=run["id"], state="queued"))
    assert_shape(rollouts[0], types.Rollout)
    assert_shape(client.rollout(rollouts[0]["id"]), types.RolloutDetail)
    assert_shape(client.trajectory(rollouts[0]["id"], full_prompts=True), types.Trajectory)

    assert client.cancel_rollout(rollouts[0]["id"]) == 1
    assert client.cancel_group(groups[1]["id"]) + client.cancel_run(run["id"]) == 2
    results = list(client.iter_results(run["id"], include="trajectory"))
    assert_shape(results[0], types.Result)
    assert {result["id"] for result in results} == {rollout["id"] for rollout in rollouts}
    assert list(client.iter_results(run["id"], after=results[1]["cursor"])) == [
        {name: value for name, value in results[2].items() if name != "trajectory"}
    ]
    assert client.wait(run["id"], timeout=10)["progress"] == 1
    assert run["id"] in [listed["id"] for listed in client.iter_runs()]


def test_servers(client: Client, case: ApiCase) -> None:
    [server] = client.iter_servers()
    assert_shape(server, types.LLMServer)
    assert client.set_server_state(server["id"], "paused")["state"] == "paused"
    assert client.change_server(server["id"], state="draining", capacity=3)["capacity"] == 3
    assert client.server(server["id"])["state"] == "draining"
    for act in (client.sleep_server, client.wake_server):
        with pytest.raises(ApiError, match="offers no /sleep"):
            act(server["id"])
    with pytest.raises(ApiError, match="did not answer"):
        client.register_server("http://127.0.0.1:9", "tiny", capacity=3, tokenizer="")
    client.remove_server(server["id"])
    assert list(client.iter_servers()) == []


def test_servers_with_the_asynchronous_client(server_url: str, case: ApiCase) -> None:
    async def change() -> None:
        async with AsyncClient(server_url, case.owner_secret) as client:
            [server] = [server async for server in client.iter_servers()]
            assert (await client.change_server(server["id"], capacity=3))["capacity"] == 3
            assert (await client.server(server["id"]))["capacity"] == 3
            for act in (client.sleep_server, client.wake_server):
                with pytest.raises(ApiError, match="offers no /sleep"):
                    await act(server["id"])

    asyncio.run(change())


def test_images(client: Client, server_url: str, case: ApiCase) -> None:
    with Client(server_url, secret_for(case.domain.project, "operate")) as operator:
        registered = operator.register_image("debian-12", "debian", {"suite": "bookworm"}, description="for tests")
        build = operator.build_image("debian-12", force=True)
    assert_shape(registered, types.ImageDetail)
    assert_shape(build, types.ImageBuild)
    [listed] = client.iter_images()
    assert_shape(listed, types.Image)
    assert client.image("debian-12")["builds"] == [build]
    with pytest.raises(ApiError) as raised:
        client.build_image("debian-12")
    assert raised.value.code == "insufficient_scope"


def test_a_refusal_names_the_field(client: Client, case: ApiCase) -> None:
    with pytest.raises(ApiError) as raised:
        client.submit_groups(case.domain.run.id, [{"n": 0, "dataset": "sums", "key": "one"}])
    assert (raised.value.status, raised.value.code) == (422, "invalid")
    assert [error.pointer for error in raised.value.errors] == ["/groups/0/n"]


def test_results_arrive_while_they_are_waited_for(client: Client, case: ApiCase) -> None:
    rollouts = case.domain.submit(n=3)
    first_arrived = threading.Event()

    def end_them() -> None:
        try:
            cancel_rollouts(project=case.domain.project, rollout_id=rollouts[0].id)
            assert first_arrived.wait(30)
            cancel_rollouts(project=case.domain.project, run_id=case.domain.run.id)
        finally:
            connection.close()

    thread = threading.Thread(target=end_them)
    thread.start()
    arrived = []
    for result in client.iter_results(case.domain.run.id, wait=10):
        arrived.append(result["id"])
        first_arrived.set()
    thread.join()
    assert arrived[0] == str(rollouts[0].id)
    assert sorted(arrived) == sorted(str(rollout.id) for rollout in rollouts)


def test_many_readers_share_the_asynchronous_client(server_url: str, case: ApiCase) -> None:
    case.domain.submit(n=4)
    run_id = case.domain.run.id

    async def read() -> list[list[str]]:
        async with AsyncClient(server_url, case.owner_secret) as client:

            async def one() -> list[str]:
                return [result["id"] async for result in client.iter_results(run_id, limit=2)]

            readers = [asyncio.create_task(one()) for _ in range(3)]
            await client.cancel_run(run_id)
            return await asyncio.gather(*readers)

    seen = asyncio.run(read())
    assert len(seen[0]) == 4
    assert seen[0] == seen[1] == seen[2]


def test_the_client_needs_nothing_else_of_ours() -> None:
    program = (
        "import sys, rollouts.client\n"
        "ours = {name for name in sys.modules if name.split('.')[0] in ('rollouts', 'prorl_site', 'sandboxes', 'django')}\n"
        "print(sorted(name for name in ours if not name.startswith('rollouts.client') and name != 'rollouts'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scoring_again(client: Client, case: ApiCase) -> None:
    rollout = scored(case.domain)
    rescoring = client.rescore_rollout(rollout.id)
    assert_shape(rescoring, types.Rescoring)
    counts = client.rescore_run(rollout.run_id, environment=case.domain.environment.id, only_cause="completed")
    assert_shape(counts, types.RescoreCounts)
    assert counts == {"queued": 0, "going_on": 1, "left_out": 0}
    assert [row["id"] for row in client.iter_rescorings(rollout.run_id)] == [rescoring["id"]]

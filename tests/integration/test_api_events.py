"""Event streams: what a follower of a rollout or a run gets to see, also after its connection broke, and what it costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.db import connection

from rollouts.api.views import events
from rollouts.client import ApiError, AsyncClient, Client
from rollouts.lifecycle import Stage, State
from rollouts.models import Reward, Rollout
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.transition import Guard, move
from tests.integration.api_case import ApiCase, expect_problem, secret_for
from tests.integration.web_case import UNSOLVED, WebWorld
from tests.integration.web_texts import SWE_PROMPT, SWE_TURNS

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE = 60.0


@pytest.fixture
def case(transactional_db: None) -> ApiCase:
    return ApiCase()


def stream_of(rollout: Rollout) -> str:
    return f"/api/v1/rollouts/{rollout.id}/events/stream/"


def cancel(rollout: Rollout) -> None:
    cancel_rollouts(project=rollout.project, rollout_id=rollout.id)


class Follower:
    """Reads a stream message by message."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.read()
        assert response.headers["Content-Type"] == "text/event-stream"
        self._lines = response.iter_lines()

    def messages(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Name, data and id of each; a heartbeat is called `heartbeat`."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line.startswith(":"):
                yield "heartbeat", {}, ""
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield fields["event"], json.loads(fields["data"]), fields["id"]
                fields = {}


@pytest.fixture
def http(case: ApiCase, server_url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {case.owner_secret}"}
    with httpx.Client(base_url=server_url, headers=headers, timeout=PATIENCE) as client:
        yield client


def read_all(http: httpx.Client, path: str, last: str = "") -> list[tuple[str, dict[str, Any], str]]:
    with http.stream("GET", path, headers={"Last-Event-ID": last} if last else {}) as response:
        return list(Follower(response).messages())


def finished_rollout() -> tuple[WebWorld, Rollout]:
    """With its turns, in a world of its own."""
    world = WebWorld()
    run = world.new_run("one")
    [rollout] = world.group(run, world.task(world.swe, "a"), [UNSOLVED])
    return world, rollout


def test_who_may_follow(case: ApiCase) -> None:
    for path in (stream_of(case.domain.submit()[0]), f"/api/v1/runs/{case.domain.run.id}/events/stream/"):
        expect_problem(case.stranger.get(path), 404, "not_found")
        expect_problem(case.nobody.get(path), 401, "not_authenticated")
        expect_problem(case.owner.get(path, headers={"Last-Event-ID": "nonsense"}), 400, "invalid_cursor")
        expect_problem(case.owner.get(path, {"color": "red"}), 400, "invalid_parameter", "?color")
        expect_problem(case.nobody.get(path, headers={"Accept": "text/event-stream"}), 401, "not_authenticated")


def test_a_finished_rollout_is_told_from_beginning_to_end(case: ApiCase, http: httpx.Client) -> None:
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    Reward.objects.create(rollout=rollout, name="correct", value=1.0)
    told = read_all(http, stream_of(rollout))
    states = [data["to_state"] for name, data, _ in told if name == "history" and data["from_state"] != data["to_state"]]
    assert states == ["queued", "initializing", "ready", "running", "evaluating", "succeeded"]
    assert [name for name, _, _ in told[-2:]] == ["reward", "end"]
    assert told[-2][1]["rewards"] == {"correct": 1.0}
    assert told[-1][1]["termination"]["cause"] == "completed"


def test_turns_come_between_the_moves_they_happened_in(http: httpx.Client) -> None:
    world, rollout = finished_rollout()
    http.headers["Authorization"] = f"Bearer {secret_for(world.project, 'read')}"
    told = read_all(http, stream_of(rollout))
    names = [data.get("to_state", name) for name, data, _ in told]
    first, last = names.index("turn"), len(names) - 1 - names[::-1].index("turn")
    assert names[first - 1] == "running"
    assert names[last + 1] == "evaluating"
    turns = [data for name, data, _ in told if name == "turn"]
    assert [turn["turn"] for turn in turns] == list(range(len(SWE_TURNS)))
    assert turns[0]["messages"][1]["content"].startswith(SWE_PROMPT[:100])
    assert turns[0]["reply"] == SWE_TURNS[0].reply
    assert [tool["name"] for tool in turns[0]["tool_calls"]] == [tool.name for tool in SWE_TURNS[0].tools]


def test_a_reconnect_goes_on_wherever_the_connection_broke(http: httpx.Client) -> None:
    world, rollout = finished_rollout()
    http.headers["Authorization"] = f"Bearer {secret_for(world.project, 'read')}"
    told = read_all(http, stream_of(rollout))
    for i, (name, _, id_) in enumerate(told):
        if name not in ("reward", "end"):
            assert read_all(http, stream_of(rollout), last=id_) == told[i + 1 :]
    assert read_all(http, stream_of(rollout), last=told[-2][2]) == told[-2:]  # the two belong together
    assert http.get(stream_of(rollout), headers={"Last-Event-ID": told[-1][2]}).status_code == 204


def test_what_happens_is_told_as_it_happens(case: ApiCase, http: httpx.Client) -> None:
    [rollout] = case.domain.submit()
    with http.stream("GET", stream_of(rollout)) as response:
        messages = Follower(response).messages()
        assert next(messages)[1]["kind"] == "submitted"
        worker = case.domain.worker(Stage.INIT)
        case.domain.claim(rollout, Stage.INIT, worker)
        assert next(messages)[1]["to_state"] == "initializing"
        move([rollout.id], to=State.READY, guard=Guard([State.INITIALIZING]))
        assert next(messages)[1]["to_state"] == "ready"
        cancel(rollout)
        rest = list(messages)
    assert [name for name, _, _ in rest] == ["history", "reward", "end"]
    assert rest[-1][1]["state"] == "cancelled"


def test_silence_is_filled_with_heartbeats(case: ApiCase, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.05)
    [rollout] = case.domain.submit()
    for path in (stream_of(rollout), f"/api/v1/runs/{rollout.run_id}/events/stream/"):
        with http.stream("GET", path) as response:
            messages = Follower(response).messages()
            assert [name for name, _, _ in (next(messages), *(next(messages) for _ in range(3)))].count("heartbeat") >= 2


def test_a_run_is_followed_to_its_end(case: ApiCase, http: httpx.Client) -> None:
    first, second = case.domain.submit(n=2)
    path = f"/api/v1/runs/{first.run_id}/events/stream/"
    with http.stream("GET", path) as response:
        messages = Follower(response).messages()
        assert (next(messages)[1]["ended"], first.state) == (0, "queued")
        cancel(first)
        assert next(messages)[1]["counts"]["cancelled"] == 1
        cancel(second)
        (name, data, _), (end, _, id_) = messages
    assert (name, data["progress"], end) == ("progress", 1.0, "end")
    assert http.get(path, headers={"Last-Event-ID": id_}).status_code == 204
    case.domain.submit()
    with http.stream("GET", path, headers={"Last-Event-ID": id_}) as response:
        assert next(Follower(response).messages())[1]["total"] == 3


def test_two_hundred_followers_hold_no_connection_and_are_all_told(case: ApiCase, server_url: str) -> None:
    rollouts = case.domain.submit(n=20)
    names: list[list[str]] = [[] for _ in range(200)]

    async def follow(client: httpx.AsyncClient, i: int) -> None:
        async with client.stream("GET", stream_of(rollouts[i % 20])) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    names[i].append(line.removeprefix("event: "))

    async def all_waiting() -> None:
        while not all(names):
            await asyncio.sleep(0.02)

    async def scenario() -> int:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {case.owner_secret}"}
        async with httpx.AsyncClient(base_url=server_url, headers=headers, limits=limits, timeout=PATIENCE) as client:
            followers = [asyncio.create_task(follow(client, i)) for i in range(200)]
            async with asyncio.timeout(PATIENCE):
                await all_waiting()
            connections = await asyncio.to_thread(count_connections)
            quick = await client.get(f"/api/v1/rollouts/{rollouts[0].id}/")
            assert quick.status_code == 200
            await asyncio.to_thread(cancel_all)
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*followers)
            return connections

    def count_connections() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            [count] = cursor.fetchone()
        connection.close()
        return int(count)

    def cancel_all() -> None:
        cancel_rollouts(project=case.domain.project, run_id=case.domain.run.id)
        connection.close()

    assert asyncio.run(scenario()) < 30
    assert all(told[0] == "history" and told[-2:] == ["reward", "end"] for told in names)


def test_the_clients_follow(case: ApiCase, server_url: str) -> None:
    [rollout] = case.domain.submit()
    with Client(server_url, case.owner_secret, patience=PATIENCE) as client:
        followed = client.iter_events(rollout.id)
        assert next(followed).data["kind"] == "submitted"
        cancel(rollout)
        names = [event.name for event in followed]
        assert names == ["history", "reward", "end"]
        again = list(client.iter_events(rollout.id))
        assert list(client.iter_events(rollout.id, after=again[0].id)) == again[1:]
        assert list(client.iter_events(rollout.id, after=again[-1].id)) == []
        assert [event.name for event in client.iter_progress(rollout.run_id)] == ["progress", "end"]
        with pytest.raises(ApiError, match="not_found"):
            next(client.iter_events(case.domain.NOBODY))

    async def follow() -> list[str]:
        async with AsyncClient(server_url, case.owner_secret) as aclient:
            return [event.name async for event in aclient.iter_events(rollout.id)]

    assert asyncio.run(follow()) == ["history", *names]

"""Sessions as code of an agent uses them, by both clients, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rollouts.client import ApiError, AsyncClient, Client, types
from rollouts.lifecycle import GATEWAY
from rollouts.models import Rollout, Session
from rollouts.services.lease import register_worker
from rollouts.services.reap import reap
from tests.integration.api_case import ApiCase
from tests.integration.test_api_client import assert_shape

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def case(transactional_db: None) -> ApiCase:
    register_worker(node="test-node", stage=GATEWAY, pid=1, concurrency=0)
    return ApiCase()


@pytest.fixture
def client(server_url: str, case: ApiCase) -> Iterator[Client]:
    with Client(server_url, case.owner_secret, patience=20) as client:
        yield client


@pytest.fixture
def async_client(server_url: str, case: ApiCase) -> AsyncClient:
    return AsyncClient(server_url, case.owner_secret, patience=20)


def ended(client: Client, session_id: str) -> tuple[str, str, float | None]:
    info = client.session_info(session_id)
    assert info["termination"] is not None
    return info["state"], info["termination"]["cause"], info["reward"]


def test_leaving_the_block_closes_it_with_the_reward_given(client: Client) -> None:
    with client.session(policy="tiny", metadata={"n": 1}) as session:
        assert_shape(session.info, types.OpenedSession)
        assert session.openai_url == f"{session.anthropic_url}/v1"
        assert session.google_url == session.anthropic_url
        session.reward(components=[{"name": "tests", "value": 0.5}, {"name": "style", "value": 1.0, "weight": 0.5}])
        session.artefacts["patch"] = "diff"
    assert_shape(client.session_info(session.id), types.Session)
    assert ended(client, session.id) == ("succeeded", "completed", 1.0)
    assert client.rollout(session.id)["artefacts"] == {"patch": "diff"}
    assert [listed["id"] for listed in client.iter_sessions()] == [session.id]


@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [(ValueError("no"), "failed", "agent_failed"), (KeyboardInterrupt(), "cancelled", "cancelled")],
)
def test_an_agent_that_breaks_off_gets_no_reward(client: Client, error: BaseException, state: str, cause: str) -> None:
    with pytest.raises(type(error)), client.session(policy="tiny") as session:
        session.reward(1.0)
        raise error
    assert ended(client, session.id) == (state, cause, None)


def test_it_can_be_closed_in_other_words_before(client: Client) -> None:
    with client.session(policy="tiny") as session:
        session.reward(0.25)
        info = session.close("max_turns", detail="ten turns")
        assert info["termination"] == {"phase": "run", "cause": "max_turns", "blame": "policy", "detail": "ten turns"}
    assert ended(client, session.id) == ("succeeded", "max_turns", 0.25)


def test_a_session_that_has_ended_meanwhile_says_so(client: Client) -> None:
    with pytest.raises(ApiError, match="cancelled"), client.session(policy="tiny") as session:
        client.cancel_session(session.id)
        Rollout.objects.update(cancel_requested_at="2020-01-01T00:00:00Z")
        reap()


def test_what_the_agent_raised_is_not_hidden_by_that(client: Client) -> None:
    with pytest.raises(ValueError, match="its own"), client.session(policy="tiny") as session:
        client.close_session(session.id, reward=0.5, artefacts={"a": 1})
        raise ValueError("its own")
    assert ended(client, session.id) == ("succeeded", "completed", 0.5)


def test_it_is_not_open_before_its_block(client: Client) -> None:
    with pytest.raises(RuntimeError, match="with"):
        _ = client.session(policy="tiny").key


def test_heartbeats_are_sent_meanwhile(client: Client) -> None:
    with client.session(policy="tiny", ttl_seconds=5) as session:
        begun = Session.objects.get().expires_at
        for _ in range(100):
            if Session.objects.get().expires_at > begun:
                break
            session._over.wait(0.1)
        assert Session.objects.get().expires_at > begun


def test_the_same_for_asyncio(async_client: AsyncClient, client: Client) -> None:
    async def work(error: BaseException | None = None) -> str:
        async with async_client.session(policy="tiny", ttl_seconds=60) as session:
            await session.reward(0.5)
            if error is not None:
                raise error
        return session.id

    async def broken(error: BaseException) -> str:
        with pytest.raises(type(error)):
            await work(error)
        newest, *_ = [listed["id"] async for listed in async_client.iter_sessions()]
        return newest

    async def play() -> list[Any]:
        async with async_client:
            done = await work()
            failed = await broken(ValueError("no"))
            stopped = await broken(asyncio.CancelledError())
            async with async_client.session(policy="tiny") as session:
                await session.close("abandoned")
            assert_shape(await async_client.session_info(done), types.Session)
            return [done, failed, stopped, session.id]

    assert [ended(client, id_)[1] for id_ in asyncio.run(play())] == ["completed", "agent_failed", "cancelled", "cancelled"]

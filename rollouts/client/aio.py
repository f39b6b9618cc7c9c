"""The client for asyncio code: the methods of `Client`, to await or to iterate over with `async for`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

import httpx

from . import calls
from .calls import Call, Id
from .connection import http_arguments
from .errors import ApiError
from .events import END, Event, EventReader, stream_arguments
from .retries import Retries
from .sessions import AsyncSession
from .types import (
    Dataset,
    Environment,
    Group,
    GroupSpec,
    Image,
    ImageBuild,
    ImageDetail,
    Include,
    Limits,
    LLMServer,
    NewServer,
    Page,
    Policy,
    PolicyDetail,
    PolicyVersion,
    Project,
    RescoreCounts,
    Rescoring,
    Result,
    Rollout,
    RolloutDetail,
    Run,
    RunDetail,
    ServerChange,
    SessionTask,
    StoredTask,
    SubmittedGroup,
    Task,
    TaskSpec,
    Trajectory,
)
from .types import Session as SessionInfo

T = TypeVar("T")


class AsyncClient:
    """A connection to one project. Use it as an async context manager, or await `close`.

    `base_url` and `api_key` default to PRORL_URL and PRORL_API_KEY. Methods raise ApiError for refusals, and
    httpx.TransportError when the server stayed out of reach for `patience` seconds.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        patience: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(**http_arguments(base_url, api_key), transport=transport)
        self._patience = patience

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def create_environment(
        self, name: str, handler: str, config: Mapping[str, Any] | None = None, description: str = ""
    ) -> Environment:
        """Register an environment; a known name gets its next version."""
        return await self._send(calls.create_environment(name, handler, config, description))

    async def register_image(
        self, name: str, kind: str, source: Mapping[str, Any], *, format: str = "directory", description: str = ""
    ) -> ImageDetail:
        """Register an image; nothing is built before it is asked for. Takes a key with the scope `operate`."""
        return await self._send(calls.register_image(name, kind, source, format, description))

    async def build_image(self, name: str, *, force: bool = False) -> ImageBuild:
        """Have an image built; while a build is unfinished, that one. `image` tells how it goes. Takes the scope `operate`."""
        return await self._send(calls.build_image(name, force))

    async def image(self, name: str) -> ImageDetail:
        """An image with its source and its newest builds, newest first."""
        return await self._send(calls.image(name))

    async def create_dataset(self, name: str, environment: str) -> Dataset:
        """A dataset of the newest version of the named environment."""
        return await self._send(calls.create_dataset(name, environment))

    async def add_tasks(self, dataset_id: Id, tasks: Iterable[TaskSpec]) -> list[StoredTask]:
        """Add up to 10,000 tasks, all or none. Look at `quarantined`: such tasks are kept but never rolled out."""
        return await self._send(calls.add_tasks(dataset_id, tasks))

    async def register_server(self, url: str, policy: str, **settings: Unpack[NewServer]) -> LLMServer:
        """Let an inference server (its root, without /v1) serve a policy. The service probes it first."""
        return await self._send(calls.register_server(url, policy, settings))

    async def server(self, server_id: Id) -> LLMServer:
        """An LLM server with its state and load."""
        return await self._send(calls.server(server_id))

    async def change_server(self, server_id: Id, **changes: Unpack[ServerChange]) -> LLMServer:
        """Change what is named. With another key or tokenizer the server is probed again."""
        return await self._send(calls.change_server(server_id, changes))

    async def set_server_state(self, server_id: Id, state: Literal["live", "draining", "paused"]) -> LLMServer:
        """Let a server take part, keep its rollouts and get no new ones (draining), or take no calls (paused)."""
        return await self._send(calls.change_server(server_id, {"state": state}))

    async def sleep_server(self, server_id: Id, *, level: Literal[1, 2] = 1) -> LLMServer:
        """Have a server give up its memory, for training on the same GPU. It takes no calls until it is woken."""
        return await self._send(calls.sleep_server(server_id, level))

    async def wake_server(self, server_id: Id, *tags: Literal["weights", "kv_cache"]) -> LLMServer:
        """Have it take its memory again: all, or what is named. It takes calls once it has its KV cache."""
        return await self._send(calls.wake_server(server_id, tags))

    async def remove_server(self, server_id: Id) -> None:
        """Forget a server."""
        await self._send(calls.remove_server(server_id))

    async def create_policy(self, name: str) -> Policy:
        """Make a policy before its first server is registered. Takes a key with the scope `admin`."""
        return await self._send(calls.create_policy(name))

    async def policy(self, name: str) -> PolicyDetail:
        """A policy with its servers and its newest announcement."""
        return await self._send(calls.policy(name))

    async def announce_version(
        self,
        policy: str,
        version: int,
        *,
        weights: str | Mapping[str, Any] | None = None,
        mode: Literal["drain", "continue", "abort"] = "drain",
    ) -> PolicyVersion:
        """Have all servers of a policy load new weights: a directory that they can read, or `{"kind": "lora", …}`.

        Without `weights` you put them in place yourself: `wait_for_version` until the state is `ready`, update the servers,
        then `weights_in_place`. `mode` is what happens to replies under way.
        """
        return await self._send(calls.announce_version(policy, version, weights, mode))

    async def wait_for_version(self, policy: str, version: int, *, timeout: float | None = None) -> PolicyVersion:
        """Wait until an announced version is `live`, `failed` or `ready` (external weights may be put in place).

        Look at its `report`: a server that did not load takes no calls any more. Raises TimeoutError after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 30.0 if deadline is None else max(0.0, min(30.0, deadline - time.monotonic()))
            found = await self._send(calls.policy_version(policy, version, left))
            if calls.is_settled(found):
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"version {version} of {policy} is {found['state']} after {timeout:g} seconds")

    async def weights_in_place(self, policy: str, version: int, *, failed: Mapping[Id, str] | None = None) -> PolicyVersion:
        """Say that external weights are in place, save where that `failed` (server id -> why). The servers take calls again."""
        return await self._send(calls.weights_in_place(policy, version, failed))

    async def project(self) -> Project:
        """The project of the key, with its limits and what it has used."""
        return await self._send(calls.project())

    async def create_run(
        self,
        name: str,
        policy: str,
        *,
        priority: int = 50,
        settings: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> Run:
        """Open a run. Groups can be submitted to it until it is cancelled or a limit is reached."""
        return await self._send(calls.create_run(name, policy, priority, settings, limits))

    async def set_limits(self, run_id: Id, limits: Limits) -> Run:
        """Change the limits that are named; None lifts one."""
        return await self._send(calls.set_limits(run_id, limits))

    async def submit_groups(self, run_id: Id, groups: Iterable[GroupSpec]) -> list[SubmittedGroup]:
        """Queue up to 10,000 groups, all or none. They come back in the order given."""
        return await self._send(calls.submit_groups(run_id, groups))

    async def run(self, run_id: Id) -> RunDetail:
        """A run with its progress."""
        return await self._send(calls.run(run_id))

    async def group(self, group_id: Id) -> Group:
        """A group with its counts."""
        return await self._send(calls.group(group_id))

    async def rollout(self, rollout_id: Id) -> RolloutDetail:
        """A rollout with its attempts and artefacts."""
        return await self._send(calls.rollout(rollout_id))

    async def trajectory(self, rollout_id: Id, *, full_prompts: bool = False) -> Trajectory:
        """What the rollout's newest attempt saw and did; `full_prompts` adds every call's whole prompt."""
        return await self._send(calls.trajectory(rollout_id, full_prompts))

    async def picture(self, rollout_id: Id, sha256: str) -> bytes:
        """The data of a picture that the rollout's model was shown, by its digest in a message or segment."""
        return await self._send(calls.picture(rollout_id, sha256))

    async def cancel_run(self, run_id: Id) -> int:
        """Cancel a run. How many of its rollouts were still going."""
        return await self._send(calls.cancel("runs", run_id))

    async def cancel_group(self, group_id: Id) -> int:
        """Cancel a group. How many of its rollouts were still going."""
        return await self._send(calls.cancel("groups", group_id))

    async def cancel_rollout(self, rollout_id: Id) -> int:
        """Cancel a rollout. 1 when it was still going."""
        return await self._send(calls.cancel("rollouts", rollout_id))

    def session(
        self,
        *,
        policy: str = "",
        run: str = "",
        task: SessionTask | None = None,
        ttl_seconds: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncSession:
        """A rollout whose agent is your own code: `async with client.session(policy="tiny") as session`.

        `run` is the id or name of a run; with `policy` alone it goes to the run of its sessions. The session ends when there is
        neither a call nor a heartbeat for `ttl_seconds` (600); heartbeats are sent for you.
        """
        return AsyncSession(self, calls.open_session(run, policy, task, ttl_seconds, metadata))

    async def session_info(self, session_id: Id) -> SessionInfo:
        """A session as it is now."""
        return await self._send(calls.session_info(session_id))

    async def close_session(
        self,
        session_id: Id,
        outcome: Literal["completed", "max_turns", "failed", "abandoned"] = "completed",
        *,
        reward: float | None = None,
        artefacts: Mapping[str, Any] | None = None,
        detail: str = "",
    ) -> SessionInfo:
        """End a session that was opened elsewhere."""
        return await self._send(calls.close_session(session_id, outcome, reward, artefacts or {}, detail))

    async def cancel_session(self, session_id: Id) -> None:
        """Cancel a session: its agent's calls are refused."""
        await self._send(calls.cancel_session(session_id))

    def iter_sessions(self) -> AsyncIterator[SessionInfo]:
        """Sessions, newest first."""
        return self._pages(calls.pages("/sessions/"))

    async def rescore_rollout(self, rollout_id: Id, *, environment: Id | None = None) -> Rescoring:
        """Score a finished rollout again, maybe with another version (its id) of its environment. Old rewards are kept."""
        return await self._send(calls.rescore_rollout(rollout_id, environment))

    async def rescore_run(self, run_id: Id, *, environment: Id | None = None, only_cause: str | None = None) -> RescoreCounts:
        """Score a run's finished rollouts again; with `only_cause` those that ended by it. See `iter_rescorings`."""
        return await self._send(calls.rescore_run(run_id, environment, only_cause))

    def iter_rescorings(self, run_id: Id) -> AsyncIterator[Rescoring]:
        """Rescorings of a run, newest first."""
        return self._pages(calls.rescorings(run_id))

    def iter_runs(self) -> AsyncIterator[Run]:
        """Runs, newest first."""
        return self._pages(calls.pages("/runs/"))

    def iter_groups(self, run_id: Id) -> AsyncIterator[Group]:
        """Groups of a run, oldest first."""
        return self._pages(calls.groups(run_id))

    def iter_tasks(self, dataset_id: Id, *, quarantined: bool | None = None) -> AsyncIterator[Task]:
        """Tasks of a dataset, oldest first."""
        return self._pages(calls.tasks(dataset_id, quarantined))

    def iter_environments(self) -> AsyncIterator[Environment]:
        """Environments, all versions, newest first."""
        return self._pages(calls.pages("/environments/"))

    def iter_images(self) -> AsyncIterator[Image]:
        """Images, newest first."""
        return self._pages(calls.pages("/images/"))

    def iter_policies(self) -> AsyncIterator[Policy]:
        """Policies, newest first."""
        return self._pages(calls.pages("/policies/"))

    def iter_versions(self, policy: str) -> AsyncIterator[PolicyVersion]:
        """Announced versions of a policy, newest first."""
        return self._pages(calls.pages(calls.path_of("policies", policy, "versions")))

    def iter_servers(self) -> AsyncIterator[LLMServer]:
        """LLM servers, newest first."""
        return self._pages(calls.pages("/llm-servers/"))

    def iter_rollouts(self, **filters: Any) -> AsyncIterator[Rollout]:
        """Rollouts, newest first. Filters: run, group, state, environment, cause, blame, reward_min, reward_max, trainable."""
        return self._pages(calls.pages("/rollouts/", **filters))

    async def iter_results(
        self,
        run_id: Id,
        after: str = "",
        *,
        include: Include = "",
        wait: float = 30.0,
        limit: int = 100,
        compress: bool = False,
    ) -> AsyncIterator[Result]:
        """Rollouts of a run as they end, each exactly once, until all that were submitted have ended.

        `include="segments"` brings what to train on (see `unpack`), `include="trajectory"` everything that happened.
        To go on in another process, keep a result's `cursor` and pass it as `after`. `compress` is for slow networks.
        """
        while True:
            page = await self._send(calls.results(run_id, after, wait, limit, include, compress))
            for item in page["results"]:
                yield item
            if page["done"]:
                return
            after = page["next"]

    def iter_events(self, rollout_id: Id, after: str = "") -> AsyncIterator[Event]:
        """What happens to a rollout, as it happens: `history`, `turn`, `reward`, at last `end`. Reconnects by itself."""
        return self._follow("rollouts", rollout_id, after)

    def iter_progress(self, run_id: Id) -> AsyncIterator[Event]:
        """A run's `progress`, as it changes, until all rollouts submitted so far have ended: `end`."""
        return self._follow("runs", run_id, "")

    async def wait(self, run_id: Id, *, timeout: float | None = None, poll: float = 1.0) -> RunDetail:
        """Wait until all rollouts of a run have ended. Raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            run = await self.run(run_id)
            if not calls.is_going(run):
                return run
            if deadline is not None and time.monotonic() + poll > deadline:
                raise TimeoutError(f"run {run_id} is not done after {timeout:g} seconds: {run['progress']:.0%}")
            await asyncio.sleep(poll)

    async def _pages(self, call: Call[Page]) -> AsyncIterator[Any]:
        following: Call[Page] | None = call
        while following is not None:
            page = await self._send(following)
            for item in page["results"]:
                yield item
            following = calls.next_page(following, page)

    async def _follow(self, kind: str, id_: Id, last: str) -> AsyncIterator[Event]:
        retries = Retries(self._patience)
        while True:
            reader = EventReader()
            try:
                async with self._http.stream(**stream_arguments(kind, id_, last)) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    pause = retries.pause_after(response)
                    if pause is None and not response.is_success:
                        await response.aread()
                        raise ApiError.from_response(response)
                    if pause is None:
                        async for line in response.aiter_lines():
                            if event := reader.read(line):
                                yield event
                                if event.name == END:
                                    return
                                last, retries = event.id, Retries(self._patience)
                        raise httpx.RemoteProtocolError("the stream ended before its end")
            except httpx.TransportError as error:
                pause = retries.pause_after_error(error)
            await asyncio.sleep(pause)

    async def _send(self, call: Call[T]) -> T:
        retries = Retries(self._patience)
        while True:
            try:
                response = await self._http.request(**call.arguments())
            except httpx.TransportError as error:
                pause = retries.pause_after_error(error)
            else:
                wanted = retries.pause_after(response)
                if wanted is None:
                    return call.result(response)
                pause = wanted
            await asyncio.sleep(pause)

"""The API's requests as values. `Client` and `AsyncClient` only send them."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import msgpack

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from .errors import ApiError
from .types import (
    TERMINAL_STATES,
    Dataset,
    Environment,
    Group,
    GroupSpec,
    ImageBuild,
    ImageDetail,
    Limits,
    LLMServer,
    OpenedSession,
    Page,
    Policy,
    PolicyDetail,
    PolicyVersion,
    Project,
    RescoreCounts,
    Rescoring,
    ResultsPage,
    RewardComponent,
    RolloutDetail,
    Run,
    RunDetail,
    Session,
    SessionTask,
    StoredTask,
    SubmittedGroup,
    TaskSpec,
    Trajectory,
)

T = TypeVar("T")
Id = str | uuid.UUID

_MSGPACK = "application/msgpack"  # carries token arrays as they are
_COMPRESSED = "application/msgpack+zstd"
_DATA = "application/octet-stream"
READ_TIMEOUT = 60.0  # seconds, on top of what a request asks the server to wait


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request. Sending it again has no further effect: creating ones carry an Idempotency-Key.

    `member` names the member of the answer that is the result; empty for the whole answer.
    """

    method: str
    path: str
    body: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    member: str = ""
    wait: float = 0.0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for httpx's `request`."""
        arguments: dict[str, Any] = {
            "method": self.method,
            "url": f"/api/v1{self.path}",
            "params": {name: _text(value) for name, value in self.params.items() if value is not None},
            "headers": dict(self.headers),
            "timeout": httpx.Timeout(READ_TIMEOUT + self.wait, connect=10.0),
        }
        if self.body is not None:
            arguments["json"] = self.body
        return arguments

    def result(self, response: httpx.Response) -> T:
        """What the answer holds. Raises ApiError."""
        if not response.is_success:
            raise ApiError.from_response(response)
        answer = _content(response)
        result: T = answer[self.member] if self.member else answer
        return result


def _content(response: httpx.Response) -> Any:
    kind = response.headers.get("Content-Type", "")
    if kind in (_MSGPACK, _COMPRESSED):
        return msgpack.unpackb(response.content if kind == _MSGPACK else zstd.decompress(response.content))
    if kind == _DATA or kind.startswith("image/"):
        return response.content
    return response.json() if response.content else None


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else str(value)


def path_of(*parts: Id) -> str:
    return "/" + "".join(quote(str(part), safe="") + "/" for part in parts)


def _create(path: str, body: Any, member: str = "") -> Call[Any]:
    return Call("POST", path, body, headers={"Idempotency-Key": str(uuid.uuid4())}, member=member)


def create_environment(name: str, handler: str, config: Mapping[str, Any] | None, description: str) -> Call[Environment]:
    body = {"name": name, "handler": handler, "config": dict(config or {}), "description": description}
    return _create("/environments/", body)


def register_image(name: str, kind: str, source: Mapping[str, Any], format: str, description: str) -> Call[ImageDetail]:
    body = {"name": name, "kind": kind, "source": dict(source), "format": format, "description": description}
    return _create("/images/", body)


def image(name: str) -> Call[ImageDetail]:
    return Call("GET", path_of("images", name))


def build_image(name: str, force: bool) -> Call[ImageBuild]:
    return Call("POST", path_of("images", name, "build"), {"force": force})


def create_dataset(name: str, environment: str) -> Call[Dataset]:
    return _create("/datasets/", {"name": name, "environment": environment})


def add_tasks(dataset_id: Id, tasks: Iterable[TaskSpec]) -> Call[list[StoredTask]]:
    return _create(path_of("datasets", dataset_id, "tasks"), {"tasks": list(tasks)}, "tasks")


def register_server(url: str, policy: str, settings: Mapping[str, Any]) -> Call[LLMServer]:
    return _create("/llm-servers/", {"url": url, "policy": policy, **settings})


def server(server_id: Id) -> Call[LLMServer]:
    return Call("GET", path_of("llm-servers", server_id))


def sleep_server(server_id: Id, level: int) -> Call[LLMServer]:
    return Call("POST", path_of("llm-servers", server_id, "sleep"), {"level": level})


def wake_server(server_id: Id, tags: Iterable[str]) -> Call[LLMServer]:
    return Call("POST", path_of("llm-servers", server_id, "wake"), {"tags": list(tags)})


def change_server(server_id: Id, changes: Mapping[str, Any]) -> Call[LLMServer]:
    return Call("PATCH", path_of("llm-servers", server_id), dict(changes))


def remove_server(server_id: Id) -> Call[None]:
    return Call("DELETE", path_of("llm-servers", server_id))


def create_policy(name: str) -> Call[Policy]:
    return _create("/policies/", {"name": name})


def policy(name: str) -> Call[PolicyDetail]:
    return Call("GET", path_of("policies", name))


def announce_version(policy: str, version: int, weights: str | Mapping[str, Any] | None, mode: str) -> Call[PolicyVersion]:
    """Repeated, it is only answered."""
    source: dict[str, Any] = {"kind": "external"}
    if isinstance(weights, str):
        source = {"kind": "path", "path": weights}
    elif weights is not None:
        source = dict(weights)
    body = {"version": version, "mode": mode, "source": source}
    return Call("POST", path_of("policies", policy, "versions"), body)


def policy_version(policy: str, version: int, wait: float) -> Call[PolicyVersion]:
    return Call("GET", path_of("policies", policy, "versions", str(version)), params={"wait": wait}, wait=wait)


def weights_in_place(policy: str, version: int, failed: Mapping[Id, str] | None) -> Call[PolicyVersion]:
    body = {"failed": {str(server_id): why for server_id, why in (failed or {}).items()}}
    return Call("POST", path_of("policies", policy, "versions", str(version), "loaded"), body)


def is_settled(version: PolicyVersion) -> bool:
    """Whether its servers have the weights, failed, or wait for them."""
    return version["state"] in ("ready", "live", "failed")


def project() -> Call[Project]:
    return Call("GET", "/project/")


def create_run(name: str, policy: str, priority: int, settings: Mapping[str, Any] | None, limits: Limits | None) -> Call[Run]:
    body = {"name": name, "policy": policy, "priority": priority, "settings": dict(settings or {})}
    return _create("/runs/", {**body, "limits": dict(limits or {})})


def set_limits(run_id: Id, limits: Limits) -> Call[Run]:
    return Call("PATCH", path_of("runs", run_id), {"limits": dict(limits)})


def submit_groups(run_id: Id, groups: Iterable[GroupSpec]) -> Call[list[SubmittedGroup]]:
    return _create(path_of("runs", run_id, "groups"), {"groups": list(groups)}, "groups")


def run(run_id: Id) -> Call[RunDetail]:
    return Call("GET", path_of("runs", run_id))


def group(group_id: Id) -> Call[Group]:
    return Call("GET", path_of("groups", group_id))


def rollout(rollout_id: Id) -> Call[RolloutDetail]:
    return Call("GET", path_of("rollouts", rollout_id))


def trajectory(rollout_id: Id, full_prompts: bool) -> Call[Trajectory]:
    params = {"tokens": "full" if full_prompts else "sampled"}
    return Call("GET", path_of("rollouts", rollout_id, "trajectory"), params=params)


def picture(rollout_id: Id, sha256: str) -> Call[bytes]:
    return Call("GET", path_of("rollouts", rollout_id, "pictures", sha256))


def results(run_id: Id, after: str, wait: float, limit: int, include: str, compress: bool) -> Call[ResultsPage]:
    params = {"after": after, "wait": wait, "limit": limit, "include": include}
    return Call(
        "GET",
        path_of("runs", run_id, "results"),
        params=params,
        headers={"Accept": _COMPRESSED if compress else _MSGPACK},
        wait=wait,
    )


def cancel(kind: str, id_: Id) -> Call[int]:
    """`kind` is runs, groups or rollouts. The result is how many rollouts were still going."""
    return Call("POST", path_of(kind, id_, "cancel"), member="cancelled")


def rescore_rollout(rollout_id: Id, environment: Id | None) -> Call[Rescoring]:
    body = {} if environment is None else {"environment": str(environment)}
    return Call("POST", path_of("rollouts", rollout_id, "rescore"), body)


def rescore_run(run_id: Id, environment: Id | None, only_cause: str | None) -> Call[RescoreCounts]:
    body = {"environment": environment and str(environment), "only_cause": only_cause}
    return Call("POST", path_of("runs", run_id, "rescore"), {name: value for name, value in body.items() if value})


def rescorings(run_id: Id) -> Call[Page]:
    return pages(path_of("runs", run_id, "rescorings"))


def open_session(
    run: str, policy: str, task: SessionTask | None, ttl_seconds: int | None, metadata: Mapping[str, Any] | None
) -> Call[OpenedSession]:
    body: dict[str, Any] = {"run": run, "policy": policy, "task": task, "metadata": dict(metadata or {})}
    return _create("/sessions/", body if ttl_seconds is None else {**body, "ttl_seconds": ttl_seconds})


def session_info(session_id: Id) -> Call[Session]:
    return Call("GET", path_of("sessions", session_id))


def send_heartbeat(session_id: Id) -> Call[Session]:
    return Call("POST", path_of("sessions", session_id, "heartbeat"))


def give_reward(session_id: Id, value: float | None, components: Iterable[RewardComponent] | None) -> Call[Session]:
    return Call("POST", path_of("sessions", session_id, "reward"), _reward(value, components))


def close_session(
    session_id: Id, outcome: str, reward: float | None, artefacts: Mapping[str, Any], detail: str
) -> Call[Session]:
    body: dict[str, Any] = {"outcome": outcome, "artefacts": dict(artefacts), "detail": detail}
    if reward is not None:
        body["reward"] = _reward(reward, None)
    return Call("POST", path_of("sessions", session_id, "close"), body)


def cancel_session(session_id: Id) -> Call[None]:
    return Call("DELETE", path_of("sessions", session_id))


def _reward(value: float | None, components: Iterable[RewardComponent] | None) -> dict[str, Any]:
    return {"value": value} if components is None else {"value": value, "components": list(components)}


def pages(path: str, **params: Any) -> Call[Page]:
    """The first page of a list."""
    return Call("GET", path, params=params)


def groups(run_id: Id) -> Call[Page]:
    return pages(path_of("runs", run_id, "groups"))


def tasks(dataset_id: Id, quarantined: bool | None) -> Call[Page]:
    return pages(path_of("datasets", dataset_id, "tasks"), quarantined=quarantined)


def next_page(call: Call[Page], page: Page) -> Call[Page] | None:
    """The call for the page after `page`, or None on the last one."""
    if page["next"] is None:
        return None
    [cursor] = parse_qs(urlsplit(page["next"]).query)["cursor"]
    return replace(call, params={**call.params, "cursor": cursor})


def is_going(run: RunDetail) -> bool:
    """Whether any rollout of the run has not ended yet."""
    return any(count for state, count in run["counts"].items() if state not in TERMINAL_STATES)

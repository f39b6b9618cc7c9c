"""The shapes of requests and answers. Answers may gain members; none is taken away within v1."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required, TypedDict

TERMINAL_STATES = frozenset({"succeeded", "failed", "timed_out", "cancelled", "discarded"})

Include = Literal["", "segments", "trajectory"]
Counts = dict[str, int]  # state -> how many rollouts are in it


class GroupSpec(TypedDict, total=False):
    """n rollouts of one task: `task_id`, or `dataset` and `key`, or `environment` and `payload`.

    `require_policy_version`: sampled from that version and no other.
    """

    n: Required[int]
    task_id: str
    dataset: str
    key: str
    environment: str
    payload: dict[str, Any]
    require_policy_version: int


class TaskSpec(TypedDict):
    """`key` is your own id for the task, unique in its dataset."""

    key: str
    payload: dict[str, Any]


class Environment(TypedDict):
    id: str
    name: str
    version: int
    handler: str
    config: dict[str, Any]
    description: str
    created_at: str
    config_schema: dict[str, Any] | None
    task_schema: dict[str, Any] | None


class Image(TypedDict):
    name: str
    kind: str
    format: str
    description: str
    state: str
    digest: str
    size: int
    warm_target: int
    built_at: str | None
    last_used_at: str | None
    verified_at: str | None
    verify_problem: str
    created_at: str


class ImageBuild(TypedDict):
    number: int
    state: str
    force: bool
    tries: int
    node: str
    step: str
    progress: float
    error: str
    digest: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    log: str


class ImageDetail(Image):
    source: dict[str, Any]
    env: dict[str, str]
    builds: list[ImageBuild]


class Dataset(TypedDict):
    id: str
    name: str
    environment: str
    environment_id: str
    environment_version: int
    created_at: str


class StoredTask(TypedDict):
    """A quarantined task is kept, with the reason, but never rolled out."""

    id: str
    key: str
    quarantined: bool
    quarantine_reason: str


class Task(StoredTask):
    payload: dict[str, Any]
    created_at: str


class LLMServer(TypedDict):
    id: str
    url: str
    model: str
    policy: str
    policy_version: int
    capacity: int
    max_model_len: int
    state: str  # admission unless that is open, else health
    admission: Literal["open", "draining", "paused", "asleep"]
    health: Literal["live", "suspect", "dead", "recovering"]
    health_since: str
    failures: int
    engine: Literal["vllm", "sglang", "openai"]
    features: list[str]
    tokenizer: str
    tool_format: str
    in_flight: int
    load: dict[str, float]
    has_api_key: bool
    capabilities: dict[str, Any]
    last_probe_at: str | None
    last_error: str
    created_at: str


class NewServer(TypedDict, total=False):
    """What may be said of an LLM server when it is registered. `allow_text_only`: take one that training cannot use."""

    model: str
    policy_version: int
    capacity: int
    api_key: str
    tokenizer: str
    tool_format: str
    max_model_len: int | None
    allow_text_only: bool


class ServerChange(TypedDict, total=False):
    """What may be changed of an LLM server."""

    state: Literal["live", "draining", "paused"]
    capacity: int
    policy_version: int
    api_key: str
    tokenizer: str
    tool_format: str


class Policy(TypedDict):
    """`version` is the newest version that any of its servers has loaded."""

    id: str
    name: str
    version: int
    created_at: str


class ServerReport(TypedDict):
    """What became of an announcement on one server."""

    state: Literal["waiting", "loading", "ready", "live", "failed"]
    error: NotRequired[str]
    seconds: NotRequired[float | None]


class PolicyVersion(TypedDict):
    """An announcement. `report` is by server id; `ready` asks you to put external weights in place."""

    id: str
    policy: str
    version: int
    mode: Literal["drain", "continue", "abort"]
    source: dict[str, Any]
    state: Literal["announced", "loading", "ready", "live", "failed"]
    report: dict[str, ServerReport]
    announced_at: str
    begun_at: str | None
    finished_at: str | None


class PolicyDetail(Policy):
    servers: list[LLMServer]
    announcement: PolicyVersion | None


class Limits(TypedDict, total=False):
    """Limits of a run or project; None for none."""

    max_in_flight: int | None
    max_queued: int | None
    max_rollouts: int | None
    max_tokens: int | None
    max_sandbox_seconds: int | None
    max_wall_seconds: int | None


class Usage(TypedDict):
    """Tokens and sandbox seconds are those of finished rollouts."""

    rollouts: int
    unfinished: int
    tokens: int
    sandbox_seconds: float
    wall_seconds: float


class Project(TypedDict):
    id: str
    name: str
    created_at: str
    limits: Limits
    usage: Usage
    exhausted_at: str | None
    exhausted_by: str | None


class Run(TypedDict):
    """`exhausted_by` names the limit of a budget that ran out."""

    id: str
    name: str
    policy: str
    priority: int
    settings: dict[str, Any]
    created_at: str
    cancelled_at: str | None
    keep: bool
    limits: Limits
    usage: Usage
    exhausted_at: str | None
    exhausted_by: str | None


class RunDetail(Run):
    """`progress` is the share of rollouts that have ended, 0 to 1."""

    counts: Counts
    progress: float


class SubmittedGroup(TypedDict):
    id: str
    run: str
    task: str
    n: int
    created_at: str


class Group(SubmittedGroup):
    dataset: str
    task_key: str
    counts: Counts


class Termination(TypedDict):
    """Why a rollout ended. Only `blame: policy` is the model's doing."""

    phase: str
    cause: str
    blame: str
    detail: str


class Rollout(TypedDict):
    """`reward` is None when it is not known: the infrastructure's failures are never a reward of 0."""

    id: str
    run: str
    group: str
    index: int
    task: str
    task_key: str
    environment: str
    environment_version: int
    state: str
    attempt: int
    infra_retries: int
    priority: int
    reward: float | None
    reward_version: int
    trainable: bool
    termination: Termination | None
    fidelity: str
    required_version: int | None
    policy_version: int | None
    oldest_version: int | None
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    node: str
    cancel_requested_at: str | None
    created_at: str
    state_changed_at: str
    finished_at: str | None
    queue_seconds: float
    init_seconds: float
    run_seconds: float
    eval_seconds: float
    events_pruned_at: str | None
    trajectory_pruned_at: str | None


class Attempt(TypedDict):
    number: int
    node: str
    started_at: str
    ended_at: str | None
    stage: str
    outcome: str
    error: str
    traceback: str


class RolloutDetail(Rollout):
    artefacts: dict[str, Any]
    attempts: list[Attempt]


class MessagePicture(TypedDict):
    """A picture that the model was shown; `client.picture(rollout_id, sha256)` brings its data."""

    index: int
    mime: str
    size: int
    sha256: str
    url: str


class Message(TypedDict):
    index: int
    turn: int
    role: str
    name: str
    content: str
    pictures: list[MessagePicture]


class PlacedPicture(TypedDict):
    """A picture among ids, none of which was sampled: the model sees it in place of `length` ids from `offset` on."""

    offset: int
    length: int
    sha256: str


class ModelCall(TypedDict):
    """`prompt_ids` are there when asked for. Latency in seconds. `version_spans`: (policy version, ids) in order.

    `pictures` are those new in this call; their offsets count from the first id of its prompt.
    """

    turn: int
    segment: int
    prompt_ids: NotRequired[list[int]]
    sampled_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str
    prompt_tokens: int
    pictures: list[PlacedPicture]
    policy: str
    policy_version: int
    policy_version_last: int
    version_spans: list[tuple[int, int]]
    opened_by: str
    parent_segment: int | None
    dialect: str
    server: str | None
    sampling: dict[str, Any]
    latency: float
    at: str


class ToolPicture(TypedDict):
    index: int
    mime: str
    size: int
    sha256: str


class ToolCall(TypedDict):
    turn: int
    index: int
    name: str
    arguments: dict[str, Any]
    raw: str
    output: str
    exit_code: int | None
    timed_out: bool
    truncated_bytes: int
    error: str
    note: str
    running: bool
    limit_exceeded: str
    pictures: list[ToolPicture]
    started_at: str
    duration: float


class _AnySegment(TypedDict):
    opened_by: str
    parent_segment: int | None
    pictures: list[PlacedPicture]


class Segment(_AnySegment):
    """What to train on. The lists of numbers are equally long; `loss_mask` is 1 on sampled ids, `policy_versions` -1 on others.

    `opened_by` says why it was begun, `parent_segment` which one it branched off.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    policy_versions: list[int]


class PackedSegment(_AnySegment):
    """A segment as little-endian arrays: int32, uint8, float32; base64 in a JSON answer. `unpack` reads both.

    `version_runs` are (policy version, ids) pairs over all ids.
    """

    token_ids: bytes | str
    loss_mask: bytes | str
    logprobs: bytes | str | None
    version_runs: list[tuple[int, int]]


class Trajectory(TypedDict):
    rollout: str
    attempt: int
    fidelity: str
    messages: list[Message]
    model_calls: list[ModelCall]
    tool_calls: list[ToolCall]
    segments: list[Segment]
    token_problem: str


class Result(Rollout):
    """A rollout that has ended. `cursor` is its place in the stream; `segments` or `trajectory` is there when asked for.

    Segments are withheld when the stored tokens cannot be what was sampled; `token_problem` then says why.
    """

    cursor: str
    rewards: dict[str, float | None]
    segments: NotRequired[list[PackedSegment]]
    token_problem: NotRequired[str]
    trajectory: NotRequired[Trajectory]


class ResultsPage(TypedDict):
    results: list[Result]
    next: str
    done: bool


class SessionTask(TypedDict, total=False):
    """What a session works on: `task_id`, or `dataset` and `key`."""

    task_id: str
    dataset: str
    key: str


class RewardComponent(TypedDict):
    """`value` is None when it could not be measured; `weight` is 1 unless given."""

    name: str
    value: float | None
    weight: NotRequired[float]
    detail: NotRequired[dict[str, Any]]


class Session(TypedDict):
    """A rollout whose agent runs elsewhere; `id` is that of the rollout. It takes calls while it is `open`."""

    id: str
    run: str
    group: str
    task: str
    task_key: str
    environment: str
    open: bool
    state: str
    termination: Termination | None
    reward: float | None
    trainable: bool
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    policy_version: int | None
    fidelity: str
    opened_by: str
    key_prefix: str
    metadata: dict[str, Any]
    ttl_seconds: int
    heartbeat_seconds: float
    expires_at: str
    last_seen_at: str
    last_call_at: str | None
    created_at: str
    finished_at: str | None


class BaseUrls(TypedDict):
    openai: str
    anthropic: str
    google: str


class OpenedSession(Session):
    """`key` is shown this once."""

    key: str
    base_urls: BaseUrls


class Page(TypedDict):
    """One page of a list; `next` is None on the last one."""

    results: list[Any]
    next: str | None


class Rescoring(TypedDict):
    """One more scoring of a finished rollout. `reward` is set once `state` is done; `cause` is that of the last failure."""

    id: int
    rollout: str
    environment: str
    environment_version: int
    state: Literal["queued", "running", "done", "failed"]
    tries: int
    requested_at: str
    finished_at: str | None
    reward_version: int | None
    reward_before: float | None
    reward: float | None
    cause: str
    detail: str
    traceback: str


class RescoreCounts(TypedDict):
    """Rollouts that will be scored again, those for which that is going on already, and those that cannot be scored."""

    queued: int
    going_on: int
    left_out: int

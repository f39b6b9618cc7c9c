"""Bodies: the shape of what each POST and PATCH accepts. What the values mean is for the services to check."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from rollouts.api.parsing import escape
from rollouts.api.problems import Problem
from rollouts.lifecycle import Cause
from rollouts.run_settings import LimitSettings, RunSettings
from rollouts.services.errors import FieldError
from rollouts.services.session_closing import Outcome
from rollouts.services.sessions import DEFAULT_TTL_SECONDS

BodyT = TypeVar("BodyT", bound="Body")

Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
PolicyName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Id = Annotated[UUID, Field(strict=False)]  # JSON has no ids, only strings
Object = dict[str, Any]

MAX_GROUPS = 10_000
MAX_TASKS = 10_000
_MAX_INT = 2**31 - 1


class Body(BaseModel):
    """Types are taken literally ("5" is no number) and unknown members are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewEnvironment(Body):
    name: Name
    handler: str = Field(max_length=60, description="An installed environment handler.")
    config: Object = Field(default_factory=dict, description="Must fit the handler's config schema.")
    description: str = Field("", max_length=300)


class NewDataset(Body):
    name: Name
    environment: Name = Field(description="Name of an environment; its newest version is used.")


class NewTask(Body):
    key: str = Field(min_length=1, max_length=200, description="Your own id for it, unique in the dataset.")
    payload: Object = Field(description="Must fit the environment's task schema.")


class NewTasks(Body):
    tasks: list[NewTask] = Field(min_length=1, max_length=MAX_TASKS)


class NewServer(Body):
    url: str = Field(min_length=1, max_length=300, description="Root of the server, without /v1.")
    policy: PolicyName
    model: str = Field("", max_length=200, description="The name it answers to; may be left out when it serves just one.")
    policy_version: int = Field(0, ge=0, le=_MAX_INT)
    capacity: int = Field(64, ge=1, le=_MAX_INT, description="Rollouts it takes at once.")
    api_key: str = Field("", max_length=200, description="Sent to it as a bearer token. Never shown again.")
    tokenizer: str = Field(
        "", max_length=500, description="Directory of the model's tokenizer files on the workers; empty: the server renders."
    )
    tool_format: str = Field("", max_length=30, description="How the model writes tool calls; empty: hermes.")
    max_model_len: int | None = Field(
        None, ge=1, le=_MAX_INT, description="Tokens of context; null: as the server tells, which is also the most."
    )
    allow_text_only: bool = Field(False, description="Take a server without token ids or logprobs, for evaluation only.")


class ServerChange(Body):
    """What is left out or null stays."""

    state: Literal["live", "draining", "paused"] | None = None
    capacity: int | None = Field(None, ge=1, le=_MAX_INT)
    policy_version: int | None = Field(None, ge=0, le=_MAX_INT, description="The weights that it serves now.")
    api_key: str | None = Field(None, max_length=200, description="The server is probed with it.")
    tokenizer: str | None = Field(None, max_length=500, description="Proven equal to the server; empty: the server renders.")
    tool_format: str | None = Field(None, max_length=30)


class NewPolicy(Body):
    name: PolicyName


class NewPolicyVersion(Body):
    version: int = Field(ge=1, le=_MAX_INT, description="Higher than every one announced before.")
    mode: Literal["drain", "continue", "abort"] = Field(
        "drain",
        description="Replies under way: `drain` lets them end on the old weights, `continue` lets them go on with the new, "
        "`abort` cuts them and resumes them from their ids with the new.",
    )
    source: Object = Field(
        description='Where the weights come from: {"kind": "path", "path": DIR}, {"kind": "lora", "name": …, "path": DIR}, or '
        '{"kind": "external"}: the trainer puts them in place once the version is `ready`.'
    )


class WeightsInPlace(Body):
    failed: dict[Id, str] = Field(default_factory=dict, description="Servers where that went wrong, by id, and why.")


class Sleep(Body):
    level: Literal[1, 2] = Field(1, description="1 keeps the weights in the host's memory, 2 drops them.")


class Wake(Body):
    tags: list[Literal["weights", "kv_cache"]] = Field(
        default_factory=list,
        max_length=2,
        description="What it takes memory for; empty: all. It takes calls after kv_cache.",
    )


class Drain(Body):
    seconds: float | None = Field(None, description="What it holds may finish in this time; null: PRORL_DRAIN_SECONDS.")


class NewImage(Body):
    name: str = Field(min_length=1, max_length=100)
    kind: str = Field(max_length=20, description="docker_archive, oci, sif, definition, tarball, debian or python.")
    source: Object = Field(default_factory=dict, description="The settings of the kind, see the guide to images.")
    format: Literal["directory", "sif"] = "directory"
    description: str = Field("", max_length=300)


class ImageBuildRequest(Body):
    force: bool = Field(False, description="Also when nothing has changed since it was built.")


class NewRun(Body):
    name: str = Field(min_length=1, max_length=120)
    policy: PolicyName
    priority: int = Field(50, ge=0, le=100, description="Higher goes first.")
    settings: RunSettings = RunSettings.model_validate({})
    limits: LimitSettings = LimitSettings.model_validate({})


class RunChange(Body):
    """What is not named stays as it is; null lifts a limit."""

    limits: LimitSettings = LimitSettings.model_validate({})
    keep: bool | None = Field(None, description="Whether retention leaves the run's rollouts alone.")


class NewGroup(Body):
    """n rollouts of one task. Name the task by `task_id`, by `dataset` and `key`, or give `environment` and `payload`."""

    n: int = Field(ge=1, le=1024)
    task_id: Id | None = None
    dataset: str = Field("", max_length=60)
    key: str = Field("", max_length=200)
    environment: str = Field("", max_length=60)
    payload: Object | None = None
    require_policy_version: int | None = Field(
        None, ge=0, le=_MAX_INT, description="Sample it from this policy version and no other."
    )


class NewGroups(Body):
    groups: list[NewGroup] = Field(min_length=1, max_length=MAX_GROUPS)


class SessionTask(Body):
    """By `task_id`, or by `dataset` and `key`."""

    task_id: Id | None = None
    dataset: str = Field("", max_length=60)
    key: str = Field("", max_length=200)


class NewSession(Body):
    """Name the run, or only the policy: then the session goes to the project's run for sessions of this policy."""

    run: str = Field("", max_length=120, description="Id or name of a run.")
    policy: str = Field("", max_length=100)
    task: SessionTask | None = Field(None, description="What the agent works on, if the project has it as a task.")
    ttl_seconds: int = Field(DEFAULT_TTL_SECONDS, description="It ends when there is no call and no heartbeat for so long.")
    metadata: Object = Field(default_factory=dict, description="Your own, to find it again.")


class SessionRewardComponent(Body):
    name: str = Field(min_length=1, max_length=60)
    value: float | None = Field(description="null: it could not be measured, and then the whole reward is null.")
    weight: float = 1.0
    detail: Object = Field(default_factory=dict)


class SessionReward(Body):
    """Either a number, or named components; the reward is their weighted sum."""

    value: float | None = None
    components: list[SessionRewardComponent] | None = Field(None, min_length=1, max_length=100)


class SessionEnd(Body):
    outcome: Annotated[Outcome, Field(strict=False)] = Field(Outcome.COMPLETED, description="How the agent ended.")
    reward: SessionReward | None = Field(None, description="Left out: what was given before, or the environment's own score.")
    artefacts: Object = Field(default_factory=dict, description="What the environment scores; `answer` is the last reply.")
    detail: str = Field("", max_length=500, description="A sentence on how it ended.")


class NewWebhook(Body):
    url: str = Field(min_length=1, max_length=500, description="http or https; gets signed POSTs.")
    event_types: list[str] = Field(min_length=1, max_length=20)
    description: str = Field("", max_length=300)
    run: Id | None = Field(None, description="Only events of this run; all of the project's when left out.")


class WebhookChange(Body):
    url: str = Field("", min_length=1, max_length=500)
    event_types: list[str] = Field([], min_length=1, max_length=20)
    description: str = Field("", max_length=300)
    enabled: bool = Field(True, description="Also how an endpoint that was disabled for its failures is enabled again.")


class SecretRotation(Body):
    overlap_hours: float = Field(24, ge=0, le=24 * 30, description="How long the old secret signs beside the new one.")


class Replay(Body):
    since: Annotated[AwareDatetime, Field(strict=False, description="Messages made since then, with a time zone.")]


class Rescore(Body):
    environment: Id | None = Field(None, description="Id of another version of its environment; null for its own.")


class RescoreRun(Rescore):
    only_cause: Annotated[Cause, Field(strict=False)] | None = Field(
        None, description="Only rollouts that ended by this cause, such as `evaluation_error`."
    )


def read_body(model: type[BodyT], data: Any) -> BodyT:
    """The parsed JSON as `model`. Raises Problem `invalid`, pointing at everything that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = [FieldError(_pointer(item["loc"]), _sentence(item["type"], item["msg"])) for item in error.errors()]
        first = errors[0]
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise Problem("invalid", f"{first.pointer or 'The body'}: {first.detail}{more}", errors[:_MOST_ERRORS]) from error


_MOST_ERRORS = 100


def _pointer(location: tuple[int | str, ...]) -> str:
    return "".join(f"/{escape(step)}" for step in location)


def _sentence(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "There is no such field."
    if kind == "missing":
        return "This field is required."
    return f"{message}."

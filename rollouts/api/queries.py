"""Query strings: the shape of what each GET accepts. Unknown names are refused: a misspelt filter would select everything."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollouts.api.pagination import MAX_LIMIT
from rollouts.api.problems import Problem
from rollouts.lifecycle import Blame, Cause, State
from rollouts.selectors.rollout_filter import RolloutFilter
from rollouts.services.errors import FieldError

QueryT = TypeVar("QueryT", bound="Query")


class Query(BaseModel):
    """What every URL accepts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    project: str = Field("", description="Name or id of the project; only with a dashboard login that has several.")


class PageQuery(Query):
    """Lists come in pages."""

    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most results in a page.")
    cursor: str = Field("", description="From the `next` link of the page before.")


class TaskQuery(PageQuery):
    quarantined: bool | None = Field(
        None, description="Only tasks that are never rolled out (true), or only the others (false)."
    )


class RolloutQuery(PageQuery):
    run: UUID | None = None
    group: UUID | None = None
    state: State | None = None
    environment: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,60}$", description="Name of the environment.")] | None = None
    cause: Cause | None = Field(None, description="Why it ended.")
    blame: Blame | None = Field(None, description="Who is answerable for the end.")
    reward_min: float | None = None
    reward_max: float | None = None
    trainable: bool | None = None

    def wanted(self) -> RolloutFilter:
        return RolloutFilter(**self.model_dump(exclude={"project", "limit", "cursor"}))


class TrajectoryQuery(Query):
    tokens: Literal["sampled", "full"] = Field(
        "sampled", description="`full` adds the whole prompt of every call as `prompt_ids`."
    )


class ResultsQuery(Query):
    after: str = Field("", description="`next` of the answer before; empty for the beginning.")
    wait: float = Field(0, ge=0, le=60, description="Seconds to wait for a result when there is none yet.")
    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most results in an answer.")
    include: Literal["", "segments", "trajectory"] = Field(
        "", description="`segments` embeds what to train on, packed; `trajectory` embeds all of the trajectory."
    )


class PolicyVersionQuery(Query):
    wait: float = Field(0, ge=0, le=60, description="Seconds to wait for it to be ready, live or failed.")


class DeliveryQuery(PageQuery):
    state: Literal["pending", "delivered", "failed"] | None = None


def read_query(model: type[QueryT], parameters: dict[str, str]) -> QueryT:
    """The query string as `model`. Raises Problem `invalid_parameter` naming each wrong parameter as `?name`."""
    try:
        return model.model_validate(parameters)
    except ValidationError as error:
        errors = [FieldError(f"?{item['loc'][0]}", _sentence(item["type"], item["msg"])) for item in error.errors()]
        raise Problem("invalid_parameter", " ".join(f"{e.pointer}: {e.detail}" for e in errors), errors) from error


def _sentence(kind: str, message: str) -> str:
    return "There is no such parameter here." if kind == "extra_forbidden" else f"{message}."

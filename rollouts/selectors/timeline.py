"""One rollout's trajectory, turn by turn, without its token arrays; and the tokens of a single turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db.models import F, Func, IntegerField, QuerySet
from django.db.models.functions import Coalesce

from rollouts.engine.tools import ToolResult, render_result
from rollouts.models import Message, MessagePicture, ModelCall, Reward, Rollout, ToolCall, ToolPicture
from rollouts.models.trajectory import StoredPicture

_TOKEN_BYTES = 4


class _TokenCount(Func):
    """Number of items of a packed array column, without reading it."""

    function = "OCTET_LENGTH"
    template = f"(%(function)s(%(expressions)s) / {_TOKEN_BYTES})"
    output_field = IntegerField()


class Said(NamedTuple):
    """A message with its pictures."""

    message: Message
    pictures: list[MessagePicture]


@dataclass
class ToolStep:
    """A tool call with the pictures that it displayed.

    `seen` is what the model was told, when that is not all of it, and `seen_pictures` are those that it was shown.
    """

    call: ToolCall
    seen: str = ""
    displayed: list[ToolPicture] = field(default_factory=list)
    seen_pictures: list[MessagePicture] = field(default_factory=list)

    @property
    def pictures(self) -> list[tuple[StoredPicture, bool]]:
        """What it displayed, then what only the model was shown; each with whether the model saw it."""
        displayed, seen = ({picture.blob_id for picture in some} for some in (self.displayed, self.seen_pictures))
        only_seen = [picture for picture in self.seen_pictures if picture.blob_id not in displayed]
        return [(picture, picture.blob_id in seen) for picture in [*self.displayed, *only_seen]]

    @property
    def failed(self) -> bool:
        """An error, a timeout, a limit, or an exit code other than 0."""
        call = self.call
        return bool(call.error or call.timed_out or call.limit_exceeded or call.exit_code)


@dataclass
class Turn:
    """One model call with what led to it (`messages`, also earlier replies that an agent brings along) and its `tools`.

    `unasked` are messages that came after the reply and answer none of its tool calls.
    """

    number: int
    messages: list[Said] = field(default_factory=list)
    reply: str = ""
    call: ModelCall | None = None
    tools: list[ToolStep] = field(default_factory=list)
    unasked: list[Said] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Some tool call went wrong."""
        return any(step.failed for step in self.tools)


def calls_of(rollout: Rollout, attempt: int) -> QuerySet[ModelCall]:
    """Model calls of one attempt with `sampled_tokens` and `context_tokens` counted in the database."""
    return (
        ModelCall.objects.filter(rollout=rollout, attempt=attempt)
        .annotate(
            sampled_tokens=_TokenCount(F("sampled_ids")),
            context_tokens=_TokenCount(F("context_ids")),
            logprob_count=Coalesce(_TokenCount(F("logprobs")), 0),
        )
        .defer("context_ids", "sampled_ids", "logprobs")
        .order_by("turn")
    )


def turns(rollout: Rollout, *, after: int = -1) -> list[Turn]:
    """The turns of the newest attempt that come after turn `after`, in five queries."""
    found: dict[int, Turn] = {}
    said: dict[int, list[Said]] = defaultdict(list)
    answers: dict[int, list[Said]] = {}  # what the model was told after its reply

    def at(number: int) -> Turn:
        return found.setdefault(number, Turn(number))

    newest = {"rollout": rollout, "attempt": rollout.attempt}
    scope = {**newest, "turn__gt": after}
    shown: dict[int, list[MessagePicture]] = defaultdict(list)
    for shown_picture in MessagePicture.objects.filter(**newest):
        shown[shown_picture.message].append(shown_picture)
    for message in Message.objects.filter(**scope).order_by("index"):
        said[message.turn].append(Said(message, shown[message.index]))
    for number, messages in said.items():
        # An agent may put words into the model's mouth before it asks: its own are the last.
        reply = max((place for place, one in enumerate(messages) if one.message.role == "assistant"), default=len(messages))
        at(number).messages = messages[:reply]
        at(number).reply = "".join(one.message.content for one in messages[reply : reply + 1])
        answers[number] = messages[reply + 1 :]
    for call in calls_of(rollout, rollout.attempt).filter(turn__gt=after):
        turn = at(call.turn)
        turn.call = call
        turn.reply = call.text or turn.reply
    pictures: dict[tuple[int, int], list[ToolPicture]] = defaultdict(list)
    for picture in ToolPicture.objects.filter(**scope):
        pictures[picture.turn, picture.call].append(picture)
    for tool_call in ToolCall.objects.filter(**scope).order_by("turn", "index"):
        at(tool_call.turn).tools.append(ToolStep(tool_call, displayed=pictures[tool_call.turn, tool_call.index]))
    for turn in found.values():
        turn.unasked = _tell(turn.tools, answers.get(turn.number, []))
    return [found[number] for number in sorted(found)]


def _tell(steps: Sequence[ToolStep], told: Sequence[Said]) -> list[Said]:
    """Give each tool call what the model was told of it, and return what is left.

    The shipped agent answers calls in their order. Agents of their own may answer in another, but with all that is stored.
    """
    left = list(told)
    altered = []
    for step in steps:
        expected = _expected_answer(step.call)
        whole = next((place for place, answer in enumerate(left) if answer.message.content == expected), None)
        if whole is None:
            altered.append(step)
        else:
            step.seen_pictures = left.pop(whole).pictures
    for step, answer in zip(altered, left, strict=False):
        step.seen, step.seen_pictures = answer.message.content, answer.pictures
    return left[len(altered) :]


def _expected_answer(call: ToolCall) -> str:
    """What the shipped agent tells a model of a call when it leaves nothing out."""
    result = ToolResult(
        call.output,
        exit_code=call.exit_code,
        timed_out=call.timed_out,
        truncated_bytes=call.truncated_bytes,
        error=call.error,
        note=call.note,
        limit_exceeded=call.limit_exceeded,
    )
    return render_result(result, max_chars=len(call.output))


class RewardVersion(NamedTuple):
    """The components of one scoring and their weighted sum; the sum is None when a component is."""

    version: int
    components: list[Reward]
    total: float | None


def reward_versions(rollout: Rollout) -> list[RewardVersion]:
    """All scorings, newest first."""
    versions: dict[int, list[Reward]] = defaultdict(list)
    for reward in Reward.objects.filter(rollout=rollout).order_by("-version", "id"):
        versions[reward.version].append(reward)
    return [RewardVersion(version, components, _total(components)) for version, components in versions.items()]


def _total(components: list[Reward]) -> float | None:
    values = [(component.value, component.weight) for component in components]
    if any(value is None for value, _ in values):
        return None
    return sum(value * weight for value, weight in values if value is not None)


class Seconds(NamedTuple):
    """Where the wall time of the newest attempt went. `model` and `tools` are parts of `run`."""

    queue: float
    init: float
    run: float
    eval: float
    model: float
    tools: float

    @property
    def total(self) -> float:
        return self.queue + self.init + self.run + self.eval


def seconds(rollout: Rollout, timeline: list[Turn]) -> Seconds:
    """Time by stage, and what RUN spent it on."""
    return Seconds(
        rollout.queue_seconds,
        rollout.init_seconds,
        rollout.run_seconds,
        rollout.eval_seconds,
        sum(turn.call.latency for turn in timeline if turn.call),
        sum(step.call.duration for turn in timeline for step in turn.tools),
    )

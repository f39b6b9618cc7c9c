"""What an event stream says of a rollout: summaries, since whole outputs are for the trajectory."""

from __future__ import annotations

from typing import Any

from rollouts.api.serializers.runs import RolloutEventSerializer, RolloutSerializer
from rollouts.models import Rollout, RolloutEvent
from rollouts.selectors.live import RunProgress
from rollouts.selectors.timeline import Said, ToolStep, Turn

MAX_CHARS = 2000  # of a text in a summary


def history_json(event: RolloutEvent) -> dict[str, Any]:
    """As in the list of a rollout's events."""
    return dict(RolloutEventSerializer(event).data)


def turn_json(turn: Turn, attempt: int) -> dict[str, Any]:
    """A turn with the beginnings of its texts."""
    call = turn.call
    return {
        "attempt": attempt,
        "turn": turn.number,
        "messages": [_message_json(said) for said in turn.messages],
        "reply": _cut(turn.reply),
        "finish_reason": call.finish_reason if call else "",
        "sampled_tokens": call.sampled_tokens if call else 0,  # type: ignore[attr-defined]  # counted by the query
        "policy_version": call.policy_version if call else None,
        "latency": call.latency if call else None,
        "tool_calls": [_tool_json(step) for step in turn.tools],
    }


def _message_json(said: Said) -> dict[str, Any]:
    message, pictures = said
    return {"role": message.role, "name": message.name, "content": _cut(message.content), "pictures": len(pictures)}


def _tool_json(step: ToolStep) -> dict[str, Any]:
    call = step.call
    return {
        "index": call.index,
        "name": call.name,
        "raw": _cut(call.raw),
        "output": _cut(call.output),
        "exit_code": call.exit_code,
        "timed_out": call.timed_out,
        "error": _cut(call.error),
        "note": _cut(call.note),
        "running": call.running,
        "limit_exceeded": call.limit_exceeded,
        "pictures": len(step.pictures),
        "duration": call.duration,
    }


def reward_json(rollout: Rollout, rewards: dict[str, float | None]) -> dict[str, Any]:
    return {"reward": rollout.reward, "trainable": rollout.trainable, "rewards": rewards}


def end_json(rollout: Rollout) -> dict[str, Any]:
    """The rollout as it is listed."""
    return dict(RolloutSerializer(rollout).data)


def progress_json(progress: RunProgress) -> dict[str, Any]:
    share = progress.ended / progress.total if progress.total else 0.0
    return {"counts": dict(progress.counts), "ended": progress.ended, "total": progress.total, "progress": share}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "…"

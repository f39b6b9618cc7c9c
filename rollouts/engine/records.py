"""What the engine hands to whoever stores a rollout. One `TurnRecord` is written in one transaction. No Django."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rollouts.lifecycle import Fidelity, Termination
from rollouts.llm.types import ModelCallRecord
from sandboxes.protocol import Picture


@dataclass(frozen=True)
class MessageRecord:
    """One message of the conversation, in order.

    `turn` is that of the `TurnRecord` it came with: the prompt belongs to turn 0, the results of tool calls to the turn of the
    reply that asked for them.
    """

    index: int
    turn: int
    role: str
    content: str
    name: str = ""  # the tool, for role "tool"
    pictures: tuple[Picture, ...] = ()
    picture_blobs: tuple[str, ...] = ()  # SHA-256 of the data of each picture, when that is stored


@dataclass(frozen=True)
class ToolCallRecord:
    """One tool call of a turn and what came of it. `error` is the platform's or parser's word, not the program's output."""

    turn: int
    index: int
    name: str
    arguments: dict[str, Any]
    raw: str
    output: str
    started_at: float  # unix seconds
    duration: float  # seconds
    exit_code: int | None = None
    timed_out: bool = False
    truncated_bytes: int = 0
    error: str = ""
    note: str = ""  # the tool's word about what was done
    running: bool = False  # the command went on
    limit_exceeded: str = ""  # the field of `sandboxes.protocol.Limits`
    pictures: tuple[Picture, ...] = ()
    output_blob: str | None = None  # SHA-256 of the whole output, when `output` has become an excerpt
    picture_blobs: tuple[str, ...] = ()  # SHA-256 of the data of each picture, when that is stored


@dataclass(frozen=True)
class TurnRecord:
    """Everything that one turn added."""

    turn: int
    messages: list[MessageRecord] = field(default_factory=list)
    model_call: ModelCallRecord | None = None
    tool_calls: list[ToolCallRecord] = field(default_factory=list)


@dataclass(frozen=True)
class RunOutcome:
    """How RUN ended: the termination, what evaluation will need, and the trajectory's badge."""

    termination: Termination
    artefacts: dict[str, Any]
    fidelity: Fidelity
    artefacts_blob: str | None = None  # SHA-256 of the whole artefacts, when `artefacts` has become an excerpt


class Recorder(Protocol):
    """Stores a running rollout. `turn` raises `AttemptSuperseded` when this attempt has lost its lease.

    The last record of a rollout that was cut short may lack its model call or some tool results.
    """

    async def turn(self, record: TurnRecord) -> None: ...

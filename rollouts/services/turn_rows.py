"""The rows of a turn as the one statement that stores it takes them: each table's columns with their types, and the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from rollouts.engine.records import TurnRecord
from rollouts.models import ModelCall

from .claim import Claim
from .storable import storable_json, storable_text

Row = dict[str, Any]

_PLACE = {"rollout_id": "uuid", "attempt": "int"}
CALL = _PLACE | {
    **{"turn": "int", "segment": "int", "context_ids": "bytea", "sampled_ids": "bytea", "logprobs": "bytea", "text": "text"},
    **{"finish_reason": "text", "prompt_tokens": "int", "policy": "text", "policy_version": "int", "server_id": "uuid"},
    **{"policy_version_last": "int", "version_spans": "jsonb", "opened_by": "text", "parent_segment": "int", "dialect": "text"},
    **{"conversation_key": "text", "placed": "jsonb", "sampling": "jsonb", "latency": "float8", "at": "timestamptz"},
}
MESSAGE = _PLACE | {"index": "int", "turn": "int", "role": "text", "name": "text", "content": "text"}
TOOL = _PLACE | {
    **{"turn": "int", "index": "int", "name": "text", "arguments": "jsonb", "raw": "text", "output": "text"},
    **{"output_blob_id": "text", "exit_code": "int", "timed_out": "bool", "truncated_bytes": "bigint", "error": "text"},
    **{"started_at": "timestamptz", "duration": "float8", "note": "text", "running": "bool", "limit_exceeded": "text"},
}
TOOL_PICTURE = _PLACE | {"turn": "int", "call": "int", "index": "int", "mime": "text", "blob_id": "text"}
MESSAGE_PICTURE = _PLACE | {"message": "int", "index": "int", "mime": "text", "blob_id": "text"}


def columns(table: Mapping[str, str]) -> str:
    """The names of its columns."""
    return ", ".join(table)


def arrays(prefix: str, table: Mapping[str, str]) -> str:
    """For `unnest`: an array of each column's values, which `parameters` gives under the same prefix."""
    return ", ".join(f"%({prefix}_{name})s::{sql_type}[]" for name, sql_type in table.items())


def parameters(prefix: str, table: Mapping[str, str], rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The arrays' values."""
    return {f"{prefix}_{name}": [row[name] for row in rows] for name in table}


def call_rows(claim: Claim, record: TurnRecord, at: datetime) -> Iterator[Row]:
    """Of `CALL`: one, or none when the turn was cut short before it."""
    call = record.model_call
    if call is None:
        return
    yield {
        **_place(claim),
        "turn": call.turn,
        "segment": call.segment,
        "context_ids": _packed("context_ids", call.context_ids),
        "sampled_ids": _packed("sampled_ids", call.sampled_ids),
        "logprobs": None if call.logprobs is None else _packed("logprobs", call.logprobs),
        "text": storable_text(call.text),
        "finish_reason": call.finish_reason,
        "prompt_tokens": call.prompt_tokens,
        "policy": call.policy,
        "policy_version": call.policy_version,
        "server_id": UUID(call.server_id) if call.server_id else None,
        "sampling": Jsonb(storable_json(call.sampling)),
        "policy_version_last": None if call.policy_version_last == call.policy_version else call.policy_version_last,
        "version_spans": Jsonb([list(span) for span in call.version_spans]),
        "opened_by": call.opened_by,
        "parent_segment": call.parent_segment,
        "dialect": call.dialect,
        "conversation_key": call.conversation_key,
        "placed": Jsonb([list(place) for place in call.placed]),
        "latency": call.latency,
        "at": at,
    }


def message_rows(claim: Claim, record: TurnRecord) -> Iterator[Row]:
    """Of `MESSAGE`."""
    for message in record.messages:
        yield {
            **_place(claim),
            "index": message.index,
            "turn": message.turn,
            "role": message.role,
            "name": storable_text(message.name)[:60],
            "content": storable_text(message.content),
        }


def tool_rows(claim: Claim, record: TurnRecord) -> Iterator[Row]:
    """Of `TOOL`."""
    for call in record.tool_calls:
        yield {
            **_place(claim),
            "turn": call.turn,
            "index": call.index,
            "name": storable_text(call.name)[:60],
            "arguments": Jsonb(storable_json(call.arguments)),
            "raw": storable_text(call.raw),
            "output": storable_text(call.output),
            "output_blob_id": call.output_blob,
            "exit_code": call.exit_code,
            "timed_out": call.timed_out,
            "truncated_bytes": call.truncated_bytes,
            "error": storable_text(call.error),
            "note": storable_text(call.note),
            "running": call.running,
            "limit_exceeded": call.limit_exceeded[:30],
            "started_at": datetime.fromtimestamp(call.started_at, UTC),
            "duration": call.duration,
        }


def tool_picture_rows(claim: Claim, record: TurnRecord) -> Iterator[Row]:
    """Of `TOOL_PICTURE`."""
    for call in record.tool_calls:
        for index, (picture, blob) in enumerate(zip(call.pictures, call.picture_blobs, strict=True)):
            place = {**_place(claim), "turn": call.turn, "call": call.index, "index": index}
            yield {**place, "mime": storable_text(picture.mime)[:40], "blob_id": blob}


def message_picture_rows(claim: Claim, record: TurnRecord) -> Iterator[Row]:
    """Of `MESSAGE_PICTURE`."""
    for message in record.messages:
        for index, (picture, blob) in enumerate(zip(message.pictures, message.picture_blobs, strict=True)):
            place = {**_place(claim), "message": message.index, "index": index}
            yield {**place, "mime": storable_text(picture.mime)[:40], "blob_id": blob}


def _place(claim: Claim) -> Row:
    return {"rollout_id": claim.rollout_id, "attempt": claim.attempt}


def _packed(column: str, values: Sequence[Any]) -> bytes:
    field: Any = ModelCall._meta.get_field(column)
    return bytes(field.pack(values))

"""Large outputs, pictures and artefacts are no part of a row: they are stored before the statement that refers to them."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollouts.engine.errors import StoreFailed
from rollouts.engine.records import RunOutcome, TurnRecord
from rollouts.models import BlobUnreadable
from rollouts.services import blobs

from .database import Database


async def without_large_outputs(database: Database, record: TurnRecord) -> TurnRecord:
    """The record as it is to be stored. Raises `StoreFailed` when the blob storage takes nothing for too long."""
    if any(blobs.is_large(call.output) for call in record.tool_calls):
        calls = [await database.insist(blobs.offload_tool_output, call) for call in record.tool_calls]
        record = dataclasses.replace(record, tool_calls=calls)
    if any(message.pictures for message in record.messages) or any(call.pictures for call in record.tool_calls):
        record = await database.insist(blobs.offload_pictures, record)
    return record


async def without_large_artefacts(database: Database, outcome: RunOutcome) -> RunOutcome:
    """The outcome as it is to be stored. Raises `StoreFailed` likewise."""
    if not blobs.artefacts_are_large(outcome):
        return outcome
    return await database.insist(blobs.offload_artefacts, outcome)


async def whole_artefacts(database: Database, artefacts: dict[str, Any], blob: str | None) -> dict[str, Any]:
    """All that RUN left for evaluation, of which `artefacts` may be an excerpt. Raises `StoreFailed` when it is not there."""
    if blob is None:
        return artefacts
    try:
        whole: dict[str, Any] = await database.insist(blobs.read_artefacts, blob)
    except BlobUnreadable as error:
        raise StoreFailed(str(error)) from error
    return whole

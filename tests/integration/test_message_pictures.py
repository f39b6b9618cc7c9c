"""Pictures that models are shown: stored once with the turn, kept as long as the trajectory, and counted as storage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.utils import timezone

from rollouts.engine.records import MessageRecord, ToolCallRecord, TurnRecord
from rollouts.lifecycle import ACTIVE, Stage, State
from rollouts.llm.types import ModelCallRecord, PlacedPicture
from rollouts.models import Blob, Message, MessagePicture, ModelCall, Project, Rollout, ToolPicture
from rollouts.selectors.storage import project_storage
from rollouts.selectors.trajectory import stored_calls
from rollouts.services.claim import Claim
from rollouts.services.progress import TurnWrite, record_turns
from rollouts.services.retention import prune
from rollouts.services.transition import Guard, move
from rollouts.worker.database import Database
from rollouts.worker.large_values import without_large_outputs
from sandboxes.protocol import Picture
from tests.integration.domain import Domain

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("blob_folder")]

CAT = Picture("image/png", b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
DOG = Picture("image/jpeg", b"\xff\xd8\xff\xe0" + bytes(range(256)))
# Six ids of a picture after one of text.
PLACED = (PlacedPicture(1, 6, CAT.digest),)


@pytest.fixture
def database() -> Iterator[Database]:
    database = Database(patience=0)
    yield database
    database.close()


@pytest.fixture
def claim(domain: Domain) -> Claim:
    return domain.claim(domain.rollout_in(State.READY), Stage.RUN)


def model_call(turn: int, context: list[int], prompt_tokens: int, placed: tuple[PlacedPicture, ...]) -> ModelCallRecord:
    return ModelCallRecord(
        turn=turn,
        segment=0,
        context_ids=context,
        sampled_ids=[99],
        logprobs=[-0.5],
        text="a cat",
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        policy="tiny",
        policy_version=0,
        server_id="",
        latency=0.1,
        placed=placed,
    )


def asked(*pictures: Picture, index: int = 0) -> MessageRecord:
    return MessageRecord(index, 0, "user", "What is this?", pictures=pictures)


def first_turn(*messages: MessageRecord, tool_calls: tuple[ToolCallRecord, ...] = ()) -> TurnRecord:
    return TurnRecord(0, list(messages), model_call(0, [7, *[5] * 6, 8], 8, PLACED), list(tool_calls))


def store(database: Database, claim: Claim, record: TurnRecord) -> bool:
    [stored] = record_turns([TurnWrite(claim, async_to_sync(without_large_outputs)(database, record))])
    return stored


def seen(rollout_id: Any) -> list[tuple[int, int, str, str]]:
    pictures = MessagePicture.objects.filter(rollout=rollout_id)
    return list(pictures.values_list("message", "index", "mime", "blob_id"))


def test_they_are_stored_with_their_messages_and_their_places(domain: Domain, database: Database, claim: Claim) -> None:
    record = first_turn(asked(CAT, DOG), asked(CAT, index=1))
    for _ in range(2):  # its answer was lost, so it is repeated
        assert store(database, claim, record)
    assert seen(claim.rollout_id) == [
        (0, 0, "image/png", CAT.digest),
        (0, 1, "image/jpeg", DOG.digest),
        (1, 0, "image/png", CAT.digest),
    ]
    assert {blob.sha256: blob.content() for blob in Blob.objects.all()} == {p.digest: p.data for p in (CAT, DOG)}
    assert [call.placed for call in stored_calls(claim.rollout_id, claim.attempt)] == [PLACED]
    assert Rollout.objects.get(id=claim.rollout_id).turns == 1


def test_what_a_tool_displayed_and_a_model_saw_is_stored_once(database: Database, claim: Claim) -> None:
    shown = MessageRecord(1, 0, "tool", "1 picture", "python", (CAT,))
    call = ToolCallRecord(0, 0, "python", {}, "", "", 0.0, 0.1, pictures=(CAT,))
    assert store(database, claim, first_turn(asked(), shown, tool_calls=(call,)))
    assert seen(claim.rollout_id) == [(1, 0, "image/png", CAT.digest)]
    assert [picture.blob_id for picture in ToolPicture.objects.all()] == [CAT.digest]
    assert Blob.objects.get().content() == CAT.data


def test_a_turn_is_one_statement_with_pictures_and_without(database: Database, claim: Claim) -> None:
    turns = (first_turn(asked(CAT)), TurnRecord(1, [MessageRecord(1, 1, "user", "And now?")], model_call(1, [8], 10, ())))
    for record in turns:
        ready = async_to_sync(without_large_outputs)(database, record)
        before = statements()
        assert record_turns([TurnWrite(claim, ready)]) == [True]
        assert statements() == before + 1
    assert ModelCall.objects.filter(placed=[]).count() == 1


def statements() -> int:
    """How many this test's connection has sent of those that store turns; each is prepared once and then counted."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COALESCE(sum(generic_plans + custom_plans), 0) FROM pg_prepared_statements WHERE statement LIKE %s",
            ["%INSERT INTO rollouts_modelcall%"],
        )
        return int(cursor.fetchone()[0])


def test_from_a_lost_claim_nothing_is_stored(domain: Domain, database: Database, claim: Claim) -> None:
    Rollout.objects.filter(id=claim.rollout_id).update(attempt=2)
    assert not store(database, claim, first_turn(asked(CAT)))
    assert seen(claim.rollout_id) == []
    assert not Message.objects.exists() and not ModelCall.objects.exists()


def test_one_of_many_turns_may_have_pictures(domain: Domain, database: Database, claim: Claim) -> None:
    other = domain.claim(domain.rollout_in(State.READY), Stage.RUN)
    without = TurnRecord(0, [asked()], model_call(0, [7], 1, ()))
    records = [async_to_sync(without_large_outputs)(database, record) for record in (first_turn(asked(DOG)), without)]
    assert record_turns([TurnWrite(*write) for write in zip((claim, other), records, strict=True)]) == [True, True]
    assert (len(seen(claim.rollout_id)), seen(other.rollout_id)) == (1, [])


def test_a_blob_stays_while_a_message_has_it_and_goes_after_the_trajectory(
    domain: Domain, database: Database, claim: Claim
) -> None:
    assert store(database, claim, first_turn(asked(CAT)))
    rollout = Rollout.objects.get(id=claim.rollout_id)
    long_ago = timezone.now() - timedelta(days=40)
    Blob.objects.update(touched_at=long_ago)
    assert removed() == {}
    assert Blob.objects.get().sha256 == hashlib.sha256(CAT.data).hexdigest()

    for state in (State.EVALUATING, State.SUCCEEDED):
        assert move([rollout.id], to=state, guard=Guard(list(ACTIVE)), values={"termination_cause": "completed"})
    Rollout.objects.filter(id=rollout.id).update(finished_at=long_ago)
    Project.objects.filter(id=domain.project.id).update(keep_trajectories_days=30)
    assert removed() == {"trajectories": 1, "blobs": 1}
    assert seen(rollout.id) == [] and not Blob.objects.exists()


def removed() -> dict[str, int]:
    done = prune()
    assert [pruned.error for pruned in done if pruned.error] == []
    return {pruned.kind: pruned.removed for pruned in done if pruned.removed}


def test_they_count_as_a_projects_storage_once(domain: Domain, database: Database, claim: Claim) -> None:
    call = ToolCallRecord(0, 0, "python", {}, "", "", 0.0, 0.1, pictures=(CAT,))
    assert store(database, claim, first_turn(asked(CAT, DOG), tool_calls=(call,)))
    storage = project_storage(domain.project)
    assert (storage.blobs, storage.blob_bytes) == (2, len(CAT.data) + len(DOG.data))

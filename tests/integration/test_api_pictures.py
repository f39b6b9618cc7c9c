"""Pictures that models were shown, as trainers get them: where they stand among the ids, and their data by digest."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest
from django.db import connection
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from rollouts.client import AsyncClient, Client, unpack
from rollouts.lifecycle import State
from rollouts.models import Message, MessagePicture, ModelCall, Rollout
from rollouts.services import blobs
from tests.integration.api_case import ApiCase, expect_problem
from tests.integration.test_api_results import get_settled
from tests.integration.test_message_pictures import CAT, DOG

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("blob_folder")]

IMAGE = 5  # the id that pictures are expanded to
HTML = b"<script>alert(1)</script>"


@pytest.fixture
def case() -> ApiCase:
    return ApiCase()


def message(rollout: Rollout, index: int, role: str, *pictures: tuple[str, bytes], attempt: int = 1) -> None:
    place = {"rollout": rollout, "attempt": attempt}
    Message.objects.create(**place, index=index, turn=max(0, index - 1), role=role, content="Look.")
    for number, (mime, data) in enumerate(pictures):
        blob = blobs.put(data)
        MessagePicture.objects.create(**place, message=index, index=number, mime=mime, blob_id=blob)


def call(rollout: Rollout, turn: int, context: list[int], prompt_tokens: int, placed: list[Any], **more: Any) -> None:
    ModelCall.objects.create(
        rollout=rollout,
        attempt=1,
        turn=turn,
        context_ids=context,
        sampled_ids=[9],
        logprobs=[-0.5],
        prompt_tokens=prompt_tokens,
        placed=placed,
        finish_reason="stop",
        policy="tiny",
        policy_version=1,
        latency=0.1,
        **more,
    )


@pytest.fixture
def rollout(case: ApiCase) -> Rollout:
    """Shown a cat, then a dog and the cat again; a second segment without pictures branches off."""
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    message(rollout, 0, "user", ("image/png", CAT.data))
    message(rollout, 1, "assistant")
    message(rollout, 2, "tool", ("image/jpeg", DOG.data), ("image/png", CAT.data))
    call(rollout, 0, [1, *[IMAGE] * 3, 2], 5, [[1, 3, CAT.digest]], opened_by="start")
    call(rollout, 1, [*[IMAGE] * 2, *[IMAGE] * 3, 2], 12, [[0, 2, DOG.digest], [2, 3, CAT.digest]])
    call(rollout, 2, [1, 2], 2, [], segment=1, opened_by="subagent", parent_segment=0)
    Rollout.objects.filter(id=rollout.id).update(fidelity="segmented")
    rollout.refresh_from_db()
    return rollout


PLACES = [
    {"offset": 1, "length": 3, "sha256": CAT.digest},
    {"offset": 6, "length": 2, "sha256": DOG.digest},
    {"offset": 8, "length": 3, "sha256": CAT.digest},
]


def address(rollout: Rollout, digest: str) -> str:
    return f"/api/v1/rollouts/{rollout.id}/pictures/{digest}/"


def test_a_trajectory_says_which_message_has_them_and_where_they_are_among_the_ids(case: ApiCase, rollout: Rollout) -> None:
    document = case.check_read_access(f"/api/v1/rollouts/{rollout.id}/trajectory/?tokens=full")
    assert document["token_problem"] == ""
    cat = {"mime": "image/png", "size": len(CAT.data), "sha256": CAT.digest, "url": address(rollout, CAT.digest)}
    dog = {"mime": "image/jpeg", "size": len(DOG.data), "sha256": DOG.digest, "url": address(rollout, DOG.digest)}
    assert [row["pictures"] for row in document["messages"]] == [
        [{"index": 0, **cat}],
        [],
        [{"index": 0, **dog}, {"index": 1, **cat}],
    ]
    assert [row["pictures"] for row in document["model_calls"]] == [PLACES[:1], PLACES[1:], []]
    for row in document["model_calls"]:
        for place in row["pictures"]:
            assert set(row["prompt_ids"][place["offset"] :][: place["length"]]) == {IMAGE}
    first, second = document["segments"]
    assert (first["opened_by"], first["parent_segment"], first["pictures"]) == ("start", None, PLACES)
    assert (second["opened_by"], second["parent_segment"], second["pictures"]) == ("subagent", 0, [])
    for place in PLACES:
        ids = slice(place["offset"], place["offset"] + place["length"])
        assert set(first["token_ids"][ids]) == {IMAGE}
        assert set(first["loss_mask"][ids]) == {0}


def test_packed_segments_say_the_same(case: ApiCase, rollout: Rollout) -> None:
    [plain] = get_settled(case, 1, include="trajectory")["results"]
    [packed] = get_settled(case, 1, include="segments")["results"]
    path = f"/api/v1/runs/{rollout.run_id}/results/?include=segments"
    answer = case.reader.get(path, headers={"accept": "application/msgpack"})
    [raw] = msgpack.unpackb(answer.content)["results"]
    for name in ("opened_by", "parent_segment", "pictures"):
        expected = [segment[name] for segment in plain["trajectory"]["segments"]]
        assert [segment[name] for segment in packed["segments"]] == expected
        assert [segment[name] for segment in raw["segments"]] == expected
    arrays = unpack(raw["segments"][0])
    assert arrays == unpack(packed["segments"][0])
    assert arrays.pictures == PLACES


@pytest.mark.parametrize(
    "placed",
    [
        [[4, 3, CAT.digest]],  # beyond the context
        [[1, 0, CAT.digest]],
        [[2, 2, CAT.digest], [1, 1, DOG.digest]],
        [[1, 3, "none"]],
    ],
)
def test_places_that_cannot_be_right_withhold_the_tokens(case: ApiCase, rollout: Rollout, placed: list[Any]) -> None:
    ModelCall.objects.filter(rollout=rollout, turn=0).update(placed=placed)
    [plain] = get_settled(case, 1, include="trajectory")["results"]
    [packed] = get_settled(case, 1, include="segments")["results"]
    assert (packed["segments"], plain["trajectory"]["segments"]) == ([], [])
    assert packed["token_problem"] == plain["trajectory"]["token_problem"]
    assert packed["token_problem"].startswith("turn 0 ")


def test_their_data_is_given_to_who_may_read(case: ApiCase, rollout: Rollout) -> None:
    for picture in (CAT, DOG):
        path = address(rollout, picture.digest)
        for accept in ("*/*", picture.mime, "image/*"):
            answer = case.reader.get(path, headers={"accept": accept})
            assert (answer.content, answer.headers["Content-Type"]) == (picture.data, picture.mime)
        check_headers(answer, picture.digest)
        expect_problem(case.stranger.get(path), 404, "not_found")
        expect_problem(case.nobody.get(path), 401, "not_authenticated")


def check_headers(answer: HttpResponse, digest: str) -> None:
    assert answer.headers["ETag"] == f'"{digest}"'
    assert answer.headers["Cache-Control"] == "private, no-cache"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Disposition"].startswith("attachment")


def test_who_has_it_is_not_sent_it_again(case: ApiCase, rollout: Rollout) -> None:
    path = address(rollout, CAT.digest)
    again = {"if-none-match": f'"{CAT.digest}"'}
    answer = case.reader.get(path, headers=again)
    assert (answer.status_code, answer.content) == (304, b"")
    assert case.reader.get(path, headers={"if-none-match": '"other"'}).status_code == 200
    expect_problem(case.stranger.get(path, headers=again), 404, "not_found")


def test_only_pictures_of_this_rollouts_newest_attempt_are_found(case: ApiCase, rollout: Rollout) -> None:
    other = case.domain.rollout_in(State.SUCCEEDED)
    for digest in (CAT.digest, "0" * 64, "none", CAT.digest[:10], CAT.digest.upper(), "%00"):
        expect_problem(case.reader.get(address(other, digest)), 404, "not_found")
    Rollout.objects.filter(id=rollout.id).update(attempt=2)
    expect_problem(case.reader.get(address(rollout, CAT.digest)), 404, "not_found")
    message(rollout, 0, "user", ("image/png", CAT.data), attempt=2)
    assert case.reader.get(address(rollout, CAT.digest)).content == CAT.data


def test_a_name_that_no_row_can_have_is_not_found_either(case: ApiCase) -> None:
    for path in ("policies/%00/", "images/%00/"):
        expect_problem(case.reader.get(f"/api/v1/{path}"), 404, "not_found")


def test_what_is_no_picture_is_not_called_one(case: ApiCase, rollout: Rollout) -> None:
    message(rollout, 3, "user", ("image/png", HTML))
    answer = case.reader.get(address(rollout, blobs.put(HTML)))
    assert (answer.content, answer.headers["Content-Type"]) == (HTML, "application/octet-stream")
    check_headers(answer, blobs.put(HTML))


def test_the_number_of_queries_does_not_grow_with_them(case: ApiCase, rollout: Rollout) -> None:
    path = f"/api/v1/rollouts/{rollout.id}/trajectory/"
    assert case.reader.get(path).status_code == 200  # the key is noted as used
    counts = []
    for first in (3, 30):
        with CaptureQueriesContext(connection) as queries:
            assert case.reader.get(path).status_code == 200
        counts.append(len(queries))
        for index in range(first, first + 20):
            message(rollout, index, "user", ("image/png", CAT.data))
    assert counts[0] == counts[1]


def test_the_client_brings_them(case: ApiCase, rollout: Rollout, server_url: str) -> None:
    get_settled(case, 1)
    with Client(server_url, case.owner_secret) as client:
        [result] = client.iter_results(rollout.run_id, include="segments")
        first, second = (unpack(segment) for segment in result["segments"])
        assert [client.picture(result["id"], place["sha256"]) for place in first.pictures] == [CAT.data, DOG.data, CAT.data]
        assert second.pictures == []
        assert client.trajectory(rollout.id)["messages"][0]["pictures"][0]["sha256"] == CAT.digest


async def _fetch(url: str, secret: str, rollout: Rollout) -> bytes:
    async with AsyncClient(url, secret) as client:
        return await client.picture(rollout.id, CAT.digest)


def test_so_does_the_asynchronous_one(case: ApiCase, rollout: Rollout, server_url: str) -> None:
    assert asyncio.run(_fetch(server_url, case.owner_secret, rollout)) == CAT.data

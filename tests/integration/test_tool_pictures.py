"""Pictures that tools displayed: stored with their call, shown where that is safe, and gone with the trajectory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.test import Client

from rollouts.engine.records import ToolCallRecord, TurnRecord
from rollouts.lifecycle import Stage, State
from rollouts.models import Rollout
from rollouts.selectors.storage import project_storage
from rollouts.services.progress import TurnWrite, record_turns
from rollouts.worker.database import Database
from rollouts.worker.large_values import without_large_outputs
from sandboxes.protocol import Picture
from tests.integration.api_case import ApiCase, expect_problem

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("blob_folder")]

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256))
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
HTML = b"<script>alert(1)</script>"

PICTURES = (
    Picture("image/png", PNG),
    Picture("image/jpeg", JPEG),
    Picture("image/svg+xml", SVG),
    Picture("image/png", HTML),
)


@pytest.fixture
def case() -> ApiCase:
    return ApiCase()


@pytest.fixture
def member(case: ApiCase, client: Client) -> Client:
    user = User.objects.create_user("maria", password="correct horse")
    case.domain.project.members.add(user)
    client.force_login(user)
    return client


@pytest.fixture
def database() -> Iterator[Database]:
    database = Database(patience=0)
    yield database
    database.close()


@pytest.fixture
def rollout(case: ApiCase, database: Database) -> Rollout:
    """One whose second call in turn 0 displayed `PICTURES`."""
    rollout = case.domain.rollout_in(State.READY)
    claim = case.domain.claim(rollout, Stage.RUN)
    calls = [
        ToolCallRecord(0, 0, "python", {"code": "1"}, "", "1", 0.0, 0.1),
        ToolCallRecord(0, 1, "python", {"code": "plot()"}, "", "", 0.0, 0.1, note="4 pictures", pictures=PICTURES),
    ]
    record = async_to_sync(without_large_outputs)(database, TurnRecord(0, tool_calls=calls))
    for _ in range(2):  # its answer was lost, so it is repeated
        assert record_turns([TurnWrite(claim, record)]) == [True]
    rollout.refresh_from_db()
    return rollout


def address(rollout: Rollout, index: int) -> str:
    return f"/rollouts/{rollout.id}/turns/0/calls/1/pictures/{index}"


def test_pictures_of_a_call_are_in_its_trajectory(case: ApiCase, rollout: Rollout) -> None:
    first, second = case.check_read_access(f"/api/v1/rollouts/{rollout.id}/trajectory/")["tool_calls"]
    assert first["pictures"] == []
    assert second["note"] == "4 pictures"
    assert second["pictures"] == [
        {"index": i, "mime": p.mime, "size": len(p.data), "sha256": hashlib.sha256(p.data).hexdigest()}
        for i, p in enumerate(PICTURES)
    ]


def test_the_api_gives_their_data_to_who_may_read(case: ApiCase, rollout: Rollout) -> None:
    path = f"/api/v1{address(rollout, 2)}/"
    for accept in ("*/*", "application/octet-stream"):
        answer = case.reader.get(path, headers={"accept": accept})
        assert answer.content == SVG
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    expect_problem(case.stranger.get(path), 404, "not_found")
    expect_problem(case.nobody.get(path), 401, "not_authenticated")
    expect_problem(case.reader.get(f"/api/v1{address(rollout, 4)}/"), 404, "not_found")


def test_the_page_shows_what_can_only_be_a_picture(rollout: Rollout, member: Client) -> None:
    page = member.get(f"/rollouts/{rollout.id}/").content.decode()
    assert f'<img src="{address(rollout, 0)}"' in page
    assert f'<img src="{address(rollout, 1)}"' in page
    assert f'<a href="{address(rollout, 2)}" download>' in page


@pytest.mark.parametrize(
    ("index", "mime", "data"),
    [
        (0, "image/png", PNG),
        (1, "image/jpeg", JPEG),
        (2, "application/octet-stream", SVG),
        (3, "application/octet-stream", HTML),
    ],
)
def test_the_browser_is_given_a_picture_or_a_file_to_save(
    rollout: Rollout, member: Client, index: int, mime: str, data: bytes
) -> None:
    answer = member.get(address(rollout, index))
    assert answer.content == data
    assert answer.headers["Content-Type"] == mime
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    assert ("Content-Disposition" in answer.headers) is (mime == "application/octet-stream")


def test_pictures_are_for_members(rollout: Rollout, client: Client) -> None:
    assert client.get(address(rollout, 0)).status_code == 302
    client.force_login(User.objects.create_user("sam", password="correct horse"))
    assert client.get(address(rollout, 0)).status_code == 404


def test_a_place_without_a_picture_is_not_found(rollout: Rollout, member: Client) -> None:
    assert member.get(address(rollout, 9)).status_code == 404


def test_pictures_count_as_a_projects_storage(case: ApiCase, rollout: Rollout) -> None:
    storage = project_storage(case.domain.project)
    assert (storage.blobs, storage.blob_bytes) == (4, sum(len(p.data) for p in PICTURES))

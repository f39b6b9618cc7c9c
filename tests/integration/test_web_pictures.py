"""Pictures on a rollout's pages: where they were said, and among the ids that a prompt added."""

from __future__ import annotations

import pytest
from django.db.models import F
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from rollouts.models import ModelCall, Rollout, ToolCall, ToolPicture
from rollouts.services import blobs
from sandboxes.protocol import Picture
from tests.integration.web_case import SOLVED, WebWorld
from tests.integration.web_texts import ToolText, TurnText
from tests.pictures import png

CAT = png(8, 8, (200, 120, 40))
DOG = Picture("image/jpeg", b"\xff\xd8\xff\xe0" + bytes(range(256)))
SVG = Picture("image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
HTML = Picture("image/png", b"<script>alert(1)</script>")

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("blob_folder")]


@pytest.fixture
def world() -> WebWorld:
    return WebWorld()


@pytest.fixture
def owner(world: WebWorld, client: Client) -> Client:
    client.force_login(world.owner)
    return client


@pytest.fixture
def rollout(world: WebWorld) -> Rollout:
    """Messages 0 to 3 are system, user, assistant and the answer to its one tool call; then comes a second turn."""
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED])
    for rows in (rollout.messages, rollout.model_calls, rollout.tool_calls):
        rows.all().delete()
    rollout.turns = 0
    world.add_turns(rollout, [TurnText("I draw.", (ToolText({"command": "plot"}, "done"),)), TurnText("Seen.")], "What is it?")
    return rollout


def page(client: Client, rollout: Rollout, tab: str = "") -> str:
    return " ".join(client.get(f"/rollouts/{rollout.pk}/{tab}").content.decode().split())


def address(rollout: Rollout, picture: Picture) -> str:
    return f"/rollouts/{rollout.pk}/pictures/{picture.digest}"


def message_of(page: str, role: str) -> str:
    return page.partition(f'<section class="message role-{role}"')[2].partition("</section>")[0]


def test_pictures_stand_in_their_message(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    world.show(rollout, 1, CAT, DOG)
    world.show(rollout, 3, CAT)
    shown = page(owner, rollout)
    user = message_of(shown, "user")
    assert "What is it?" in user
    assert user.index(address(rollout, CAT)) < user.index(address(rollout, DOG))
    assert f'<img src="{address(rollout, DOG)}" alt="Picture 1 of message 1" loading="lazy">' in user
    assert "<img" not in message_of(shown, "system")
    assert address(rollout, CAT) in message_of(shown, "tool")


def test_of_what_a_tool_displayed_it_is_told_what_the_model_saw(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    for index, picture in enumerate([CAT, SVG]):
        place = {"rollout": rollout, "attempt": 1, "turn": 0, "call": 0, "index": index}
        ToolPicture.objects.create(**place, mime=picture.mime, blob_id=blobs.put(picture.data))
    world.show(rollout, 3, CAT)
    tool = message_of(page(owner, rollout), "tool")
    assert tool.count("<img") == 1
    seen, _, unseen = tool.partition("</figure>")
    assert "not shown to the model" not in seen
    assert "download>Download picture 1 displayed by call 0 of turn 0 (image/svg+xml)</a>" in unseen
    assert "not shown to the model" in unseen


def test_answers_in_another_order_than_their_calls_stay_with_these(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    """As agents of their own may send them."""
    turn = ToolCall.objects.get(rollout=rollout)
    ToolCall.objects.filter(pk=turn.pk).update(output="a cat", exit_code=None)
    turn.pk, turn.index, turn.output, turn.exit_code = None, 1, "a dog", None
    turn.save()
    rollout.messages.filter(index__gt=3).update(index=F("index") + 1)
    rollout.messages.filter(index=3).update(content="a dog")
    rollout.messages.create(attempt=1, index=4, turn=0, role="tool", content="a cat")
    world.show(rollout, 3, DOG)
    world.show(rollout, 4, CAT)
    first, second = page(owner, rollout).split('<section class="message role-tool"')[1:]
    assert address(rollout, CAT) in first and address(rollout, DOG) in second
    assert address(rollout, DOG) not in first and "As the model saw it" not in first


def test_an_answer_to_no_call_is_not_lost(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    ToolCall.objects.filter(rollout=rollout).delete()
    world.show(rollout, 3, CAT)
    assert address(rollout, CAT) in page(owner, rollout)


def test_the_picture_of_a_message_is_for_members(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    world.show(rollout, 1, CAT)
    answer = owner.get(address(rollout, CAT))
    assert (answer.content, answer.headers["Content-Type"]) == (CAT.data, "image/png")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    assert owner.get(address(rollout, DOG)).status_code == 404
    assert owner.get(f"/rollouts/{rollout.pk}/pictures/nonsense").status_code == 404
    owner.logout()
    assert owner.get(address(rollout, CAT)).status_code == 302
    owner.force_login(world.stranger)
    assert owner.get(address(rollout, CAT)).status_code == 404


def test_what_is_no_picture_is_saved_and_not_shown(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    world.show(rollout, 1, HTML)
    answer = owner.get(address(rollout, HTML))
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"].startswith("attachment;")


def test_the_ids_of_a_picture_are_one_among_those_of_text(world: WebWorld, owner: Client, rollout: Rollout) -> None:
    world.show(rollout, 1, CAT, DOG)
    placed = [[1, 3, CAT.digest], [4, 2, DOG.digest]]
    ModelCall.objects.filter(rollout=rollout, turn=0).update(context_ids=[71, *[5] * 3, *[5] * 2, 72, 73], placed=placed)
    shown = page(owner, rollout, "tokens/?turn=0")
    new = shown.partition("New in the prompt")[2].partition("</details>")[0]
    assert "8 ids, loss mask 0; 2 pictures among them" in new
    before, cat, dog_and_after = new.partition("picture, 3 ids")
    assert cat
    assert before.rstrip().endswith(f'71 <a class="picture-chip" href="{address(rollout, CAT)}" data-picture>')
    assert dog_and_after.index("picture, 2 ids") < dog_and_after.index("72 73")
    assert "of which 8 are new" in shown


def test_many_pictures_cost_no_more_queries(
    world: WebWorld, owner: Client, rollout: Rollout, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    ModelCall.objects.filter(rollout=rollout, turn=0).update(
        context_ids=[5] * 30, placed=[[i, 1, CAT.digest] for i in range(30)]
    )
    world.show(rollout, 1, *[CAT] * 30)
    world.show(rollout, 3, *[DOG] * 20)
    for tab, pictures in (("", 50), ("tokens/", 30)):
        with django_assert_max_num_queries(14):
            assert page(owner, rollout, tab).count("<img") == pictures

"""What only a browser shows of pictures: that they are loaded, open whole by keyboard, and show above their ids."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from rollouts.lifecycle import State
from rollouts.models import Message, ModelCall, Rollout
from tests.integration.web_case import SOLVED, WebWorld
from tests.integration.web_texts import TurnText
from tests.pictures import png

WIDE, SMALL = png(2000, 500, (40, 120, 200)), png(8, 8, (200, 120, 40))


@pytest.fixture
def rollout(world: WebWorld) -> Rollout:
    """The user message of its first turn has two pictures."""
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.sums, "1 + 1"), [SOLVED])
    world.show(rollout, 1, WIDE, SMALL)
    call = ModelCall.objects.get(rollout=rollout, turn=0)
    placed = [[0, 65, WIDE.digest], [66, 4, SMALL.digest]]
    ModelCall.objects.filter(pk=call.pk).update(context_ids=[*[5] * 65, 9, *[5] * 4, 10], placed=placed)
    return rollout


def expect_loaded(picture: Locator, width: int) -> None:
    expect(picture).to_be_visible()
    expect(picture).to_have_js_property("naturalWidth", width)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_thumbnail_opens_whole_and_closes(world: WebWorld, page: Page, rollout: Rollout, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(f"/rollouts/{rollout.pk}/")
    thumbnail = page.get_by_role("link", name="Picture 0 of message 1")
    expect_loaded(thumbnail.get_by_role("img"), 2000)
    box = thumbnail.bounding_box()
    assert box is not None
    assert box["width"] <= 240
    thumbnail.focus()
    thumbnail.press("Enter")
    dialog = page.get_by_role("dialog", name="Picture 0 of message 1")
    expect_loaded(dialog.get_by_role("img"), 2000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    expect(thumbnail).to_be_focused()
    page.get_by_role("link", name="Picture 1 of message 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.url.endswith(f"/rollouts/{rollout.pk}/")


def test_a_picture_opens_by_itself(world: WebWorld, page: Page, rollout: Rollout) -> None:
    page.goto(f"/rollouts/{rollout.pk}/pictures/{WIDE.digest}")
    expect_loaded(page.locator("img"), 2000)


def test_its_ids_show_the_picture_to_who_points_at_them(world: WebWorld, page: Page, rollout: Rollout) -> None:
    page.goto(f"/rollouts/{rollout.pk}/tokens/")
    page.get_by_text("New in the prompt").click()
    chips = page.locator(".picture-chip")
    expect(chips).to_have_text(["picture, 65 ids", "picture, 4 ids"])
    expect(chips.get_by_role("img")).to_have_count(0)
    chips.nth(1).hover()
    expect_loaded(chips.nth(1).locator("img"), 8)
    chips.nth(0).focus()
    page.mouse.move(0, 0)
    expect(chips.nth(1).locator("img")).not_to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect_loaded(page.get_by_role("dialog").get_by_role("img"), 8)


def test_pictures_of_a_new_turn_open_as_well(world: WebWorld, page: Page) -> None:
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.sums, "1 + 1"), [State.RUNNING])
    page.goto(f"/rollouts/{rollout.pk}/")
    index = Message.objects.filter(rollout=rollout).count()
    Message.objects.create(rollout=rollout, attempt=1, index=index, turn=rollout.turns, role="user", content="And this?")
    world.show(rollout, index, SMALL)
    world.add_turns(rollout, [TurnText("An orange.")])
    link = page.get_by_role("link", name=f"Picture 0 of message {index}")
    expect(link).to_be_visible(timeout=10_000)
    link.click()
    expect_loaded(page.get_by_role("dialog").get_by_role("img"), 8)

"""Images in the browser: builds that go on before the reader's eyes, and the ways to start and end one."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from sandboxes.images.services.builds import Report, claim_build, report_build
from sandboxes.models import Image, ImageBuild
from tests.integration.image_case import an_image, claimed, fail, finish
from tests.integration.web_case import WebWorld

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def operator(world: WebWorld) -> WebWorld:
    """The owner may build images."""
    world.owner.is_staff = world.owner.is_superuser = True
    world.owner.save()
    return world


def test_a_build_goes_on_and_ends_before_the_readers_eyes(world: WebWorld, page: Page) -> None:
    claim = claimed(an_image())
    page.goto("/images/")
    expect(page.locator("#image-busy")).to_contain_text("0%")
    report_build(claim=claim, report=Report(0.42, "unpacking layer 2 of 5", f"1.0  {HOSTILE}\n", 34))
    expect(page.locator("#image-busy")).to_contain_text("42%", timeout=10_000)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/images/busy/")
    expect(page.get_by_role("progressbar", name="Progress of the build")).to_have_attribute("value", "42")
    expect(page.get_by_text("unpacking layer 2 of 5")).to_be_visible()
    expect(page.get_by_label("Log")).to_contain_text(HOSTILE)
    page.get_by_text("Source").click()
    finish(claim)
    expect(page.get_by_role("heading", level=1)).to_have_text("busy ready", timeout=10_000)
    expect(page.get_by_text("5.0\xa0MB")).to_be_visible()
    expect(page.get_by_text('"path": "/srv/busy.tar"')).to_be_visible()  # still open
    expect(page.get_by_text("Source")).to_be_focused()


def test_a_failed_build_says_why(world: WebWorld, page: Page) -> None:
    fail(claimed(an_image()), "mmdebstrap ended with status 25:\nE: Unable to locate package pyhton3")
    page.goto("/images/busy/")
    expect(page.locator(".build-error")).to_contain_text("E: Unable to locate package pyhton3")
    expect(page.get_by_role("button", name="Build")).to_have_count(0)  # not for members of a project


def test_a_build_is_started_and_cancelled_on_the_page(operator: WebWorld, page: Page) -> None:
    an_image()
    page.goto("/images/busy/")
    page.get_by_role("button", name="Build").click()
    expect(page.get_by_role("status").get_by_text("busy will be built.")).to_be_visible()
    page.get_by_role("button", name="Cancel the build").click()
    expect(page.get_by_text("is cancelled")).to_be_visible()
    expect(page.locator("#build + .progress-line")).to_contain_text("cancelled")


def test_registered_and_built_in_the_admin(operator: WebWorld, page: Page) -> None:
    page.goto("/admin/sandboxes/image/add/")
    page.get_by_label("Name").fill("debian-12")
    page.get_by_label("Kind").select_option("debian")
    expect(page.get_by_text('"suite": "bookworm"')).to_be_visible()
    page.get_by_label("Source").fill('{"suit": "bookworm"}')
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("suite: This setting is required.")).to_be_visible()
    expect(page.get_by_label("Source")).to_have_value(re.compile('"suit": "bookworm"'))
    page.get_by_label("Source").fill('{"suite": "bookworm"}')
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_url("**/admin/sandboxes/image/")
    page.get_by_role("checkbox", name="Select this object for an action").check()
    page.get_by_label("Action:").select_option("build")
    page.get_by_role("button", name="Go").click()
    expect(page.get_by_text("1 to be built.")).to_be_visible()
    build = ImageBuild.objects.get(image=Image.objects.get(name="debian-12"))
    assert build.requested_by == operator.owner.username
    assert claim_build(node="n1")
    page.get_by_role("link", name="builds", exact=True).click()
    expect(page.get_by_role("heading", name="Build 1")).to_be_visible()


@pytest.mark.parametrize("path", ["/images/", "/images/busy/", "/nodes/"])
def test_nothing_sticks_out_on_a_phone(operator: WebWorld, page: Page, path: str) -> None:
    finish(claimed(an_image()))
    page.set_viewport_size({"width": 420, "height": 900})
    page.goto(path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420

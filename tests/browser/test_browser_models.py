"""What only a browser shows of model servers, policies and branches: live updates, actions, and the way between turns."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from playwright.sync_api import Page, expect

from rollouts.lifecycle import State
from rollouts.models import LLMServer, ModelCall, PolicyVersion, Rollout
from tests.integration.web_case import SOLVED, WebWorld
from tests.integration.web_texts import TurnText


def test_the_servers_page_follows_and_pauses_them(world: WebWorld, page: Page) -> None:
    User.objects.filter(pk=world.owner.pk).update(is_staff=True, is_superuser=True)
    page.goto("/servers/")
    row = page.locator(f"#server-{world.server.pk}")
    expect(row).to_contain_text("live for")
    error = "/health did not answer: <b>ConnectionRefusedError</b>"
    LLMServer.objects.update(health="dead", last_error=error, load={"running": 7})
    expect(row).to_contain_text(error, timeout=15_000)
    expect(row).to_contain_text("dead")
    row.get_by_role("link", name="Pause…").click()
    page.get_by_role("link", name="Back").click()
    page.wait_for_url(f"**/servers/#server-{world.server.pk}")
    row.get_by_role("link", name="Pause…").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("takes no calls.")).to_be_visible()
    expect(row).to_contain_text("paused")
    row.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("takes part again.")).to_be_visible()


def test_an_update_moves_before_the_readers_eyes(world: WebWorld, page: Page) -> None:
    page.goto(f"/policies/{world.policy.pk}/")
    expect(page.locator("#update")).to_have_count(0)
    report = {str(world.server.pk): {"state": "waiting"}}
    update = PolicyVersion.objects.create(policy=world.policy, version=15, state="loading", report=report)
    LLMServer.objects.update(hold="wait")
    expect(page.locator("#update")).to_contain_text(f"waiting {world.server.url}", timeout=10_000)
    expect(page.locator(f"#server-{world.server.pk}")).to_contain_text("updating")
    update.state, update.finished_at = "live", timezone.now()
    update.report = {str(world.server.pk): {"state": "live", "error": "", "seconds": 3.1}}
    update.save()
    LLMServer.objects.update(hold="", policy_version=15)
    expect(page.locator("#update")).to_have_count(0, timeout=10_000)
    version = page.locator("#version-15")
    version.get_by_text("1 server has it").click()
    expect(version).to_contain_text("3.1 s")


def branched(world: WebWorld, rollout: Rollout) -> None:
    ModelCall.objects.filter(rollout=rollout, turn=1).update(segment=1, opened_by="subagent", parent_segment=0)


def test_branches_lead_through_the_turns(world: WebWorld, page: Page) -> None:
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED])
    branched(world, rollout)
    page.goto(f"/rollouts/{rollout.pk}/")
    page.locator("#branches").get_by_role("link", name="sub-agent 1").click()
    page.wait_for_url("**/#t1")
    expect(page.locator("#t1")).to_be_in_viewport()
    page.locator("#t0").get_by_role("link", name="goes on in turn 2").click()
    expect(page.locator("#t2")).to_be_in_viewport()
    page.locator("#branches").get_by_role("link", name="only this").last.click()
    page.wait_for_url("**/?branch=1")
    expect(page.locator(".turn")).to_have_count(1)
    page.get_by_role("link", name="Show all turns").click()
    expect(page.locator(".turn")).not_to_have_count(1)
    badge = page.locator("#rollout-header").get_by_role("link", name="token-exact")
    badge.focus()
    badge.press("Enter")
    expect(page.locator("#fidelity")).to_be_in_viewport()


def test_branches_of_a_running_rollout_grow(world: WebWorld, page: Page) -> None:
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [State.RUNNING])
    page.goto(f"/rollouts/{rollout.pk}/")
    expect(page.locator(".branch")).to_have_count(0)
    branched(world, rollout)
    world.add_turns(rollout, [TurnText("one more")])
    expect(page.locator(".branch")).to_have_count(2, timeout=10_000)
    expect(page.locator("#t3")).to_contain_text("one more")
    expect(page.locator("#t3")).to_contain_text("main")


@pytest.mark.parametrize("width", [360, 420])
def test_the_pages_fit_a_phone(world: WebWorld, page: Page, width: int) -> None:
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED])
    branched(world, rollout)
    report = {str(world.server.pk): {"state": "failed", "error": "e" * 300}}
    PolicyVersion.objects.create(policy=world.policy, version=15, state="failed", report=report)
    LLMServer.objects.update(health="dead", last_error="e" * 300)
    page.set_viewport_size({"width": width, "height": 844})
    rollouts = [f"/rollouts/{rollout.pk}/", f"/rollouts/{rollout.pk}/tokens/?segment=1"]
    for path in ["/servers/", "/policies/", f"/policies/{world.policy.pk}/", *rollouts]:
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path

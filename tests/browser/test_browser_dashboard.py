"""What only a browser shows: the keyboard, live updates, colours, and pages that keep to their security policy."""

from __future__ import annotations

import datetime as dt

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from playwright.sync_api import Browser, BrowserContext, Page, expect
from pytest_django.live_server_helper import LiveServer

from rollouts.lifecycle import Stage, State
from rollouts.models import Node, WorkerProcess
from rollouts.services.lease import register_worker
from rollouts.services.nodes import drain_node
from rollouts.services.webhooks import create_endpoint
from tests.integration.web_case import NODE_LOST, SOLVED, UNSOLVED, WebWorld
from tests.integration.web_texts import ToolText, TurnText

HOSTILE = "<img src=x onerror=alert(1)><script>document.title = 'owned'</script>"


def test_the_keyboard_walks_from_the_runs_to_a_turn_and_back(world: WebWorld, page: Page) -> None:
    first, second = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED, UNSOLVED])
    page.goto("/rollouts/?state=succeeded")
    page.keyboard.press("j")
    expect(page.locator("tr.selected")).to_have_id(f"rollout-{second.pk}")
    page.keyboard.press("j")
    expect(page.locator("tr.selected")).to_have_id(f"rollout-{first.pk}")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/rollouts/{first.pk}/")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator(".turn.current")).to_have_id("t1")
    assert page.url.endswith("#t1")
    page.keyboard.press(".")
    expect(page.locator(".turn.current")).to_have_id("t2")
    expect(page.locator("#t2 details[open]")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator("#t2 details:not([open])")).to_have_count(0)
    page.keyboard.press("]")
    page.wait_for_url(f"**/rollouts/{second.pk}/")
    page.keyboard.press("2")
    page.wait_for_url(f"**/rollouts/{second.pk}/reward/")
    page.keyboard.press("Escape")
    page.wait_for_url("**/rollouts/?state=succeeded")


def test_the_help_sheet_opens_and_typing_is_no_shortcut(world: WebWorld, page: Page) -> None:
    world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED])
    page.goto("/rollouts/")
    page.keyboard.press("?")
    expect(page.locator("dialog#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog#help")).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("jk?")
    expect(page.locator("[name=task]")).to_have_value("jk?")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/?task=jk%3F")
    expect(page.get_by_text("The filters hide everything")).to_be_visible()


def test_everything_opened_once_stays_open_on_the_next_rollout(world: WebWorld, page: Page) -> None:
    first, second = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED, UNSOLVED])
    page.goto(f"/rollouts/{first.pk}/")
    page.keyboard.press("e")
    expect(page.locator(".turn details:not([open])")).to_have_count(0)
    page.goto(f"/rollouts/{second.pk}/")
    expect(page.locator(".turn details:not([open])")).to_have_count(0)
    page.get_by_role("button", name="Close everything").click()
    expect(page.locator(".turn details[open]")).to_have_count(0)


def test_a_running_rollout_grows_and_ends_before_the_readers_eyes(world: WebWorld, page: Page) -> None:
    rollout, _ = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [State.RUNNING, State.QUEUED])
    page.goto(f"/rollouts/{rollout.pk}/")
    expect(page.locator(".turn")).to_have_count(3)
    world.add_turns(rollout, [TurnText("THOUGHT: one more look", (ToolText({"command": "ls"}, output="setup.py"),))])
    expect(page.locator(".turn")).to_have_count(4, timeout=10_000)
    expect(page.locator("#t3")).to_contain_text("setup.py")
    expect(page.get_by_role("button", name="1 new turn")).to_be_visible()
    world.finish(rollout, NODE_LOST)
    expect(page.locator("#rollout-header")).to_contain_text("worker lost", timeout=10_000)
    expect(page.locator("#follow[hx-get]")).to_have_count(0)


def test_a_runs_progress_moves_without_reloading(world: WebWorld, page: Page) -> None:
    run = world.new_run("grpo")
    rollouts = world.group(run, world.task(world.swe, "sklearn-1"), [State.QUEUED] * 4)
    page.goto(f"/runs/{run.pk}/")
    expect(page.get_by_text("0 of 4 finished")).to_be_visible()
    world.finish(rollouts[0], NODE_LOST)
    expect(page.get_by_text("1 of 4 finished").first).to_be_visible(timeout=10_000)
    page.get_by_role("link", name="Cancel run…").click()
    page.get_by_role("button", name="Cancel 3 rollouts").click()
    expect(page.get_by_text("Cancelling 3 rollouts.")).to_be_visible()
    expect(page.get_by_text("4 of 4 finished")).to_be_visible()
    expect(page.locator("#run-live[hx-get]")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_toggle_is_remembered(
    world: WebWorld, context: BrowserContext, page: Page, scheme: str
) -> None:
    def dark() -> bool:
        return bool(page.evaluate("getComputedStyle(document.body).backgroundColor === 'rgb(18, 19, 22)'"))

    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto("/")
    assert dark() is (scheme == "dark")
    other = "light" if scheme == "dark" else "dark"
    toggle = page.locator("[data-theme-toggle]")
    while toggle.get_attribute("aria-label") != f"Colours: {other}":
        toggle.click()
    assert dark() is (other == "dark")
    page.reload()
    assert dark() is (other == "dark")


def test_pages_fit_a_phone(world: WebWorld, page: Page) -> None:
    world.fill()
    page.set_viewport_size({"width": 390, "height": 844})
    rollout = world.groups[0][0]
    pages = ["/", "/rollouts/", f"/runs/{world.running.pk}/"]
    for path in [*pages, f"/rollouts/{rollout.pk}/", f"/rollouts/{rollout.pk}/tokens/"]:
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_hostile_text_runs_nothing(world: WebWorld, page: Page) -> None:
    (rollout,) = world.group(world.new_run(HOSTILE), world.task(world.sums, HOSTILE), [State.RUNNING])
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.goto(f"/rollouts/{rollout.pk}/")
    call = ToolText({"command": HOSTILE}, output=HOSTILE, error=HOSTILE)
    world.add_turns(rollout, [TurnText(f"<think>{HOSTILE}</think>{HOSTILE}", (call,))])
    expect(page.locator("#t1")).to_contain_text("onerror=alert(1)", timeout=10_000)
    for path in ("raw/", "events/", "tokens/"):
        page.goto(f"/rollouts/{rollout.pk}/{path}")
    assert page.title() != "owned"
    assert page.locator("main img, main script").count() == 0


def test_pages_can_be_read_without_javascript(
    world: WebWorld, browser: Browser, live_server: LiveServer, context: BrowserContext
) -> None:
    first, second = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED, UNSOLVED])
    bare = browser.new_context(base_url=live_server.url, java_script_enabled=False, storage_state=context.storage_state())
    reader = bare.new_page()
    reader.goto(f"/rollouts/{first.pk}/")
    reader.get_by_text("Reasoning").first.click()
    expect(reader.get_by_text("I'll search for its definition")).to_be_visible()
    reader.get_by_role("link", name="#1").first.click()
    reader.wait_for_url(f"**/rollouts/{second.pk}/")
    bare.close()


def test_the_admin_keeps_to_the_policy_too(world: WebWorld, page: Page) -> None:
    User.objects.filter(pk=world.owner.pk).update(is_staff=True, is_superuser=True)
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.sums, "1 + 1"), [SOLVED])
    paths = ["", "rollouts/environment/add/", f"rollouts/environment/{world.sums.pk}/change/", "rollouts/apikey/add/"]
    for path in [*paths, "rollouts/project/add/", "rollouts/rollout/", f"rollouts/rollout/{rollout.pk}/change/"]:
        response = page.goto(f"/admin/{path}")
        assert response is not None
        assert response.status == 200, path


def test_the_queue_and_the_nodes_follow_what_happens(world: WebWorld, page: Page) -> None:
    run = world.new_run("grpo")
    world.group(run, world.task(world.swe, "sklearn-1"), [State.QUEUED])
    page.goto("/queue/")
    row = page.locator(f"#run-{run.pk}")
    expect(row).to_contain_text("No INIT worker is alive; 1 rollout waits queued.")
    page.keyboard.press("j")
    for stage in (Stage.INIT, Stage.RUN):
        register_worker(node="gpu-03", stage=stage, pid=1, concurrency=2)
    WorkerProcess.objects.update(lease_expires_at=timezone.now() + dt.timedelta(hours=1))
    expect(row).not_to_contain_text("worker is alive", timeout=15_000)
    expect(row).to_have_class("selected")
    page.get_by_role("link", name="Nodes", exact=True).click()
    expect(page.locator("#node-gpu-03")).to_contain_text("takes work")
    drain_node(node=Node.objects.get())
    expect(page.locator("#node-gpu-03")).to_contain_text("drained", timeout=15_000)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/?node=gpu-03")


@pytest.mark.parametrize("path", ["/queue/", "/nodes/", "/webhooks/"])
def test_tables_scroll_inside_a_narrow_page(world: WebWorld, page: Page, path: str) -> None:
    world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [State.QUEUED, State.RUNNING])
    register_worker(node="gpu-03", stage=Stage.RUN, pid=2, concurrency=2)
    create_endpoint(project=world.project, url="http://trainer:9000/hook", event_types=["rollout.finished"])
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(path)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

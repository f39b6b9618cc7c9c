"""Who sees which page, and that every page renders."""

from __future__ import annotations

import datetime as dt
import re
import uuid

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from rollouts.lifecycle import Stage, State
from rollouts.models import Rollout
from tests.integration.web_case import SOLVED, WebWorld


@pytest.fixture
def world(db: None) -> WebWorld:
    world = WebWorld()
    world.fill()
    return world


@pytest.fixture
def owner(world: WebWorld) -> Client:
    client = Client()
    client.force_login(world.owner)
    return client


ROLLOUT_PAGES = ["", "reward/", "tokens/", "events/", "attempts/", "raw/", "rollout.json", "cancel/", "live/?after=0&attempt=1"]
RUN_PAGES = ["", "live/", "cancel/", "rollouts/"]
LISTS = ["/", "/rollouts/", "/servers/", "/servers/live/", "/policies/"]


def paths(world: WebWorld) -> list[str]:
    rollouts = [world.groups[0][0], world.groups[0][5], world.groups[3][2], world.groups[3][7], *world.live_group]
    runs = [world.finished, world.running, world.empty]
    return [
        *LISTS,
        *(f"/policies/{world.policy.pk}/{page}" for page in ("", "live/")),
        *(f"/runs/{run.pk}/{page}" for run in runs for page in RUN_PAGES),
        *(f"/rollouts/{rollout.pk}/{page}" for rollout in rollouts for page in ROLLOUT_PAGES),
    ]


def test_every_page_opens_for_a_member(world: WebWorld, owner: Client) -> None:
    for path in paths(world):
        assert owner.get(path, follow=True).status_code == 200, path


def test_a_stranger_finds_nothing_and_changes_nothing(world: WebWorld) -> None:
    client = Client()
    client.force_login(world.stranger)
    for path in paths(world)[len(LISTS) :]:
        assert client.get(path).status_code == 404, path
    for path in (f"/runs/{world.running.pk}/cancel/", f"/rollouts/{world.live_group[0].pk}/cancel/"):
        assert client.post(path).status_code == 404, path
    assert "grpo-swe" not in client.get("/").content.decode()
    assert client.get("/?project=code-rl").status_code == 404
    assert "sympy" not in client.get(f"/rollouts/?run={world.finished.pk}").content.decode()
    assert not Rollout.objects.filter(cancel_requested_at__isnull=False).exists()


def test_an_anonymous_visitor_is_sent_to_the_login_page(world: WebWorld) -> None:
    for path in paths(world):
        response = Client().get(path)
        assert response.status_code == 302, path
        assert response.headers["Location"].startswith("/login/"), path


def test_a_superuser_sees_every_project(world: WebWorld, admin_client: Client) -> None:
    assert "grpo-swe-step-0140" in admin_client.get("/").content.decode()


def test_logging_in_and_out(world: WebWorld) -> None:
    client = Client()
    wrong = client.post("/login/", {"username": "maria", "password": "wrong"})
    assert "correct username and password" in wrong.content.decode()
    assert client.post("/login/", {"username": "maria", "password": "correct horse"}).headers["Location"] == "/"
    assert client.get("/").status_code == 200
    assert client.post("/logout/").headers["Location"] == "/login/"


def test_an_unknown_row_is_a_404(owner: Client) -> None:
    for path in (f"/runs/{uuid.uuid4()}/", f"/rollouts/{uuid.uuid4()}/", "/rollouts/none/"):
        assert owner.get(path).status_code == 404


def test_cancelling_a_run_asks_first_and_then_does_it(world: WebWorld, owner: Client) -> None:
    path = f"/runs/{world.running.pk}/cancel/"
    assert "Cancel 14 rollouts" in owner.get(path).content.decode()
    assert not Rollout.objects.filter(run=world.running, state=State.CANCELLED).exists()
    page = owner.post(path, follow=True).content.decode()
    assert "Cancelling 14 rollouts" in page
    assert Rollout.objects.filter(run=world.running, state=State.CANCELLED).exists()


def test_cancelling_an_ended_rollout_changes_nothing(world: WebWorld, owner: Client) -> None:
    rollout = world.groups[0][0]
    assert "nothing to cancel" in owner.get(f"/rollouts/{rollout.pk}/cancel/").content.decode()
    assert "already ended" in owner.post(f"/rollouts/{rollout.pk}/cancel/", follow=True).content.decode()


def test_the_run_page_tells_what_is_missing(world: WebWorld, owner: Client) -> None:
    page = owner.get(f"/runs/{world.running.pk}/").content.decode()
    assert "No EVAL worker is alive; 1 rollout waits evaluating" in page
    world.workers(Stage.EVAL)
    world.server.admission = "paused"
    world.server.save()
    page = owner.get(f"/runs/{world.running.pk}/").content.decode()
    assert "No EVAL worker" not in page
    assert "No live LLM server serves the policy qwen3-8b" in page
    later = timezone.now() + dt.timedelta(minutes=3)
    Rollout.objects.filter(run=world.running, state=State.QUEUED).update(not_before=later)
    page = owner.get(f"/runs/{world.running.pk}/").content.decode()
    assert "9 rollouts wait for another try after an infrastructure failure" in page
    assert f"between {later:%H:%M:%S} and {later:%H:%M:%S} UTC" in page


def test_the_run_page_shows_rewards_endings_and_groups(world: WebWorld, owner: Client) -> None:
    page = owner.get(f"/runs/{world.finished.pk}/").content.decode()
    assert re.search(r"36\s+of 36 finished", page)
    assert f"?run={world.finished.pk}&amp;cause=worker_lost" in page
    assert page.count("no signal") == 2
    assert '<polyline class="chart-line" points="0.00,' in page
    assert "The curve begins with the eighth reward" in owner.get(f"/runs/{world.running.pk}/").content.decode()
    assert 'hx-trigger="every' not in page


def test_polling_answers_304_until_something_changes(world: WebWorld, owner: Client) -> None:
    for path in (f"/runs/{world.finished.pk}/live/", f"/rollouts/{world.groups[0][0].pk}/live/?after=6&attempt=1"):
        first = owner.get(path)
        assert owner.get(path, headers={"If-None-Match": first.headers["ETag"]}).status_code == 304
    etag = owner.get(f"/runs/{world.finished.pk}/live/").headers["ETag"]
    world.group(world.finished, world.groups[0][0].task, [SOLVED])
    assert owner.get(f"/runs/{world.finished.pk}/live/", headers={"If-None-Match": etag}).status_code == 200


def test_following_a_rollout_gives_only_the_new_turns(world: WebWorld, owner: Client) -> None:
    rollout = world.live_group[3]
    page = owner.get(f"/rollouts/{rollout.pk}/live/?after=1&attempt=1").content.decode()
    assert 'id="t2"' in page
    assert 'id="t1"' not in page
    assert "after=2&amp;attempt=1" in page
    other_attempt = owner.get(f"/rollouts/{rollout.pk}/live/?after=1&attempt=0")
    assert other_attempt.headers["HX-Refresh"] == "true"
    assert owner.get(f"/rollouts/{rollout.pk}/live/").status_code == 404


def test_an_empty_project_says_how_to_begin(world: WebWorld) -> None:
    client = Client()
    client.force_login(world.stranger)
    page = client.get("/").content.decode()
    assert "has no runs yet" in page
    assert "client.submit_groups(" in page
    assert "Nothing has been submitted to math-lab" in client.get("/rollouts/").content.decode()
    world.other_project.members.clear()
    assert "You are in no project yet" in client.get("/").content.decode()


def test_the_download_is_an_attachment_with_tokens(world: WebWorld, owner: Client) -> None:
    response = owner.get(f"/rollouts/{world.groups[0][0].pk}/rollout.json")
    assert response.headers["Content-Disposition"].startswith("attachment")
    document = response.json()
    assert document["rollout"]["reward"] == 1.0
    assert len(document["trajectory"]["model_calls"][0]["sampled_ids"]) > 10


def test_pages_need_no_more_queries_for_more_rows(
    world: WebWorld, owner: Client, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for path in ("/", "/rollouts/", f"/runs/{world.finished.pk}/", f"/rollouts/{world.groups[0][0].pk}/"):
        with django_assert_max_num_queries(16) as few:
            owner.get(path)
        before = len(few)
        for i in range(3):
            run = world.new_run(f"more-{i}")
            world.group(run, world.task(world.math, f"{path}-{i}"), [SOLVED] * 4)
            world.group(world.finished, world.task(world.math, f"{path}-more-{i}"), [SOLVED] * 4)
        with django_assert_max_num_queries(before):
            owner.get(path)

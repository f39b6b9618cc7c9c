"""The rollout list's filters and pages, and what a rollout's page makes of hostile or enormous text."""

from __future__ import annotations

import re
import time

import pytest
from django.test import Client

from rollouts.lifecycle import State
from rollouts.models import Rollout
from tests.integration.web_case import MOSTLY, NODE_LOST, SOLVED, UNSOLVED, WebWorld
from tests.integration.web_texts import ToolText, TurnText

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b[0m {% now %} {{ request }}"


@pytest.fixture
def world(db: None) -> WebWorld:
    return WebWorld()


@pytest.fixture
def owner(world: WebWorld) -> Client:
    client = Client()
    client.force_login(world.owner)
    return client


def listed(client: Client, query: str) -> list[str]:
    page = client.get(f"/rollouts/?{query}").content.decode()
    return re.findall(r'<tr id="rollout-([0-9a-f-]+)">', page)


def ids(*rollouts: Rollout) -> list[str]:
    return sorted((str(rollout.pk) for rollout in rollouts), reverse=True)


def test_filters_narrow_the_list(world: WebWorld, owner: Client) -> None:
    run = world.new_run("one")
    solved, unsolved, mostly, lost, queued = world.group(
        run, world.task(world.sums, "17 * 23"), [SOLVED, UNSOLVED, MOSTLY, NODE_LOST, State.QUEUED]
    )
    (elsewhere,) = world.group(world.new_run("two"), world.task(world.math, "aime-7"), [SOLVED])
    assert listed(owner, "state=queued") == ids(queued)
    assert listed(owner, f"run={run.pk}&state=succeeded") == ids(solved, unsolved, mostly)
    assert listed(owner, "environment=competition-math") == ids(elsewhere)
    assert listed(owner, "cause=worker_lost") == ids(lost)
    assert listed(owner, "blame=infrastructure") == ids(lost)
    assert listed(owner, "reward_min=0.5&reward_max=0.9") == ids(mostly)
    assert listed(owner, "fidelity=token-exact&node=gpu-04") == ids(unsolved)
    assert listed(owner, "task=AIME") == ids(elsewhere)
    assert listed(owner, f"group={solved.group_id}&version=14") == ids(solved, unsolved, mostly, lost)
    assert listed(owner, "project=code-rl") == ids(solved, unsolved, mostly, lost, queued, elsewhere)


def test_a_filter_that_makes_no_sense_is_reported_and_not_applied(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.sums, "1 + 1"), [SOLVED])
    page = owner.get("/rollouts/?state=exploded&reward_min=much").content.decode()
    assert "State: Select a valid choice" in page
    assert "Reward ≥: Enter a number. The filter is not applied." in page
    assert str(rollout.pk) in page


def test_an_empty_list_says_that_the_filters_hide_everything(world: WebWorld, owner: Client) -> None:
    world.group(world.new_run("one"), world.task(world.sums, "1 + 1"), [SOLVED])
    page = owner.get("/rollouts/?state=discarded&blame=caller").content.decode()
    assert "none matches all 2 filters" in page


def test_pages_cover_everything_once_and_keep_the_filters(world: WebWorld, owner: Client) -> None:
    run = world.new_run("long")
    rollouts = [r for i in range(3) for r in world.group(run, world.task(world.sums, f"{i}"), [State.QUEUED] * 70)]
    path, seen = f"/rollouts/?run={run.pk}&state=queued", []
    while path:
        page = owner.get(path).content.decode()
        seen += re.findall(r'<tr id="rollout-([0-9a-f-]+)">', page)
        older = re.search(r'rel="next" href="([^"]+)"', page)
        last, path = path, f"/rollouts/{older[1]}".replace("&amp;", "&") if older else ""
    assert seen == ids(*rollouts)
    newer = re.search(r'rel="prev" href="([^"]+)"', owner.get(last).content.decode())
    assert newer
    assert "state=queued" in newer[1]
    assert len(listed(owner, newer[1].lstrip("?").replace("&amp;", "&"))) == 100
    assert len(listed(owner, "older=nonsense")) == 100


def test_clicking_a_value_adds_it_to_the_filters(world: WebWorld, owner: Client) -> None:
    world.group(world.new_run("one"), world.task(world.sums, "1 + 1"), [NODE_LOST])
    page = owner.get("/rollouts/?state=failed&older=&newer=").content.decode()
    assert 'href="?state=failed&amp;cause=worker_lost"' in page


def test_hostile_text_is_shown_and_never_becomes_markup(world: WebWorld, owner: Client) -> None:
    markup = HOSTILE.partition("\x1b")[0]
    task = world.task(world.sums, markup)
    run = world.new_run(markup)
    rollout, failed = world.group(run, task, [SOLVED, NODE_LOST])
    call = ToolText({"command": HOSTILE}, output=HOSTILE, error=HOSTILE, name=HOSTILE[:60])
    world.add_turns(rollout, [TurnText(f"<think>{HOSTILE}</think>{HOSTILE}", (call,))])
    Rollout.objects.filter(pk=rollout.pk).update(termination_detail=HOSTILE, artefacts={HOSTILE: HOSTILE})
    rollout.rewards.update(detail={HOSTILE: HOSTILE})
    failed.attempts.update(error=HOSTILE, traceback=HOSTILE)
    rollout.events.update(data={HOSTILE: HOSTILE})
    pages = [f"/rollouts/{rollout.pk}/{page}" for page in ("", "reward/", "tokens/", "events/", "raw/")]
    for path in [*pages, f"/rollouts/{failed.pk}/attempts/", f"/runs/{run.pk}/", "/rollouts/", "/"]:
        page = owner.get(path).content.decode()
        assert "<script>alert" not in page, path
        assert "<img" not in page, path
        assert "\x1b" not in page, path
    timeline = owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert timeline.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    assert "{{ request }}" in timeline


def test_long_output_is_folded_and_nothing_of_it_is_lost(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.sums, "1 + 1"), [State.RUNNING])
    lines = [f"line {i} of the log" for i in range(500)]
    world.add_turns(rollout, [TurnText("look", (ToolText({"command": "cat log"}, output="\n".join(lines)),))])
    page = owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert "show 480 more lines" in page
    assert all(line in page for line in lines)


def test_tool_calls_stand_with_what_came_of_them(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.swe, "sklearn-1"), [SOLVED])
    page = owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    for text in ("exit 0", "exit 1", "timed out", "48\u202f213 bytes were cut", "invalid arguments for bash"):
        assert text in page, text
    assert "&lt;think&gt;" not in page
    assert page.count("Reasoning <span") == 2
    assert page.count("&lt;tool_call&gt;") == page.count("As sampled")


def test_an_answer_that_differs_from_the_output_is_shown_as_well(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.swe, "sklearn-1"), [SOLVED])
    assert "As the model saw it" not in owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    rollout.messages.filter(role="tool", turn=0).update(content="(shortened by the environment)")
    page = owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert page.count("As the model saw it") == 1
    assert "(shortened by the environment)" in page


def test_tokens_of_a_turn_with_and_without_logprobs(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.swe, "sklearn-1"), [SOLVED])
    page = owner.get(f"/rollouts/{rollout.pk}/tokens/?turn=2").content.decode()
    assert "<h2>Turn 2</h2>" in page
    assert "Least likely" in page
    rollout.model_calls.update(logprobs=None)
    assert "no logprobs" in owner.get(f"/rollouts/{rollout.pk}/tokens/").content.decode()
    rollout.model_calls.update(sampled_ids=[])
    assert "text only" in owner.get(f"/rollouts/{rollout.pk}/tokens/?turn=nonsense").content.decode()


def test_a_rollout_of_a_thousand_turns_opens(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.sums, "1 + 1"), [State.RUNNING])
    look = ToolText({"command": "ls -l"}, output="a\nb\n" * 8)
    world.add_turns(rollout, [TurnText("<think>What next?</think>THOUGHT: look again. " * 6, (look,))] * 1000)
    started = time.perf_counter()
    page = owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert page.count('<article class="turn') == 1001
    assert time.perf_counter() - started < 10  # a bound against a regression of kind; benchmarks measure the time


def test_only_the_newest_attempt_is_the_trajectory(world: WebWorld, owner: Client) -> None:
    (rollout,) = world.group(world.new_run("one"), world.task(world.sums, "1 + 1"), [State.RUNNING])
    Rollout.objects.filter(pk=rollout.pk).update(attempt=2)
    page = owner.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert "boxed" not in page
    assert "Running; new turns appear here" in page

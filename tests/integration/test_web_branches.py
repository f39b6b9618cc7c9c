"""A rollout's page where its trajectory is more than one conversation, or was sampled from more than one version."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from rollouts.lifecycle import State
from rollouts.models import Message, ModelCall, Rollout, Session, ToolCall
from rollouts.selectors.timeline import calls_of
from rollouts.web.branches import Branches, branches_of
from tests.integration.web_case import SOLVED, WebWorld
from tests.integration.web_texts import TurnText


@pytest.fixture
def world(db: None) -> WebWorld:
    return WebWorld()


@pytest.fixture
def owner(world: WebWorld) -> Client:
    client = Client()
    client.force_login(world.owner)
    return client


def text(client: Client, path: str) -> str:
    return " ".join(client.get(path).content.decode().split())


def rollout_of(world: WebWorld, *calls: tuple[int, str, int | None], **values: Any) -> Rollout:
    """A rollout with a call for each (segment, why it was opened, parent)."""
    (rollout,) = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [SOLVED])
    for model in (ModelCall, Message, ToolCall):
        model.objects.filter(rollout=rollout).delete()
    rollout.turns = 0
    world.add_turns(rollout, [TurnText(f"reply {turn}") for turn in range(len(calls))])
    for turn, (segment, opened_by, parent) in enumerate(calls):
        place = {"segment": segment, "opened_by": opened_by, "parent_segment": parent}
        ModelCall.objects.filter(rollout=rollout, turn=turn).update(**place, **values)
    return rollout


def read(rollout: Rollout) -> Branches:
    return branches_of(calls_of(rollout, rollout.attempt))


START, ON = (0, "start", None), (0, "", None)


class TestBranches:
    def test_one_conversation_is_one_branch(self, world: WebWorld) -> None:
        found = read(rollout_of(world, START, ON, ON))
        assert [branch.name for branch in found.rows] == ["main"]
        assert not found.several
        assert found.places[1].begins is None

    def test_a_segment_that_goes_on_stays_in_the_branch(self, world: WebWorld) -> None:
        found = read(rollout_of(world, START, (1, "template", None), (2, "cut", 1), (3, "edited", 2), (3, "", None)))
        assert [branch.name for branch in found.rows] == ["main"]
        assert [segment.number for segment in found.rows[0].segments] == [0, 1, 2, 3]
        begins = [place.begins.number for place in found.places.values() if place.begins]
        assert begins == [1, 2, 3]

    def test_calls_from_before_causes_were_stored(self, world: WebWorld) -> None:
        found = read(rollout_of(world, ON, (1, "", None), (2, "", None)))
        assert [branch.name for branch in found.rows] == ["main"]
        assert found.places[1].begins is not None
        assert found.places[1].begins.why == "the conversation before it could not be continued"

    def test_sub_agents_stand_below_what_they_left(self, world: WebWorld) -> None:
        calls = [START, (1, "subagent", 0), (2, "subagent", 0), (1, "", None), (3, "subagent", 1), ON, (2, "", None)]
        found = read(rollout_of(world, *calls))
        assert [(b.name, b.depth, b.left_at, b.turns) for b in found.rows] == [
            ("main", 0, None, [0, 5]),
            ("sub-agent 1", 1, 0, [1, 3]),
            ("sub-agent 3", 2, 3, [4]),
            ("sub-agent 2", 1, 0, [2, 6]),
        ]
        place = found.places[3]
        assert (place.branch.name, place.before, place.after) == ("sub-agent 1", 1, None)

    def test_samples_and_edited_copies_of_a_conversation_that_goes_on(self, world: WebWorld) -> None:
        found = read(rollout_of(world, START, (1, "sibling", 0), (2, "edited", 0), ON, (2, "", None)))
        assert [(b.name, b.depth) for b in found.rows] == [("main", 0), ("other sample 1", 1), ("edited copy 1", 1)]

    def test_a_sub_agent_that_left_nothing(self, world: WebWorld) -> None:
        found = read(rollout_of(world, START, (1, "subagent", None), ON))
        assert [(b.name, b.depth, b.left_at) for b in found.rows] == [("main", 0, None), ("sub-agent 1", 1, None)]

    def test_a_rollout_without_calls(self, world: WebWorld) -> None:
        assert read(rollout_of(world)).rows == []


class TestPage:
    def test_branches_lead_to_their_turns(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START, (1, "subagent", 0), ON, (1, "", None), dialect="anthropic")
        page = text(owner, f"/rollouts/{rollout.pk}/")
        assert "2 branches" in page
        assert '<a href="#t1">sub-agent 1</a>' in page
        assert 'After <a href="#t0">turn 0</a>: a conversation of its own began' in page
        assert '<a class="quiet-link" href="#t3">goes on in turn 3</a>' in page
        assert "anthropic" in page

    def test_one_branch_can_be_read_by_itself(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START, (1, "subagent", 0), ON, (1, "", None))
        page = text(owner, f"/rollouts/{rollout.pk}/?branch=1")
        assert [number for number in range(4) if f'id="t{number}"' in page] == [1, 3]
        assert f'After <a href="/rollouts/{rollout.pk}/#t0">' in page

    def test_following_one_branch_leaves_the_others_out(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START, (1, "subagent", 0), ON, (1, "", None))
        Rollout.objects.filter(pk=rollout.pk).update(turns=5)
        page = text(owner, f"/rollouts/{rollout.pk}/live/?after=0&attempt=1&branch=1")
        assert [number for number in range(4) if f'id="t{number}"' in page] == [1, 3]

    def test_replies_that_an_agent_brings_along_are_shown_with_what_follows_them(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START)
        Message.objects.filter(rollout=rollout, role="assistant").update(index=9)
        brought = [("user", "first example"), ("assistant", "put there"), ("user", "the question")]
        for index, (role, content) in enumerate(brought, start=2):
            Message.objects.create(rollout=rollout, attempt=rollout.attempt, turn=0, index=index, role=role, content=content)
        page = text(owner, f"/rollouts/{rollout.id}/")
        places = [page.find(words) for words in ("first example", "put there", "the question", "reply 0")]
        assert -1 not in places and places == sorted(places)

    def test_weights_that_changed_within_a_reply(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START, ON)
        spans = {"policy_version": 13, "policy_version_last": 14}
        ModelCall.objects.filter(rollout=rollout, turn=0).update(**spans, version_spans=[[13, 1], [14, 1]])
        ModelCall.objects.filter(rollout=rollout, turn=1).update(**spans)
        Rollout.objects.filter(pk=rollout.pk).update(oldest_version=13, required_version=14)
        page = text(owner, f"/rollouts/{rollout.pk}/")
        assert page.count(">v13 → v14</span>") == 2
        assert "1 token of v13, then 1 token of v14" in page
        assert "does not tell at which token" in page
        assert "v13 to v14" in page
        assert "must be v14" in page
        assert "1 version old" in page
        tokens = text(owner, f"/rollouts/{rollout.pk}/tokens/")
        assert tokens.index(">v13</b>") < tokens.index(">v14</b>")

    def test_segments_are_chosen_in_the_token_view(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START, (1, "edited", 0), (1, "", None))
        page = text(owner, f"/rollouts/{rollout.pk}/tokens/?segment=1")
        assert "Turn 1</h2>" in page
        assert "?segment=1&amp;turn=2" in page
        assert "turn=0" not in page
        assert "with loss mask 0" in page

    def test_the_badge_is_explained(self, world: WebWorld, owner: Client) -> None:
        rollout = rollout_of(world, START)
        page = text(owner, f"/rollouts/{rollout.pk}/")
        assert 'href="#fidelity" title="One sequence of ids' in page
        assert page.count("Nothing was decoded and encoded again.") == 2

    def test_a_session_tells_of_its_agent(self, world: WebWorld, owner: Client) -> None:
        (rollout,) = world.group(world.new_run("grpo"), world.task(world.swe, "sklearn-1"), [State.RUNNING])
        assert 'id="session"' not in text(owner, f"/rollouts/{rollout.pk}/")
        Session.objects.create(
            rollout=rollout,
            project=world.project,
            opened_by="key <b>ci</b>",
            key_id="abcdef",
            key_sha256="0" * 64,
            ttl_seconds=600,
            expires_at=timezone.now() + dt.timedelta(minutes=10),
        )
        page = text(owner, f"/rollouts/{rollout.pk}/")
        assert "key &lt;b&gt;ci&lt;/b&gt;" in page
        assert "none yet" in page
        assert "10 m 00 s after the last sign: until" in page


def test_what_a_program_left_behind_can_be_read(world: WebWorld, owner: Client) -> None:
    rollout = rollout_of(world, START)
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old <b>\n+new\n same\n"
    left = {"exit_code": 1, "output": "Traceback\n\x1b[31mboom\x1b[0m", "files": {"out_1.txt": "a\nb"}, "patch": patch}
    Rollout.objects.filter(pk=rollout.pk).update(artefacts=left)
    assert f'<a href="/rollouts/{rollout.pk}/reward/#artefacts">' in text(owner, f"/rollouts/{rollout.pk}/")
    page = owner.get(f"/rollouts/{rollout.pk}/reward/").content.decode()
    assert "<dt>exit code</dt>" in page
    assert "Traceback\nboom</pre>" in page
    assert "<dt>files: out_1.txt</dt>" in page
    assert '<span class="patch-removed">-old &lt;b&gt;\n</span><span class="patch-added">+new\n</span> same' in page
    assert "--- a/x.py\n+++ b/x.py\n<span" in page

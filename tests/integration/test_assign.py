"""Which LLM server a rollout gets: one rule after the other, against the function in the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.conf import LazySettings
from django.utils import timezone

from rollouts.lifecycle import Stage, State
from rollouts.models import Group, LLMServer, Policy, Rollout, Run
from rollouts.scheduling.load import read_load
from rollouts.services.assign import choose_servers, move_rollout
from rollouts.services.claim import Claim, claim_rollouts
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db


@pytest.fixture
def domain(db: None) -> Domain:
    """Its server has room for 8 and has been there for long."""
    domain = Domain()
    LLMServer.objects.update(created_at=timezone.now() - timedelta(days=1))
    return domain


def server(domain: Domain, *, age: float = 86_400, **values: Any) -> LLMServer:
    number = LLMServer.objects.count()
    created = timezone.now() - timedelta(seconds=age)
    known = {"project": domain.project, "policy": domain.policy, "url": f"http://s{number}", "model": "m", "max_model_len": 99}
    return LLMServer.objects.create(**known | {"capacity": 8, "created_at": created} | values)


def running(domain: Domain, n: int, on: LLMServer, run: Run | None = None) -> list[Rollout]:
    """Rollouts of one group that run on this server, wherever they would have gone."""
    rollouts = domain.submit(n, run)
    worker = domain.worker(concurrency=n)
    for rollout in rollouts:
        domain.claim(rollout, Stage.INIT)
    ids = [rollout.id for rollout in rollouts]
    Rollout.objects.filter(id__in=ids).update(state=State.READY.value, lease_owner=None)
    Rollout.objects.filter(id__in=ids).update(state=State.RUNNING.value, lease_owner=worker.id, llm_server=on)
    return list(Rollout.objects.filter(id__in=ids).order_by("index"))


def chosen_for(rollouts: Sequence[Rollout], at: datetime | None = None) -> Counter[UUID]:
    return Counter(choose_servers([rollout.id for rollout in rollouts], at=at).values())


def each_alone(domain: Domain, n: int, run: Run | None = None) -> list[Rollout]:
    """Rollouts of groups of their own."""
    return [domain.submit(1, run)[0] for _ in range(n)]


class TestLeastBusy:
    def test_relative_to_capacity(self, domain: Domain):
        large = server(domain, capacity=24)
        assert chosen_for(each_alone(domain, 16)) == {large.id: 12, domain.server.id: 4}

    def test_counting_what_runs(self, domain: Domain):
        other = server(domain)
        running(domain, 4, domain.server)
        assert chosen_for(each_alone(domain, 4)) == {other.id: 4}

    def test_of_its_own_policy(self, domain: Domain):
        server(domain, policy=Policy.objects.create(project=domain.project, name="other"))
        assert chosen_for(each_alone(domain, 2)) == {domain.server.id: 2}

    def test_without_room_there_is_none(self, domain: Domain):
        running(domain, 7, domain.server)
        assert chosen_for(each_alone(domain, 3)) == {domain.server.id: 1}

    @pytest.mark.parametrize(
        "state",
        [
            {"admission": "draining"},
            {"admission": "paused"},
            {"admission": "asleep"},
            {"health": "suspect"},
            {"health": "dead"},
            {"hold": "wait"},
            {"hold": "cut"},
        ],
    )
    def test_a_server_that_takes_nothing_gets_nothing(self, domain: Domain, state: dict[str, str]):
        server(domain, **state)
        assert chosen_for(each_alone(domain, 4)) == {domain.server.id: 4}

    def test_the_dispatcher_counts_on_the_same_room(self, domain: Domain, settings: LazySettings):
        settings.SLOW_START_SECONDS = 3600
        server(domain, capacity=100, age=365)
        server(domain, capacity=100, health="dead")
        room = read_load().policies[domain.policy.id].capacity
        assert chosen_for(each_alone(domain, 40)).total() == room == 8 + 10


class TestGroups:
    def test_a_group_stays_together(self, domain: Domain):
        other = server(domain, capacity=64)
        running(domain, 3, other)
        [*first] = running(domain, 1, domain.server)
        siblings = list(Rollout.objects.bulk_create(sibling_of(first[0], index) for index in (1, 2)))
        assert chosen_for(siblings) == {domain.server.id: 2}

    def test_also_with_those_of_it_that_have_ended(self, domain: Domain):
        server(domain, capacity=64)
        [first] = running(domain, 1, domain.server)
        Rollout.objects.filter(id=first.id).update(state=State.EVALUATING.value)
        assert chosen_for([Rollout.objects.bulk_create([sibling_of(first, 1)])[0]]) == {domain.server.id: 1}

    def test_from_its_first_choice_on(self, domain: Domain):
        server(domain)
        assert list(chosen_for(domain.submit(2)).values()) == [2]

    def test_until_its_server_is_much_busier_than_another(self, domain: Domain):
        LLMServer.objects.update(capacity=16)
        other = server(domain, capacity=16)
        by_server = chosen_for(domain.submit(16))
        assert by_server[domain.server.id] + by_server[other.id] == 16
        assert abs(by_server[domain.server.id] - by_server[other.id]) <= 16 * 0.25 + 1

    def test_or_full(self, domain: Domain):
        other = server(domain)
        running(domain, 7, other)
        [*group] = running(domain, 8, domain.server)
        assert chosen_for([Rollout.objects.bulk_create([sibling_of(group[0], 8)])[0]]) == {other.id: 1}


def sibling_of(rollout: Rollout, index: int) -> Rollout:
    names = ("project_id", "run_id", "group_id", "task_id", "environment_id")
    return Rollout(index=index, **{name: getattr(rollout, name) for name in names})


class TestSlowStart:
    @pytest.mark.parametrize(("age", "share"), [(0, 0.1), (6, 0.2), (15, 0.5), (30, 1.0)])
    def test_a_new_server_has_a_part_of_its_room(self, domain: Domain, age: float, share: float):
        new = server(domain, capacity=100, age=0)
        counts = chosen_for(each_alone(domain, 100), new.created_at + timedelta(seconds=age))
        assert abs(counts[new.id] - min(100 * share, 92 + 1)) <= 1

    def test_so_does_one_that_was_dead(self, domain: Domain):
        back = server(domain, capacity=100, health="recovering", health_since=timezone.now())
        assert chosen_for(each_alone(domain, 40), back.health_since) == {back.id: 10, domain.server.id: 8}

    def test_it_is_preferred_no_more_than_its_part(self, domain: Domain):
        new = server(domain, capacity=80, age=0)
        running(domain, 4, domain.server)  # half full, as is the new one with 4 of the 8 that it may have
        running(domain, 4, new)
        counts = chosen_for(each_alone(domain, 4), new.created_at)
        assert counts == {new.id: 2, domain.server.id: 2}

    def test_a_fleet_that_starts_as_a_whole_is_not_slowed_down(self, domain: Domain):
        LLMServer.objects.update(created_at=timezone.now())
        new = server(domain, age=0)
        assert chosen_for(each_alone(domain, 20), new.created_at).total() == 16

    def test_it_can_be_switched_off(self, domain: Domain, settings: LazySettings):
        settings.SLOW_START_SECONDS = 0
        new = server(domain, capacity=100, age=0)
        assert chosen_for(each_alone(domain, 108))[new.id] == 100


class TestVersions:
    def test_a_rollout_that_requires_one_gets_it_or_nothing(self, domain: Domain):
        newer = server(domain, policy_version=2)
        old, new, none = each_alone(domain, 3)
        for rollout, version in ((old, 0), (new, 2), (none, 1)):
            Rollout.objects.filter(id=rollout.id).update(required_version=version)
        assert choose_servers([old.id, new.id, none.id]) == {old.id: domain.server.id, new.id: newer.id}

    def test_a_groups_first_choice_decides_for_it(self, domain: Domain):
        newer = server(domain, policy_version=2, capacity=4)
        run = domain.new_run(versions="group")
        rollouts = domain.submit(6, run)
        assert chosen_for(rollouts) == {newer.id: 4}, "the newest, and nothing once that is full"
        assert Group.objects.get(id=rollouts[0].group_id).policy_version == 2
        LLMServer.objects.filter(id=newer.id).update(policy_version=3)
        assert choose_servers([rollouts[5].id]) == {}

    def test_a_strict_rollout_starts_on_the_newest(self, domain: Domain):
        newer = server(domain, policy_version=2, capacity=2)
        assert chosen_for(each_alone(domain, 3, domain.new_run(versions="strict"))) == {newer.id: 2}

    def test_and_stays_with_it(self, domain: Domain):
        [rollout] = running(domain, 1, domain.server, domain.new_run(versions="strict"))
        Rollout.objects.filter(id=rollout.id).update(policy_version=0)
        server(domain, policy_version=1)
        assert move(rollout, avoid=[domain.server.id]) is None
        same = server(domain, policy_version=0)
        assert move(rollout, avoid=[domain.server.id]) == same.id

    def test_otherwise_any_version_will_do(self, domain: Domain):
        newer = server(domain, policy_version=2)
        assert chosen_for(each_alone(domain, 4)) == {newer.id: 2, domain.server.id: 2}


def move(rollout: Rollout, **values: Any) -> UUID | None:
    assert rollout.lease_owner_id is not None
    held = {"rollout_id": rollout.id, "attempt": rollout.attempt, "owner": rollout.lease_owner_id}
    return move_rollout(**held | values)


class TestMoving:
    def test_away_from_what_failed(self, domain: Domain):
        [rollout] = running(domain, 1, domain.server)
        assert move(rollout, avoid=[domain.server.id]) is None
        other = server(domain)
        assert move(rollout, avoid=[domain.server.id]) == other.id
        rollout.refresh_from_db()
        assert rollout.llm_server_id == other.id

    def test_it_stays_where_its_prefix_is(self, domain: Domain):
        server(domain)
        [rollout, _] = running(domain, 2, domain.server)
        assert move(rollout) == domain.server.id

    def test_unless_that_is_much_busier(self, domain: Domain):
        other = server(domain)
        rollouts = running(domain, 8, domain.server)
        assert [move(rollout) for rollout in rollouts].count(other.id) == 3  # 5 and 3 of 8: within the slack

    def test_to_a_full_server_rather_than_nowhere(self, domain: Domain):
        other = server(domain, capacity=1)
        running(domain, 1, other)
        [rollout] = running(domain, 1, domain.server)
        assert move(rollout, avoid=[domain.server.id]) == other.id

    @pytest.mark.parametrize("late", [{"attempt": 0}, {"attempt": 2}, {"owner": Domain.NOBODY}])
    def test_nothing_is_stored_for_who_does_not_hold_it(self, domain: Domain, late: dict[str, Any]):
        server(domain)
        [rollout] = running(domain, 1, domain.server)
        move(rollout, avoid=[domain.server.id], **late)
        rollout.refresh_from_db()
        assert rollout.llm_server_id == domain.server.id


class TestClaims:
    def test_a_claim_says_what_its_route_needs(self, domain: Domain):
        rollout = domain.rollout_in(State.READY)
        Rollout.objects.filter(id=rollout.id).update(required_version=0)
        claim: Claim = domain.claim(rollout, Stage.RUN)
        assert claim.server is not None
        assert (claim.server.server_id, claim.policy_id, claim.required_version) == (
            str(domain.server.id),
            domain.policy.id,
            0,
        )

    def test_what_has_no_server_is_not_taken(self, domain: Domain):
        rollout = domain.rollout_in(State.READY)
        LLMServer.objects.update(hold="wait")
        worker = domain.worker()
        domain.hint(rollout)
        assert claim_rollouts(stage=Stage.RUN, rollout_ids=[rollout.id], owner=worker.id, node=worker.node) == []

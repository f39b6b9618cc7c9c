"""Lists, filters and the sums of runs: the same answers as reading everything, and by an index each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Avg, Count, Sum
from django.utils import timezone

from rollouts.lifecycle import Blame, Cause, Fidelity, State
from rollouts.models import Environment, FeedCursor, Project, Rollout, Run, RunTally, Task
from rollouts.selectors.pages import rows_in_order
from rollouts.selectors.rollout_filter import MOST_BRANCHES, RolloutFilter
from rollouts.selectors.run_charts import MOST_POINTS, MOST_REWARDS, reward_series
from rollouts.selectors.run_summary import summarise
from rollouts.selectors.tallies import cells_of, counts_by_state
from rollouts.services.tallies import keep_tallies, restart_tally
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db
# What is finished is only counted once its transaction is over.
commits = pytest.mark.django_db(transaction=True)

_ENDS = [
    (State.SUCCEEDED, Cause.COMPLETED, Blame.POLICY, 1.0),
    (State.SUCCEEDED, Cause.COMPLETED, Blame.POLICY, 0.0),
    (State.SUCCEEDED, Cause.MAX_TURNS, Blame.POLICY, 0.25),
    (State.TIMED_OUT, Cause.AGENT_TIMEOUT, Blame.POLICY, 0.5),
    (State.FAILED, Cause.SANDBOX_ERROR, Blame.INFRASTRUCTURE, None),
    (State.CANCELLED, Cause.CANCELLED, Blame.CALLER, None),
]


def end(rollouts: list[Rollout], chance: Random) -> None:
    """Finish rollouts in one transaction, in all the ways there are; their columns are those that the services write."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")  # straight to the end
        cursor.execute("SELECT pg_current_xact_id()::text::bigint")
        [xid] = cursor.fetchone()
        for rollout in rollouts:
            state, cause, blame, reward = chance.choice(_ENDS)
            Rollout.objects.filter(id=rollout.id).update(
                state=state,
                termination_cause=cause,
                termination_blame=blame,
                reward=reward,
                trainable=reward is not None and cause is not Cause.AGENT_TIMEOUT,
                fidelity=chance.choice(list(Fidelity)),
                node=chance.choice(["left", "right"]),
                policy_version=chance.randrange(3),
                attempt=1,
                turns=chance.randrange(9),
                prompt_tokens=chance.randrange(99),
                sampled_tokens=chance.randrange(99),
                infra_retries=chance.randrange(2),
                finished_at=timezone.now(),
                finished_xid=xid,
                state_changed_at=timezone.now(),
            )


class World:
    """Two projects with two environment versions and two runs each; some rollouts of all have ended, some wait."""

    def __init__(self) -> None:
        chance = Random(7)  # noqa: S311
        self.domains = [Domain("alpha"), Domain("beta")]
        for domain in self.domains:
            newer = Environment.objects.create(project=domain.project, name="sums", version=2, handler="arithmetic")
            other = domain.dataset.__class__.objects.create(project=domain.project, environment=newer, name="newer")
            tasks = [Task.objects.create(dataset=other, key=f"sum-{n}", payload={"a": n, "b": 1}) for n in range(3)]
            second = domain.new_run()
            for task, run in itertools.product([domain.task, *tasks], [domain.run, second]):
                domain.task = task
                end(domain.submit(6, run)[:4], chance)

    @property
    def projects(self) -> list[Project]:
        return [domain.project for domain in self.domains]


@pytest.fixture
def world() -> World:
    return World()


def chosen(wanted: RolloutFilter, projects: list[Project]) -> list[Any]:
    return [r.id for r in rows_in_order(Rollout.objects.all(), 1000, branches=wanted.branches(projects))]


def expected(projects: list[Project], **lookups: Any) -> list[Any]:
    return [r.id for r in Rollout.objects.filter(project__in=projects, **lookups).order_by("-id")]


_FILTERS: dict[str, tuple[Callable[[World], dict[str, Any]], Callable[[World], dict[str, Any]]]] = {
    "nothing": (lambda w: {}, lambda w: {}),
    "run": (lambda w: {"run": w.domains[0].run.id}, lambda w: {"run": w.domains[0].run}),
    "environment": (lambda w: {"environment": "sums"}, lambda w: {"environment__name": "sums"}),
    "no environment": (lambda w: {"environment": "none"}, lambda w: {"environment__name": "none"}),
    "state": (lambda w: {"state": State.FAILED}, lambda w: {"state": "failed"}),
    "cause": (lambda w: {"cause": Cause.CANCELLED}, lambda w: {"termination_cause": "cancelled"}),
    "blame": (lambda w: {"blame": Blame.INFRASTRUCTURE}, lambda w: {"termination_blame": "infrastructure"}),
    "reward": (lambda w: {"reward_min": 0.2, "reward_max": 0.5}, lambda w: {"reward__gte": 0.2, "reward__lte": 0.5}),
    "trainable": (lambda w: {"trainable": False}, lambda w: {"trainable": False}),
    "fidelity": (lambda w: {"fidelity": Fidelity.TEXT_ONLY}, lambda w: {"fidelity": "text-only"}),
    "node": (lambda w: {"node": "left"}, lambda w: {"node": "left"}),
    "version": (lambda w: {"version": 2}, lambda w: {"policy_version": 2}),
    "task": (lambda w: {"task": "UM-"}, lambda w: {"task__key__contains": "um-"}),
    "no task": (lambda w: {"task": "zzz"}, lambda w: {"task__key": "zzz"}),
    "run, cause": (
        lambda w: {"run": w.domains[0].run.id, "cause": Cause.COMPLETED},
        lambda w: {"run": w.domains[0].run, "termination_cause": "completed"},
    ),
    "environment, state, task": (
        lambda w: {"environment": "sums", "state": State.SUCCEEDED, "task": "sum-1"},
        lambda w: {"environment__name": "sums", "state": "succeeded", "task__key": "sum-1"},
    ),
}


@pytest.mark.parametrize("name", _FILTERS)
def test_a_filter_selects_as_reading_everything_would(world: World, name: str) -> None:
    wanted, lookups = _FILTERS[name]
    for projects in (world.projects, world.projects[:1], []):
        assert chosen(RolloutFilter(**wanted(world)), projects) == expected(projects, **lookups(world))


def test_a_group_is_found_only_by_those_who_may_see_it(world: World) -> None:
    mine, other = world.projects
    rollout = Rollout.objects.filter(project=mine).first()
    assert rollout is not None
    for narrowed in (RolloutFilter(group=rollout.group_id), RolloutFilter(group=rollout.group_id, run=rollout.run_id)):
        assert chosen(narrowed, [mine]) == expected([mine], group=rollout.group)
        assert chosen(narrowed, [other]) == []
    foreign_run = Run.objects.filter(project=other).first()
    assert foreign_run is not None
    assert chosen(RolloutFilter(group=rollout.group_id, run=foreign_run.id), [mine]) == []
    assert chosen(RolloutFilter(run=rollout.run_id), [other]) == []


def test_a_search_that_many_tasks_match_selects_the_same(world: World) -> None:
    domain = world.domains[0]
    Task.objects.bulk_create(Task(dataset=domain.dataset, key=f"sum-many-{n}", payload={}) for n in range(MOST_BRANCHES + 1))
    assert chosen(RolloutFilter(task="sum-"), world.projects) == expected(world.projects, task__key__contains="sum-")


# The filter, and the index that keeps its values in the order of the list.
_INDEXES = {
    "nothing": "rollout_list",
    "run": "rollout_run_list",
    "environment": "rollout_by_environment",
    "state": "rollout_by_state",
    "cause": "rollout_by_cause",
    "blame": "rollout_by_blame",
    "fidelity": "rollout_by_fidelity",
    "node": "rollout_by_node",
    "version": "rollout_by_version",
    "task": "rollout_by_task",
}


@pytest.mark.parametrize(("name", "index"), _INDEXES.items())
def test_the_newest_of_a_filter_come_from_its_index_without_sorting(world: World, name: str, index: str) -> None:
    """The table is too small for an index to pay, so Postgres is told not to sort and not to read it from end to end."""
    wanted, _ = _FILTERS[name]
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE rollouts_rollout")
        for setting in ("enable_seqscan", "enable_sort", "enable_bitmapscan"):
            cursor.execute(f"SET LOCAL {setting} = off")
        # Pages cost nothing, because how many there are depends on what earlier tests have left in the table and its indexes.
        for setting in ("seq_page_cost", "random_page_cost"):
            cursor.execute(f"SET LOCAL {setting} = 0")
    for branch in RolloutFilter(**wanted(world)).branches(world.projects):
        plan = Rollout.objects.filter(branch).order_by("-id").values_list("id")[:100].explain()
        assert index in plan and "Seq Scan" not in plan and "Sort" not in plan, plan


def _as_if_read(run: Run) -> tuple[Any, ...]:
    rollouts = Rollout.objects.filter(run=run)
    states = dict(rollouts.order_by().values_list("state").annotate(Count("id")))
    ends = rollouts.exclude(termination_cause="").order_by().values_list("termination_cause").annotate(Count("id"))
    sums = rollouts.aggregate(
        scored=Count("reward"),
        mean=Avg("reward"),
        prompt=Sum("prompt_tokens"),
        sampled=Sum("sampled_tokens"),
        retries=Sum("infra_retries"),
    )
    sums["trainable"] = rollouts.filter(trainable=True).count()
    return states, dict(ends), {name: pytest.approx(value) for name, value in sums.items()}


def _as_summarised(run: Run) -> tuple[Any, ...]:
    summary = summarise(run)
    sums = {
        "scored": summary.scored,
        "mean": summary.reward_mean,
        "prompt": summary.prompt_tokens,
        "sampled": summary.sampled_tokens,
        "retries": summary.retries,
        "trainable": summary.trainable,
    }
    return dict(summary.tally.counts), {ending.cause: ending.n for ending in summary.endings}, sums


@pytest.fixture
def runs(world: World) -> list[Run]:
    return list(Run.objects.order_by("id"))


@commits
def test_the_sums_of_a_run_are_right_whether_counted_or_not(world: World, runs: list[Run]) -> None:
    chance = Random(8)  # noqa: S311
    for _ in range(3):
        for run in runs:
            assert _as_summarised(run) == _as_if_read(run)
        keep_tallies()
        for run in runs:
            assert _as_summarised(run) == _as_if_read(run)
        for domain in world.domains:
            end(domain.submit(5)[:3], chance)
    assert {tally.run_id for tally in RunTally.objects.filter(xid__gt=0)} == {run.id for run in runs}


@commits
def test_what_is_counted_is_not_read_again(world: World, runs: list[Run]) -> None:
    keep_tallies()
    cells = cells_of([run.id for run in runs])
    Rollout.objects.filter(run__in=runs).delete()
    for run in runs:
        finished = {state: n for state, n in counts_by_state(cells[run.id]).items() if state != "queued"}
        assert counts_by_state(cells_of([run.id])[run.id]) == finished


@commits
def test_a_changed_reward_is_counted_anew(world: World, runs: list[Run]) -> None:
    keep_tallies()
    rollout = Rollout.objects.filter(run=runs[0], reward=0.0).first()
    assert rollout is not None
    Rollout.objects.filter(id=rollout.id).update(reward=0.75)
    restart_tally(rollout_id=rollout.id)
    assert _as_summarised(runs[0]) == _as_if_read(runs[0])
    keep_tallies()
    assert _as_summarised(runs[0]) == _as_if_read(runs[0])
    assert RunTally.objects.get(run=runs[0]).xid > 0


@commits
def test_counting_again_from_the_start_of_the_feed_counts_nothing_twice(world: World, runs: list[Run]) -> None:
    keep_tallies()
    FeedCursor.objects.filter(consumer="tallies").update(xid=0)
    keep_tallies()
    for run in runs:
        assert _as_summarised(run) == _as_if_read(run)


def test_the_curve_of_a_long_run_is_drawn_from_a_sample() -> None:
    domain = Domain()
    rollouts = domain.submit(1000)
    chance = Random(9)  # noqa: S311
    for start in range(0, 1000, 100):
        end(rollouts[start : start + 100], chance)
    scored = Rollout.objects.filter(run=domain.run, reward__isnull=False).count()
    every = reward_series(domain.run, scored)
    sampled = reward_series(domain.run, MOST_REWARDS + 1)
    assert sum(point.n for point in every) == scored
    assert len(every) == MOST_POINTS and 0 < len(sampled) <= MOST_POINTS
    assert all(0 <= point.p10 <= point.mean <= point.p90 <= 1 or point.n < 10 for point in sampled)

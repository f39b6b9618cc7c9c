"""Limits of runs and projects: what they refuse, what counts against them, and what happens when one runs out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client as Browser
from django.utils import timezone
from pytest_django.live_server_helper import LiveServer

from rollouts.client import ApiError, BudgetExhausted, Client, TooManyQueued
from rollouts.lifecycle import ACTIVE, Limit, Stage, State
from rollouts.models import Group, Project, Rollout, RolloutEvent, Run
from rollouts.selectors.budgets import in_flight_limits_reached, limit_uses
from rollouts.services import errors
from rollouts.services.budgets import change_limits
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.finish import hand_back
from rollouts.services.reap import reap
from rollouts.services.submit import GroupRequest, create_run, submit_groups
from rollouts.services.transition import Guard, move
from rollouts.services.usage import keep_accounts
from tests.integration.api_case import ApiCase, expect_problem
from tests.integration.domain import Domain

# The feed of finished rollouts wants their transactions to be over.
pytestmark = pytest.mark.django_db(transaction=True)

NO_LIMITS = dict.fromkeys([limit.value for limit in Limit])


@pytest.fixture
def domain(transactional_db: None) -> Domain:
    return Domain()


@pytest.fixture
def case(transactional_db: None) -> ApiCase:
    return ApiCase()


@pytest.fixture(params=["run", "project"])
def scope(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def owner_of(domain: Domain, scope: str) -> Any:
    return domain.run if scope == "run" else domain.project


def limit(domain: Domain, scope: str, **limits: int | None) -> None:
    change_limits(owner=owner_of(domain, scope), limits=limits)


def post(case: ApiCase, n: int, key: str | None = None) -> Any:
    headers = {"HTTP_IDEMPOTENCY_KEY": key} if key else {}
    body = {"groups": [{"n": n, "dataset": "sums", "key": "one"}]}
    return case.submitter.post(f"/api/v1/runs/{case.domain.run.id}/groups/", body, **headers)


def finish(rollout: Rollout, tokens: int = 0, seconds: float = 0.0) -> None:
    """The rollout has used this much and ends."""
    Rollout.objects.filter(id=rollout.id).update(prompt_tokens=tokens, run_seconds=seconds, sandbox_name="prorl-test")
    termination = {"termination_cause": "completed"}
    assert move([rollout.id], to=State.CANCELLED, guard=Guard([*ACTIVE, State.QUEUED]), values=termination)


def refreshed(row: Any) -> Any:
    row.refresh_from_db()
    return row


# Visible and changeable


def test_a_run_shows_its_limits_and_what_it_has_used(case: ApiCase) -> None:
    body = {"name": "grpo", "policy": "tiny", "limits": {"max_tokens": 5_000_000_000, "max_in_flight": 3}}
    run = case.submitter.post("/api/v1/runs/", body).json()
    assert run["limits"] == {**NO_LIMITS, "max_tokens": 5_000_000_000, "max_in_flight": 3}
    assert (run["exhausted_at"], run["exhausted_by"]) == (None, None)
    submit_groups(run=Run.objects.get(id=run["id"]), groups=[GroupRequest(n=4, task_id=case.domain.task.id)])
    usage = case.check_read_access(f"/api/v1/runs/{run['id']}/")["usage"]
    assert usage.pop("wall_seconds") >= 0
    assert usage == {"rollouts": 4, "unfinished": 4, "tokens": 0, "sandbox_seconds": 0}


def test_the_project_shows_its_limits_to_its_own_keys(case: ApiCase) -> None:
    limit(case.domain, "project", max_queued=7)
    case.domain.submit(n=2)
    case.check_list_access("/api/v1/project/")
    project = case.reader.get("/api/v1/project/").json()
    assert (project["name"], project["limits"]["max_queued"], project["usage"]["unfinished"]) == ("alpha", 7, 2)
    assert case.stranger.get("/api/v1/project/").json()["name"] == "beta"
    expect_problem(case.owner.patch("/api/v1/project/", {"limits": NO_LIMITS}), 405, "method_not_allowed")


def test_limits_of_a_run_are_changed_one_by_one(case: ApiCase) -> None:
    path = f"/api/v1/runs/{case.domain.run.id}/"
    case.check_write_access("patch", path, {"limits": {"max_queued": 1}})
    assert case.submitter.patch(path, {"limits": {"max_queued": 9, "max_tokens": 100}}).json()["limits"]["max_queued"] == 9
    changed = case.submitter.patch(path, {"limits": {"max_queued": None}}).json()
    assert changed["limits"] == {**NO_LIMITS, "max_tokens": 100}
    assert case.submitter.patch(path, {"limits": {}}).json()["limits"] == changed["limits"]


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, 0) for name in NO_LIMITS), *(("max_tokens", value) for value in (-1, "5", 1.5, True, 2**63, [], {}))],
)
def test_a_limit_that_makes_no_sense_is_named_and_changes_nothing(case: ApiCase, name: str, value: Any) -> None:
    before = case.row_counts()
    body = {"name": "grpo", "policy": "tiny", "limits": {name: value}}
    expect_problem(case.submitter.post("/api/v1/runs/", body), 422, "invalid", f"/limits/{name}")
    answer = case.submitter.patch(f"/api/v1/runs/{case.domain.run.id}/", {"limits": {"max_rollouts": 5, name: value}})
    expect_problem(answer, 422, "invalid", f"/limits/{name}")
    assert refreshed(case.domain.run).max_rollouts is None
    assert case.row_counts() == before


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"limits": {"max_turns": 1}}, "/limits/max_turns"),
        ({"limits": None}, "/limits"),
        ({"limits": {}, "priority": 3}, "/priority"),
        ([], ""),
    ],
)
def test_a_change_of_anything_else_is_refused(case: ApiCase, body: Any, pointer: str) -> None:
    expect_problem(case.submitter.patch(f"/api/v1/runs/{case.domain.run.id}/", body), 422, "invalid", pointer)


def test_services_refuse_limits_like_the_api(domain: Domain) -> None:
    with pytest.raises(errors.Refused) as refused:
        create_run(project=domain.project, name="run", policy="tiny", limits={"max_tokens": 0})
    assert refused.value.errors[0].pointer == "/limits/max_tokens"
    with pytest.raises(errors.Refused) as refused:
        change_limits(owner=domain.project, limits={"max_tokens": -1})
    assert refused.value.errors[0].pointer == "/limits/max_tokens"


# Admission


def test_beyond_max_rollouts_nothing_is_accepted_until_it_is_raised(case: ApiCase, scope: str) -> None:
    limit(case.domain, scope, max_rollouts=10)
    assert post(case, 8).status_code == 201
    before = case.row_counts()
    answer = post(case, 3, key="k")
    problem = expect_problem(answer, 402, "budget_exhausted")
    assert problem["limit"] == {"scope": scope, "name": "max_rollouts", "maximum": 10, "used": 8, "requested": 3}
    assert "max_rollouts = 10" in problem["detail"]
    assert "raise" in problem["detail"].lower()
    assert case.row_counts() == before
    assert refreshed(owner_of(case.domain, scope)).used_rollouts == 8
    assert post(case, 2).status_code == 201
    limit(case.domain, scope, max_rollouts=13)
    assert post(case, 3, key="k").status_code == 201  # a refusal leaves the key free
    assert post(case, 3, key="k").headers["Idempotency-Replayed"] == "true"
    assert refreshed(owner_of(case.domain, scope)).used_rollouts == Rollout.objects.count() == 13


def test_beyond_max_queued_the_trainer_is_told_when_to_come_back(case: ApiCase, scope: str) -> None:
    limit(case.domain, scope, max_queued=4)
    assert post(case, 3).status_code == 201
    before = case.row_counts()
    answer = post(case, 2, key="k")
    problem = expect_problem(answer, 429, "too_many_queued")
    assert problem["limit"] == {"scope": scope, "name": "max_queued", "maximum": 4, "used": 3, "requested": 2}
    assert int(answer.headers["Retry-After"]) >= 1
    assert case.row_counts() == before
    finish(Rollout.objects.first())
    keep_accounts()
    assert post(case, 2, key="k").status_code == 201


def test_the_pause_follows_from_how_fast_rollouts_finish(case: ApiCase, scope: str) -> None:
    case.other.submit()
    finish(Rollout.objects.get())  # another project's do not count
    Rollout.objects.update(finished_at=timezone.now() - timedelta(seconds=1))
    limit(case.domain, scope, max_queued=20)
    rollouts = case.domain.submit(n=10)
    assert post(case, 15).headers["Retry-After"] == "30"
    for rollout in rollouts[:2]:
        finish(rollout)
    Rollout.objects.filter(id=rollouts[0].id).update(finished_at=timezone.now() - timedelta(seconds=20))
    keep_accounts()
    # Three too many, and two finished in the last 20 seconds (or a little longer, by the time this is asked).
    pause = int(post(case, 15).headers["Retry-After"])
    assert 30 <= pause < 60
    Rollout.objects.filter(id=rollouts[0].id).update(finished_at=timezone.now() - timedelta(seconds=2))
    assert 3 <= int(post(case, 15).headers["Retry-After"]) < pause


def test_more_than_ever_fits_at_once_is_no_matter_of_waiting(case: ApiCase, scope: str) -> None:
    limit(case.domain, scope, max_queued=4)
    problem = expect_problem(post(case, 5), 422, "invalid", "/groups")
    assert "in parts" in problem["detail"]


def test_bad_groups_are_named_before_limits_are(case: ApiCase) -> None:
    limit(case.domain, "run", max_rollouts=1)
    case.domain.submit()
    answer = case.submitter.post(f"/api/v1/runs/{case.domain.run.id}/groups/", {"groups": []})
    expect_problem(answer, 422, "invalid", "/groups")


def in_threads(n: int, work: Any) -> list[Any]:
    """What `n` calls at once gave, each on its own connection; errors are results too."""
    results: list[Any] = []
    together = threading.Barrier(n)

    def call() -> None:
        together.wait()
        try:
            results.append(work())
        except Exception as error:
            results.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=call) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(("name", "refusal"), [("max_rollouts", errors.BudgetExhausted), ("max_queued", errors.TooManyQueued)])
def test_submissions_at_once_never_exceed_a_limit(domain: Domain, scope: str, name: str, refusal: type[Exception]) -> None:
    limit(domain, scope, **{name: 20})
    runs = itertools.cycle([domain.run, domain.new_run() if scope == "project" else domain.run])

    def submit() -> list[Group]:
        return submit_groups(run=next(runs), groups=[GroupRequest(n=3, task_id=domain.task.id)])

    results = in_threads(20, submit)
    accepted = [result for result in results if isinstance(result, list)]
    assert len(accepted) == 6
    assert all(isinstance(result, refusal) for result in results if not isinstance(result, list)), results
    assert Rollout.objects.count() == refreshed(domain.project).used_rollouts == 18
    assert sum(run.used_rollouts for run in Run.objects.all()) == 18


def test_a_run_that_is_cancelled_while_groups_come_in_is_left_with_none_going(domain: Domain) -> None:
    works = iter([*([domain.submit] * 8), lambda: cancel_rollouts(project=domain.project, run_id=domain.run.id)])
    results = in_threads(9, lambda: next(works)())
    assert all(isinstance(result, list | int | errors.Conflict) for result in results), results
    assert not Rollout.objects.filter(finished_at=None).exists()


# Counting


def test_what_finished_is_counted_once(domain: Domain) -> None:
    other_run = domain.new_run()
    rollouts = [*domain.submit(n=2), *domain.submit(n=1, run=other_run)]
    for rollout in rollouts:
        finish(rollout, tokens=100, seconds=2.5)
    for _ in range(3):
        keep_accounts()
    run, other, project = refreshed(domain.run), refreshed(other_run), refreshed(domain.project)
    assert (run.finished_rollouts, run.used_tokens, run.used_sandbox_seconds) == (2, 200, 5.0)
    assert (other.finished_rollouts, other.used_tokens, other.used_sandbox_seconds) == (1, 100, 2.5)
    assert (project.finished_rollouts, project.used_tokens, project.used_sandbox_seconds) == (3, 300, 7.5)


def test_earlier_attempts_count_and_rollouts_without_a_sandbox_have_no_sandbox_seconds(domain: Domain) -> None:
    [rollout] = domain.submit()
    for tokens in (30, 12):
        claim = domain.claim(rollout, Stage.INIT)
        Rollout.objects.filter(id=rollout.id).update(prompt_tokens=tokens, sampled_tokens=1, init_seconds=4)
        if tokens == 30:
            Rollout.objects.filter(id=rollout.id).update(sandbox_name="prorl-test")
            hand_back(rollout_id=rollout.id, guard=claim.guard, stage=Stage.INIT, reason="test")
    assert move([rollout.id], to=State.FAILED, guard=claim.guard, values={"termination_cause": "internal_error"})
    keep_accounts()
    run = refreshed(domain.run)
    assert run.used_tokens == 31 + 13
    assert run.used_sandbox_seconds == pytest.approx(4, abs=0.5)


def test_use_includes_what_is_in_flight(domain: Domain) -> None:
    limit(domain, "run", max_in_flight=1, max_tokens=1000)
    limit(domain, "project", max_in_flight=5)
    assert [use.used for use in limit_uses(domain.run)] == [0, 0, 0]
    rollout = domain.rollout_in(State.RUNNING)
    Rollout.objects.filter(id=rollout.id).update(prompt_tokens=70)
    domain.submit(n=3)
    uses = {(use.scope, use.limit): use for use in limit_uses(refreshed(domain.run))}
    assert uses["run", Limit.MAX_TOKENS].used == 70
    assert uses["run", Limit.MAX_IN_FLIGHT].reached
    assert not uses["project", Limit.MAX_IN_FLIGHT].reached
    [binding] = in_flight_limits_reached(domain.run)
    assert (binding.scope, binding.maximum) == ("run", 1)


# Running out


def test_when_tokens_run_out_what_waits_is_cancelled_and_the_rest_ends_by_itself(domain: Domain, scope: str) -> None:
    limit(domain, scope, max_tokens=100)
    running = domain.rollout_in(State.RUNNING)
    first, *waiting = domain.submit(n=4)
    finish(first, tokens=99)
    keep_accounts()
    assert refreshed(owner_of(domain, scope)).exhausted_at is None
    Rollout.objects.filter(id=running.id).update(sampled_tokens=1)  # in flight, and counted
    keep_accounts()
    owner = refreshed(owner_of(domain, scope))
    assert owner.exhausted_by == "max_tokens"
    for rollout in waiting:
        ended = refreshed(rollout)
        assert (ended.state, ended.termination_cause, ended.termination_blame) == ("cancelled", "budget_exhausted", "caller")
        assert ended.termination_phase == "queue"
        assert f"max_tokens of the {scope}" in ended.termination_detail
        assert (ended.reward, ended.trainable) == (None, False)
    assert refreshed(running).state == "running"
    assert running.cancel_requested_at is None
    with pytest.raises(errors.BudgetExhausted) as refused:
        domain.submit()
    assert refused.value.reached == (scope, "max_tokens", 100, 100, 1)


def test_a_stopped_run_does_not_start_over(domain: Domain) -> None:
    """What a worker loses goes back to the queue, and from there nowhere."""
    limit(domain, "run", max_tokens=10)
    running = domain.rollout_in(State.RUNNING)
    Rollout.objects.filter(id=running.id).update(prompt_tokens=10)
    keep_accounts()
    move([running.id], to=State.QUEUED, guard=Guard([State.RUNNING]), values={"node": ""})
    keep_accounts()
    assert refreshed(running).termination_cause == "budget_exhausted"


def test_a_run_may_have_its_rollouts_in_flight_stopped(domain: Domain, scope: str) -> None:
    domain.run = domain.new_run(on_budget="cancel")
    limit(domain, scope, max_sandbox_seconds=50)
    ready, running = domain.rollout_in(State.READY), domain.rollout_in(State.RUNNING)
    [done] = domain.submit()
    finish(done, seconds=50)
    keep_accounts()
    ended = refreshed(ready)
    assert (ended.state, ended.termination_cause, ended.termination_phase) == ("cancelled", "budget_exhausted", "run")
    assert refreshed(running).cancel_requested_at is not None
    assert RolloutEvent.objects.filter(rollout=running, kind="cancel_requested").count() == 1
    keep_accounts()
    assert RolloutEvent.objects.filter(rollout=running, kind="cancel_requested").count() == 1
    move([running.id], to=State.EVALUATING, guard=Guard([State.RUNNING]))  # its worker hands it on at that moment
    reap()
    ended = refreshed(running)
    assert (ended.state, ended.termination_cause) == ("cancelled", "budget_exhausted")


def test_sandbox_seconds_of_a_stage_under_way_count(domain: Domain) -> None:
    limit(domain, "run", max_sandbox_seconds=60)
    rollout = domain.rollout_in(State.RUNNING)
    keep_accounts()
    assert refreshed(domain.run).exhausted_at is None
    Rollout.objects.filter(id=rollout.id).update(state_changed_at=timezone.now() - timedelta(seconds=61))
    keep_accounts()
    assert refreshed(domain.run).exhausted_at is None  # it has no sandbox
    Rollout.objects.filter(id=rollout.id).update(sandbox_name="prorl-test")
    keep_accounts()
    assert refreshed(domain.run).exhausted_by == "max_sandbox_seconds"


def test_wall_clock(domain: Domain, scope: str) -> None:
    limit(domain, scope, max_wall_seconds=3600)
    [rollout] = domain.submit()
    type(owner_of(domain, scope)).objects.update(created_at=timezone.now() - timedelta(seconds=3599))
    keep_accounts()
    assert refreshed(rollout).state == "queued"
    type(owner_of(domain, scope)).objects.update(created_at=timezone.now() - timedelta(seconds=3601))
    with pytest.raises(errors.BudgetExhausted):
        domain.submit()
    keep_accounts()
    assert refreshed(rollout).termination_cause == "budget_exhausted"


def test_time_that_passes_after_the_end_exhausts_nothing(domain: Domain) -> None:
    limit(domain, "run", max_wall_seconds=3600)
    [rollout] = domain.submit()
    finish(rollout)
    keep_accounts()
    Run.objects.update(created_at=timezone.now() - timedelta(days=1))
    keep_accounts()
    assert refreshed(domain.run).exhausted_at is None


def test_a_raised_limit_lets_submissions_in_again(case: ApiCase) -> None:
    limit(case.domain, "run", max_tokens=100)
    [rollout] = case.domain.submit()
    finish(rollout, tokens=150)
    keep_accounts()
    path = f"/api/v1/runs/{case.domain.run.id}/"
    assert case.reader.get(path).json()["exhausted_by"] == "max_tokens"
    expect_problem(post(case, 1), 402, "budget_exhausted")
    assert case.submitter.patch(path, {"limits": {"max_tokens": 150}}).json()["exhausted_by"] == "max_tokens"
    expect_problem(post(case, 1), 402, "budget_exhausted")
    Run.objects.update(created_at=timezone.now() - timedelta(seconds=2))
    other = case.submitter.patch(path, {"limits": {"max_tokens": 151, "max_wall_seconds": 1}}).json()
    assert (other["exhausted_at"] is None, other["exhausted_by"]) == (False, "max_wall_seconds")
    raised = case.submitter.patch(path, {"limits": {"max_wall_seconds": None}}).json()
    assert (raised["exhausted_at"], raised["exhausted_by"]) == (None, None)
    assert post(case, 1).status_code == 201
    keep_accounts()
    assert Rollout.objects.filter(state="queued").count() == 1


def test_another_runs_and_projects_budget_is_not_mine(case: ApiCase) -> None:
    limit(case.other, "project", max_tokens=1)
    other_run = case.domain.new_run()
    change_limits(owner=other_run, limits={"max_tokens": 1})
    for domain, run in ((case.other, None), (case.domain, other_run)):
        [rollout] = domain.submit(run=run)
        finish(rollout, tokens=5)
    waiting = case.domain.submit(n=2)
    keep_accounts()
    assert [refreshed(rollout).state for rollout in waiting] == ["queued", "queued"]
    assert post(case, 1).status_code == 201


# The client, the pages


@pytest.fixture
def client(live_server: LiveServer, case: ApiCase) -> Iterator[Client]:
    with Client(live_server.url, case.owner_secret, patience=0.5) as client:
        yield client


def test_the_client_raises_typed_errors(client: Client, case: ApiCase) -> None:
    run = client.create_run("grpo", "tiny", limits={"max_rollouts": 5, "max_queued": 2})
    group: Any = {"n": 2, "dataset": "sums", "key": "one"}
    client.submit_groups(run["id"], [group])
    with pytest.raises(TooManyQueued) as busy:
        client.submit_groups(run["id"], [group])
    assert (busy.value.status, busy.value.limit.name, busy.value.limit.used) == (429, "max_queued", 2)
    assert client.set_limits(run["id"], {"max_queued": None})["limits"]["max_queued"] is None
    client.submit_groups(run["id"], [group])
    with pytest.raises(BudgetExhausted) as spent:
        client.submit_groups(run["id"], [group])
    assert (spent.value.status, spent.value.limit.name, spent.value.limit.requested) == (402, "max_rollouts", 2)
    assert isinstance(spent.value, ApiError)
    assert client.project()["usage"]["rollouts"] == 4


def test_the_run_page_shows_limits_and_says_what_is_used_up(domain: Domain) -> None:
    person = User.objects.create_user("maria", password="correct horse")
    domain.project.members.add(person)
    browser = Browser()
    browser.force_login(person)
    [rollout] = domain.submit()
    page = f"/runs/{domain.run.id}/"
    assert "<code>max_tokens</code>" not in browser.get(page).content.decode()
    limit(domain, "run", max_tokens=777)
    limit(domain, "project", max_in_flight=12)
    shown = browser.get(page).content.decode()
    assert "<code>max_tokens</code>" in shown
    assert "<code>max_in_flight</code>" in shown
    assert ">777<" in shown
    finish(rollout, tokens=777)
    keep_accounts()
    assert "used up max_tokens" in browser.get(page).content.decode()


def test_limits_of_a_project_are_set_in_the_admin_without_touching_its_use(domain: Domain) -> None:
    boss = User.objects.create_superuser("boss", password="correct horse")
    browser = Browser()
    browser.force_login(boss)
    limit(domain, "project", max_tokens=10)
    [rollout] = domain.submit()
    finish(rollout, tokens=10)
    keep_accounts()
    path = f"/admin/rollouts/project/{domain.project.id}/change/"
    form = browser.get(path).context["adminform"].form
    values = {name: value for name, value in form.initial.items() if value is not None}
    assert "used_tokens" not in values
    refused = browser.post(path, {**values, "members": [], "max_tokens": 0})
    assert "max_tokens" in refused.context["adminform"].form.errors
    assert browser.post(path, {**values, "members": [], "max_tokens": 11}).status_code == 302
    project = Project.objects.get()
    assert (project.max_tokens, project.exhausted_at, project.exhausted_by, project.used_tokens) == (11, None, "", 10)
    domain.submit()

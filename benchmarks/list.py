"""Lists, filters, search and run pages over 1,000,000 rollouts: time in the database, and the index that each query uses."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.list_data import prepared_database
from benchmarks.report import Figure, Machine, conclude, table

ROUNDS = 20
TARGET_MS = 150.0
_TABLE = "rollouts_rollout"


class Statement(NamedTuple):
    """What a request asked of the table of rollouts."""

    sql: str
    parameters: Any


@dataclass
class Case:
    """One request. `ms` holds the time of its slowest statement in each round, `total_ms` all of its time in the database."""

    name: str
    path: str
    ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    scans: list[str] = field(default_factory=list)

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.ms, n=20, method="inclusive")[-1]


def main() -> int:
    machine = Machine()
    postgres, _ = prepared_database()
    try:
        import django

        django.setup()
        _count_as_the_dispatcher_would()
        cases = _cases()
        clients = _clients()
        for _ in range(ROUNDS + 1):  # the first round warms up
            for case in cases:
                _request(clients[case.path.startswith("/api/")], case)
            machine.sample()
        for case in cases:
            del case.ms[0], case.total_ms[0]
            case.scans = _explain(case)
    finally:
        postgres.stop()
    rows = [(c.name, c.p95, statistics.median(c.total_ms), ", ".join(c.scans)) for c in cases]
    table("1,000,000 rollouts", ["request", "slowest query p95, ms", "all queries, ms", "reads rollouts by"], rows)
    sequential = [case.name for case in cases if any(scan.startswith("Seq Scan") for scan in case.scans)]
    worst = max(cases, key=lambda case: case.p95)
    figures = [
        Figure("p95 of the slowest query", worst.p95, "ms", TARGET_MS),
        Figure("median over all requests", statistics.median(case.p95 for case in cases), "ms"),
        Figure("requests that scan the whole table", len(sequential), "", 0),
    ]
    return conclude("list", figures, machine)


def _count_as_the_dispatcher_would() -> None:
    from rollouts.services.tallies import keep_tallies

    keep_tallies()


def _cases() -> list[Case]:
    """Every filter that the API and the dashboard offer, with values that are common, rare, old and absent."""
    from rollouts.models import Group, Project, Run

    largest = Run.objects.get(name="run-1")
    small = Run.objects.get(name="run-56")
    assert small.project_id == largest.project_id
    oldest = Run.objects.filter(project=largest.project_id).earliest("created_at")
    group = Group.objects.filter(run=oldest).first()
    assert group is not None
    other = Project.objects.exclude(pk=largest.project_id).latest("name")
    filters = {
        "no filter": "",
        "run, 300,000 rollouts": f"run={largest.pk}",
        "run, small": f"run={small.pk}",
        "run, the oldest": f"run={oldest.pk}",
        "group": f"group={group.pk}",
        **{
            f"state {state}": f"state={state}"
            for state in ("queued", "running", "succeeded", "failed", "cancelled", "discarded")
        },
        "environment": "environment=swe",
        **{f"cause {cause}": f"cause={cause}" for cause in ("completed", "worker_lost", "sandbox_error", "refusal")},
        **{f"blame {blame}": f"blame={blame}" for blame in ("policy", "infrastructure", "caller")},
        "reward at least 1": "reward_min=1",
        "reward in a narrow range": "reward_min=0.5&reward_max=0.5005",
        "reward above all": "reward_min=2",
        "run and state": f"run={largest.pk}&state=failed",
        "run and cause": f"run={largest.pk}&cause=sandbox_error",
        "run and reward": f"run={largest.pk}&reward_min=0.5&reward_max=0.501",
        "environment and cause": "environment=swe&cause=sandbox_error",
        "state and reward": "state=timed_out&reward_min=0.5&reward_max=0.501",
    }
    only_api = {
        "trainable": "trainable=true",
        "not trainable": "trainable=false",
        "run and not trainable": f"run={largest.pk}&trainable=false",
    }
    only_pages = {
        "fidelity": "fidelity=text-only",
        "run and fidelity": f"run={largest.pk}&fidelity=text-only",
        "node": "node=node-7",
        "node, absent": "node=nowhere",
        "version, old": "version=1",
        "version, absent": "version=999",
        "run and version": f"run={largest.pk}&version=1",
        "task contains, common": "task=django",
        "task contains, rare": "task=sympy__sympy-10046",
        "task contains, absent": "task=zzz",
        "task and run": f"task=10046&run={largest.pk}",
        "task and cause": "task=django&cause=sandbox_error",
        "one project": f"project={other.name}",
        "one project, cause": f"project={other.name}&cause=sandbox_error",
        "older, deep": f"older={oldest.pk}",
        "newer, deep": f"newer={oldest.pk}",
    }
    cases = [Case(f"API: {name}", f"/api/v1/rollouts/?{query}") for name, query in (filters | only_api).items()]
    cases += [Case(f"page: {name}", f"/rollouts/?{query}") for name, query in (filters | only_pages).items()]
    for name, run in {"largest": largest, "oldest": oldest, "small": small}.items():
        cases.append(Case(f"run page: {name}", f"/runs/{run.pk}/"))
        cases.append(Case(f"run page, polled: {name}", f"/runs/{run.pk}/live/"))
        cases.append(Case(f"API: run {name}", f"/api/v1/runs/{run.pk}/"))
        cases.append(Case(f"API: groups of {name}", f"/api/v1/runs/{run.pk}/groups/"))
        cases.append(Case(f"API: results of {name}", f"/api/v1/runs/{run.pk}/results/"))
    return [*cases, Case("overview of runs", "/")]


def _clients() -> dict[bool, Any]:
    """A superuser's browser, who sees all projects (False), and a key of the largest run's project (True)."""
    from django.contrib.auth.models import User
    from django.test import Client
    from rest_framework.test import APIClient

    from rollouts.models import Run
    from rollouts.services.keys import issue_key

    browser = Client(headers={"host": "localhost"}, raise_request_exception=True)
    browser.force_login(User.objects.get_or_create(username="admin", is_superuser=True)[0])
    key = issue_key(project=Run.objects.get(name="run-1").project, name="benchmark", scopes=["read"])
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {key.secret}", HTTP_HOST="localhost")
    return {False: browser, True: api}


def _request(client: Any, case: Case) -> None:
    times: list[float] = []
    case.statements = []
    with _watched(times, case.statements):
        response = client.get(case.path)
    assert response.status_code == 200, (case.path, response.status_code, response.content[:500])
    case.ms.append(max(times, default=0.0))
    case.total_ms.append(sum(times))


@contextmanager
def _watched(times: list[float], statements: list[Statement]) -> Iterator[None]:
    """Note the milliseconds of every statement, and those that read rollouts."""
    from django.db import connection

    def watch(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        begun = time.perf_counter()
        try:
            return execute(sql, parameters, many, context)
        finally:
            times.append((time.perf_counter() - begun) * 1000)
            if _TABLE in sql:
                statements.append(Statement(sql, parameters))

    with connection.execute_wrapper(watch):
        yield


def _explain(case: Case) -> list[str]:
    """How the statements read the table: the names of the indexes, or "Seq Scan"."""
    from django.db import connection

    found: dict[str, None] = {}
    for statement in case.statements:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {statement.sql}", statement.parameters)
            [(plans,)] = cursor.fetchall()
        for plan in plans:
            found |= dict.fromkeys(_scans(plan["Plan"]))
    return [*found]


def _scans(plan: dict[str, Any]) -> Iterator[str]:
    if plan.get("Relation Name") == _TABLE and plan["Node Type"] == "Seq Scan":
        yield "Seq Scan"
    if (plan.get("Relation Name") == _TABLE and "Index Name" in plan) or plan["Node Type"] == "Bitmap Index Scan":
        yield plan["Index Name"].removeprefix(f"{_TABLE}_")
    for child in plan.get("Plans", []):
        yield from _scans(child)


if __name__ == "__main__":
    sys.exit(main())

"""The demo from the first line to the last."""

from __future__ import annotations

import json
import time

from rich.console import Console

from prorl_site.local import Platform, Say, platform

from .model import start_model


def demo(*, stay: bool) -> int:
    """Start everything, do the job, show it; the exit code says whether all went well."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # in a log, lines are cut by nobody
    begun = time.monotonic()
    code = 1

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - begun:6.1f} s[/]  {line}", highlight=False)

    with platform(say) as running:
        llm_url = start_model(running.supervisor, say)
        code = _do_the_job(running, llm_url, console, say, begun)
        if stay:
            say("try next: new weights (docs/guide/weights.md), an agent of your own (docs/guide/sessions.md)")
            say("still up; Ctrl-C stops everything")
            running.supervisor.wait()
    return code


def _do_the_job(running: Platform, llm_url: str, console: Console, say: Say, begun: float) -> int:
    from rollouts.client import Client

    from . import job, report

    with Client(running.url, _api_key()) as client:
        job.prepare(client, llm_url)
        say("environments arithmetic and math are registered, their tasks are loaded")
        run_id = job.submit(client)
        submitted = (job.SUMS + job.PROBLEMS) * job.GROUP_SIZE
        say(f"submitted {submitted} rollouts in groups of {job.GROUP_SIZE}; watch them at {running.url}/runs/{run_id}/")
        rollouts = report.follow(client, run_id, submitted, console)
    totals = job.total(rollouts, submitted)
    console.print(report.table(rollouts))
    console.print(f"Dashboard  {running.url}/runs/{run_id}/")
    console.print(f"Log in as  {running.login}  with password  {running.password}", highlight=False)
    console.print(
        json.dumps({"ok": totals.ok, **totals._asdict(), "seconds": round(time.monotonic() - begun, 1)}),
        soft_wrap=True,
        highlight=False,
    )
    return 0 if totals.ok else 1


def _api_key() -> str:
    """A key for this demo alone."""
    from datetime import timedelta

    from django.db import connection
    from django.utils import timezone

    from rollouts.models import Project
    from rollouts.services.keys import issue_key

    try:
        project, _ = Project.objects.get_or_create(name="demo")
        return issue_key(project=project, name="demo", scopes=["admin"], expires_at=timezone.now() + timedelta(days=1)).secret
    finally:
        connection.close()

"""The `prorl` command. `prorl --help` lists what there is."""

from __future__ import annotations

import os
import sys
import time

import typer

from prorl_site.embedded.supervisor import SupervisorError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="ProRL Site: rollout-as-a-service.")


@app.command()
def up() -> None:
    """Run the whole platform on this machine until Ctrl-C."""
    from prorl_site.local import platform

    begun = time.monotonic()

    def say(line: str) -> None:
        typer.echo(f"{time.monotonic() - begun:6.1f} s  {line}")

    with platform(say) as running:
        say(f"dashboard {running.url}/  admin {running.url}/admin/  log in as {running.login} with password {running.password}")
        running.supervisor.wait()


@app.command()
def demo(leave: bool = typer.Option(False, "--exit", help="Stop when the job is done instead of staying up.")) -> None:
    """Run the main job on this machine: real model, real sandboxes, a run of groups, results."""
    from prorl_site.demo.main import demo as run_demo

    raise typer.Exit(run_demo(stay=not leave))


@app.command()
def prune(dry_run: bool = typer.Option(False, "--dry-run", help="Only say how much would go.")) -> None:
    """Remove now what is older than its project keeps it, and blobs that nothing refers to."""
    _manage("prune", *(["--dry-run"] if dry_run else []))


@app.command()
def doctor(as_json: bool = typer.Option(False, "--json", help="One JSON object instead of lines for people.")) -> None:
    """Check everything the platform stands on, and say what to do. Exit code 1: something fails."""
    _manage("doctor", *(["--json"] if as_json else []))


@app.command()
def rescore(
    id: str = typer.Argument(help="Of a run or a rollout."),
    environment: str = typer.Option("", help="NAME@VERSION to score with instead of each rollout's own."),
    only_cause: str = typer.Option("", help="Of a run: only rollouts that ended by this cause."),
) -> None:
    """Score finished rollouts again; the old rewards are kept."""
    _manage("rescore", id, "--environment", environment, *(["--only-cause", only_cause] if only_cause else []))


def _manage(*arguments: str) -> None:
    """Run a management command; what it refuses is said without a traceback, with exit code 1."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line
    from django.db import OperationalError

    try:
        execute_from_command_line(["prorl", *arguments])
    except (ImproperlyConfigured, OperationalError) as error:
        typer.echo(f"prorl: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point; what a person can do something about is said without a traceback."""
    try:
        app()
    except SupervisorError as error:
        typer.echo(f"prorl: {error}", err=True)
        sys.exit(1)

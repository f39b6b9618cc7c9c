"""How the demo shows a run in the terminal."""

from __future__ import annotations

from statistics import mean

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollouts.client import Client
from rollouts.client.types import Result

from .job import by_group


def follow(client: Client, run_id: str, submitted: int, console: Console) -> list[Result]:
    """Take the results as they come, with a progress bar; returns when every rollout is terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    finished: list[Result] = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rollouts", total=submitted)
        for rollout in client.iter_results(run_id):
            finished.append(rollout)
            progress.advance(bar)
            if not console.is_terminal and len(finished) % 8 == 0:
                console.print(f"{len(finished)} of {submitted} rollouts finished")
    return finished


def table(rollouts: list[Result]) -> Table:
    """One row for each group; seconds are means over its rollouts."""
    result = Table(title="Groups of the run", title_justify="left", box=SIMPLE)
    for name in ("environment", "task", "rewards"):
        result.add_column(name, no_wrap=True)
    for name in ("turns", "tokens", "queue s", "init s", "run s", "eval s"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("termination")
    for group in by_group(rollouts):
        result.add_row(
            group[0]["environment"],
            group[0]["task_key"],
            " ".join("–" if rollout["reward"] is None else f"{rollout['reward']:g}" for rollout in group),
            f"{mean(rollout['turns'] for rollout in group):.1f}",
            str(sum(rollout["sampled_tokens"] for rollout in group)),
            f"{mean(rollout['queue_seconds'] for rollout in group):.1f}",
            f"{mean(rollout['init_seconds'] for rollout in group):.1f}",
            f"{mean(rollout['run_seconds'] for rollout in group):.1f}",
            f"{mean(rollout['eval_seconds'] for rollout in group):.1f}",
            ", ".join(sorted({rollout["termination"]["cause"] for rollout in group if rollout["termination"]})),
        )
    return result

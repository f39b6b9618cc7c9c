"""How the demo shows a run in the terminal."""

from __future__ import annotations

from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollouts.client import Client

from .job import by_group


def follow(client: Client, run_id: str, submitted: int, console: Console) -> list[dict[str, Any]]:
    """Take the results as they come, with a progress bar; returns when every rollout is terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    finished = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rollouts", total=submitted)
        for rollout in client.iter_results(run_id):
            finished.append(rollout)
            progress.advance(bar)
            if not console.is_terminal and len(finished) % 8 == 0:
                console.print(f"{len(finished)} of {submitted} rollouts finished")
    return finished


def table(rollouts: list[dict[str, Any]]) -> Table:
    """One row for each group."""
    result = Table(title="Groups of the run", title_justify="left")
    for name, justify in (
        ("environment", "left"),
        ("task", "left"),
        ("rewards", "left"),
        ("turns", "right"),
        ("tokens", "right"),
        ("queue", "right"),
        ("init", "right"),
        ("run", "right"),
        ("eval", "right"),
        ("termination", "left"),
    ):
        result.add_column(name, justify=justify)  # type: ignore[arg-type]
    for group in by_group(rollouts):
        causes = sorted({rollout["termination"]["cause"] for rollout in group})
        result.add_row(
            group[0]["environment"],
            group[0]["task_key"],
            " ".join("–" if rollout["reward"] is None else f"{rollout['reward']:g}" for rollout in group),
            f"{mean(rollout['turns'] for rollout in group):.1f}",
            str(sum(rollout["sampled_tokens"] for rollout in group)),
            *(f"{mean(rollout[f'{stage}_seconds'] for rollout in group):.1f} s" for stage in ("queue", "init", "run", "eval")),
            ", ".join(causes),
        )
    return result

"""Which command is to blame for what the sandbox's processes take together."""

from __future__ import annotations

import os

from .processes import descendants_of, hunt, list_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .processes import Process
    from .tool import Tool


class Scene:
    """All processes below the broker at one moment.

    `owners` maps their pids to the tool they are or whose running job they belong to; None is what earlier commands left.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        everything = list_processes()
        self.owners = _owners(tools, everything)
        self.processes = [everything[pid] for pid in self.owners]
        self.has_background = any(_goes_on(process, self.owners[process.pid]) for process in self.processes)


def end_the_worst(limit: str, scene: Scene, shares: Mapping[int, int]) -> bool:
    """End the job that holds most of `shares` (by pid), or kill what earlier commands left when that is more.

    False when no job was there to be told.
    """
    totals: dict[Tool | None, int] = {}
    for pid, share in shares.items():
        owner = scene.owners[pid]
        totals[owner] = totals.get(owner, 0) + share
    worst = max(totals, key=lambda owner: totals[owner])
    if worst is None:
        return False
    had_job = worst.job_since is not None
    worst.exceed(limit, replace_child=2 * shares.get(worst.pid or 0, 0) > totals[worst])
    return had_job


def end_jobs(limit: str, tools: Iterable[Tool]) -> bool:
    """End all running jobs; False when there is none."""
    running = [tool for tool in tools if tool.job_since is not None]
    for tool in running:
        tool.exceed(limit)
    return bool(running)


def kill_background(tools: Sequence[Tool]) -> None:
    """Kill what earlier commands left; idle tools and running jobs are spared."""
    hunt(lambda everything: {pid for pid, owner in _owners(tools, everything).items() if owner is None})


def _owners(tools: Sequence[Tool], everything: Mapping[int, Process]) -> dict[int, Tool | None]:
    children = {tool.pid: tool for tool in tools}
    below: dict[int, Tool | None] = {}
    owners: dict[int, Tool | None] = {}
    for pid in descendants_of(os.getpid(), everything, set()):  # parents come first
        process = everything[pid]
        if pid in children:
            below[pid] = owners[pid] = children[pid]
            continue
        tool = below[pid] = below.get(process.parent)
        # Orphans of tools that do not adopt them come to the broker.
        candidates = [tool] if tool is not None else [tool for tool in tools if not tool.adopts_orphans]
        owners[pid] = next((tool for tool in candidates if _is_of_job(process, tool)), None)
    return owners


def _is_of_job(process: Process, tool: Tool) -> bool:
    return tool.job_since is not None and tool.job_since.is_before(process.pid, process.start)


def _goes_on(process: Process, owner: Tool | None) -> bool:
    # A tool that waits for its next job has one thread; in others something may go on.
    return owner is None or (owner.job_since is None and process.threads > 1)

"""What holds rollouts back: what a run is missing, or the limit that is full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rollouts.lifecycle import STAGES, Limit, Stage
from rollouts.models import LLMServer, Node, Run
from rollouts.scheduling.load import Load, NodeLoad, read_load

from .budgets import in_flight_limits_reached
from .waits import Waits, waits_by_run


class Obstacle(NamedTuple):
    """One reason, and what to do about it.

    `blocks` when nothing moves until somebody acts. Otherwise something is full, and rollouts go on as others end.
    """

    reason: str
    remedy: str
    blocks: bool = True


def obstacles(run: Run, load: Load | None = None, waits: Waits | None = None) -> list[Obstacle]:
    """What keeps the rollouts of a run waiting, worst first; empty when all of them can move or are done."""
    if waits is None:
        waits = waits_by_run([run.pk]).get(run.pk, Waits())
    if not waits.unfinished:
        return []
    if load is None:
        load = read_load()
    missing = [*_missing_workers(load, waits), *_missing_servers(run)]
    return [*missing, *(() if missing else _full(run, load, waits)), *_delayed(waits)]


def _missing_workers(load: Load, waits: Waits) -> Iterator[Obstacle]:
    nodes = load.nodes.values()
    closed = False
    for stage in Stage:
        waiting = waits.stages[stage].waiting
        state = STAGES[stage].waits_in.value
        feeds = stage is Stage.RUN and waits.stages[Stage.INIT].waiting
        if not waiting and not feeds:
            continue
        what = f"{_rollouts(waiting)} {state}" if waiting else "without one no queued rollout is started"
        if not any(node.stages[stage].processes for node in nodes):
            start = f"Start one on a node with “python -m django work {stage.value}”"
            yield Obstacle(f"No {stage.upper()} worker is alive; {what}.", f"{start}, or look at the worker processes.")
        elif not closed and not any(node.stages[stage].limit for node in nodes):
            closed = True
            able = [node for node in nodes if node.stages[stage].processes]
            problem = _sandbox_problem(node.name for node in able) if stage is Stage.INIT else None
            if problem is not None:
                yield Obstacle(
                    f"No sandbox can be started on {problem.name}: {problem.sandbox_problem}; {what}.",
                    f"Put it right there; “python -m django sandbox_selfcheck {problem.sandbox_backend}” shows more.",
                )
                continue
            yield Obstacle(
                f"Every node with {stage.upper()} workers drains or has max_{stage.value} = 0; {what}.",
                f"Let one take part again: “prorl nodes resume {able[0].name}”, or raise its limit in the admin.",
            )


def _sandbox_problem(names: Iterable[str]) -> Node | None:
    return Node.objects.filter(name__in=list(names), draining_since=None).exclude(sandbox_problem="").first()


def _missing_servers(run: Run) -> Iterator[Obstacle]:
    if not LLMServer.objects.filter(
        policy=run.policy,
        admission=LLMServer.Admission.OPEN,
        health__in=(LLMServer.Health.LIVE, LLMServer.Health.RECOVERING),
    ).exists():
        yield Obstacle(
            f"No live LLM server serves the policy {run.policy.name}.",
            "Register one, resume a paused one, or look at the last error of a dead one.",
        )


def _full(run: Run, load: Load, waits: Waits) -> Iterator[Obstacle]:
    """Limits that are reached. What holds back the next rollout to start comes first."""
    nodes = list(load.nodes.values())
    policy = load.policy(run.policy_id)
    starting, ready, scoring = (waits.stages[stage].waiting - waits.stages[stage].hinted for stage in Stage)
    if starting:
        for use in in_flight_limits_reached(run):
            yield Obstacle(
                f"The {use.scope} has reached {Limit.MAX_IN_FLIGHT}: {use.used:,.0f} of {use.maximum:,}.",
                f"Others start as these end; raise {Limit.MAX_IN_FLIGHT} of the {use.scope} for more at once.",
                blocks=False,
            )
    if (starting and not load.policy_room_to_start(run.policy_id)) or (ready and not policy.room_to_run):
        yield Obstacle(
            f"The LLM servers of {run.policy.name} are full: {policy.running:,} of {policy.capacity:,}.",
            f"Add one, or raise the capacity of one. {policy.ahead - policy.running:,} more are on their way to them.",
            blocks=False,
        )
    elif starting and not any(node.room_to_start for node in nodes):
        yield _full_nodes(nodes)
    elif ready and _taken(nodes, Stage.RUN):
        yield _full_stage(nodes, Stage.RUN)
    if scoring and _taken(nodes, Stage.EVAL):
        yield _full_stage(nodes, Stage.EVAL)


def _full_nodes(nodes: list[NodeLoad]) -> Obstacle:
    """No node may start anything: its INIT workers are busy, or enough waits for its RUN workers already."""
    if _taken(nodes, Stage.INIT):
        return _full_stage(nodes, Stage.INIT)
    slots = sum(node.stages[Stage.RUN].limit for node in nodes)
    buffer = sum(node.ready_buffer for node in nodes if node.stages[Stage.RUN].limit)
    return Obstacle(
        f"The RUN slots ({slots:,}) and the READY buffer ({buffer:,}) are full.",
        "Add RUN workers or raise their --concurrency. PRORL_READY_BUFFER (or a node's own) only says how many wait prepared.",
        blocks=False,
    )


def _full_stage(nodes: list[NodeLoad], stage: Stage) -> Obstacle:
    slots = sum(node.stages[stage].limit for node in nodes)
    return Obstacle(
        f"All {stage.upper()} slots are taken ({slots:,}).",
        f"Add {stage.upper()} workers, or raise their --concurrency or the node's max_{stage.value}.",
        blocks=False,
    )


def _taken(nodes: list[NodeLoad], stage: Stage) -> bool:
    return not any(node.stages[stage].room for node in nodes)


def _delayed(waits: Waits) -> Iterator[Obstacle]:
    if not waits.delayed:
        return
    until = f"{waits.delayed_from:%H:%M:%S}"
    if waits.delayed > 1:
        until = f"between {until} and {waits.delayed_until:%H:%M:%S}"
    yield Obstacle(
        f"{_rollouts(waits.delayed).capitalize()} for another try after an infrastructure failure.",
        f"They go on by themselves {until} UTC; their attempts tell what went wrong.",
        blocks=False,
    )


def _rollouts(n: int) -> str:
    return f"{n:,} rollout waits" if n == 1 else f"{n:,} rollouts wait"

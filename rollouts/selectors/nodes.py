"""Worker hosts: what they hold, what they may hold, and whether anybody is there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import NamedTuple

from django.db.models import Count, QuerySet
from django.utils import timezone

from rollouts.lifecycle import GATEWAY, Stage
from rollouts.models import Draining, Node, WorkerProcess
from rollouts.scheduling.load import NodeLoad, StageLoad, read_load
from sandboxes.models import Sandbox
from sandboxes.protocol import Limits


class NodeRow(NamedTuple):
    """A node with its live worker processes; each has `rollouts_held`."""

    node: Node
    load: NodeLoad
    processes: list[WorkerProcess]
    leftovers: list[Sandbox]  # stopping them failed

    @property
    def stages(self) -> list[tuple[Stage, StageLoad]]:
        return list(self.load.stages.items())

    @property
    def held(self) -> int:
        return sum(stage.held for stage in self.load.stages.values())

    @property
    def sandbox_limits(self) -> list[tuple[str, str]]:
        return sandbox_limits(self.node)

    @property
    def ready(self) -> int:
        """READY rollouts: prepared sandboxes that wait for a RUN slot."""
        run = self.load.stages[Stage.RUN]
        return run.waiting + run.hinted

    @property
    def state(self) -> str:
        """In one word: absent, drained, draining or working. Workers may also drain by themselves, before they end."""
        workers = [process for process in self.processes if process.stage != GATEWAY]
        if not workers:
            return "absent"
        ending = all(process.draining_since for process in workers)
        if self.node.draining(timezone.now()) is Draining.NO and not ending:
            return "working"
        return "draining" if self.held else "drained"


def sandbox_limits(node: Node) -> list[tuple[str, str]]:
    """(limit, how it is held) for the sandboxes of a node, in the order of `Limits`."""
    facts = node.sandbox_facts
    return [(field.name, facts[field.name]) for field in fields(Limits) if field.name in facts]


def leftover_sandboxes() -> QuerySet[Sandbox]:
    """Those of which something survived their stop; the janitor of their node goes on trying."""
    return Sandbox.objects.filter(stopped_at=None, stop_attempts__gt=0).order_by("created_at")


def node_rows() -> list[NodeRow]:
    """All nodes by name. Nodes belong to the installation, not to a project."""
    load = read_load()
    live = WorkerProcess.objects.filter(stopped_at=None, lost_at=None, lease_expires_at__gt=timezone.now())
    processes: defaultdict[str, list[WorkerProcess]] = defaultdict(list)
    for process in live.annotate(rollouts_held=Count("held")).order_by("node", "started_at"):
        processes[process.node].append(process)
    leftovers = defaultdict(list)
    for sandbox in leftover_sandboxes():
        leftovers[sandbox.node].append(sandbox)
    order = [*Stage, GATEWAY]
    return [
        NodeRow(
            node,
            load.node(node.name),
            sorted(processes[node.name], key=lambda process: order.index(process.stage)),
            leftovers[node.name],
        )
        for node in Node.objects.order_by("name")
    ]

"""Worker hosts: what they hold, what they may hold, and whether anybody is there."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from django.db.models import Count
from django.utils import timezone

from rollouts.lifecycle import Stage
from rollouts.models import Draining, Node, WorkerProcess
from rollouts.scheduling.load import NodeLoad, StageLoad, read_load


class NodeRow(NamedTuple):
    """A node with its live worker processes; each has `rollouts_held`."""

    node: Node
    load: NodeLoad
    processes: list[WorkerProcess]

    @property
    def stages(self) -> list[tuple[Stage, StageLoad]]:
        return list(self.load.stages.items())

    @property
    def held(self) -> int:
        return sum(stage.held for stage in self.load.stages.values())

    @property
    def ready(self) -> int:
        """READY rollouts: prepared sandboxes that wait for a RUN slot."""
        run = self.load.stages[Stage.RUN]
        return run.waiting + run.hinted

    @property
    def state(self) -> str:
        """In one word: absent, drained, draining or working. Workers may also drain by themselves, before they end."""
        if not self.processes:
            return "absent"
        ending = all(process.draining_since for process in self.processes)
        if self.node.draining(timezone.now()) is Draining.NO and not ending:
            return "working"
        return "draining" if self.held else "drained"


def node_rows() -> list[NodeRow]:
    """All nodes by name. Nodes belong to the installation, not to a project."""
    load = read_load()
    live = WorkerProcess.objects.filter(stopped_at=None, lost_at=None, lease_expires_at__gt=timezone.now())
    processes: defaultdict[str, list[WorkerProcess]] = defaultdict(list)
    for process in live.annotate(rollouts_held=Count("held")).order_by("node", "started_at"):
        processes[process.node].append(process)
    order = list(Stage)
    return [
        NodeRow(node, load.node(node.name), sorted(processes[node.name], key=lambda process: order.index(Stage(process.stage))))
        for node in Node.objects.order_by("name")
    ]

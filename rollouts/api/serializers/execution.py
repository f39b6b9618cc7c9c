"""What executes rollouts: nodes, and the queue before them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers


class StageUseSerializer(serializers.Serializer[Any]):
    """One stage of one node, in rollouts."""

    slots = serializers.IntegerField(help_text="What its live worker processes take at once.")
    limit = serializers.IntegerField(help_text="What they may hold: `slots`, or the node's own limit; 0 when it drains.")
    processes = serializers.IntegerField(help_text="Live worker processes.")
    held = serializers.IntegerField()
    hinted = serializers.IntegerField(help_text="Offered to its workers, not yet taken.")
    waiting = serializers.IntegerField(help_text="Handed on by the stage before, could start now.")


class NodeStagesSerializer(serializers.Serializer[Any]):
    init = StageUseSerializer()
    run = StageUseSerializer()
    eval = StageUseSerializer()


class NodeSandboxesSerializer(serializers.Serializer[Any]):
    """What its INIT workers found out about sandboxes when they started."""

    backend = serializers.CharField(source="sandbox_backend", help_text="Empty: no INIT worker has looked yet.")
    problem = serializers.CharField(source="sandbox_problem", help_text="Why none can be started; INIT takes nothing then.")
    facts = serializers.DictField(
        source="sandbox_facts",
        child=serializers.CharField(),
        help_text="Programs and versions, and for each limit how it is held; “none”: not at all.",
    )


class NodeSerializer(serializers.Serializer[Any]):
    """A worker host."""

    name = serializers.CharField(source="node.name")
    state = serializers.CharField(help_text="working, draining, drained, or absent: none of its workers is alive")
    drain_deadline = serializers.DateTimeField(source="node.drain_deadline", allow_null=True)
    ready_buffer = serializers.IntegerField(source="load.ready_buffer", help_text="Prewarmed rollouts kept for RUN.")
    stages = NodeStagesSerializer(source="load.stages")
    cpus = serializers.IntegerField(source="node.cpus")
    memory = serializers.IntegerField(source="node.memory", help_text="Bytes.")
    version = serializers.CharField(source="node.version", help_text="Of this project, on the node.")
    sandboxes = NodeSandboxesSerializer(source="node")
    booted_at = serializers.DateTimeField(source="node.booted_at", allow_null=True)
    last_seen_at = serializers.DateTimeField(source="node.last_seen_at")


class NodesSerializer(serializers.Serializer[Any]):
    results = NodeSerializer(many=True)


class StageWaitSerializer(serializers.Serializer[Any]):
    """One stage over all nodes and projects, in rollouts."""

    stage = serializers.CharField(help_text="init, run or eval")
    slots = serializers.IntegerField(help_text="What its workers may hold at once.")
    held = serializers.IntegerField(source="wait.held")
    waiting = serializers.IntegerField(source="wait.waiting", help_text="Nobody holds them, and they could start now.")
    hinted = serializers.IntegerField(source="wait.hinted", help_text="Of these: offered to workers.")
    delayed = serializers.IntegerField(source="wait.delayed", help_text="Put off after a failure of the infrastructure.")
    waiting_since = serializers.DateTimeField(source="wait.since", allow_null=True, help_text="Of the one that waits longest.")


class ObstacleSerializer(serializers.Serializer[Any]):
    """Why rollouts wait, and what to do about it."""

    reason = serializers.CharField()
    remedy = serializers.CharField()
    blocks = serializers.BooleanField(help_text="Nothing moves until somebody acts; else something is full and will be free.")


class WaitingRunSerializer(serializers.Serializer[Any]):
    """A run with unfinished rollouts."""

    id = serializers.UUIDField(source="run.id")
    name = serializers.CharField(source="run.name")
    priority = serializers.IntegerField(source="run.priority")
    waiting = serializers.IntegerField(source="waits.waiting")
    delayed = serializers.IntegerField(source="waits.delayed")
    in_flight = serializers.IntegerField(source="waits.in_flight", help_text="Started and not finished.")
    obstacles = ObstacleSerializer(many=True, help_text="Worst first; empty when all its rollouts can move.")


class QueueSerializer(serializers.Serializer[Any]):
    stages = StageWaitSerializer(many=True)
    runs = WaitingRunSerializer(many=True, help_text="Of the key's project, at most 50, in the order in which they are served.")
    more_runs = serializers.IntegerField(help_text="Runs left out.")

"""`manage.py nodes list|drain|resume`: worker hosts."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.models import Node
from rollouts.selectors.nodes import node_rows, sandbox_limits
from rollouts.services.errors import Refused
from rollouts.services.nodes import drain_node, resume_node


class Command(BaseCommand):
    help = "List worker hosts, drain one, or let it take part again."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list")
        drain = actions.add_parser("drain")
        drain.add_argument("name")
        drain.add_argument("--seconds", type=float, help="What it holds may finish in this time (default PRORL_DRAIN_SECONDS).")
        actions.add_parser("resume").add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list()
        elif options["action"] == "drain":
            try:
                drain_node(node=_find(options["name"]), seconds=options["seconds"])
            except Refused as refused:
                raise CommandError(f"--seconds: {refused.errors[0].detail}") from None
            self.stdout.write(f"{options['name']} drains: it starts nothing any more.")
        else:
            resume_node(node=_find(options["name"]))
            self.stdout.write(f"{options['name']} takes part again.")

    def _list(self) -> None:
        """Rollouts held of those that may be held, for each stage."""
        rows = node_rows()
        if not rows:
            self.stdout.write("No worker has registered yet.")
            return
        wide = max(len("node"), *(len(row.node.name) for row in rows))
        self.stdout.write(f"{'node':{wide}}  {'state':9}  {'init':>9}  {'run':>9}  {'eval':>9}  {'ready':>9}  cpus  version")
        for row in rows:
            use = "  ".join(f"{f'{stage.held}/{stage.limit}':>9}" for _, stage in row.stages)
            ready = f"{row.ready}/{row.load.ready_buffer}"
            self.stdout.write(
                f"{row.node.name:{wide}}  {row.state:9}  {use}  {ready:>9}  {row.node.cpus:>4}  {row.node.version}"
            )
            if row.node.sandbox_backend:
                for line in _sandboxes(row.node):
                    self.stdout.write(f"{'':{wide}}  {line}")


def _sandboxes(node: Node) -> list[str]:
    """The backend, then a line for each way in which limits are held."""
    if node.sandbox_problem:
        return [f"no sandboxes: {node.sandbox_backend}: {node.sandbox_problem}"]
    held: dict[str, list[str]] = {}
    for limit, mechanism in sandbox_limits(node):
        held.setdefault("not held" if mechanism == "none" else mechanism, []).append(limit)
    lines = [f"    {mechanism}: {', '.join(limits)}" for mechanism, limits in held.items()]
    return [f"sandboxes: {node.sandbox_backend} {node.sandbox_facts.get('version', '')}", *lines]


def _find(name: str) -> Node:
    node = Node.objects.filter(name=name).first()
    if node is None:
        known = ", ".join(Node.objects.values_list("name", flat=True)) or "none"
        raise CommandError(f"There is no node {name!r}. Known: {known}.")
    return node

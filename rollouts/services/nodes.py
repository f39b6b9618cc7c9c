"""Worker hosts: registered by their worker processes, drained by an administrator."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import version
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models.functions import Coalesce, Now

from rollouts.models import Node

from .errors import Refused
from .transition import DISPATCH_CHANNEL

LONGEST_DRAIN_SECONDS = 7 * 86_400


def register_node(name: str) -> None:
    """Called on the node itself. A node that drains goes on draining when its workers are restarted."""
    host = {**_host(), "last_seen_at": Now()}  # in one statement: its workers start at the same moment
    Node.objects.bulk_create([Node(name=name, **host)], update_conflicts=True, unique_fields=["name"], update_fields=list(host))


@cache
def _host() -> dict[str, Any]:
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "booted_at": datetime.fromtimestamp(time.time() - since_boot, UTC),
        "version": version("prorl-site"),
    }


def note_sandboxes(*, node: str, backend: str, facts: Mapping[str, str]) -> None:
    """A node can start sandboxes: with what, and how it holds them to their limits (`Backend.probe`)."""
    Node.objects.filter(name=node).update(sandbox_backend=backend, sandbox_facts=dict(facts), sandbox_problem="")


def note_no_sandboxes(*, node: str, backend: str, problem: str) -> None:
    """A node cannot start sandboxes: its INIT workers are offered nothing until it can."""
    Node.objects.filter(name=node).update(sandbox_backend=backend, sandbox_facts={}, sandbox_problem=problem)


def drain_node(*, node: Node, seconds: float | None = None) -> None:
    """Start nothing on a node any more. What it holds may finish for `seconds` (PRORL_DRAIN_SECONDS), the rest is handed back.

    READY rollouts go back to the queue at once: they lose a prepared sandbox and nothing else. Draining again moves the
    deadline.
    """
    seconds = settings.DRAIN_SECONDS if seconds is None else seconds
    if not 0 <= seconds <= LONGEST_DRAIN_SECONDS:
        raise Refused.field("/seconds", f"Must be between 0 and {LONGEST_DRAIN_SECONDS}.")
    Node.objects.filter(name=node.name).update(
        draining_since=Coalesce("draining_since", Now()), drain_deadline=Now() + timedelta(seconds=seconds)
    )


def resume_node(*, node: Node) -> None:
    """Let a draining node take part again."""
    Node.objects.filter(name=node.name).update(draining_since=None, drain_deadline=None)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, '')", [DISPATCH_CHANNEL])

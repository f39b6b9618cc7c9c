"""Worker hosts: their limits, and draining."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone

from rollouts.models import Node
from rollouts.services.nodes import drain_node, resume_node

from .base import OurAdmin


@admin.register(Node)
class NodeAdmin(OurAdmin):
    """A node comes with its first worker process. What it may take is set here, its state by the actions."""

    list_display = ["name", "draining", "max_init", "max_run", "max_eval", "ready_buffer", "cpus", "version", "last_seen_at"]
    search_fields = ["name"]
    actions = ["drain", "resume"]
    _observed = (
        *("draining_since", "drain_deadline", "cpus", "memory", "booted_at", "version", "registered_at", "last_seen_at"),
        *("sandbox_backend", "sandbox_facts", "sandbox_problem"),
    )
    fields = ["name", "max_init", "max_run", "max_eval", "ready_buffer", *_observed]
    readonly_fields = ["name", *_observed]

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display
    def draining(self, node: Node) -> str:
        return node.draining(timezone.now()).value

    @admin.action(description="Drain: start nothing, finish what it holds in PRORL_DRAIN_SECONDS", permissions=["change"])
    def drain(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        for node in queryset:
            drain_node(node=node)
        self.message_user(request, f"{len(queryset)} draining.", messages.SUCCESS)

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        for node in queryset:
            resume_node(node=node)
        self.message_user(request, f"{len(queryset)} take part again.", messages.SUCCESS)

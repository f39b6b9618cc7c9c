"""Policies, and the versions that trainers announced."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString

from rollouts.models import Policy, PolicyVersion

from .base import OurAdmin, ReadOnlyAdmin, dashboard_link, pretty


@admin.register(Policy)
class PolicyAdmin(OurAdmin):
    """Trainers announce versions through the API; a policy can be made ahead of its first server here."""

    list_display = ["name", "project", "version", "created_at", "in_dashboard"]
    list_filter = ["project"]
    list_select_related = ["project"]
    search_fields = ["name"]
    readonly_fields = ["version", "created_at"]
    actions = None

    def get_readonly_fields(self, request: HttpRequest, obj: Policy | None = None) -> list[str]:
        return ["version", "created_at"] if obj is None else ["project", "name", "version", "created_at"]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="dashboard")
    def in_dashboard(self, policy: Policy) -> SafeString:
        return dashboard_link("policy", policy)


@admin.register(PolicyVersion)
class PolicyVersionAdmin(ReadOnlyAdmin):
    list_display = ["policy", "version", "mode", "state", "announced_at", "finished_at"]
    list_display_links = ["version"]
    list_filter = ["state", "mode", "policy__project"]
    list_select_related = ["policy"]
    search_fields = ["policy__name"]
    fields = ["policy", "version", "mode", "state", "shown_source", "shown_report", "announced_at", "begun_at", "finished_at"]
    ordering = ["-id"]

    @admin.display(description="source")
    def shown_source(self, version: PolicyVersion) -> SafeString:
        return pretty(version.source)

    @admin.display(description="report")
    def shown_report(self, version: PolicyVersion) -> SafeString:
        return pretty(version.report)

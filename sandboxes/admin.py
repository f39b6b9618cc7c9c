"""Sandboxes, to read: services start and stop them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from .models import Sandbox

# Django's own classes take type parameters only in its type stubs.
if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Sandbox]
else:
    _ModelAdmin = admin.ModelAdmin


@admin.register(Sandbox)
class SandboxAdmin(_ModelAdmin):
    """Which node holds which sandbox, and which were never proven empty."""

    list_display = ["name", "node", "backend", "created_at", "ready_at", "stopped_at", "stop_reason"]
    list_filter = ["backend", ("stopped_at", admin.EmptyFieldListFilter)]
    search_fields = ["name", "node"]
    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

"""What happened: runs, groups, rollouts and worker processes, to read and to cancel."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.safestring import SafeString

from rollouts.models import Attempt, Group, Rescoring, Rollout, RolloutEvent, Run, StageFailure, WorkerProcess
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.errors import Refused
from rollouts.services.rescore import rescore_rollout, rescore_run
from rollouts.services.retention import set_run_keep

from .base import LIMIT_FIELDS, USE_FIELDS, ReadOnlyAdmin, TabularInline, dashboard_link, pretty


class _Inline(TabularInline):
    extra = 0
    can_delete = False
    show_change_link = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AttemptInline(_Inline):
    model = Attempt
    fields = ["number", "node", "stage", "outcome", "started_at", "ended_at", "error"]


class StageFailureInline(_Inline):
    model = StageFailure
    fields = ["at", "attempt", "stage", "node", "pid", "cause", "detail", "retried_as"]


class EventInline(_Inline):
    model = RolloutEvent
    fields = ["at", "attempt", "kind", "from_state", "to_state", "data"]


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    list_display = ["name", "project", "policy", "priority", "created_at", "cancelled_at", "keep", "in_dashboard"]
    list_filter = ["project", "keep"]
    list_select_related = ["project", "policy"]
    search_fields = ["name"]
    fields = [
        *("project", "name", "policy", "priority", "shown_settings", "created_at", "cancelled_at", "keep", "in_dashboard"),
        *LIMIT_FIELDS,
        *USE_FIELDS,
    ]
    actions = ["cancel", "rescore", "keep", "keep_no_longer"]

    @admin.display(description="settings")
    def shown_settings(self, run: Run) -> SafeString:
        return pretty(run.settings)

    @admin.display(description="dashboard")
    def in_dashboard(self, run: Run) -> SafeString:
        return dashboard_link("run", run)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("rollouts.change_run")

    @admin.action(description="Cancel everything that has not ended", permissions=["cancel"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        n = sum(cancel_rollouts(project=run.project, run_id=run.pk) for run in queryset.select_related("project"))
        self.message_user(request, f"Cancelling {n} rollouts.", messages.SUCCESS)

    @admin.action(description="Score again what can be scored", permissions=["cancel"])
    def rescore(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        asked = [rescore_run(project=run.project, run_id=run.pk) for run in queryset.select_related("project")]
        queued, left_out = sum(one.queued for one in asked), sum(one.left_out for one in asked)
        self.message_user(request, f"{queued} rollouts will be scored again, {left_out} cannot be.", messages.SUCCESS)

    @admin.action(description="Keep: retention leaves their rollouts alone", permissions=["cancel"])
    def keep(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        self._set_keep(request, queryset, True)

    @admin.action(description="Keep no longer than the project says", permissions=["cancel"])
    def keep_no_longer(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        self._set_keep(request, queryset, False)

    def _set_keep(self, request: HttpRequest, queryset: QuerySet[Run], keep: bool) -> None:
        for run in queryset:
            set_run_keep(run=run, keep=keep)
        self.message_user(request, f"{len(queryset)} runs {'kept' if keep else 'not kept any more'}.", messages.SUCCESS)


@admin.register(Group)
class GroupAdmin(ReadOnlyAdmin):
    list_display = ["id", "run", "task", "n", "created_at"]
    list_select_related = ["run", "task"]
    fields = ["run", "task", "n", "created_at"]


@admin.register(Rollout)
class RolloutAdmin(ReadOnlyAdmin):
    list_display = ["id", "state", "run", "task", "environment", "attempt", "termination_cause", "reward", "in_dashboard"]
    list_filter = ["state", "termination_blame", "project"]
    list_select_related = ["run", "task", "environment"]
    exclude = ["artefacts"]
    readonly_fields = ["in_dashboard"]
    inlines = [AttemptInline, StageFailureInline, EventInline]
    actions = ["cancel", "rescore"]
    ordering = ["-id"]

    @admin.display(description="dashboard")
    def in_dashboard(self, rollout: Rollout) -> SafeString:
        return dashboard_link("rollout", rollout)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("rollouts.change_rollout")

    @admin.action(description="Cancel", permissions=["cancel"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Rollout]) -> None:
        n = sum(cancel_rollouts(project=row.project, rollout_id=row.pk) for row in queryset.select_related("project"))
        self.message_user(request, f"Cancelling {n} rollouts.", messages.SUCCESS)

    @admin.action(description="Score again", permissions=["cancel"])
    def rescore(self, request: HttpRequest, queryset: QuerySet[Rollout]) -> None:
        for rollout in queryset.select_related("project"):
            try:
                rescore_rollout(project=rollout.project, rollout_id=rollout.pk)
            except Refused as refused:
                self.message_user(request, f"{rollout}: {refused.detail}", messages.WARNING)
            else:
                self.message_user(request, f"{rollout} will be scored again.", messages.SUCCESS)


@admin.register(Rescoring)
class RescoringAdmin(ReadOnlyAdmin):
    list_display = ["id", "state", "rollout", "environment", "reward_before", "reward", "cause", "requested_at", "finished_at"]
    list_filter = ["state"]
    list_select_related = ["rollout", "environment"]


@admin.register(WorkerProcess)
class WorkerProcessAdmin(ReadOnlyAdmin):
    list_display = ["node", "stage", "pid", "status", "concurrency", "started_at", "lease_expires_at"]
    list_filter = ["stage"]
    search_fields = ["node"]

    @admin.display
    def status(self, worker: WorkerProcess) -> str:
        if worker.stopped_at:
            return "stopped"
        return "lost" if worker.lost_at or worker.lease_expires_at <= timezone.now() else "alive"

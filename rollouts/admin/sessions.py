"""Sessions: to read, to close and to cancel. Their keys are shown nowhere."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from rollouts.models import Session
from rollouts.models.session import KEY_PREFIX
from rollouts.services.errors import Refused
from rollouts.services.session_closing import Outcome, close_session
from rollouts.services.sessions import cancel_session

from .base import ReadOnlyAdmin, dashboard_link, pretty


@admin.register(Session)
class SessionAdmin(ReadOnlyAdmin):
    list_display = ["rollout_id", "project", "state", "opened_by", "shown_key", "last_call_at", "expires_at", "in_dashboard"]
    list_filter = ["project", "rollout__state"]
    list_select_related = ["project", "rollout"]
    search_fields = ["opened_by", "key_id"]
    fields = [
        *("rollout_id", "project", "state", "opened_by", "shown_key", "ttl_seconds", "expires_at", "last_seen_at"),
        *("last_call_at", "shown_metadata", "shown_reward", "taken_at", "wanted_at", "in_dashboard"),
    ]
    actions = ["close", "cancel"]
    ordering = ["-rollout_id"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Session], search_term: str
    ) -> tuple[QuerySet[Session], bool]:
        """Keys are known by how they begin, prefix included."""
        return super().get_search_results(request, queryset, search_term.removeprefix(f"{KEY_PREFIX}_"))

    @admin.display
    def state(self, session: Session) -> str:
        return session.rollout.state

    @admin.display(description="key")
    def shown_key(self, session: Session) -> str:
        return f"{session.key_prefix}_…"

    @admin.display(description="metadata")
    def shown_metadata(self, session: Session) -> SafeString:
        return pretty(session.metadata)

    @admin.display(description="reward given so far")
    def shown_reward(self, session: Session) -> SafeString:
        return pretty(session.reward)

    @admin.display(description="dashboard")
    def in_dashboard(self, session: Session) -> SafeString:
        return dashboard_link("rollout", session.rollout)

    def has_end_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("rollouts.change_session")

    @admin.action(description="Close as completed, with the reward given so far or scored", permissions=["end"])
    def close(self, request: HttpRequest, queryset: QuerySet[Session]) -> None:
        self._end(request, queryset, lambda session: close_session(session=session, outcome=Outcome.COMPLETED))

    @admin.action(description="Cancel: its calls are refused from then on", permissions=["end"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Session]) -> None:
        self._end(request, queryset, lambda session: cancel_session(session=session))

    def _end(self, request: HttpRequest, queryset: QuerySet[Session], end: Callable[[Session], object]) -> None:
        for session in queryset.select_related("project"):
            try:
                end(session)
            except Refused as refused:
                self.message_user(request, f"{session}: {refused.detail}", messages.ERROR)
            else:
                self.message_user(request, f"{session} ends.", messages.SUCCESS)

"""Webhook endpoints: made here, then enabled, disabled or given another secret by action. The dashboard shows messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from rollouts.models import WebhookEndpoint, WebhookEvent
from rollouts.services.errors import Refused
from rollouts.services.webhooks import change_endpoint, create_endpoint, rotate_secret

from .base import ModelForm, OurAdmin, add_refusal

_OVERLAP = timedelta(days=1)


class NewEndpointForm(ModelForm):
    """Makes the endpoint once everything is valid."""

    event_types = forms.MultipleChoiceField(choices=WebhookEvent.choices, widget=forms.CheckboxSelectMultiple)

    class Meta:
        model = WebhookEndpoint
        fields = ["project", "run", "url", "description", "event_types"]

    def full_clean(self) -> None:
        super().full_clean()
        if not self.is_bound or self.errors:
            return
        try:
            self.created = create_endpoint(**{name: self.cleaned_data[name] for name in self.Meta.fields})
        except Refused as refused:
            add_refusal(self, refused)

    def save(self, commit: bool = True) -> WebhookEndpoint:
        return self.created

    def save_m2m(self) -> None:
        """Nothing to do: the service has stored everything."""


@admin.register(WebhookEndpoint)
class WebhookEndpointAdmin(OurAdmin):
    """A secret is shown in one message, right after it was made."""

    form = NewEndpointForm
    list_display = ["url", "project", "shown_events", "status", "failing_since", "created_at"]
    list_filter = ["project"]
    list_select_related = ["project"]
    search_fields = ["url", "description"]
    raw_id_fields = ["run"]
    actions = ["enable", "disable", "rotate"]

    def get_fields(self, request: HttpRequest, obj: WebhookEndpoint | None = None) -> Any:
        if obj is None:
            return NewEndpointForm.Meta.fields
        return ["project", "run", "url", "description", "shown_events", "status", "failing_since", "created_at"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Only the list's actions: what an endpoint is told of changes through the API."""
        return obj is None and super().has_change_permission(request, obj)

    def save_model(self, request: HttpRequest, obj: WebhookEndpoint, form: Any, change: bool) -> None:
        """The service has stored it; this is the one time its secret can be shown."""
        self._show_secret(request, obj)

    def _show_secret(self, request: HttpRequest, endpoint: WebhookEndpoint) -> None:
        text = f"The secret of {endpoint.url} is {endpoint.secret} (copy it now: it is shown only this once)."
        self.message_user(request, text)

    @admin.display(description="events")
    def shown_events(self, endpoint: WebhookEndpoint) -> str:
        return ", ".join(endpoint.event_types)

    @admin.display
    def status(self, endpoint: WebhookEndpoint) -> str:
        return f"disabled: {endpoint.disabled_reason}" if endpoint.disabled_at else "enabled"

    @admin.action(description="Enable", permissions=["change"])
    def enable(self, request: HttpRequest, queryset: QuerySet[WebhookEndpoint]) -> None:
        self._set_enabled(request, queryset, True)

    @admin.action(description="Disable: nothing is sent, and what ends meanwhile is never told", permissions=["change"])
    def disable(self, request: HttpRequest, queryset: QuerySet[WebhookEndpoint]) -> None:
        self._set_enabled(request, queryset, False)

    def _set_enabled(self, request: HttpRequest, queryset: QuerySet[WebhookEndpoint], enabled: bool) -> None:
        for endpoint in queryset:
            change_endpoint(endpoint=endpoint, enabled=enabled)
        self.message_user(request, f"{len(queryset)} {'enabled' if enabled else 'disabled'}.", messages.SUCCESS)

    @admin.action(description="New secret; the old one also signs for a day", permissions=["change"])
    def rotate(self, request: HttpRequest, queryset: QuerySet[WebhookEndpoint]) -> None:
        for endpoint in queryset:
            self._show_secret(request, rotate_secret(endpoint=endpoint, overlap=_OVERLAP))

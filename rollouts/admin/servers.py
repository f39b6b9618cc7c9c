"""Policies and the LLM servers that serve them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from rollouts.models import LLMServer, Policy
from rollouts.services.errors import Refused
from rollouts.services.server_health import probe_servers
from rollouts.services.servers import register_server, remove_server, set_server_state

from .base import ModelForm, OurAdmin, add_refusal, pretty


@admin.register(Policy)
class PolicyAdmin(OurAdmin):
    """Trainers announce versions through the API; a policy can be made ahead of its first server here."""

    list_display = ["name", "project", "version", "created_at"]
    list_filter = ["project"]
    list_select_related = ["project"]
    search_fields = ["name"]
    readonly_fields = ["version", "created_at"]
    actions = None

    def get_readonly_fields(self, request: HttpRequest, obj: Policy | None = None) -> list[str]:
        return ["version", "created_at"] if obj is None else ["project", "name", "version", "created_at"]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class RegisterServerForm(ModelForm):
    """A server is probed when the form is sent; what it lacks is said at the field."""

    policy_name = forms.CharField(label="Policy", max_length=100, help_text="Made when there is none of that name.")
    api_key = forms.CharField(
        label="API key",
        required=False,
        max_length=200,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Sent to the server as a bearer token. It is never shown again.",
    )
    model = forms.CharField(required=False, max_length=200, help_text="May stay empty when the server serves only one.")

    class Meta:
        model = LLMServer
        fields = ["project", "url", "model", "policy_version", "capacity"]

    def full_clean(self) -> None:
        super().full_clean()
        if not self.is_bound or self.errors:
            return
        names = ("project", "url", "model", "policy_version", "capacity", "api_key")
        try:
            self.registered = register_server(
                policy=self.cleaned_data["policy_name"], **{name: self.cleaned_data[name] for name in names}
            )
        except Refused as refused:
            add_refusal(self, refused)

    def save(self, commit: bool = True) -> LLMServer:
        return self.registered

    def save_m2m(self) -> None:
        """Nothing to do: the service has stored everything."""


class EditServerForm(ModelForm):
    """What may change without another probe. An empty key field keeps the key."""

    new_api_key = forms.CharField(
        label="New API key",
        required=False,
        max_length=200,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Leave empty to keep the present one, which is never shown.",
    )

    class Meta:
        model = LLMServer
        fields = ["capacity"]

    def save(self, commit: bool = True) -> LLMServer:
        if key := self.cleaned_data["new_api_key"]:
            self.instance.api_key = key
        server: LLMServer = super().save(commit)
        return server


@admin.register(LLMServer)
class LLMServerAdmin(OurAdmin):
    """Inference endpoints with their health."""

    list_display = ["url", "model", "policy", "policy_version", "state", "capacity", "last_probe_at", "last_error"]
    list_filter = ["admission", "health", "project"]
    list_select_related = ["policy", "project"]
    search_fields = ["url", "model"]
    actions = ["probe", "pause", "drain", "resume"]

    def get_form(self, request: HttpRequest, obj: LLMServer | None = None, change: bool = False, **kwargs: Any) -> Any:
        kwargs["form"] = EditServerForm if change else RegisterServerForm
        return super().get_form(request, obj, change, **kwargs)

    def get_fields(self, request: HttpRequest, obj: LLMServer | None = None) -> Any:
        if obj is None:
            return ["project", "url", "policy_name", "policy_version", "model", "capacity", "api_key"]
        return ["project", "url", "policy", "policy_version", "model", "capacity", "new_api_key", *self._observed]

    _observed = ("state", "max_model_len", "shown_capabilities", "last_probe_at", "last_error", "created_at")

    def get_readonly_fields(self, request: HttpRequest, obj: LLMServer | None = None) -> list[str]:
        return [] if obj is None else ["project", "url", "policy", "policy_version", "model", *self._observed]

    @admin.display(description="capabilities")
    def shown_capabilities(self, server: LLMServer) -> SafeString:
        return pretty(server.capabilities)

    def save_model(self, request: HttpRequest, obj: LLMServer, form: Any, change: bool) -> None:
        if change:  # a new server was stored by the service when the form was checked
            super().save_model(request, obj, form, change)

    def delete_model(self, request: HttpRequest, obj: LLMServer) -> None:
        remove_server(server=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[LLMServer]) -> None:
        for server in queryset:
            remove_server(server=server)

    @admin.action(description="Probe now", permissions=["change"])
    def probe(self, request: HttpRequest, queryset: QuerySet[LLMServer]) -> None:
        probe_servers(list(queryset))
        for server in queryset.all():
            level = messages.SUCCESS if server.state == LLMServer.Health.LIVE else messages.WARNING
            self.message_user(request, f"{server}: {server.state}. {server.last_error}", level)

    @admin.action(description="Pause: take no calls; turns go elsewhere or wait", permissions=["change"])
    def pause(self, request: HttpRequest, queryset: QuerySet[LLMServer]) -> None:
        self._set_state(request, queryset, "paused")

    @admin.action(description="Drain: keep its rollouts, get no new ones", permissions=["change"])
    def drain(self, request: HttpRequest, queryset: QuerySet[LLMServer]) -> None:
        self._set_state(request, queryset, "draining")

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[LLMServer]) -> None:
        self._set_state(request, queryset, "live")

    def _set_state(self, request: HttpRequest, queryset: QuerySet[LLMServer], state: str) -> None:
        for server in queryset:
            try:
                set_server_state(server=server, state=state)
            except Refused as refused:
                self.message_user(request, f"{server}: {refused.detail} {refused.errors[0].detail}", messages.ERROR)
            else:
                self.message_user(request, f"{server}: now {state}.", messages.SUCCESS)

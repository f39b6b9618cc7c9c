"""The LLM servers that serve policies."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from rollouts.models import LLMServer
from rollouts.services.errors import Refused
from rollouts.services.server_health import probe_servers
from rollouts.services.servers import ServerChanges, change_server, register_server, remove_server, set_server_state

from .base import ModelForm, OurAdmin, add_refusal, pretty


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
    max_model_len = forms.IntegerField(
        required=False, min_value=1, help_text="Where the server does not tell it, or less of it."
    )
    allow_text_only = forms.BooleanField(
        required=False, help_text="Also one that gives no token ids; what it samples cannot be trained on."
    )

    class Meta:
        model = LLMServer
        fields = ["project", "url", "model", "policy_version", "capacity", "max_model_len", "tokenizer", "tool_format"]

    def full_clean(self) -> None:
        super().full_clean()
        if not self.is_bound or self.errors:
            return
        values = dict(self.cleaned_data)
        try:
            self.registered = register_server(policy=values.pop("policy_name"), **values)
        except Refused as refused:
            add_refusal(self, refused)

    def save(self, commit: bool = True) -> LLMServer:
        return self.registered

    def save_m2m(self) -> None:
        """Nothing to do: the service has stored everything."""


class EditServerForm(ModelForm):
    """What may change. A new key or tokenizer is tried on the server first; an empty key field keeps the key."""

    new_api_key = forms.CharField(
        label="New API key",
        required=False,
        max_length=200,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Leave empty to keep the present one, which is never shown.",
    )

    class Meta:
        model = LLMServer
        fields = ["capacity", "policy_version", "tokenizer", "tool_format"]

    def full_clean(self) -> None:
        super().full_clean()
        if not self.is_bound or self.errors:
            return
        changes = {name: self.cleaned_data[name] for name in self.changed_data if name != "new_api_key"}
        try:
            changed = ServerChanges(**changes, api_key=self.cleaned_data["new_api_key"] or None)
            change_server(server=LLMServer.objects.get(pk=self.instance.pk), changes=changed)
        except Refused as refused:
            add_refusal(self, refused)

    def save(self, commit: bool = True) -> LLMServer:
        return LLMServer.objects.get(pk=self.instance.pk)

    def save_m2m(self) -> None:
        """Nothing to do: the service has stored everything."""


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
            return ["project", "url", "policy_name", *self._ours, "max_model_len", "allow_text_only", "api_key"]
        return ["project", "url", "policy", *self._ours, "new_api_key", *self._observed]

    _ours = ("policy_version", "model", "capacity", "tokenizer", "tool_format")
    _observed = (
        *("admission", "health", "health_since", "failures", "hold", "weights_unknown", "last_probe_at", "last_error"),
        *("engine", "max_model_len", "shown_capabilities", "shown_load", "created_at"),
    )

    def get_readonly_fields(self, request: HttpRequest, obj: LLMServer | None = None) -> list[str]:
        return [] if obj is None else ["project", "url", "policy", "model", *self._observed]

    @admin.display(description="capabilities")
    def shown_capabilities(self, server: LLMServer) -> SafeString:
        return pretty(server.capabilities)

    @admin.display(description="load")
    def shown_load(self, server: LLMServer) -> SafeString:
        return pretty(server.load)

    def save_model(self, request: HttpRequest, obj: LLMServer, form: Any, change: bool) -> None:
        """Nothing to do: the service has stored everything when the form was checked."""

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

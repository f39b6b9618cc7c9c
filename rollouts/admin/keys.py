"""API keys: issued here once, then only to be revoked."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone

from rollouts.models import ApiKey, Scope
from rollouts.services.errors import Refused
from rollouts.services.keys import issue_key, revoke_key

from .base import ModelForm, OurAdmin, add_refusal


class IssueKeyForm(ModelForm):
    """Issues the key once everything is valid."""

    scopes = forms.MultipleChoiceField(choices=Scope.choices, widget=forms.CheckboxSelectMultiple)

    class Meta:
        model = ApiKey
        fields = ["project", "name", "scopes", "expires_at"]

    def full_clean(self) -> None:
        super().full_clean()
        if not self.is_bound or self.errors:
            return
        try:
            self.issued = issue_key(**{name: self.cleaned_data[name] for name in ("project", "name", "scopes", "expires_at")})
        except Refused as refused:
            add_refusal(self, refused)

    def save(self, commit: bool = True) -> ApiKey:
        return self.issued.key

    def save_m2m(self) -> None:
        """Nothing to do: the service has stored everything."""


@admin.register(ApiKey)
class ApiKeyAdmin(OurAdmin):
    """The secret is shown in one message, right after the key was issued."""

    form = IssueKeyForm
    list_display = ["name", "project", "public_id", "shown_scopes", "status", "last_used_at", "created_at"]
    list_filter = ["project"]
    list_select_related = ["project"]
    search_fields = ["name", "public_id"]
    actions = ["revoke"]

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        if obj is None:
            return ["project", "name", "scopes", "expires_at"]
        moments = ["expires_at", "revoked_at", "last_used_at", "created_at"]
        return ["project", "name", "public_id", "shown_scopes", "status", *moments]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Only the list's actions: a key that exists does not change."""
        return obj is None and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """The service has stored it; this is the one time its secret can be shown."""
        secret = form.issued.secret
        self.message_user(request, f"The secret of {obj.name} is {secret} (copy it now: it is shown only this once).")

    @admin.display(description="scopes")
    def shown_scopes(self, key: ApiKey) -> str:
        return ", ".join(key.scopes)

    @admin.display
    def status(self, key: ApiKey) -> str:
        if key.revoked_at:
            return "revoked"
        return "expired" if key.expires_at and key.expires_at <= timezone.now() else "valid"

    @admin.action(description="Revoke: the keys stop working at once", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        for key in queryset:
            revoke_key(key=key)
        self.message_user(request, f"{len(queryset)} revoked.", messages.SUCCESS)

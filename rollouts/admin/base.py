"""What our admin pages share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from rollouts.lifecycle import Limit
from rollouts.services.errors import Refused

# Django's own classes take type parameters only in its type stubs.
if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    ModelForm = forms.ModelForm[Any]
    TabularInline = admin.TabularInline[Any, Any]
else:
    ModelAdmin, ModelForm, TabularInline = admin.ModelAdmin, forms.ModelForm, admin.TabularInline


LIMIT_FIELDS = [limit.value for limit in Limit]
USE_FIELDS = ["used_rollouts", "finished_rollouts", "used_tokens", "used_sandbox_seconds", "exhausted_at", "exhausted_by"]


class OurAdmin(ModelAdmin):
    """Lists that stay quick on large tables: no second COUNT, foreign keys fetched with the rows, ids instead of drop-downs."""

    show_full_result_count = False
    list_per_page = 50


class ReadOnlyAdmin(OurAdmin):
    """Rows that only services write."""

    actions_on_bottom = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class PrettyJSONField(forms.JSONField):
    """JSON to edit by hand, indented."""

    widget = forms.Textarea

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("widget", forms.Textarea(attrs={"rows": 16, "cols": 90, "spellcheck": "false"}))
        super().__init__(**kwargs)

    def prepare_value(self, value: Any) -> Any:
        return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def pretty(value: Any) -> SafeString:
    """A JSON value for a read-only field."""
    return format_html("<pre>{}</pre>", json.dumps(value, indent=2, ensure_ascii=False, default=str))


def dashboard_link(view: str, row: Model) -> SafeString:
    """To the page of a row, by the name of its view."""
    return format_html('<a href="{}">open</a>', reverse(view, args=[row.pk]))


def add_refusal(form: ModelForm, refused: Refused) -> None:
    """Show what a service refused at the fields it names. A pointer below a field is written out in the message."""
    if not refused.errors:
        form.add_error(None, refused.detail)
    for error in refused.errors:
        name, _, rest = error.pointer.removeprefix("/").partition("/")
        field = name if name in form.fields else None
        place = rest.replace("/", ".") if field else error.pointer.removeprefix("/").replace("/", ".")
        form.add_error(field, ValidationError(f"{place}: {error.detail}" if place else error.detail))

"""Images that sandboxes start from, and their builds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from rollouts.services.errors import Refused
from rollouts.services.images import refused_as
from sandboxes.images.errors import ImageBusy
from sandboxes.images.services.builds import cancel_build, request_build
from sandboxes.images.services.registry import check_source, register_image, remove_image
from sandboxes.images.services.verification import request_verification
from sandboxes.images.sources import KINDS
from sandboxes.images.states import UNFINISHED
from sandboxes.models import Image, ImageBuild

from .base import ModelForm, OurAdmin, PrettyJSONField, ReadOnlyAdmin, add_refusal, pretty


def _examples() -> SafeString:
    """Settings of each kind, as somebody might write them."""
    lines = ((kind, json.dumps(source.example)) for kind, source in KINDS.items())
    return format_html("The settings of its kind, for example:{}", format_html_join("", "<br>{}: <code>{}</code>", lines))


class ImageForm(ModelForm):
    """The settings of the source are checked by its kind's own schema before they are stored."""

    source = PrettyJSONField(required=False, initial=dict, help_text=_examples())

    class Meta:
        model = Image
        fields = ["name", "kind", "source", "format", "description", "warm_target"]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        name, kind = (cleaned.get(field) or getattr(self.instance, field) for field in ("name", "kind"))
        try:
            with refused_as():
                cleaned["source"] = check_source(name=name, kind=kind, source=cleaned.get("source") or {})
        except Refused as refused:
            add_refusal(self, refused)
        return cleaned


@admin.register(Image)
class ImageAdmin(OurAdmin):
    """What is stored here says how to make an image; the actions have it made. Logs are on its page in the dashboard."""

    form = ImageForm
    list_display = ["name", "kind", "format", "state", "shown_size", "built_at", "last_used_at", "warm_target", "page"]
    list_filter = ["state", "kind"]
    search_fields = ["name", "description"]
    actions = ["build", "build_anew", "cancel", "verify"]
    _observed = (
        "state",
        "digest",
        "shown_size",
        "shown_env",
        "built_at",
        "last_used_at",
        "verified_at",
        "verify_problem",
        "page",
    )

    def get_fields(self, request: HttpRequest, obj: Image | None = None) -> Any:
        fields = ["name", "kind", "source", "format", "description", "warm_target"]
        return fields if obj is None else [*fields, *self._observed, "schema"]

    def get_readonly_fields(self, request: HttpRequest, obj: Image | None = None) -> list[str]:
        return [] if obj is None else ["name", "kind", *self._observed, "schema"]

    def save_model(self, request: HttpRequest, obj: Image, form: Any, change: bool) -> None:
        """Only what was changed is written: the image may be built while somebody looks at its form."""
        if change:
            obj.save(update_fields=form.changed_data)
            return
        created = register_image(
            name=obj.name, kind=obj.kind, source=obj.source, format=obj.format, description=obj.description
        )
        Image.objects.filter(pk=created.pk).update(warm_target=obj.warm_target)
        obj.pk = created.pk
        obj._state.adding = False

    def delete_model(self, request: HttpRequest, obj: Image) -> None:
        try:
            remove_image(image=obj)
        except ImageBusy as error:
            self.message_user(request, str(error), messages.ERROR)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Its builds, which nobody may delete by themselves, go with an image."""
        shown, counts, forbidden, protected = super().get_deleted_objects(objs, request)
        return shown, counts, forbidden - {ImageBuild._meta.verbose_name}, protected

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Image]) -> None:
        for image in queryset:
            self.delete_model(request, image)

    @admin.display(description="size", ordering="size")
    def shown_size(self, image: Image) -> str:
        return filesizeformat(image.size) if image.digest else "–"

    @admin.display(description="environment variables")
    def shown_env(self, image: Image) -> SafeString:
        return pretty(image.env)

    @admin.display(description="log")
    def page(self, image: Image) -> SafeString:
        return format_html('<a href="{}">builds</a>', reverse("image", args=[image.name]))

    @admin.display(description="schema of the settings")
    def schema(self, image: Image) -> SafeString:
        return pretty(KINDS[image.kind].settings.model_json_schema())

    @admin.action(description="Build now", permissions=["change"])
    def build(self, request: HttpRequest, queryset: QuerySet[Image]) -> None:
        self._ask(request, queryset, lambda image: request_build(image=image, by=request.user.get_username()), "to be built")

    @admin.action(description="Build anew, also when nothing has changed", permissions=["change"])
    def build_anew(self, request: HttpRequest, queryset: QuerySet[Image]) -> None:
        by = request.user.get_username()
        self._ask(request, queryset, lambda image: request_build(image=image, force=True, by=by), "to be built")

    @admin.action(description="Cancel their builds", permissions=["change"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Image]) -> None:
        builds = ImageBuild.objects.filter(image__in=queryset, state__in=UNFINISHED)
        self.message_user(request, f"{sum(cancel_build(build=build) for build in builds)} builds cancelled.", messages.SUCCESS)

    @admin.action(description="Verify: read them again, start a sandbox of each", permissions=["change"])
    def verify(self, request: HttpRequest, queryset: QuerySet[Image]) -> None:
        self._ask(request, queryset, lambda image: request_verification(image=image), "to be verified")

    def _ask(self, request: HttpRequest, queryset: QuerySet[Image], ask: Callable[[Image], object], what: str) -> None:
        asked = 0
        for image in queryset:
            try:
                ask(image)
                asked += 1
            except ImageBusy as error:
                self.message_user(request, str(error), messages.WARNING)
        if asked:
            self.message_user(request, f"{asked} {what}.", messages.SUCCESS)


@admin.register(ImageBuild)
class ImageBuildAdmin(ReadOnlyAdmin):
    """Every build, with the end of its log."""

    list_display = ["__str__", "state", "step", "tries", "node", "requested_by", "created_at", "finished_at"]
    list_filter = ["state"]
    list_select_related = ["image"]
    search_fields = ["image__name"]

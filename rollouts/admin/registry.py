"""Projects, environments, datasets and tasks."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from rollouts.environments import registry
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment
from rollouts.lifecycle import Limit
from rollouts.models import Dataset, Environment, Project, Task
from rollouts.selectors.storage import project_storage
from rollouts.services.budgets import change_limits
from rollouts.services.errors import Refused
from rollouts.services.registry import check_config, create_environment

from .base import LIMIT_FIELDS, USE_FIELDS, ModelForm, OurAdmin, PrettyJSONField, ReadOnlyAdmin, add_refusal, pretty


@admin.register(Project)
class ProjectAdmin(OurAdmin):
    """Members see the project in the dashboard; trainers come with API keys. Its limits can be changed only here."""

    list_display = ["name", "member_count", "unfinished", "exhausted_by", "created_at"]
    readonly_fields = [*USE_FIELDS, "storage"]
    search_fields = ["name"]
    filter_horizontal = ["members"]
    actions = None

    def get_queryset(self, request: HttpRequest) -> QuerySet[Project]:
        projects: QuerySet[Project] = super().get_queryset(request)
        return projects.annotate(member_count=Count("members"))

    @admin.display(description="members", ordering="member_count")
    def member_count(self, project: Project) -> int:
        count: int = project.member_count  # type: ignore[attr-defined]
        return count

    @admin.display
    def storage(self, project: Project) -> str:
        use = project_storage(project)
        blobs = f"{use.blobs:,} blobs of {filesizeformat(use.blob_bytes)} in {filesizeformat(use.stored_bytes)}"
        return f"{use.rollouts:,} finished rollouts, {use.with_trajectory:,} with their trajectory; {blobs}"

    @admin.display
    def unfinished(self, project: Project) -> int:
        return int(project.use[Limit.MAX_QUEUED])

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Project, form: Any, change: bool) -> None:
        """Only what was changed is written: the use of a project grows while somebody looks at its form."""
        if not change:
            return super().save_model(request, obj, form, change)
        columns = {field.name for field in Project._meta.concrete_fields}.intersection(form.changed_data)
        obj.save(update_fields=columns.difference(LIMIT_FIELDS))
        change_limits(owner=obj, limits={name: form.cleaned_data[name] for name in columns.intersection(LIMIT_FIELDS)})


class EnvironmentForm(ModelForm):
    """The configuration is checked by the handler's own schema before it is stored."""

    handler = forms.ChoiceField(help_text="Installed under the entry point group “prorl.environments”.")
    config = PrettyJSONField(required=False, initial=dict, help_text="Checked against the handler's schema.")

    class Meta:
        model = Environment
        fields = ["project", "name", "handler", "config", "description"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "handler" in self.fields:
            self.fields["handler"].choices = [(name, name) for name in registry.names()]  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        cleaned["config"] = cleaned.get("config") or {}
        if "handler" in cleaned and not self.errors:
            try:
                check_config(handler=cleaned["handler"], config=cleaned["config"])
            except Refused as refused:
                add_refusal(self, refused)
        return cleaned


@admin.register(Environment)
class EnvironmentAdmin(OurAdmin):
    """A version that a dataset uses never changes; “save as new version” makes the next one."""

    form = EnvironmentForm
    list_display = ["name", "version", "project", "handler", "dataset_count", "description", "created_at"]
    list_filter = ["handler", "project"]
    list_select_related = ["project"]
    search_fields = ["name"]
    actions = None
    change_form_template = "admin/rollouts/environment/change_form.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Environment]:
        environments: QuerySet[Environment] = super().get_queryset(request)
        return environments.annotate(dataset_count=Count("datasets"))

    @admin.display(description="datasets", ordering="dataset_count")
    def dataset_count(self, environment: Environment) -> int:
        count: int = environment.dataset_count  # type: ignore[attr-defined]
        return count

    def get_fields(self, request: HttpRequest, obj: Environment | None = None) -> Any:
        if obj is None:
            return ["project", "name", "handler", "config", "description"]
        return ["project", "name", "version", "handler", "config", "description", "schema"]

    def get_readonly_fields(self, request: HttpRequest, obj: Environment | None = None) -> list[str]:
        return [] if obj is None else ["project", "name", "version", "schema"]

    @admin.display(description="schema of the configuration")
    def schema(self, environment: Environment) -> SafeString:
        try:
            return pretty(registry.get(environment.handler).config.model_json_schema())
        except (UnknownEnvironment, BrokenEnvironment) as error:
            return format_html("{}", str(error))

    def has_delete_permission(self, request: HttpRequest, obj: Environment | None = None) -> bool:
        return super().has_delete_permission(request, obj) and obj is not None and not obj.datasets.exists()

    def save_model(self, request: HttpRequest, obj: Environment, form: Any, change: bool) -> None:
        """Add, or save as a new version, through the service; an unused version is corrected in place."""
        if change and "_newversion" not in request.POST and not obj.datasets.exists():
            super().save_model(request, obj, form, change)
            return
        created = create_environment(
            project=obj.project,
            name=obj.name,
            handler=obj.handler,
            config=obj.config,
            description=obj.description,
        )
        obj.pk, obj.version = created.pk, created.version
        obj._state.adding = False

    def response_change(self, request: HttpRequest, obj: Environment) -> HttpResponse:
        if "_newversion" not in request.POST:
            return super().response_change(request, obj)
        self.message_user(request, f"Saved as {obj}. Datasets made from now on use it.", messages.SUCCESS)
        return HttpResponseRedirect(reverse("admin:rollouts_environment_change", args=[obj.pk]))

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        environment = self.get_object(request, object_id)
        used = environment is not None and environment.datasets.exists()
        if used and request.method == "POST" and "_newversion" not in request.POST:
            refusal = "A dataset uses this version, so it cannot change. Save it as a new version."
            self.message_user(request, refusal, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
        context = {
            **(extra_context or {}),
            "used": used,
            "show_save": not used,
            "show_save_and_continue": False,
            "show_save_and_add_another": False,
        }
        return super().change_view(request, object_id, form_url, context)


@admin.register(Dataset)
class DatasetAdmin(OurAdmin):
    """Datasets are filled through the API; here they can be seen and, while nothing was rolled out, removed."""

    list_display = ["name", "project", "environment", "created_at"]
    list_filter = ["project"]
    list_select_related = ["project", "environment"]
    search_fields = ["name"]
    readonly_fields = ["project", "environment", "name", "created_at"]
    actions = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False


class _Quarantined(admin.SimpleListFilter):
    title = "quarantine"
    parameter_name = "quarantined"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "quarantined"), ("no", "usable")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Task]) -> QuerySet[Task]:
        if self.value() == "yes":
            return queryset.exclude(quarantine_reason="")
        return queryset.filter(quarantine_reason="") if self.value() == "no" else queryset


@admin.register(Task)
class TaskAdmin(ReadOnlyAdmin):
    """Tasks as imported. A quarantined one tells why it is never rolled out."""

    list_display = ["key", "dataset", "quarantine_reason", "created_at"]
    list_filter = [_Quarantined]
    list_select_related = ["dataset"]
    search_fields = ["key"]
    fields = ["dataset", "key", "quarantine_reason", "shown_payload", "created_at"]

    @admin.display(description="payload")
    def shown_payload(self, task: Task) -> SafeString:
        return pretty(task.payload)

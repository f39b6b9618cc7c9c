"""Images as rows, and every build of one."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from sandboxes.images.sources import KINDS
from sandboxes.images.states import UNFINISHED, BuildState, Format, ImageState

image_name_validator = RegexValidator(
    r"^[a-z0-9][a-z0-9._-]*\Z",
    "Use lower-case letters, digits, dots, dashes and underscores; begin with a letter or digit.",
)


def _choices(members: Any) -> list[tuple[str, str]]:
    return [(member.value, member.value) for member in members]


class Image(models.Model):
    """A root file system that environments name. What is built of it lies in the store under `digest`."""

    name = models.CharField(max_length=100, unique=True, validators=[image_name_validator])
    kind = models.CharField(max_length=20, choices=[(kind, kind) for kind in KINDS], help_text="What it is made from.")
    source: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="The settings of its kind.")
    format = models.CharField(
        max_length=10, choices=_choices(Format), default=Format.DIRECTORY.value, help_text="In which form it is kept."
    )
    description = models.CharField(max_length=300, blank=True)
    warm_target = models.PositiveIntegerField(default=0, help_text="Sandboxes of it that each node keeps started in advance.")

    state = models.CharField(max_length=10, choices=_choices(ImageState), default=ImageState.PENDING.value, editable=False)
    digest = models.CharField(max_length=80, blank=True, editable=False, help_text="Names its entry in the store.")
    built_as = models.CharField(max_length=10, blank=True, choices=_choices(Format), editable=False)
    input_key = models.CharField(max_length=64, blank=True, editable=False, help_text="Hash of all that went into it.")
    size = models.PositiveBigIntegerField(default=0, editable=False, help_text="Bytes.")
    env: models.JSONField[Any, Any] = models.JSONField(
        default=dict, editable=False, help_text="Environment variables that it sets in its sandboxes."
    )
    labels: models.JSONField[Any, Any] = models.JSONField(default=dict, editable=False, help_text="What it says of itself.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    built_at = models.DateTimeField(null=True, editable=False)
    last_used_at = models.DateTimeField(null=True, editable=False)
    verify_requested_at = models.DateTimeField(null=True, editable=False)
    verified_at = models.DateTimeField(null=True, editable=False, help_text="When it was last read again and tried.")
    verify_problem = models.TextField(blank=True, default="", editable=False, help_text="What was wrong with it then.")

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.CheckConstraint(
                condition=Q(state=ImageState.READY.value, digest__gt="") | (~Q(state=ImageState.READY.value) & Q(digest="")),
                name="image_ready_has_digest",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class ImageBuild(models.Model):
    """One request to build an image, through all its tries. `owner` and `tries` fence the writes of a worker that lost it."""

    image = models.ForeignKey(Image, models.CASCADE, related_name="builds")
    number = models.PositiveIntegerField()
    force = models.BooleanField(default=False, help_text="Although nothing has changed since the last one.")
    requested_by = models.CharField(max_length=150, blank=True)
    state = models.CharField(max_length=10, choices=_choices(BuildState), default=BuildState.QUEUED.value)
    tries = models.PositiveIntegerField(default=0)
    node = models.CharField(max_length=100, blank=True)
    owner = models.UUIDField(null=True)
    lease_expires_at = models.DateTimeField(null=True)
    not_before = models.DateTimeField(null=True, help_text="Put off after a failure.")
    hinted_at = models.DateTimeField(null=True)
    cancel_requested_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, help_text="Of the newest try.")
    finished_at = models.DateTimeField(null=True)
    step = models.CharField(max_length=200, blank=True)
    progress = models.FloatField(default=0.0, help_text="0 to 1.")
    log_tail = models.TextField(blank=True)
    log_length = models.PositiveBigIntegerField(default=0, help_text="Characters written in all; `log_tail` is the end of it.")
    error = models.TextField(blank=True, help_text="Of the newest try that failed.")
    digest = models.CharField(max_length=80, blank=True)

    class Meta:
        ordering: ClassVar = ["-created_at"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["image", "number"], name="image_build_number_once"),
            models.UniqueConstraint(
                fields=["image"],
                condition=Q(state__in=[state.value for state in UNFINISHED]),
                name="image_one_unfinished_build",
            ),
            models.CheckConstraint(
                condition=Q(state=BuildState.RUNNING.value, owner__isnull=False, lease_expires_at__isnull=False)
                | (~Q(state=BuildState.RUNNING.value) & Q(owner=None, lease_expires_at=None)),
                name="image_build_running_has_owner",
            ),
            models.CheckConstraint(condition=Q(progress__gte=0, progress__lte=1), name="image_build_progress_is_a_share"),
        ]
        indexes: ClassVar = [
            models.Index(
                fields=["created_at"],
                name="image_build_unfinished",
                condition=Q(state__in=[state.value for state in UNFINISHED]),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.image.name} #{self.number}"

    @property
    def percent(self) -> int:
        return int(100 * self.progress)

"""How pages name the pictures of a rollout, and where they lie."""

from __future__ import annotations

from django.urls import reverse

from rollouts.models import MessagePicture, ToolPicture

AnyPicture = ToolPicture | MessagePicture


def address_of(picture: AnyPicture) -> str:
    """The path that gives its data."""
    if isinstance(picture, MessagePicture):
        return reverse("rollout-picture", args=[picture.rollout_id, picture.blob_id])
    return reverse("rollout-tool-picture", args=[picture.rollout_id, picture.turn, picture.call, picture.index])


def name_of(picture: AnyPicture) -> str:
    """What it is called to those who do not see it."""
    if isinstance(picture, MessagePicture):
        return f"Picture {picture.index} of message {picture.message}"
    return f"Picture {picture.index} displayed by call {picture.call} of turn {picture.turn}"

"""Images that sandboxes start from: what there is, how their builds go, and the buttons that start and end builds."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from rollouts.selectors.images import builds_of, images, unfinished_build, unfinished_builds
from rollouts.web.access import visible_projects
from rollouts.web.conditional import clock, etag_of, fragment, part, unchanged
from sandboxes.images.services.builds import cancel_build, request_build
from sandboxes.models import Image

POLL_SECONDS = 2
_may_build = permission_required("sandboxes.change_image", raise_exception=True)


def _list_context(request: HttpRequest) -> dict[str, Any]:
    builds = unfinished_builds()
    return {
        "rows": [(image, builds.get(image.pk)) for image in images().order_by("name")],
        "poll_seconds": POLL_SECONDS,
        "projects": visible_projects(request),
        "section": "images",
    }


@require_safe
@login_required
def listing(request: HttpRequest) -> HttpResponse:
    """Every image: images belong to the installation, not to a project."""
    return render(request, "web/images.html", _list_context(request))


@require_safe
@login_required
def listing_live(request: HttpRequest) -> HttpResponse:
    """The part that changes."""
    return part(request, "web/parts/images_live.html", _list_context(request))


def _detail_context(request: HttpRequest, image: Image) -> dict[str, Any]:
    builds = builds_of(image)
    return {
        "image": image,
        "builds": builds,
        "newest": builds[0] if builds else None,
        "going_on": unfinished_build(image),
        "may_build": request.user.has_perm("sandboxes.change_image"),
        "poll_seconds": POLL_SECONDS,
        "projects": visible_projects(request),
        "section": "images",
    }


def _etag(context: dict[str, Any]) -> str:
    image, newest = context["image"], context["newest"]
    facts = [image.state, image.digest, image.last_used_at, image.verified_at, context["may_build"]]
    if newest is not None:
        facts += [newest.pk, newest.state, newest.step, newest.progress, newest.log_length, newest.cancel_requested_at]
    return etag_of(image.pk, *facts, clock() if context["going_on"] else None)


@require_safe
@login_required
def detail(request: HttpRequest, name: str) -> HttpResponse:
    """One image with its builds and the log of the newest one."""
    context = _detail_context(request, get_object_or_404(Image, name=name))
    return render(request, "web/image.html", {**context, "etag": _etag(context)})


@require_safe
@login_required
def live(request: HttpRequest, name: str) -> HttpResponse:
    """The part that changes; 304 when it did not."""
    context = _detail_context(request, get_object_or_404(Image, name=name))
    etag = _etag(context)
    return unchanged(request, etag) or fragment(request, "web/parts/image_live.html", context, etag)


@require_POST
@login_required
@_may_build
def build(request: HttpRequest, name: str) -> HttpResponse:
    """Have it built; `force` also when nothing has changed."""
    image = get_object_or_404(Image, name=name)
    request_build(image=image, force="force" in request.POST, by=request.user.get_username())
    messages.success(request, f"{name} will be built.")
    return redirect("image", name=name)


@require_POST
@login_required
@_may_build
def cancel(request: HttpRequest, name: str) -> HttpResponse:
    """End the build that is not finished."""
    going_on = unfinished_build(get_object_or_404(Image, name=name))
    if going_on is not None and cancel_build(build=going_on):
        messages.success(request, f"{name}: the build is cancelled as soon as its worker hears of it.")
    return redirect("image", name=name)

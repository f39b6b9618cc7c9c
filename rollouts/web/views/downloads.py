"""Files made of a rollout. They may be large, and what lies in the blob storage is read here and on no page.

What agents and programs in a sandbox made is hostile. The browser is to save it, except for pictures that can only be pictures.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_safe

from rollouts.llm.pictures import type_of
from rollouts.models import BlobUnreadable, Rollout
from rollouts.models.trajectory import StoredPicture
from rollouts.selectors.dashboard import rollouts_of
from rollouts.selectors.storage import picture_of, seen_picture, tool_call_of, whole_output
from rollouts.web.access import visible_or_404, visible_projects
from rollouts.web.document import rollout_document

logger = logging.getLogger(__name__)

_PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"  # the style is the browser's own, of a picture alone


def _download(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """For members only, as the type it says and no other, and with a plain word when the blob storage fails."""

    @require_safe
    @login_required
    @functools.wraps(view)
    def wrapped(request: HttpRequest, rollout_id: UUID, **place: Any) -> HttpResponse:
        rollouts = rollouts_of(visible_projects(request)).defer(None).select_related("artefacts_blob")
        rollout: Rollout = visible_or_404(request, rollouts, pk=rollout_id)
        try:
            response = view(rollout, **place)
        except BlobUnreadable as error:
            logger.error("%s", error)
            return HttpResponse(f"The {error}.", status=503, content_type="text/plain; charset=utf-8")
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    return wrapped


@_download
def rollout_json(rollout: Rollout) -> HttpResponse:
    """The rollout with token arrays, whole outputs and artefacts."""
    response = JsonResponse(rollout_document(rollout, tokens=True), json_dumps_params={"ensure_ascii": False})
    response.headers["Content-Disposition"] = f'attachment; filename="rollout-{rollout.pk}.json"'
    return response


@_download
def tool_output(rollout: Rollout, turn: int, index: int) -> HttpResponse:
    """All that a tool call of the newest attempt printed."""
    call = tool_call_of(rollout, turn, index)
    if call is None:
        raise Http404
    response = HttpResponse(whole_output(call), content_type="text/plain; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="output-{rollout.pk}-{turn}-{index}.txt"'
    return response


@_download
def tool_picture(rollout: Rollout, turn: int, index: int, picture: int) -> HttpResponse:
    """A picture that a tool call of the newest attempt displayed."""
    return _picture(picture_of(rollout, turn, index, picture))


@_download
def picture(rollout: Rollout, sha256: str) -> HttpResponse:
    """A picture that the model of the newest attempt was shown."""
    return _picture(seen_picture(rollout, sha256))


def _picture(found: StoredPicture | None) -> HttpResponse:
    """The picture by its data's type, and not by what those who brought it call it."""
    if found is None:
        raise Http404
    data = found.blob.content()
    mime = type_of(data)
    response = HttpResponse(data, content_type=mime or "application/octet-stream")
    response.headers["Content-Security-Policy"] = _PICTURE_POLICY
    if mime is None:
        response.headers["Content-Disposition"] = f'attachment; filename="picture-{found.blob_id[:12]}"'
    return response

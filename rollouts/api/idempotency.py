"""`Idempotency-Key`: a creating request that is sent twice creates once and is answered twice."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from django.db import connection, transaction
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from rollouts.api.auth import access_of
from rollouts.api.problems import Problem
from rollouts.models import IdempotentResponse, Project

HandlerT = TypeVar("HandlerT", bound=Callable[..., Response])

_USABLE = re.compile(r"[\x21-\x7e]{1,200}")


def idempotent(handler: HandlerT) -> HandlerT:
    """Makes a view's `post` honour the header.

    The work and the stored answer are one transaction: either both exist or neither, whatever crashes in between. Refusals
    store nothing, so that the corrected (or simply later) request may use the key.
    """

    @functools.wraps(handler)
    def post(view: APIView, request: Request, **kwargs: Any) -> Response:
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return handler(view, request, **kwargs)
        if not _USABLE.fullmatch(key):
            raise Problem("invalid_idempotency_key", "Use 1 to 200 visible ASCII characters; a UUID does well.")
        project = access_of(request).project
        fingerprint = _fingerprint(request)
        with transaction.atomic():
            hold(project, key)
            stored = IdempotentResponse.objects.filter(project=project, key=key).first()
            if stored is not None:
                return _replay(stored, fingerprint)
            response = handler(view, request, **kwargs)
            IdempotentResponse.objects.create(
                project=project,
                key=key,
                fingerprint=fingerprint,
                status=response.status_code,
                body=json.loads(JSONRenderer().render(response.data)),
            )
        return response

    return cast(HandlerT, post)


def hold(project: Project, key: str) -> None:
    """Hold the key until the transaction ends. A lock rather than a row, so that a twin is told at once instead of waiting."""
    number = int.from_bytes(hashlib.sha256(f"{project.id} {key}".encode()).digest()[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [number])
        [claimed] = cursor.fetchone()
    if not claimed:
        raise Problem(
            "idempotency_in_progress",
            "The first request with this key has not been answered yet.",
            headers={"Retry-After": "1"},
        )


def _fingerprint(request: Request) -> str:
    body: Any = json.dumps(request.data, sort_keys=True)
    return hashlib.sha256(f"{request.method} {request.path} {body}".encode()).hexdigest()


def _replay(stored: IdempotentResponse, fingerprint: str) -> Response:
    if stored.fingerprint != fingerprint:
        raise Problem("idempotency_key_reused", "This key was used for a request with another path or body.")
    return Response(stored.body, status=stored.status, headers={"Idempotency-Replayed": "true"})

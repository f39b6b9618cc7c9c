"""One line for every HTTP request, and a request id that its answer and all its log lines carry."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware

from prorl_site import logs

logger = structlog.get_logger(__name__)

HEADER = "X-Request-ID"
_USABLE_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
# Asked by machines every few seconds; worth a line only to who looks for it.
_QUIET = ("/livez", "/readyz", "/metrics", "/static/")


@sync_and_async_middleware
def request_log_middleware(get_response: Any) -> Any:
    """Outermost, so that it sees what every other middleware answers. Waits without a thread when the view does."""
    if iscoroutinefunction(get_response):

        async def respond_async(request: HttpRequest) -> Any:
            with _logged(request) as answered:
                return answered(await get_response(request))

        return respond_async

    def respond(request: HttpRequest) -> Any:
        with _logged(request) as answered:
            return answered(get_response(request))

    return respond


@contextmanager
def _logged(request: HttpRequest) -> Iterator[Any]:
    given = request.headers.get(HEADER, "")
    request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    begun = time.perf_counter()

    def answered(response: Any) -> Any:
        response.headers[HEADER] = request_id
        log = logger.debug if request.path.startswith(_QUIET) else logger.info
        log(
            "request",
            method=request.method,
            path=_template(request),
            status=response.status_code,
            ms=round((time.perf_counter() - begun) * 1000, 1),
            **_who(request),
        )
        return response

    with logs.bound(request=request_id):
        yield answered


def _template(request: HttpRequest) -> str:
    """The route, such as `/runs/<uuid:id>/`: what one can count by. A path that nothing serves is given as it came, cut."""
    match = request.resolver_match
    return f"/{match.route}" if match and match.route else request.path[:100]


def _who(request: HttpRequest) -> dict[str, Any]:
    """As far as the view found it out; asking here would cost a query."""
    if (access := getattr(request, "auth", None)) is not None:
        return {"project": access.project.name, "key": access.key}
    user = getattr(request, "_cached_user", None)
    return {"user": user.pk} if user is not None and user.pk else {}

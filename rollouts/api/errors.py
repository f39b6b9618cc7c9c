"""Every failure under /api/ becomes one shape: application/problem+json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.core.signals import got_request_exception
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.views import defaults
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from rollouts.api.problems import KINDS, Problem, document
from rollouts.models import BlobUnreadable
from rollouts.services.errors import BudgetExhausted, Refused, TooManyQueued

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"
RETRY_SECONDS = "1"

_NO_SUCH_THING = "There is no such thing in this project."


def problem_response(error: Exception, context: Mapping[str, Any]) -> Response:
    """DRF's exception handler. Knows every error the API raises; anything else is ours, logged, and a 500."""
    set_rollback()
    problem = _as_problem(error)
    if problem is None:
        # Returning a response hides the error from Django, so it is reported here as Django would.
        request = context["request"]
        logger.error("unhandled error in %s %s", request.method, request.path, exc_info=error)
        got_request_exception.send(sender=type(context.get("view")), request=request)
        problem = Problem("internal_error", "This is a defect of the server; its log has the traceback.")
    if problem.code == "unavailable":
        problem.headers.setdefault("Retry-After", RETRY_SECONDS)
    path = context["request"].path
    body = document(problem.code, problem.detail, problem.errors, instance=path, reached=problem.reached)
    return Response(body, status=KINDS[problem.code].status, headers=problem.headers, content_type=CONTENT_TYPE)


def _as_problem(error: Exception) -> Problem | None:
    match error:
        case Problem():
            return error
        case TooManyQueued():
            return Problem(error.code, error.detail, headers={"Retry-After": str(error.retry_after)}, reached=error.reached)
        case BudgetExhausted():
            return Problem(error.code, error.detail, reached=error.reached)
        case Refused():
            return Problem(error.code, error.detail, error.errors)
        case RequestDataTooBig():
            return Problem("body_too_large", "The body is larger than this server accepts.")
        case OperationalError():
            logger.warning("the database does not answer: %s", error)
            return Problem("unavailable", "The database does not answer.")
        case BlobUnreadable():
            logger.error("%s", error)
            return Problem("unavailable", f"The {error}.")
        case Http404() | exceptions.NotFound():
            return Problem("not_found", _NO_SUCH_THING)
        case exceptions.NotAuthenticated():
            headers = {"WWW-Authenticate": getattr(error, "auth_header", "Bearer")}
            return Problem("not_authenticated", "Send an API key: `Authorization: Bearer prl_…`.", headers=headers)
        case exceptions.AuthenticationFailed():
            headers = {"WWW-Authenticate": f'{getattr(error, "auth_header", "Bearer")}, error="invalid_token"'}
            return Problem("invalid_api_key", str(error.detail), headers=headers)
        case exceptions.MethodNotAllowed():
            return Problem("method_not_allowed", str(error.detail))
        case exceptions.NotAcceptable():
            return Problem(
                "not_acceptable", "Ask for application/json; results are also application/msgpack, streams text/event-stream."
            )
        case exceptions.UnsupportedMediaType():
            return Problem("unsupported_media_type", "Send JSON with `Content-Type: application/json`.")
        case exceptions.PermissionDenied() | PermissionDenied():
            return Problem("insufficient_scope", str(error))
        case exceptions.ParseError():
            return Problem("invalid_request", str(error.detail))
        case _:
            return None


def _plain_response(request: HttpRequest, code: str, detail: str) -> HttpResponse:
    body = json.dumps(document(code, detail, instance=request.path))
    return HttpResponse(body, status=KINDS[code].status, content_type=CONTENT_TYPE)


@csrf_exempt
def no_such_path(request: HttpRequest) -> HttpResponse:
    """Whatever /api/ does not route."""
    return _plain_response(request, "not_found", "There is nothing at this path. Paths end with a slash.")


def handler400(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's handler for requests refused before a view ran. Pages get Django's own answer."""
    if request.path.startswith("/api/"):
        return _plain_response(request, "invalid_request", "The request was refused before it reached the API.")
    return defaults.bad_request(request, exception)


def handler500(request: HttpRequest) -> HttpResponse:
    """Django's handler for errors outside a view. Pages get Django's own answer."""
    if request.path.startswith("/api/"):
        return _plain_response(request, "internal_error", "This is a defect of the server; its log has the traceback.")
    return defaults.server_error(request)

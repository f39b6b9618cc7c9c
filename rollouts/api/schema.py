"""What the OpenAPI schema says about operations, authentication and problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from pydantic import BaseModel
from rest_framework import serializers

from rollouts.api.queries import Query

F = TypeVar("F", bound=Callable[..., Any])


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Registered by being defined."""

    target_class = "rollouts.api.auth.ApiKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API key of a project: `Authorization: Bearer prl_…`."}


class SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Registered by being defined."""

    target_class = "rollouts.api.auth.ProjectSessionAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME, "description": "The dashboard's login."}


class FieldErrorSerializer(serializers.Serializer[Any]):
    pointer = serializers.CharField(help_text="JSON pointer into the body, or `?name` of a query parameter.")
    detail = serializers.CharField()


class LimitReachedSerializer(serializers.Serializer[Any]):
    scope = serializers.CharField(help_text="run or project")
    name = serializers.CharField(help_text="max_rollouts, max_queued, …")
    maximum = serializers.IntegerField()
    used = serializers.FloatField()
    requested = serializers.IntegerField(help_text="Rollouts asked for.")


class ProblemSerializer(serializers.Serializer[Any]):
    """RFC 9457. The codes are listed in the reference of errors."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField()
    instance = serializers.CharField()
    code = serializers.CharField()
    # Hides an attribute of DRF's that is of no use here: this class only describes.
    errors = FieldErrorSerializer(many=True)  # type: ignore[assignment]
    limit = LimitReachedSerializer(required=False, help_text="Only of budget_exhausted and too_many_queued.")


_IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="Repeat a request under the same key and it is carried out once.",
)


def documented(
    operation: str,
    description: str,
    answer: Any,
    *,
    status: int | tuple[int, str] = 200,
    body: type[BaseModel] | None = None,
    query: type[Query] = Query,
    creates: bool = False,
) -> Callable[[F], F]:
    """The operation's entry in the OpenAPI schema. `operation` becomes its id and its heading: `list_runs`, List runs.

    `status` may name a media type as well: `(200, "text/event-stream")`.
    """
    parameters: list[Any] = [query, *([_IDEMPOTENCY_KEY] if creates else [])]  # drf-spectacular takes Pydantic models too
    return extend_schema(
        operation_id=operation,
        summary=operation.replace("_", " ").capitalize(),
        description=f"{description}.",
        request=body,
        parameters=parameters,
        responses={status: answer, ("4XX", "application/problem+json"): ProblemSerializer},
    )


def page_of(serializer: type[serializers.BaseSerializer[Any]]) -> Any:
    """The schema of one page of a list."""
    name = serializer.__name__.removesuffix("Serializer") + "Page"
    fields = {
        "results": serializer(many=True),
        "next": serializers.CharField(allow_null=True, help_text="Path of the next page; null on the last one."),
    }
    return inline_serializer(name, fields)

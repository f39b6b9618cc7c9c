"""Pages by key: the next page starts behind the last id of this one. Nothing is counted and nothing skipped over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import ValidationError
from django.db.models import Model, Q
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api import cursors
from rollouts.selectors.pages import rows_in_order

MAX_LIMIT = 500


class KeysetPagination(BasePagination):
    """Orders by id, which is the order of creation: newest first, or oldest first for views with `oldest_first`.

    The view has read `limit` and `cursor` into `view.query`.
    """

    def __init__(self, branches: Sequence[Q] = (Q(),)) -> None:
        """`branches` as in `rows_in_order`."""
        self._branches = branches

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        query = view.query
        if query.cursor:
            behind = "id__gt" if view.oldest_first else "id__lt"
            queryset = queryset.filter(**{behind: _read_id(queryset.model, query.cursor)})
        rows = rows_in_order(queryset, query.limit + 1, branches=self._branches, oldest_first=view.oldest_first)
        page = rows[: query.limit]
        self._next = None
        if len(rows) > query.limit:
            parameters = {**request.query_params.dict(), "cursor": cursors.encode(page[-1].pk)}
            # A path, not a URL: behind a proxy this server does not know the scheme that its clients use.
            self._next = f"{request.path}?{urlencode(parameters)}"
        return page

    def get_paginated_response(self, data: Any) -> Response:
        return Response({"results": data, "next": self._next})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "required": ["results", "next"],
            "properties": {
                "results": schema,
                "next": {"type": ["string", "null"], "description": "Path of the next page; null on the last one."},
            },
        }


def _read_id(model: type[Model], cursor: str) -> Any:
    [text] = cursors.decode(cursor, parts=1)
    try:
        return model._meta.pk.to_python(text)
    except ValidationError as error:
        raise cursors.invalid_cursor() from error

"""What all views share: one project, checked query strings and bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from django.db.models import Model, Q, QuerySet
from django.http import Http404
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from rollouts.api.auth import access_of
from rollouts.api.bodies import BodyT, read_body
from rollouts.api.pagination import KeysetPagination
from rollouts.api.parsing import StrictJSONParser
from rollouts.api.queries import PageQuery, Query, read_query
from rollouts.models import Project, Scope

ModelT = TypeVar("ModelT", bound=Model)


class ApiView(APIView):
    """A view of one project's things. `query` is the checked query string of a GET; `project` is the key's."""

    parser_classes = [StrictJSONParser]
    metadata_class = None
    writes_need: ClassVar[Scope] = Scope.SUBMIT
    query_model: ClassVar[type[Query]] = Query
    query: Any

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if any("\0" in name for name in kwargs.values() if isinstance(name, str)):
            raise Http404  # Postgres has no such text, and would not even look
        model = self.query_model if request.method == "GET" else Query
        self.query = read_query(model, request.query_params.dict())

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        final = super().finalize_response(request, response, *args, **kwargs)
        final.headers.setdefault("Cache-Control", "no-store")
        return final

    @property
    def project(self) -> Project:
        return access_of(self.request).project

    def body(self, model: type[BodyT]) -> BodyT:
        return read_body(model, self.request.data)


class ListView(ApiView):
    """A list in pages, newest first unless `oldest_first`."""

    query_model: ClassVar[type[Query]] = PageQuery
    oldest_first: ClassVar[bool] = False

    def page(self, queryset: QuerySet[Any], represent: Callable[[list[Any]], Any], branches: Sequence[Q] = (Q(),)) -> Response:
        """One page; `represent` turns its rows into JSON values. `branches` as in `rows_in_order`."""
        pages = KeysetPagination(branches)
        rows = pages.paginate_queryset(queryset, self.request, self)
        return pages.get_paginated_response(represent(rows))


def find(queryset: QuerySet[ModelT], id_: UUID) -> ModelT:
    """The row, or a 404. The queryset is already limited to the project, so another project's row is not found."""
    row = queryset.filter(pk=id_).first()
    if row is None:
        raise Http404
    return row

"""Keyset pages over rows in descending id order: equally quick at any depth, and stable while rows arrive."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from django.db.models import Model, Q, QuerySet

from rollouts.selectors.pages import rows_in_order

ModelT = TypeVar("ModelT", bound=Model)


class Page(NamedTuple, Generic[ModelT]):
    """One page. `older` and `newer` are the values of `?older=` and `?newer=` for its neighbours, empty at the ends."""

    rows: list[ModelT]
    older: str
    newer: str


def page(queryset: QuerySet[ModelT], query: Mapping[str, str], size: int, branches: Sequence[Q] = (Q(),)) -> Page[ModelT]:
    """The page that the query string asks for; `branches` as in `rows_in_order`.

    A cursor that is no id is ignored: the first page is shown.
    """
    older, newer = _cursor(query.get("older")), _cursor(query.get("newer"))
    if newer and not older:
        rows = rows_in_order(queryset.filter(pk__gt=newer), size + 1, branches=branches, oldest_first=True)
        more_newer, more_older = len(rows) > size, True
        rows = rows[:size][::-1]
    else:
        if older:
            queryset = queryset.filter(pk__lt=older)
        rows = rows_in_order(queryset, size + 1, branches=branches)
        more_newer, more_older = older is not None, len(rows) > size
        rows = rows[:size]
    if not rows:
        return Page([], "", "")
    return Page(rows, str(rows[-1].pk) if more_older else "", str(rows[0].pk) if more_newer else "")


def _cursor(value: str | None) -> uuid.UUID | None:
    try:
        return uuid.UUID(value) if value else None
    except ValueError:
        return None

"""The rows of one page of a long table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from django.db.models import Model, Q, QuerySet

ModelT = TypeVar("ModelT", bound=Model)


def rows_in_order(
    queryset: QuerySet[ModelT], n: int, *, branches: Sequence[Q] = (Q(),), oldest_first: bool = False
) -> list[ModelT]:
    """The first `n` rows by descending (or ascending) id.

    `branches` are conditions of which each row meets at most one: the first rows of each are found by its own index and then
    merged. Only ids are read that way, so an index that holds the condition's columns and the id answers alone.
    """
    order = "id" if oldest_first else "-id"
    parts = [queryset.filter(branch).order_by(order).values_list("id", flat=True)[:n] for branch in branches]
    if not parts:
        return []
    first, *others = parts
    ids = first.union(*others, all=True).order_by(order)[:n] if others else first
    return list(queryset.filter(pk__in=ids).order_by(order))

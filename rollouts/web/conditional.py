"""Conditional responses for the parts of pages that poll."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import parse_etags, quote_etag

_CLOCK_SECONDS = 10


def etag_of(*facts: object) -> str:
    """A tag that changes when one of the facts does."""
    return quote_etag(hashlib.sha256(repr(facts).encode()).hexdigest()[:20])


def clock() -> int:
    """A fact that changes every few seconds, for parts that show ages and rates."""
    return int(time.time() // _CLOCK_SECONDS)


def unchanged(request: HttpRequest, etag: str) -> HttpResponse | None:
    """A 304 when the browser already shows this."""
    if etag in parse_etags(request.headers.get("If-None-Match", "")):
        return HttpResponse(status=304, headers={"ETag": etag})
    return None


def part(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    """A rendered part of a page. Browsers must not answer polls from their own cache."""
    response = render(request, template, context)
    response.headers["Cache-Control"] = "no-store"
    return response


def fragment(request: HttpRequest, template: str, context: dict[str, Any], etag: str) -> HttpResponse:
    """A rendered part with its tag."""
    response = part(request, template, {**context, "etag": etag})
    response.headers["ETag"] = etag
    return response

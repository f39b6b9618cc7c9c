"""Response headers that every page carries."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

_STRICT = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# The bundled API documentation sets inline styles; it shows no user data.
_API_DOCS = _STRICT.replace(
    "default-src 'self'",
    "default-src 'self'; style-src 'self' 'unsafe-inline'; worker-src blob:",
)


class ContentSecurityPolicyMiddleware:
    """What models and tools print is shown on our pages, so pages run no script and load nothing but our own files."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        policy = _API_DOCS if request.path.startswith("/api/docs") else _STRICT
        response.headers.setdefault("Content-Security-Policy", policy)
        return response

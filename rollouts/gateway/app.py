"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rollouts.gateway.dialects.anthropic import AnthropicMessages
from rollouts.gateway.dialects.base import CountingDialect, Dialect
from rollouts.gateway.dialects.google import GoogleGenerate
from rollouts.gateway.dialects.openai_chat import OpenAIChat
from rollouts.gateway.dialects.openai_completions import OpenAICompletions
from rollouts.gateway.dialects.openai_responses import OpenAIResponses
from rollouts.gateway.directory import SessionDirectory
from rollouts.gateway.endpoint import CountEndpoint, Endpoint, Limits, ModelsEndpoint
from rollouts.gateway.errors import CallRefused, Kind

_GOOGLE = ("/v1beta/models", "/v1/models")  # versions of its API


def create_app(directory: SessionDirectory, limits: Limits | None = None) -> ASGIApp:
    """The application that serves the sessions of `directory`."""
    limits = limits or Limits()
    anthropic, google, chat = AnthropicMessages(), GoogleGenerate(), OpenAIChat()

    def post(path: str, dialect: Dialect) -> Route:
        return Route(path, Endpoint(dialect, directory, limits), methods=["POST"])

    def count(path: str, dialect: CountingDialect) -> Route:
        return Route(path, CountEndpoint(dialect, directory, limits), methods=["POST"])

    return Starlette(
        routes=[
            Route("/livez", _livez),
            post("/v1/chat/completions", chat),
            post("/v1/completions", OpenAICompletions()),
            post("/v1/responses", OpenAIResponses()),
            post("/v1/messages", anthropic),
            count("/v1/messages/count_tokens", anthropic),
            *(post(f"{root}/{{model}}:generateContent", google) for root in _GOOGLE),
            *(post(f"{root}/{{model}}:streamGenerateContent", GoogleGenerate(stream=True)) for root in _GOOGLE),
            *(count(f"{root}/{{model}}:countTokens", google) for root in _GOOGLE),
            Route("/v1/models", ModelsEndpoint(chat, directory, limits, _models), methods=["GET"]),
            Route("/v1/models/{model:path}", ModelsEndpoint(chat, directory, limits, _model), methods=["GET"]),
            Route("/v1beta/models", ModelsEndpoint(google, directory, limits, _google_models), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _no_such_path},
    )


async def _livez(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _no_such_path(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)  # noqa: S101 - registered for it
    kind = Kind.WRONG_METHOD if exc.status_code == Kind.WRONG_METHOD.value else Kind.NOT_FOUND
    path = request.url.path
    dialect: Dialect = OpenAIChat()
    if path.startswith("/v1beta/") or (request.method == "POST" and path.startswith(_GOOGLE)):
        dialect = GoogleGenerate()
    elif path.startswith("/v1/messages"):
        dialect = AnthropicMessages()
    error = CallRefused(kind, f"{request.method} {path} is not served here")
    return JSONResponse(dialect.error(error), kind.value, exc.headers)


def _model(name: str) -> Mapping[str, Any]:
    """With the fields of OpenAI's and of Anthropic's APIs, in which it has the same path."""
    model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "prorl", "type": "model"}
    return model | {"display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _models(name: str) -> Mapping[str, Any]:
    pages = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [_model(name)], **pages, **_google_models(name)}


def _google_models(name: str) -> Mapping[str, Any]:
    methods = ["generateContent", "countTokens"]
    return {"models": [{"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}]}

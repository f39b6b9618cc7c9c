"""The gateway as an ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rollouts.gateway.dialects.openai_chat import OpenAIChat
from rollouts.gateway.directory import SessionDirectory
from rollouts.gateway.endpoint import Endpoint, Limits, ModelsEndpoint


def create_app(directory: SessionDirectory, limits: Limits | None = None) -> ASGIApp:
    """The application that serves the sessions of `directory`."""
    limits = limits or Limits()

    chat = OpenAIChat()
    return Starlette(
        routes=[
            Route("/livez", _livez),
            Route("/v1/chat/completions", Endpoint(chat, directory, limits)),
            Route("/v1/models", ModelsEndpoint(chat, directory)),
        ],
    )


async def _livez(request: Request) -> Response:
    return PlainTextResponse("ok\n")

"""LLM servers."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import NewServer, ServerChange, Sleep, Wake
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.registry import LLMServerSerializer
from rollouts.models import Scope
from rollouts.selectors.registry import servers_of
from rollouts.services import servers
from rollouts.services.server_sleep import sleep_server, wake_server


class LLMServerList(ListView):
    writes_need = Scope.ADMIN

    @documented("list_llm_servers", "LLM servers, newest first", page_of(LLMServerSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(servers_of(self.project), lambda rows: LLMServerSerializer(rows, many=True).data)

    @documented(
        "register_llm_server",
        "Probe an LLM server and register it",
        LLMServerSerializer,
        status=201,
        body=NewServer,
        creates=True,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        server = servers.register_server(project=self.project, **self.body(NewServer).model_dump())
        return Response(LLMServerSerializer(find(servers_of(self.project), server.id)).data, status=201)


class LLMServerDetail(ApiView):
    writes_need = Scope.ADMIN

    @documented("get_llm_server", "An LLM server", LLMServerSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        return Response(LLMServerSerializer(find(servers_of(self.project), id)).data)

    @documented("change_llm_server", "Drain, pause, resume or change an LLM server", LLMServerSerializer, body=ServerChange)
    def patch(self, request: Request, id: UUID) -> Response:
        server = find(servers_of(self.project), id)
        changes = servers.ServerChanges(**self.body(ServerChange).model_dump())
        servers.change_server(server=server, changes=changes)
        return Response(LLMServerSerializer(find(servers_of(self.project), id)).data)

    @documented("remove_llm_server", "Forget an LLM server", None, status=204)
    def delete(self, request: Request, id: UUID) -> Response:
        servers.remove_server(server=find(servers_of(self.project), id))
        return Response(status=204)


class LLMServerSleep(ApiView):
    @documented("sleep_llm_server", "Have an LLM server give up its memory", LLMServerSerializer, body=Sleep)
    def post(self, request: Request, id: UUID) -> Response:
        sleep_server(server=find(servers_of(self.project), id), level=self.body(Sleep).level)
        return Response(LLMServerSerializer(find(servers_of(self.project), id)).data)


class LLMServerWake(ApiView):
    @documented("wake_llm_server", "Have an LLM server take its memory again", LLMServerSerializer, body=Wake)
    def post(self, request: Request, id: UUID) -> Response:
        wake_server(server=find(servers_of(self.project), id), tags=self.body(Wake).tags)
        return Response(LLMServerSerializer(find(servers_of(self.project), id)).data)

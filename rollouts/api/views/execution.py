"""Nodes and the queue. Nodes belong to the installation: any key may look at them, and `operate` may drain them."""

from __future__ import annotations

from django.http import Http404
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView
from rollouts.api.bodies import Drain
from rollouts.api.schema import documented
from rollouts.api.serializers.execution import NodeSerializer, NodesSerializer, QueueSerializer
from rollouts.models import Scope
from rollouts.selectors.nodes import NodeRow, node_rows
from rollouts.selectors.queue import read_queue
from rollouts.services.nodes import drain_node, resume_node


class Queue(ApiView):
    @documented("get_queue", "What waits at each stage, and what holds back the project's runs", QueueSerializer)
    def get(self, request: Request) -> Response:
        return Response(QueueSerializer(read_queue([self.project])).data)


class NodeList(ApiView):
    @documented("list_nodes", "All worker hosts by name", NodesSerializer)
    def get(self, request: Request) -> Response:
        return Response(NodesSerializer({"results": node_rows()}).data)


class NodeDrain(ApiView):
    writes_need = Scope.OPERATE

    @documented("drain_node", "Start nothing on a node any more; again: move the deadline", NodeSerializer, body=Drain)
    def post(self, request: Request, name: str) -> Response:
        drain_node(node=_find(name).node, seconds=self.body(Drain).seconds)
        return Response(NodeSerializer(_find(name)).data)


class NodeResume(ApiView):
    writes_need = Scope.OPERATE

    @documented("resume_node", "Let a draining node take part again", NodeSerializer)
    def post(self, request: Request, name: str) -> Response:
        resume_node(node=_find(name).node)
        return Response(NodeSerializer(_find(name)).data)


def _find(name: str) -> NodeRow:
    row = next((row for row in node_rows() if row.node.name == name), None)
    if row is None:
        raise Http404
    return row

"""Webhooks: endpoints of a project, what was sent to them, and sending it again."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import NewWebhook, Replay, SecretRotation, WebhookChange
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import DeliveryQuery, PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.webhooks import (
    ReplayedSerializer,
    WebhookDeliverySerializer,
    WebhookSerializer,
    WebhookWithSecretSerializer,
)
from rollouts.models import Scope, WebhookEndpoint
from rollouts.selectors.rollouts import runs_of
from rollouts.selectors.webhooks import deliveries_of, endpoints_of
from rollouts.services import webhooks
from rollouts.services.errors import Refused


class WebhookList(ListView):
    writes_need = Scope.ADMIN

    @documented("list_webhooks", "Webhook endpoints, newest first", page_of(WebhookSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(endpoints_of([self.project]), lambda rows: WebhookSerializer(rows, many=True).data)

    @documented(
        "create_webhook",
        "Have a URL told of what ends from now on",
        WebhookWithSecretSerializer,
        status=201,
        body=NewWebhook,
        creates=True,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        body = self.body(NewWebhook)
        run = runs_of(self.project).filter(id=body.run).first() if body.run else None
        if body.run and run is None:
            raise Refused.field("/run", "There is no such run in this project.")
        endpoint = webhooks.create_endpoint(
            project=self.project, url=body.url, event_types=body.event_types, description=body.description, run=run
        )
        return Response(WebhookWithSecretSerializer(endpoint).data, status=201)


class _OfEndpoint(ApiView):
    """A view of one endpoint."""

    def endpoint(self, id_: UUID) -> WebhookEndpoint:
        return find(endpoints_of([self.project]), id_)


class WebhookDetail(_OfEndpoint):
    writes_need = Scope.ADMIN

    @documented("get_webhook", "A webhook endpoint", WebhookSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        return Response(WebhookSerializer(self.endpoint(id)).data)

    @documented("change_webhook", "Change, disable or enable a webhook endpoint", WebhookSerializer, body=WebhookChange)
    def patch(self, request: Request, id: UUID) -> Response:
        endpoint = self.endpoint(id)
        changed = webhooks.change_endpoint(endpoint=endpoint, **self.body(WebhookChange).model_dump(exclude_unset=True))
        return Response(WebhookSerializer(changed).data)

    @documented("remove_webhook", "Forget a webhook endpoint and what was sent to it", None, status=204)
    def delete(self, request: Request, id: UUID) -> Response:
        webhooks.remove_endpoint(endpoint=self.endpoint(id))
        return Response(status=204)


class WebhookRotate(_OfEndpoint):
    writes_need = Scope.ADMIN

    @documented(
        "rotate_webhook_secret",
        "A new secret; the old one also signs for a while",
        WebhookWithSecretSerializer,
        body=SecretRotation,
    )
    def post(self, request: Request, id: UUID) -> Response:
        endpoint = self.endpoint(id)
        overlap = timedelta(hours=self.body(SecretRotation).overlap_hours)
        return Response(WebhookWithSecretSerializer(webhooks.rotate_secret(endpoint=endpoint, overlap=overlap)).data)


class WebhookReplay(_OfEndpoint):
    @documented("replay_webhook", "Send everything again that failed since a moment", ReplayedSerializer, body=Replay)
    def post(self, request: Request, id: UUID) -> Response:
        endpoint = self.endpoint(id)
        return Response({"replayed": webhooks.replay_failed(endpoint=endpoint, since=self.body(Replay).since)})


class DeliveryList(ListView, _OfEndpoint):
    query_model = DeliveryQuery

    @documented(
        "list_webhook_deliveries",
        "Messages of an endpoint with their attempts, newest first",
        page_of(WebhookDeliverySerializer),
        query=DeliveryQuery,
    )
    def get(self, request: Request, id: UUID) -> Response:
        deliveries = deliveries_of(self.endpoint(id), self.query.state)
        return self.page(deliveries, lambda rows: WebhookDeliverySerializer(rows, many=True).data)


class DeliveryDetail(_OfEndpoint):
    @documented("get_webhook_delivery", "A message with its attempts", WebhookDeliverySerializer)
    def get(self, request: Request, id: UUID, delivery: UUID) -> Response:
        return Response(WebhookDeliverySerializer(find(deliveries_of(self.endpoint(id)), delivery)).data)


class DeliveryReplay(_OfEndpoint):
    @documented("replay_webhook_delivery", "Send a message again, under the same id", WebhookDeliverySerializer)
    def post(self, request: Request, id: UUID, delivery: UUID) -> Response:
        deliveries = deliveries_of(self.endpoint(id))
        webhooks.replay(delivery=find(deliveries, delivery))
        return Response(WebhookDeliverySerializer(find(deliveries, delivery)).data)

"""Webhooks on the dashboard and in the admin."""

from __future__ import annotations

import datetime as dt

import pytest
from django.test import Client
from django.utils import timezone

from rollouts.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from rollouts.services.webhooks import create_endpoint
from tests.integration.web_case import WebWorld


@pytest.fixture
def world(db: None) -> WebWorld:
    return WebWorld()


@pytest.fixture
def endpoint(world: WebWorld) -> WebhookEndpoint:
    """With a message that was delivered and one that was given up."""
    endpoint = create_endpoint(project=world.project, url="http://trainer:9000/hook", event_types=["rollout.finished"])
    for state, error in (("delivered", ""), ("failed", "no <b>answer</b>")):
        delivery = WebhookDelivery.objects.create(
            endpoint=endpoint, event_type="rollout.finished", event_key=state, payload={"type": "rollout.finished"}, state=state
        )
        WebhookAttempt.objects.create(delivery=delivery, duration=0.5, status=None if error else 200, error=error)
    return endpoint


def visitor(world: WebWorld, name: str) -> Client:
    client = Client()
    client.force_login({"maria": world.owner, "sam": world.stranger}[name])
    return client


def test_pages_show_endpoints_messages_and_attempts_but_no_secret(world: WebWorld, endpoint: WebhookEndpoint) -> None:
    maria = visitor(world, "maria")
    listing = maria.get("/webhooks/").content.decode()
    page = maria.get(f"/webhooks/{endpoint.pk}/").content.decode()
    assert "trainer:9000" in listing
    assert "no &lt;b&gt;answer" in page
    for text in (listing, page):
        assert endpoint.secret not in text
    failed = maria.get(f"/webhooks/{endpoint.pk}/?state=failed").content.decode()
    assert failed.count('<td class="main-cell">') == 1


def test_a_project_without_webhooks_says_how_to_make_one(world: WebWorld) -> None:
    assert "POST /api/v1/webhooks/" in visitor(world, "maria").get("/webhooks/").content.decode()


def test_strangers_find_nothing(world: WebWorld, endpoint: WebhookEndpoint) -> None:
    sam = visitor(world, "sam")
    delivery = endpoint.deliveries.get(state="failed")
    assert "trainer" not in sam.get("/webhooks/").content.decode()
    for path in ("", f"deliveries/{delivery.pk}/replay/", "replay/"):
        request = sam.post if path else sam.get
        assert request(f"/webhooks/{endpoint.pk}/{path}").status_code == 404
        assert Client().get(f"/webhooks/{endpoint.pk}/{path}").status_code in (302, 405)
    delivery.refresh_from_db()
    assert delivery.state == "failed"


def test_messages_are_sent_again_by_a_button(world: WebWorld, endpoint: WebhookEndpoint) -> None:
    maria = visitor(world, "maria")
    delivered = endpoint.deliveries.get(state="delivered")
    maria.post(f"/webhooks/{endpoint.pk}/deliveries/{delivered.pk}/replay/")
    delivered.refresh_from_db()
    assert delivered.state == "pending"
    answer = maria.post(f"/webhooks/{endpoint.pk}/replay/", follow=True)
    assert "1 message will be sent again." in answer.content.decode()
    assert not endpoint.deliveries.exclude(state="pending").exists()


def test_messages_of_long_ago_are_left_alone(world: WebWorld, endpoint: WebhookEndpoint) -> None:
    endpoint.deliveries.update(created_at=timezone.now() - dt.timedelta(days=30))
    visitor(world, "maria").post(f"/webhooks/{endpoint.pk}/replay/")
    assert endpoint.deliveries.filter(state="failed").exists()


def test_the_admin_makes_an_endpoint_and_shows_its_secret_once(world: WebWorld, admin_client: Client) -> None:
    path = "/admin/rollouts/webhookendpoint/"
    form = {"project": str(world.project.pk), "run": "", "url": "http://169.254.169.254/", "description": "x"}
    refused = admin_client.post(f"{path}add/", {**form, "event_types": ["run.finished"]})
    assert "url" in refused.context["adminform"].form.errors
    made = admin_client.post(f"{path}add/", {**form, "url": "http://t/", "event_types": ["run.finished"]}, follow=True)
    endpoint = WebhookEndpoint.objects.get()
    assert endpoint.secret in made.content.decode().replace("&#x3D;", "=")
    for page in (path, f"{path}{endpoint.pk}/change/"):
        assert endpoint.secret not in admin_client.get(page).content.decode()

    def act(action: str) -> str:
        answer = admin_client.post(path, {"action": action, "_selected_action": [str(endpoint.pk)]}, follow=True)
        endpoint.refresh_from_db()
        return answer.content.decode()

    act("disable")
    assert endpoint.disabled_at is not None
    act("enable")
    assert endpoint.disabled_at is None
    old = endpoint.secret
    assert "The secret of http://t/" in act("rotate")
    assert endpoint.secret != old
    assert endpoint.old_secret == old

"""Webhooks: who may make them, what they are told, how often, and what happens when a receiver does not answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from standardwebhooks import Webhook

from rollouts.lifecycle import State
from rollouts.management.commands.deliver import Deliverer
from rollouts.models import FeedCursor, Rollout, Run, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.delivery import endpoints_with_work, note_answer, take_due
from rollouts.services.delivery_events import record_events
from rollouts.services.delivery_http import Answer, Poster, refusal_of
from rollouts.worker.database import Database
from tests.integration.api_case import ApiCase, expect_problem

# The feed looks at all transactions of the database cluster, so rows of an open test transaction would never be seen.
pytestmark = pytest.mark.django_db(transaction=True)

WEBHOOKS = "/api/v1/webhooks/"
OK = Answer(200, "", "thanks", 0.1)
DOWN = Answer(503, "", "not now", 0.1)


class Receiver(ThreadingHTTPServer):
    """Keeps what it was sent; answers with `statuses`, the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.statuses = [200]
        self.location = ""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((dict(self.headers), body))
                status = receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
                self.send_response(status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()
                self.wfile.write(b"x" * 5000)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook"
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.shutdown()


@pytest.fixture
def case(transactional_db: None) -> ApiCase:
    return ApiCase()


def create(case: ApiCase, url: str = "https://hooks.example/x", **body: Any) -> dict[str, Any]:
    answer = case.owner.post(WEBHOOKS, {"url": url, "event_types": ["rollout.finished"], **body})
    assert answer.status_code == 201, answer.content
    return answer.json()  # type: ignore[no-any-return]


def cancel(rollout: Rollout) -> None:
    cancel_rollouts(project=rollout.project, rollout_id=rollout.id)


def record_all() -> None:
    """Until the feed has got to every finished rollout: other tests' transactions on this server hold it back."""
    newest = Rollout.objects.exclude(finished_xid=None).order_by("-finished_xid", "-id").first()
    assert newest is not None
    for _ in range(3000):
        record_events()
        if FeedCursor.objects.filter(consumer="webhooks", xid=newest.finished_xid, rollout_id=newest.id).exists():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the feed did not get there")


def keys() -> list[str]:
    return list(WebhookDelivery.objects.order_by("id").values_list("event_key", flat=True))


def attempt(endpoint: WebhookEndpoint, answer: Answer) -> None:
    """Make what is due, and nothing else, come to `answer`."""
    for sending in take_due(endpoint_id=endpoint.id, limit=100):
        note_answer(sending=sending, answer=answer)


def make_due() -> None:
    WebhookDelivery.objects.update(next_attempt_at=timezone.now())


# --- Endpoints ---------------------------------------------------------------------------------------------------------------


def test_the_secret_is_shown_once(case: ApiCase) -> None:
    made = create(case, description="to the trainer")
    assert made["secret"].startswith("whsec_")
    assert made["enabled"] is True
    path = f"{WEBHOOKS}{made['id']}/"
    plain = case.check_read_access(path)
    assert {**plain, "secret": made["secret"]} == made
    assert made["secret"] not in case.owner.get(WEBHOOKS).content.decode()


def test_who_may_write(case: ApiCase) -> None:
    body = {"url": "https://hooks.example/x", "event_types": ["rollout.finished"]}
    case.check_list_access(WEBHOOKS)
    case.check_write_access("post", WEBHOOKS, body, needs="admin", own=False)
    path = f"{WEBHOOKS}{create(case)['id']}/"
    case.check_write_access("patch", path, {"enabled": False}, needs="admin")
    case.check_write_access("delete", path, needs="admin")
    case.check_write_access("post", f"{path}rotate/", {}, needs="admin")
    case.check_write_access("post", f"{path}replay/", {"since": "2026-01-01T00:00:00Z"})
    case.check_read_access(f"{path}deliveries/")
    assert WebhookEndpoint.objects.filter(disabled_at=None).count() == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hooks.example/",
        "hooks.example",
        "http://",
        "http://user:secret@hooks.example/",
        "https://hooks.example/#here",
        "http://hooks.example:99999/",
        "http://hooks.example/a b",
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://0.0.0.0/",
        "http://224.0.0.1/",
    ],
)
def test_urls_that_cannot_be(case: ApiCase, url: str) -> None:
    body = {"url": url, "event_types": ["rollout.finished"]}
    expect_problem(case.owner.post(WEBHOOKS, body), 422, "invalid", "/url")
    assert not WebhookEndpoint.objects.exists()


def test_everything_wrong_is_named_at_once(case: ApiCase) -> None:
    body = {"url": "nowhere", "event_types": ["rollout.started"]}
    expect_problem(case.owner.post(WEBHOOKS, body), 422, "invalid", "/url", "/event_types")
    expect_problem(case.owner.post(WEBHOOKS, {"urll": "x"}), 422, "invalid", "/urll", "/url", "/event_types")
    strange = {"url": "https://hooks.example/x", "event_types": ["rollout.finished"], "run": str(case.other.run.id)}
    expect_problem(case.owner.post(WEBHOOKS, strange), 422, "invalid", "/run")


@pytest.mark.parametrize(
    ("host", "anywhere", "public_only"),
    [
        ("hooks.example", True, True),  # judged when it is resolved
        ("93.184.216.34", True, True),
        ("10.0.0.7", True, False),
        ("127.0.0.1", True, False),
        ("fd12::1", True, False),
        ("169.254.169.254", False, False),
        ("100.100.100.200", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:a9fe:a9fe::1", False, False),
        ("fd00:ec2::254", False, False),
    ],
)
def test_addresses(host: str, anywhere: bool, public_only: bool) -> None:
    assert (refusal_of(host, allow_private=True) == "") is anywhere
    assert (refusal_of(host, allow_private=False) == "") is public_only


def test_change_disable_and_enable(case: ApiCase) -> None:
    path = f"{WEBHOOKS}{create(case)['id']}/"
    changed = case.owner.patch(path, {"url": "https://other.example/", "event_types": ["run.finished", "group.finished"]})
    assert changed.json()["event_types"] == ["group.finished", "run.finished"]
    assert case.owner.patch(path, {"enabled": False}).json()["disabled_reason"] == "by hand"
    cancel(case.domain.submit()[0])
    record_all()
    assert keys() == []
    assert case.owner.patch(path, {"enabled": True}).json()["enabled"] is True
    expect_problem(case.owner.patch(path, {"url": ""}), 422, "invalid", "/url")
    assert case.owner.delete(path).status_code == 204
    expect_problem(case.owner.get(path), 404, "not_found")


# --- What is told ------------------------------------------------------------------------------------------------------------


def test_each_event_is_told_once(case: ApiCase) -> None:
    create(case, event_types=["rollout.finished", "group.finished", "run.finished"])
    first, second = case.domain.submit(n=2)
    run = case.domain.run
    cancel(first)
    record_all()
    assert keys() == [f"rollout.finished:{first.id}"]
    cancel(second)
    record_all()
    record_events()
    assert sorted(keys()) == sorted(
        [
            f"rollout.finished:{first.id}",
            f"rollout.finished:{second.id}",
            f"group.finished:{first.group_id}",
            f"run.finished:{run.id}:2",
        ]
    )
    cancel(case.domain.submit()[0])  # the run goes on, and is finished once more
    record_all()
    assert f"run.finished:{run.id}:3" in keys()


def test_only_what_an_endpoint_asked_for(case: ApiCase) -> None:
    other_run = case.domain.new_run()
    create(case, run=str(other_run.id))
    create(case, event_types=["group.finished"])
    case.stranger.post(WEBHOOKS, {"url": "https://stranger.example/", "event_types": ["rollout.finished"]})
    [here] = case.domain.submit()
    [there] = case.domain.submit(run=other_run)
    cancel(here)
    cancel(there)
    record_all()
    assert sorted(keys()) == sorted(
        [f"rollout.finished:{there.id}", f"group.finished:{here.group_id}", f"group.finished:{there.group_id}"]
    )


def test_a_message_says_what_happened_and_carries_no_tokens(case: ApiCase) -> None:
    made = create(case, event_types=["rollout.finished", "group.finished"])
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    record_all()
    deliveries = case.owner.get(f"{WEBHOOKS}{made['id']}/deliveries/").json()["results"]
    payloads = {delivery["event_type"]: delivery["payload"] for delivery in deliveries}
    message, group = payloads["rollout.finished"], payloads["group.finished"]
    assert (message["type"], group["type"]) == ("rollout.finished", "group.finished")
    assert set(message["data"]) == {
        *("rollout", "group", "run", "task", "index", "state", "cause", "blame", "reward", "trainable", "finished_at", "links")
    }
    assert (message["data"]["rollout"], message["data"]["state"]) == (str(rollout.id), "succeeded")
    assert case.owner.get(message["data"]["links"]["trajectory"]).status_code == 200
    assert group["data"]["counts"] == {"succeeded": 1}
    assert len(json.dumps(message)) < 1000


def test_a_budget_that_ran_out_is_told_once(case: ApiCase) -> None:
    create(case, event_types=["run.budget_exhausted"])
    Run.objects.filter(id=case.domain.run.id).update(exhausted_at=timezone.now(), exhausted_by="tokens")
    record_events()
    record_events()
    [delivery] = WebhookDelivery.objects.all()
    assert delivery.payload["data"]["exhausted_by"] == "tokens"


def test_concurrent_feeds_write_each_message_once(case: ApiCase) -> None:
    create(case, event_types=["rollout.finished", "group.finished", "run.finished"])
    case.domain.submit(n=20)
    cancel_rollouts(project=case.domain.project, run_id=case.domain.run.id)

    def work() -> None:
        try:
            record_all()
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys()) == len(set(keys())) == 22


# --- Attempts ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint(case: ApiCase) -> WebhookEndpoint:
    """With one message to send."""
    made = create(case)
    cancel(case.domain.submit()[0])
    record_all()
    return WebhookEndpoint.objects.get(id=made["id"])


def test_success(endpoint: WebhookEndpoint) -> None:
    attempt(endpoint, OK)
    delivery = endpoint.deliveries.get()
    assert (delivery.state, delivery.tries) == ("delivered", 1)
    assert endpoints_with_work() == []


def test_failures_are_repeated_ever_later_and_given_up(endpoint: WebhookEndpoint, settings: Any) -> None:
    settings.WEBHOOK_RETRY_SECONDS = [10, 100]
    for pause in (10, 100):
        attempt(endpoint, DOWN)
        delivery = endpoint.deliveries.get()
        assert delivery.state == "pending"
        assert 0.75 * pause < (delivery.next_attempt_at - timezone.now()).total_seconds() < 1.25 * pause
        assert take_due(endpoint_id=endpoint.id, limit=9) == []
        make_due()
    attempt(endpoint, DOWN)
    delivery.refresh_from_db()
    assert (delivery.state, delivery.tries, delivery.attempts.count()) == ("failed", 3, 3)
    endpoint.refresh_from_db()
    assert endpoint.failing_since is not None
    assert endpoint.disabled_at is None


def test_gone_disables(endpoint: WebhookEndpoint) -> None:
    attempt(endpoint, Answer(410, "", "", 0.1))
    endpoint.refresh_from_db()
    assert endpoint.disabled_reason == "the receiver answered 410 Gone"
    assert endpoint.deliveries.get().state == "failed"


def test_long_failure_disables_and_success_forgives(endpoint: WebhookEndpoint, settings: Any) -> None:
    attempt(endpoint, DOWN)
    WebhookEndpoint.objects.update(failing_since=timezone.now() - timedelta(days=settings.WEBHOOK_DISABLE_DAYS + 1))
    make_due()
    attempt(endpoint, DOWN)
    endpoint.refresh_from_db()
    assert endpoint.disabled_at is not None
    make_due()
    assert take_due(endpoint_id=endpoint.id, limit=9) == []
    WebhookEndpoint.objects.update(disabled_at=None)
    attempt(endpoint, OK)
    endpoint.refresh_from_db()
    assert endpoint.failing_since is None


def test_what_was_taken_is_not_taken_twice_and_comes_back_when_its_sender_dies(endpoint: WebhookEndpoint) -> None:
    [sending] = take_due(endpoint_id=endpoint.id, limit=9)
    assert take_due(endpoint_id=endpoint.id, limit=9) == []
    make_due()  # as the time of a killed sender runs out
    [again] = take_due(endpoint_id=endpoint.id, limit=9)
    assert again.message_id == sending.message_id
    note_answer(sending=sending, answer=DOWN)  # of the late one only the attempt is kept
    assert endpoint.deliveries.get().next_attempt_at > timezone.now() + timedelta(seconds=25)
    note_answer(sending=again, answer=OK)
    assert endpoint.deliveries.get().state == "delivered"
    assert WebhookAttempt.objects.count() == 2


def test_an_answer_after_the_endpoint_was_removed_is_harmless(endpoint: WebhookEndpoint) -> None:
    [sending] = take_due(endpoint_id=endpoint.id, limit=9)
    endpoint.delete()
    note_answer(sending=sending, answer=OK)
    assert not WebhookAttempt.objects.exists()


def test_replay_of_one_and_of_all_that_failed(case: ApiCase, endpoint: WebhookEndpoint) -> None:
    attempt(endpoint, Answer(410, "", "", 0.1))
    WebhookEndpoint.objects.update(disabled_at=None)
    delivery = endpoint.deliveries.get()
    path = f"{WEBHOOKS}{endpoint.id}/deliveries/{delivery.id}/"
    case.check_read_access(path)
    case.check_write_access("post", f"{path}replay/", {})
    replayed = case.submitter.post(f"{path}replay/", {}).json()
    assert (replayed["state"], replayed["message_id"], len(replayed["attempts"])) == ("pending", delivery.message_id, 1)
    assert case.submitter.post(f"{path}replay/", {}).status_code == 200
    attempt(endpoint, OK)
    assert case.owner.get(f"{WEBHOOKS}{endpoint.id}/deliveries/", {"state": "failed"}).json()["results"] == []

    WebhookDelivery.objects.update(state="failed")
    all_path = f"{WEBHOOKS}{endpoint.id}/replay/"
    late, early = (timezone.now() + timedelta(minutes=1)).isoformat(), "2026-01-01T00:00:00Z"
    assert case.submitter.post(all_path, {"since": late}).json() == {"replayed": 0}
    assert case.submitter.post(all_path, {"since": early}).json() == {"replayed": 1}
    for wrong in ({"since": "2026-01-01T00:00:00"}, {"since": "yesterday"}, {}):
        expect_problem(case.submitter.post(all_path, wrong), 422, "invalid", "/since")


# --- Over the wire -----------------------------------------------------------------------------------------------------------


async def post(url: str, secrets: list[str], *, allow_private: bool = True, timeout: float = 15.0) -> Answer:
    async with Poster(allow_private=allow_private, timeout=timeout) as poster:
        return await poster.post(url, message_id="msg_1", body='{"a":1}', secrets=secrets)


def test_signatures_verify_with_the_new_and_the_old_secret(case: ApiCase, receiver: Receiver) -> None:
    made = create(case, receiver.url)
    cancel(case.domain.submit()[0])
    record_all()
    rotated = case.owner.post(f"{WEBHOOKS}{made['id']}/rotate/", {"overlap_hours": 1}).json()
    assert rotated["secret"] != made["secret"]
    [sending] = take_due(endpoint_id=made["id"], limit=9)
    assert asyncio.run(post(sending.url, sending.secrets)).ok
    headers, body = receiver.got[0]
    for secret in (made["secret"], rotated["secret"]):
        assert Webhook(secret).verify(body, headers) == {"a": 1}
    make_due()
    case.owner.post(f"{WEBHOOKS}{made['id']}/rotate/", {"overlap_hours": 0})
    [sending] = take_due(endpoint_id=made["id"], limit=9)
    assert len(sending.secrets) == 1


def test_redirects_are_not_followed_and_bodies_are_cut(receiver: Receiver) -> None:
    receiver.statuses, receiver.location = [302], receiver.url
    answer = asyncio.run(post(receiver.url, ["whsec_AAAA"]))
    assert (answer.status, answer.ok, len(answer.body), len(receiver.got)) == (302, False, 1000, 1)


def test_names_are_judged_by_what_they_resolve_to(receiver: Receiver) -> None:
    port = receiver.server_address[1]
    for host in ("localhost", "127.0.0.1"):
        answer = asyncio.run(post(f"http://{host}:{port}/", ["whsec_AAAA"], allow_private=False))
        assert (answer.status, "public addresses only" in answer.error) == (None, True), answer
    assert receiver.got == []


def test_no_answer_is_an_answer_too(receiver: Receiver) -> None:
    nobody = asyncio.run(post("http://127.0.0.1:1/", ["whsec_AAAA"]))
    assert (nobody.status, nobody.ok, bool(nobody.error)) == (None, False, True)


def test_the_sender_retries_until_it_is_told_to_stop(case: ApiCase, receiver: Receiver, settings: Any) -> None:
    settings.WEBHOOK_RETRY_SECONDS, settings.WEBHOOK_POLL_SECONDS = [0.05, 0.05, 0.05], 0.05
    receiver.statuses = [500, 302, 200]
    endpoint = WebhookEndpoint.objects.get(id=create(case, receiver.url)["id"])
    cancel(case.domain.submit()[0])

    async def until_delivered() -> None:
        deliverer = Deliverer()
        running = asyncio.create_task(deliverer.run())
        database = Database(patience=1)
        async with asyncio.timeout(60):
            while not await database.call(endpoint.deliveries.filter(state="delivered").exists):
                await asyncio.sleep(0.02)
        database.close()
        deliverer.stop()
        await running

    asyncio.run(until_delivered())
    assert [status for (status,) in WebhookAttempt.objects.order_by("id").values_list("status")] == [500, 302, 200]
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({body for _, body in receiver.got}) == 1

"""Delivery by all three ways while the processes that deliver are killed: nothing is lost, nothing comes twice as new."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from rollouts.client import Client, unpack
from tests.acceptance.platform import Platform, running_platform, submit

ROLLOUTS = 48
_KEY = """
import json
from rollouts.models import Project
from rollouts.services.keys import issue_key
project, _ = Project.objects.get_or_create(name="alpha")
print(json.dumps(issue_key(project=project, name="trainer", scopes=["admin"]).secret))
"""


class Receiver(ThreadingHTTPServer):
    """Fails every third time."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.got.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(500 if len(receiver.got) % 3 == 0 else 204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    settings = {"webhook_retry_seconds": "0.2,0.2,0.2,0.2,0.2,0.2,0.2,0.2,0.2,0.2", "webhook_poll_seconds": 0.1}
    with running_platform(tmp_path_factory.mktemp("platform") / "var", **settings) as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.shutdown()


def finished(platform: Platform) -> int:
    return int(platform.value("SELECT count(*) FROM rollouts_rollout WHERE finished_at IS NOT NULL"))


def test_everything_that_ends_is_told_whatever_is_killed(platform: Platform, slow_model: str, receiver: Receiver) -> None:
    key = platform.shell(_KEY)
    url = platform.start_web()
    platform.spawn("webhooks", "django", "deliver")
    hook = httpx.post(
        f"{url}/api/v1/webhooks/",
        json={
            "url": f"http://127.0.0.1:{receiver.server_address[1]}/",
            "event_types": ["rollout.finished", "group.finished", "run.finished"],
        },
        headers={"Authorization": f"Bearer {key}"},
    ).json()
    platform.start_execution(concurrency=8)
    groups = [{"n": 4, "environment": "sums", "payload": {"a": i, "b": 1}} for i in range(ROLLOUTS // 4)]
    run_id = submit(platform, slow_model, groups)
    first = str(platform.value("SELECT id FROM rollouts_rollout ORDER BY id DESC LIMIT 1"))

    pulled: list[str] = []
    told: list[str] = []

    def pull() -> None:
        with Client(url, key, patience=120) as client:
            for result in client.iter_results(run_id, include="segments", limit=5, wait=5):
                assert all(len(unpack(segment).token_ids) for segment in result["segments"])
                pulled.append(result["id"])

    def follow() -> None:
        with Client(url, key, patience=120) as client:
            told.extend(event.data.get("to_state", event.name) for event in client.iter_events(first))

    threads = [threading.Thread(target=work) for work in (pull, follow)]
    for thread in threads:
        thread.start()
    for part in (1, 2, 3):
        platform.wait_for(lambda enough=part * ROLLOUTS // 4: finished(platform) >= enough, "some rollouts to end")
        platform.kill("web")
        platform.kill("webhooks")
        platform.spawn("webhooks", "django", "deliver")
        platform.start_web()
    platform.wait_until_all_finished()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), platform.tails()

    ids = [str(row["id"]) for row in platform.rows("SELECT id FROM rollouts_rollout")]
    assert sorted(pulled) == sorted(ids)  # each exactly once
    assert told == ["queued", "initializing", "ready", "running", "turn", *told[5:-3], "succeeded", "reward", "end"]

    pending = "SELECT count(*) = 0 FROM rollouts_webhookdelivery WHERE state = 'pending'"
    recorded = "SELECT count(*) FROM rollouts_webhookdelivery"
    expected = ROLLOUTS + len(groups) + 1
    platform.wait_for(lambda: platform.value(recorded) >= expected and platform.value(pending), "the webhooks to be delivered")
    messages: dict[str, set[str]] = defaultdict(set)
    for headers, body in receiver.got:
        Webhook(hook["secret"]).verify(body, headers)
        message = json.loads(body)
        subject = message["data"]["rollout" if message["type"] == "rollout.finished" else message["type"].partition(".")[0]]
        messages[f"{message['type']} {subject}"].add(headers["webhook-id"])
    assert Counter(name.split()[0] for name in messages) == {
        "rollout.finished": ROLLOUTS,
        "group.finished": len(groups),
        "run.finished": 1,
    }
    assert {len(ids_of_one_event) for ids_of_one_event in messages.values()} == {1}

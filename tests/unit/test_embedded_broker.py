"""The file broker under the load that breaks kombu's own: fast pollers reading while a producer writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from queue import Empty

import pytest
from kombu import Connection

from prorl_site.embedded.broker import filesystem_broker_settings

MESSAGES = 2000

CONSUMER = """
import sys
from pathlib import Path
from kombu import Connection
from prorl_site.embedded.broker import filesystem_broker_settings

url = filesystem_broker_settings(Path(sys.argv[1]))["broker_url"]
with Connection(url, transport_options={"polling_interval": 0.0005}) as connection:
    queue = connection.SimpleQueue("hints")
    while True:
        message = queue.get()
        message.ack()
        if message.payload == "end":
            break
        print(message.payload["number"], len(message.payload["padding"]))
    queue.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bröker %41"


@pytest.fixture
def connection(folder: Path):
    with Connection(filesystem_broker_settings(folder)["broker_url"]) as connection:
        yield connection


def test_racing_consumers_get_every_message_once_and_whole(folder, connection):
    command = [sys.executable, "-c", CONSUMER, str(folder)]
    consumers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    queue = connection.SimpleQueue("hints")
    padding = "x" * 20_000  # several pages, so that a write in place would be seen half done
    for number in range(MESSAGES):
        queue.put({"number": number, "padding": padding})
    for _ in consumers:
        queue.put("end")
    outputs = [consumer.communicate(timeout=120)[0].splitlines() for consumer in consumers]
    queue.close()

    assert [consumer.returncode for consumer in consumers] == [0, 0, 0]
    received = sorted(tuple(map(int, line.split())) for lines in outputs for line in lines)
    assert received == [(number, len(padding)) for number in range(MESSAGES)]
    assert all(outputs), "every consumer had its part"


def test_messages_keep_their_order_and_survive_the_producer(folder, connection):
    with Connection(filesystem_broker_settings(folder)["broker_url"]) as producer:
        queue = producer.SimpleQueue("rollouts.run.gpu-node_1.cluster")
        for number in range(20):
            queue.put(number)
        queue.close()

    queue = connection.SimpleQueue("rollouts.run.gpu-node_1.cluster")
    assert [queue.get(timeout=1).payload for _ in range(20)] == list(range(20))
    with pytest.raises(Empty):
        queue.get(block=False)
    queue.close()


def test_unacknowledged_messages_return_when_a_consumer_leaves(folder, connection):
    queue = connection.SimpleQueue("hints")
    queue.put("once more")
    with Connection(filesystem_broker_settings(folder)["broker_url"]) as leaving:
        taken = leaving.SimpleQueue("hints")
        assert taken.get(timeout=1).payload == "once more"
        taken.close()

    again = queue.get(timeout=1)
    again.ack()
    assert again.payload == "once more"
    queue.close()


@pytest.mark.parametrize("name", ["../../escape", "..", "a/b", "ümlaut"])
def test_no_queue_name_leads_out_of_the_folder(folder, connection, name):
    queue = connection.SimpleQueue(name)
    queue.put("here")

    assert [path.is_relative_to(folder) for path in folder.parent.rglob("*.message")] == [True]
    assert queue.get(timeout=1).payload == "here"
    queue.close()


def test_other_users_cannot_read_the_messages(folder, connection):
    assert folder.stat().st_mode & 0o077 == 0


def test_purge_counts_what_it_removes(connection):
    queue = connection.SimpleQueue("hints")
    for number in range(3):
        queue.put(number)

    assert queue.qsize() == 3
    assert queue.clear() == 3
    assert queue.qsize() == 0
    queue.close()

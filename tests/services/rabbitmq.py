"""A real RabbitMQ of this test run: own ports, own folder, as whatever user runs the tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kombu import Connection

from prorl_site.embedded.processes import LeashedProcess, free_port, port_answers, wait_until

# The wrapper in /usr/sbin refuses users other than root and rabbitmq; the program itself does not.
PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_START_SECONDS = 90.0
_CONFIG = """
consumer_timeout = 86400000
loopback_users = none
"""


class RabbitMQ:
    """Started on construction; killed, with everything it started, by `stop`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        port, distribution_port, epmd_port = free_port(), free_port(), free_port()
        (folder / "rabbitmq.conf").write_text(_CONFIG)
        (folder / "plugins").write_text("[].\n")
        env = {
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"test{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        }
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        # Erlang's name server would be left behind, detached, if RabbitMQ had to start it and then ended by itself.
        names = ["epmd", "-port", str(epmd_port), "-address", "127.0.0.1"]
        self._name_server = LeashedProcess(names, log=folder / "epmd.log")
        wait_until(lambda: port_answers(epmd_port), timeout=_START_SECONDS)
        self.process = LeashedProcess([PROGRAM], log=folder / "rabbitmq.log", env=env)
        if not wait_until(lambda: self.process.poll() is not None or self._answers(), timeout=_START_SECONDS, interval=0.2):
            self.stop()
            raise TimeoutError(f"RabbitMQ did not start within {_START_SECONDS:.0f} s:\n{self.process.log_tail()}")
        if self.process.poll() is not None:
            self.stop()
            raise RuntimeError(f"RabbitMQ ended:\n{self.process.log_tail()}")

    def _answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=2) as connection:
                connection.connect()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self._name_server.kill()


def why_missing() -> str:
    """What keeps RabbitMQ from being used, or an empty string."""
    if not PROGRAM.exists():
        return "RabbitMQ is not installed (Debian package rabbitmq-server)"
    if not shutil.which("erl") and not os.environ.get("ERLANG_HOME"):
        return "Erlang is not installed"
    return ""

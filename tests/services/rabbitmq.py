"""A real RabbitMQ of this test run: own ports, own folder, as whatever user runs the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kombu import Connection

from prorl_site.embedded.processes import LeashedProcess, free_port, port_answers, wait_until
from tests.services.ports import lasting_port

# The wrappers in /usr/sbin refuse users other than root and rabbitmq; the programs themselves do not.
PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
CONTROL = Path("/usr/lib/rabbitmq/bin/rabbitmqctl")
_START_SECONDS = 90.0
_CONTROL_SECONDS = 60.0
_CONFIG = """
consumer_timeout = 86400000
loopback_users = none
"""


class RabbitMQ:
    """Started on construction; killed, with everything it started, by `stop`. `crash` and `start` keep queues and address."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        port, distribution_port, epmd_port = lasting_port(), lasting_port(), free_port()
        (folder / "rabbitmq.conf").write_text(_CONFIG)
        (folder / "plugins").write_text("[].\n")
        self._folder = folder
        self._env = {
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
        self.start()

    def start(self) -> None:
        """Also after `crash`; returns when it accepts connections."""
        self.process = LeashedProcess([PROGRAM], log=self._folder / "rabbitmq.log", env=self._env)
        if not wait_until(lambda: self.process.poll() is not None or self._answers(), timeout=_START_SECONDS, interval=0.2):
            self.stop()
            raise TimeoutError(f"RabbitMQ did not start within {_START_SECONDS:.0f} s:\n{self.process.log_tail()}")
        if self.process.poll() is not None:
            self.stop()
            raise RuntimeError(f"RabbitMQ ended:\n{self.process.log_tail()}")

    def crash(self) -> None:
        """SIGKILL; its messages and queues stay on disk."""
        self.process.kill()

    def close_connections(self) -> None:
        """Hang up on every client, as an operator or a failing network does."""
        subprocess.run(
            [CONTROL, "close_all_connections", "closed by a test"],
            env={**os.environ, **self._env},
            capture_output=True,
            timeout=_CONTROL_SECONDS,
            check=True,
        )

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

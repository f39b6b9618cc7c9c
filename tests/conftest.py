"""A PostgreSQL for each of the parallel test processes, and what they share.

One for all would tie them together: results are delivered, and finished rollouts counted, once no transaction that is open
anywhere in the cluster can come before them, and every test of another process may hold one.

The environment is set here before anything imports the settings; that is why nothing of ours is imported at the top.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import django
import pytest

from tests.services import rabbitmq
from tests.services.lender import borrow

_SHARED = "PRORL_TEST_DIR"  # a directory for what the parallel test processes share; the first process makes it

_postgres = None
_lender = None


def _begin() -> None:
    """Make the environment of a fresh machine. A developer's own settings must not leak into tests."""
    global _lender
    from tests.services.lender import Lender

    for name in [name for name in os.environ if name.startswith("PRORL_") and name != "PRORL_FAIL_ON_SKIP"]:
        del os.environ[name]
    shared = Path(tempfile.mkdtemp(prefix="prorl-test-"))
    os.environ |= {
        _SHARED: str(shared),
        "PRORL_SECRET_KEY": "tests only",
        "PRORL_VAR_DIR": str(shared / "var"),
        "PRORL_DB_POOL_SIZE": "0",
        "PRORL_NODE": "test-node",
    }
    _lender = Lender(shared)


def _name_the_database() -> None:
    """The settings need its address now; it is started when it is known whether this process runs tests."""
    global _postgres
    from prorl_site.embedded.postgres import EmbeddedPostgres

    folder = Path(os.environ[_SHARED]) / os.environ.get("PYTEST_XDIST_WORKER", "main")
    _postgres = EmbeddedPostgres(folder / "postgres", durable=False)
    os.environ |= {"PRORL_DATABASE_URL": _postgres.url, "DJANGO_SETTINGS_MODULE": "prorl_site.settings"}


# While this file is imported, since the conftest files of the folders below import models, and those the settings.
if _SHARED not in os.environ:
    _begin()
_name_the_database()
django.setup()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):
        _postgres.start()
    else:  # This process only hands out tests. Those that run them would read the settings before they know their own database.
        del os.environ["DJANGO_SETTINGS_MODULE"]


def pytest_unconfigure(config: pytest.Config) -> None:
    _postgres.stop()
    if _lender is not None:
        _lender.close()
        shutil.rmtree(os.environ.pop(_SHARED), ignore_errors=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int):
    """With PRORL_FAIL_ON_SKIP=1 (CI) a skipped test fails the run: its reason is in the report above."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("PRORL_FAIL_ON_SKIP") == "1" and reporter and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """A directory that all parallel test processes of this run share."""
    return Path(os.environ[_SHARED])


@pytest.fixture(scope="session")
def rabbitmq_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real RabbitMQ of this test process alone: platforms that run at once must not take each other's hints."""
    if reason := rabbitmq.why_missing():
        pytest.skip(reason)
    server = rabbitmq.RabbitMQ(tmp_path_factory.mktemp("broker") / "rabbitmq")
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def vllm_url(shared_dir: Path) -> str:
    """A real vLLM that serves `tiny-chat`."""
    return borrow("vllm", shared_dir)

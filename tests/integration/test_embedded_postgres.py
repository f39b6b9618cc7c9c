"""The embedded database: keeps its data, survives kills and long paths, lets nobody else in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from prorl_site.embedded.postgres import LONGEST_SOCKET_PATH, EmbeddedPostgres, EmbeddedPostgresError
from prorl_site.embedded.processes import wait_until
from prorl_site.embedded.supervisor import Supervisor

OWNER = """
import sys, time
from pathlib import Path
from prorl_site.embedded.postgres import EmbeddedPostgres
print(EmbeddedPostgres(Path(sys.argv[1])).start(), flush=True)
time.sleep(60)
"""


def query(url: str, statement: str) -> list[tuple]:
    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def server_pid(data: Path) -> int:
    return int((data / "postmaster.pid").read_text().split("\n", 1)[0])


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory that was created and never started."""
    data = tmp_path_factory.mktemp("template") / "postgres"
    EmbeddedPostgres(data, durable=False).prepare()
    return data


@pytest.fixture
def data(tmp_path: Path, empty: Path) -> Path:
    shutil.copytree(empty, tmp_path / "postgres")
    return tmp_path / "postgres"


def test_data_is_found_again_by_the_next_start(tmp_path):
    data = tmp_path / "not yet there" / "postgres"
    with EmbeddedPostgres(data) as first:
        query(first.url, "CREATE TABLE note AS SELECT 'kept' AS text")
    with EmbeddedPostgres(data) as second:
        assert query(second.url, "SELECT text FROM note") == [("kept",)]
        assert query(second.url, "SELECT current_setting('max_connections'), current_setting('fsync')") == [("200", "on")]
    assert not (data / "postmaster.pid").exists()


def test_an_interrupted_creation_is_begun_anew(tmp_path):
    partial = tmp_path / "postgres.partial"
    partial.mkdir()
    (partial / "PG_VERSION").write_text("")

    with EmbeddedPostgres(tmp_path / "postgres", durable=False) as postgres:
        assert query(postgres.url, "SELECT 1") == [(1,)]
    assert not partial.exists()


def test_committed_data_survives_a_killed_owner_and_the_server_does_not(data):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(data)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    url = owner.stdout.readline().strip()
    query(url, "CREATE TABLE note AS SELECT 'committed' AS text")
    pid = server_pid(data)

    owner.kill()
    owner.communicate()

    with EmbeddedPostgres(data) as postgres:
        assert query(postgres.url, "SELECT text FROM note") == [("committed",)]
        assert server_pid(data) != pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_left_over_pid_that_now_belongs_to_another_program_does_not_matter(data):
    (data / "postmaster.pid").write_text(f"{os.getpid()}\n{data}\n0\n5432\n\n\n\nready\n")

    with EmbeddedPostgres(data, durable=False) as postgres:
        assert query(postgres.url, "SELECT 1") == [(1,)]


def test_a_server_that_runs_on_the_same_data_is_left_alone(data, monkeypatch):
    monkeypatch.setattr("prorl_site.embedded.postgres.PREDECESSOR_SECONDS", 0.1)
    with EmbeddedPostgres(data, durable=False) as first:
        with pytest.raises(EmbeddedPostgresError, match="already running on"):
            EmbeddedPostgres(data, durable=False).start()
        assert query(first.url, "SELECT 1") == [(1,)]


def test_two_projects_run_side_by_side(data, tmp_path, empty):
    shutil.copytree(empty, tmp_path / "other" / "postgres")
    with EmbeddedPostgres(data, durable=False) as one, EmbeddedPostgres(tmp_path / "other" / "postgres", durable=False) as two:
        query(one.url, "CREATE TABLE only_here (id int)")
        assert query(two.url, "SELECT to_regclass('only_here')") == [(None,)]


def deep(data: Path) -> Path:
    """The same data below a path that is too long for a socket."""
    folder = data.parent / ("deep-" * 12) / ("deeper-" * 12)
    folder.mkdir(parents=True)
    return data.rename(folder / "postgres")


def test_a_path_too_long_for_a_socket_gets_a_short_private_folder(data):
    long = deep(data)
    assert len(bytes(long)) > LONGEST_SOCKET_PATH
    with EmbeddedPostgres(long, durable=False) as postgres:
        (socket_folder,) = query(postgres.url, "SELECT current_setting('unix_socket_directories')")[0]
        assert query(postgres.url, "SELECT 1") == [(1,)]
        assert Path(socket_folder).stat().st_mode & 0o077 == 0
    Path(socket_folder).rmdir()


def test_a_socket_folder_that_others_may_enter_is_refused(data):
    socket_folder = data.with_name("postgres.socket")
    socket_folder.mkdir()
    socket_folder.chmod(0o755)

    with pytest.raises(EmbeddedPostgresError, match="closed to others"):
        EmbeddedPostgres(data, durable=False).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as somebody else")
def test_another_user_cannot_connect(data):
    # As if the project lay in a public place; the directories are opened, what the database made is not.
    for folder in data.parents:
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o001)
    with EmbeddedPostgres(data, durable=False) as postgres:
        (socket_folder,) = query(postgres.url, "SELECT current_setting('unix_socket_directories')")[0]
        connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1] + '/.s.PGSQL.5432')"
        command = ["/usr/bin/python3", "-c", connect, socket_folder]
        as_nobody = subprocess.run(
            command, user="nobody", group="nogroup", extra_groups=[], capture_output=True, text=True, check=False
        )
        as_owner = subprocess.run(command, check=False)

    assert "PermissionError" in as_nobody.stderr
    assert as_owner.returncode == 0


def test_data_of_another_major_version_is_not_touched(data):
    (data / "PG_VERSION").write_text("15\n")

    with pytest.raises(EmbeddedPostgresError, match=r"was written by PostgreSQL 15, this installation has \d+"):
        EmbeddedPostgres(data, durable=False).start()


def test_a_crash_under_the_supervisor_is_repaired_at_the_same_url(data, tmp_path):
    lines: list[str] = []
    postgres = EmbeddedPostgres(data)
    postgres.prepare()
    with Supervisor(tmp_path / "var", say=lines.append) as supervisor:
        supervisor.start(postgres.service())
        query(postgres.url, "CREATE TABLE note AS SELECT 'committed' AS text")
        os.kill(server_pid(data), signal.SIGKILL)

        assert wait_until(lambda: "postgres started again" in lines, timeout=10)
        assert wait_until(postgres.is_ready, timeout=10)
        assert query(postgres.url, "SELECT text FROM note") == [("committed",)]

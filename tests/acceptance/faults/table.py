"""The faults themselves: each strikes a site at work once, and brings back what it killed as a supervisor would."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from tests.acceptance.faults.site import Site

# A rollout may be struck in every round; what is tested here is not when the platform gives up.
_PATIENT: dict[str, Any] = {"max_infra_retries": 50}
_SLOW_SECONDS = 6.0
_BUSY = 4  # rollouts in the middle of their RUN when a fault strikes that is not aimed at one worker


@dataclass(frozen=True)
class Fault:
    """`strike` gets the site and the id of the run it is to hit.

    `shows` is the cause that the history of some rollout must then name. `may_fail` are causes for which a rollout may end
    without success, where the run's settings ask for that.
    """

    name: str
    strike: Callable[[Site, str], None]
    shows: str = ""
    settings: dict[str, Any] = field(default_factory=lambda: _PATIENT)
    may_fail: tuple[str, ...] = ()


def _wait_until_busy(site: Site, run_id: str) -> None:
    site.wait_for(lambda: site.in_state(run_id, "running") >= _BUSY, f"{_BUSY} rollouts to run")


def _kill_worker(stage: str, site: Site, run_id: str) -> None:
    site.platform.freeze_with_work(stage)
    site.platform.kill(stage)
    site.restart(stage)


def _kill_process(name: str, site: Site, run_id: str) -> None:
    _wait_until_busy(site, run_id)
    site.platform.kill(name)
    site.restart(name)


def _freeze_worker(stage: str, site: Site, run_id: str) -> None:
    site.platform.freeze_with_work(stage)
    _wake_as_zombie(stage, site)


def _freeze_worker_in_transaction(site: Site, run_id: str) -> None:
    """The EVAL worker, after it has ended rollouts and before it has committed: what it has locked must not hold up others."""
    with psycopg.connect(site.platform.database_url) as ours:
        ours.execute("LOCK TABLE rollouts_reward IN SHARE MODE")  # rewards are written last
        waits = "SELECT count(*) FROM pg_locks WHERE relation = 'rollouts_reward'::regclass AND NOT granted"
        site.wait_for(lambda: site.platform.value(waits), "the eval worker to write rewards")
        site.platform.processes["eval"].send_signal(signal.SIGSTOP)
    _wake_as_zombie("eval", site)


def _wake_as_zombie(stage: str, site: Site) -> None:
    """A frozen worker goes on when its rollouts are in other hands, or wait for some."""
    frozen = site.platform.processes[stage]
    lost = "SELECT count(*) FROM rollouts_workerprocess WHERE pid = %s AND lost_at IS NOT NULL"
    before = site.platform.value(lost, frozen.pid)
    site.wait_for(lambda: site.platform.value(lost, frozen.pid) > before, f"the frozen {stage} worker to be declared lost")
    taken = "SELECT count(*) FROM rollouts_rollout r JOIN rollouts_workerprocess w ON w.id = r.lease_owner_id WHERE w.pid = %s"
    site.wait_for(lambda: site.platform.value(taken, frozen.pid) == 0, f"the frozen {stage} worker's rollouts to be taken back")
    frozen.send_signal(signal.SIGCONT)
    back = "SELECT count(*) FROM rollouts_workerprocess WHERE pid = %s AND lost_at IS NULL AND stopped_at IS NULL"
    site.wait_for(lambda: site.platform.value(back, frozen.pid) == 1, f"the {stage} worker to start over under a new id")


def _kill_broker(site: Site, run_id: str) -> None:
    _wait_until_busy(site, run_id)
    site.broker.crash()
    site.broker.start()


def _close_broker_connections(site: Site, run_id: str) -> None:
    """RabbitMQ's own program does it, and takes seconds to start; slow replies keep the workers busy for so long."""
    site.model.answer_after(_SLOW_SECONDS)
    _wait_until_busy(site, run_id)
    site.broker.close_connections()
    assert site.in_state(run_id, "running"), "the strike came too late"
    site.model.answer_after(None)


def _kill_database(site: Site, run_id: str) -> None:
    _wait_until_busy(site, run_id)
    site.postgres.crash()
    site.postgres.start()


def _kill_model(site: Site, run_id: str) -> None:
    _wait_until_busy(site, run_id)
    site.model.kill()
    _wait_for_cause(site, run_id, "model_error")
    site.model.start()


def _freeze_model(site: Site, run_id: str) -> None:
    _wait_until_busy(site, run_id)
    site.model.freeze()
    _wait_for_cause(site, run_id, "model_error")
    site.model.thaw()


def _fill_disk(site: Site, run_id: str) -> None:
    """For the RUN worker, which can create files and not write a byte to them: where large outputs go."""
    worker = site.platform.processes["run"].pid
    usual = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    _wait_until_busy(site, run_id)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        _wait_for_cause(site, run_id, "internal_error")
    finally:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, usual)


def _wait_for_cause(site: Site, run_id: str, cause: str) -> None:
    seen = causes(site, run_id).get(cause, 0)
    site.wait_for(lambda: causes(site, run_id).get(cause, 0) > seen, f"a rollout given up because of {cause}")


def causes(site: Site, run_id: str) -> dict[str, int]:
    """How many attempts of the run's rollouts were given up, by cause."""
    query = """SELECT e.data->>'cause' AS cause, count(*) FROM rollouts_rolloutevent e
               JOIN rollouts_rollout r ON r.id = e.rollout_id
               WHERE r.run_id = %s AND (e.kind IN ('requeued', 'released') OR e.to_state = 'failed')
                 AND e.data->>'cause' IS NOT NULL GROUP BY 1"""
    return {row["cause"]: row["count"] for row in site.platform.rows(query, run_id)}


FAULTS = [
    Fault("run worker killed", partial(_kill_worker, "run"), "worker_lost"),
    Fault("init worker killed", partial(_kill_worker, "init"), "worker_lost"),
    Fault("eval worker killed", partial(_kill_worker, "eval"), "worker_lost"),
    Fault(
        "run worker killed, no retries",
        partial(_kill_worker, "run"),
        "worker_lost",
        settings={"max_infra_retries": 0},
        may_fail=("worker_lost",),
    ),
    Fault("run worker frozen past its lease", partial(_freeze_worker, "run"), "worker_lost"),
    Fault("init worker frozen past its lease", partial(_freeze_worker, "init"), "worker_lost"),
    Fault("eval worker frozen past its lease", partial(_freeze_worker, "eval"), "worker_lost"),
    Fault("eval worker frozen in a transaction", _freeze_worker_in_transaction, "worker_lost"),
    Fault("dispatcher killed", partial(_kill_process, "dispatcher")),
    Fault("web server killed", partial(_kill_process, "web")),
    Fault("model server killed", _kill_model, "model_error"),
    Fault("model server hangs", _freeze_model, "model_error", settings={**_PATIENT, "timeouts": {"model_call": 4}}),
    Fault("broker connections closed", _close_broker_connections),
    Fault("broker killed", _kill_broker),
    Fault("database killed", _kill_database),
    Fault("disk full for blobs", _fill_disk, "internal_error"),
]

FROZEN_LONG = Fault("run worker frozen, lease of 30 s", partial(_freeze_worker, "run"), "worker_lost")

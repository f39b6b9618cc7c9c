"""`prorl doctor`: looks at everything the platform stands on, says what it found, and what to do.

`examine` runs the checks in the order in which things depend on each other; what needs the database is left out while it does
not answer. `report` has the shape of a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import broker, database, execution, machine, reach
from .report import Finding, Status, fail, warn

__all__ = ["Finding", "Status", "examine"]

Check = Callable[[], Iterator[Finding]]

_ON_THIS_HOST: tuple[Check, ...] = (machine.python, machine.settings, machine.files, reach.sandbox, reach.blobs, broker.server)
_GATES: tuple[Check, ...] = (database.server, database.migrations)
_ON_DATABASE: tuple[Check, ...] = (
    database.connections,
    database.transactions,
    database.clock,
    execution.dispatcher,
    execution.workers,
    execution.gateway,
    execution.nodes,
    execution.sandboxes,
    execution.images,
    execution.stuck,
    execution.standstill,
    broker.queues,
    reach.model_servers,
)


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is known. Changes nothing, apart from things it removes again."""
    for check in _ON_THIS_HOST:
        yield from _guarded(check)
    for gate in _GATES:
        for finding in _guarded(gate):
            yield finding
            if finding.status is Status.FAIL:
                yield warn("the rest", "was not looked at: it is in the database", "Mend that first, then run this again.")
                return
    for check in _ON_DATABASE:
        yield from _guarded(check)


def _guarded(check: Check) -> Iterator[Finding]:
    """A check that breaks is a finding too, and must not hide the others."""
    try:
        yield from check()
    except Exception as error:
        yield fail(check.__name__, f"the check broke: {type(error).__name__}: {error}", "Report this.")

"""Garbage collection for processes that run for days and must end within a second."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """To be called once everything is imported.

    What is there now stays, so no collection looks at it again, the ones at exit (a quarter of a second of CPU time) included.
    What comes later is almost all freed by reference counting; cycles are looked for a hundred times less often than usual.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

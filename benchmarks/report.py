"""What every benchmark prints: tables while it goes on, and at the end one line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

_LOOP = 1_500_000  # additions; about 50 ms on a core of 2023


class Figure(NamedTuple):
    """A measured value and its bound: at most `target`, or at least that when `at_least`. Without a target it only informs."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def ok(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def bound(self) -> str | None:
        return None if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:g}"


class Machine:
    """How steady the machine is: the time of a fixed computation, sampled around every round."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self.sample()

    def sample(self) -> None:
        begun = time.perf_counter()
        total = 0
        for number in range(_LOOP):
            total += number
        self._seconds.append(time.perf_counter() - begun)

    @property
    def noise(self) -> float:
        """Slowest over median sample, less 1: 0.1 means that the same work once took 10 % longer than usual."""
        return max(self._seconds) / statistics.median(self._seconds) - 1

    def as_json(self) -> dict[str, float]:
        return {
            "cpus": len(os.sched_getaffinity(0)),
            "noise": round(self.noise, 3),
            "loop_ms": round(statistics.median(self._seconds) * 1000, 1),
        }


def say(text: str) -> None:
    """A line for whoever watches."""
    Console().print(text, highlight=False, markup=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    shown = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        shown.add_column(column, justify="left" if place == 0 else "right", no_wrap=column != columns[-1], overflow="fold")
    for row in rows:
        shown.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=max(110, Console().width)).print(shown, markup=False)


def conclude(name: str, figures: Sequence[Figure], machine: Machine) -> int:
    """Print the figures with their targets and the JSON line, which is about the first of them; the exit status."""
    table(
        f"{name}: figures",
        ["figure", "value", "unit", "target", "ok"],
        [(f.name, f.value, f.unit, f.bound or "", "" if f.target is None else "yes" if f.ok else "NO") for f in figures],
    )
    first, *others = figures
    line = {
        "name": name,
        "value": round(first.value, 4),
        "unit": first.unit,
        "target": first.bound,
        "ok": all(figure.ok for figure in figures),
        "more": {figure.name: round(figure.value, 4) for figure in others},
        "machine": machine.as_json(),
    }
    print(json.dumps(line), flush=True)
    return 0 if line["ok"] else 1

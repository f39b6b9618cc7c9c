"""`python -m benchmarks [NAME…]`: run benchmarks, each in a process of its own; without names, all of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def names() -> list[str]:
    """Every module here that has a `main`."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\ndef main() -> int:" in path.read_text())


def _run(name: str) -> int:
    """The benchmark's exit status. A SIGTERM to us goes on to it, so that it stops what it has started."""
    process = subprocess.Popen([sys.executable, "-m", f"benchmarks.{name}"], cwd=_ROOT)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def main_of_all(chosen: list[str]) -> int:
    if unknown := set(chosen) - set(names()):
        print(f"There is no benchmark {', '.join(sorted(unknown))}; choose from: {', '.join(names())}", file=sys.stderr)
        return 2
    missed = []
    for name in chosen or names():
        print(f"=== {name}", flush=True)
        if _run(name):
            missed.append(name)
    if missed:
        print(f"Missed their targets or failed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main_of_all(sys.argv[1:]))

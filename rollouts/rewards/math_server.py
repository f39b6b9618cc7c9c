"""The process that judges mathematical answers: one JSON object per line in, one per line out. See `rollouts.rewards.isolated`.

    {"gold": "...", "answer": "...", "timeout": 5.0}  ->  {"verdict": {...}} | {"unparseable": "..."} | {"error": "..."}

It ends at the end of its input, and a request that runs over its time ends it: SIGALRM keeps its default action, which kills
the process even within one long big-integer operation. So a platform process killed at any moment leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from rollouts.rewards.math import UnparseableGold, verify

MEMORY_BYTES = 2 * 1024**3


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request. A request without an answer only asks whether the gold can be parsed."""
    gold = request["gold"]
    try:
        return {"verdict": dataclasses.asdict(verify(gold, request.get("answer", gold)))}
    except UnparseableGold as exc:
        return {"unparseable": str(exc)}
    except Exception as exc:
        # Only the type: printing the message of a SymPy error may itself compute without end.
        return {"error": type(exc).__name__}


def main() -> None:
    """Serve requests from stdin until it closes."""
    logging.disable(logging.CRITICAL)  # math-verify warns about its disabled timeouts; ours replace them
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # a library that prints must not break the protocol
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        reply = answer_request(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()

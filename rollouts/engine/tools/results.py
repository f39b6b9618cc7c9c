"""How a result reads."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.engine.tools.base import ToolResult


def render_result(result: ToolResult, *, max_chars: int, more_notes: Sequence[str] = ()) -> str:
    """A tool's result as the model reads it: at most `max_chars` characters of output, then what the output does not say."""
    output, cut = cut_middle(result.output.rstrip("\n"), max_chars)
    notes = []
    if result.error:
        notes.append(f"Error: {result.error}")
    if result.limit_exceeded:
        notes.append(f"[ended for exceeding the sandbox's limit {result.limit_exceeded}]")
    elif result.timed_out:
        notes.append("[stopped at its time limit]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if result.note:
        notes.append(f"[{result.note}]")
    if cut:
        notes.append(f"[{cut} characters cut from the middle]")
    if result.truncated_bytes:
        notes.append(f"[{result.truncated_bytes} bytes had been cut from the middle before]")
    notes += [f"[{note}]" for note in more_notes]
    return "\n".join(filter(None, [output, *notes])) or "[no output]"


def cut_middle(text: str, max_chars: int) -> tuple[str, int]:
    """At most `max_chars` characters of a text, its beginning and its end, and how many were left out between them."""
    cut = len(text) - max_chars
    if cut <= 0:
        return text, 0
    head = (max_chars + 1) // 2
    tail = max_chars - head
    return f"{text[:head]}\n[…]\n{text[len(text) - tail :]}", cut

"""Pictures among ids: where a server's render puts them, how they are sent, and the proof that the model saw what is stored.

A server expands a picture to as many ids as its size asks for. The expanded ids are what is kept; on the way to the server each
picture's range shrinks to one id, the server's `picture_id`, which it expands again. docs/adr/0004-token-fidelity.md has the
reasons.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.llm.answers import token_list
from rollouts.llm.errors import ModelError
from rollouts.llm.messages import data_url
from rollouts.llm.types import PlacedPicture, TokenPrompt
from sandboxes.protocol import Picture

_SHA_256 = re.compile(r"[0-9a-f]{64}")


def rendered(answer: dict[str, Any], pictures: Sequence[Picture]) -> TokenPrompt:
    """The prompt of an answer of `/v1/chat/completions/render` to messages with these pictures, in their order.

    Raises `ModelError` when the answer does not give each picture a range of its own.
    """
    ids = token_list(answer, "token_ids")
    try:
        ranges = answer["features"]["mm_placeholders"]["image"]
        placed = tuple(
            PlacedPicture(int(place["offset"]), int(place["length"]), picture.digest)
            for place, picture in zip(ranges, pictures, strict=True)
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ModelError(f"the rendered prompt does not tell where its pictures are ({len(pictures)})", retryable=True) from exc
    if problem := misplaced(placed, len(ids)):
        raise ModelError(f"the rendered prompt has a wrong place for a picture: {problem}", retryable=True)
    return TokenPrompt(ids, placed)


def misplaced(placed: Sequence[PlacedPicture], length: int) -> str:
    """What is wrong with these places among `length` ids; empty when nothing is."""
    end = 0
    for place in placed:
        if place.length < 1 or not end <= place.offset <= length - place.length:
            return f"{place.length} ids from index {place.offset} on, of {length}, after a picture that ends at {end}"
        if not _SHA_256.fullmatch(place.digest):
            return f"{place.digest!r} is no SHA-256"
        end = place.end
    return ""


def collapsed(prompt: TokenPrompt, picture_id: int) -> list[int]:
    """The ids with one `picture_id` in place of each picture's range."""
    ids: list[int] = []
    end = 0
    for place in prompt.placed:
        ids += [*prompt.ids[end : place.offset], picture_id]
        end = place.end
    return ids + prompt.ids[end:]


def expands_alike(prompt: TokenPrompt, picture_id: int | None) -> bool:
    """Whether a server that gets the collapsed prompt expands the right ids: the first ones of `picture_id` that it finds.

    False when one that stands for nothing comes before a picture. Models may sample it, and texts may have it written out.
    """
    ends = (0, *(place.end for place in prompt.placed))
    return not any(picture_id in prompt.ids[end : place.offset] for end, place in zip(ends, prompt.placed, strict=False))


def content_parts(prompt: TokenPrompt, pictures: Mapping[str, Picture]) -> list[dict[str, str]]:
    """The pictures of a prompt in their order, as `/inference/v1/generate` takes them."""
    return [{"type": "image_url", "url": data_url(pictures[place.digest])} for place in prompt.placed]


def check_seen(seen: Any, prompt: TokenPrompt) -> None:
    """Raise `ModelError` unless `seen`, the ids that the server says the model has seen, are those of the prompt."""
    if seen == prompt.ids:
        return
    if not isinstance(seen, list):
        raise ModelError("the server does not tell which ids the model saw in place of the pictures", retryable=True)
    shorter = min(len(seen), len(prompt.ids))
    first = next((at for at in range(shorter) if seen[at] != prompt.ids[at]), shorter)
    raise ModelError(
        f"the server expanded the pictures to other ids than it rendered: the model saw {len(seen)} ids, "
        f"{len(prompt.ids)} were rendered, and they differ from index {first} on",
        retryable=True,
    )

"""Finding out, by showing it one, whether a model takes pictures beside ids, and which id stands for one in what is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rollouts.llm.capabilities import Feature
from rollouts.llm.client import HELPER_TIMEOUT, ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.messages import PICTURE_PART, pictures_in
from rollouts.llm.pictures import SMALL_PICTURE
from rollouts.llm.types import ChatMessage, Sampling, ServerAddress, TokenPrompt
from sandboxes.protocol import Picture

ONE_TOKEN = Sampling(max_tokens=1)
MAX_TRIALS = 6  # ids; a picture's range has its pad id most often, and few others
_NOT_FOUND_YET = -1


async def find_picture_id(client: ModelClient, server: ServerAddress) -> int | None:
    """The id that `server` expands to a picture, to the very ids that its render has; None when there is none.

    A model that does not see costs one refused request. None also where a picture becomes other ids when one came before it
    (templates number them), or changes those beside it: such a conversation could not be continued.
    """
    messages = [_question(SMALL_PICTURE)]
    pictures = pictures_in(messages)
    seeing = replace(server, tokenizer="", features=frozenset({Feature.GENERATE}), picture_id=_NOT_FOUND_YET)

    async def refusal(candidate: int, prompt: TokenPrompt) -> ModelError | ContextOverflow | None:
        trial = replace(seeing, picture_id=candidate)
        try:
            await client.generate(trial, prompt, ONE_TOKEN, timeout=HELPER_TIMEOUT, pictures=pictures)
        except (ModelError, ContextOverflow) as error:
            return error
        return None

    try:
        prompt = await client.render(seeing, messages, add_generation_prompt=True)
    except (ModelError, ContextOverflow):
        return None
    for candidate in _by_frequency(prompt):
        if await refusal(candidate, prompt) is None:
            error = await refusal(candidate, prompt.followed_by(prompt))
            # Where the request itself is refused, the server bounds how many pictures it takes at once.
            expands_otherwise = isinstance(error, ModelError) and error.status != 400
            return None if expands_otherwise else candidate
    return None


def _question(picture: Picture) -> ChatMessage:
    """Between line breaks, which some processors (Gemma 3's) merge with those that they put around a picture."""
    text = {"type": "text", "text": "\nWhat is it?\n"}
    return {"role": "user", "content": "What is it?", "parts": [text, {"type": PICTURE_PART, "picture": picture}, text]}


def _by_frequency(prompt: TokenPrompt) -> list[int]:
    place = prompt.placed[0]
    counts = Counter(prompt.ids[place.offset : place.end])
    return [token for token, _ in counts.most_common(MAX_TRIALS)]

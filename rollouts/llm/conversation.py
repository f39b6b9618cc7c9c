"""One token-exact conversation with one model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import structlog

from rollouts.lifecycle import Fidelity
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.messages import numbered_pictures, pictures_in
from rollouts.llm.pictures import SMALL_PICTURE, picture_message
from rollouts.llm.placed import expands_alike
from rollouts.llm.route import Route
from rollouts.llm.sampler import ask, sample
from rollouts.llm.segment_ids import SegmentIds
from rollouts.llm.types import ChatMessage, ModelCallRecord, Sampling, SegmentCause, ServerAddress, TokenPrompt
from sandboxes.protocol import Picture

logger = structlog.get_logger(__name__)

Result = TypeVar("Result")


class Conversation:
    """Messages on one side, the exact ids on the other.

    `messages` is everything so far, sampled replies included as text.
    """

    def __init__(
        self,
        client: ModelClient,
        route: Route,
        sampling: Sampling,
        *,
        call_timeout: float,
    ) -> None:
        self.messages: list[ChatMessage] = []
        self._client = client
        self._route = route
        self._sampling = sampling
        self._call_timeout = call_timeout
        self._segments = SegmentIds()
        self._answered = 0  # how many of `messages` the model has seen or said
        self._last_id: int | None = None  # the last reply's last id; None before the first reply and after one without ids
        self._was_cut = False  # the last reply ended at a limit or stop string

    @property
    def fidelity(self) -> Fidelity:
        """The badge so far."""
        return self._segments.fidelity

    @property
    def context_left(self) -> int:
        """Tokens of the model's context that the last reply left free."""
        return max(0, self._route.server.max_model_len - self._length)

    @property
    def _so_far(self) -> TokenPrompt:
        """The newest segment, of which there must be one."""
        return self._segments.first(len(self._segments) - 1, self._length)

    @property
    def _length(self) -> int:
        """Of the newest segment, in ids."""
        return self._segments.length(len(self._segments) - 1) if len(self._segments) else 0

    @property
    def takes_pictures(self) -> bool:
        """Whether the server of the next call does."""
        return self._route.server.picture_id is not None

    async def can_show(self, pictures: Sequence[Picture], *, role: Literal["user", "tool"]) -> bool:
        """Whether a server can show its model these in one message, after all that there were before.

        Some are broken, models and servers have their bounds, and some templates leave out what tools show.
        """
        # As `turns.continuation` will render them: a message of a tool comes after a reply. Of earlier ones only the number
        # matters, and they would all be sent and decoded again.
        before = sum(1 for _ in numbered_pictures(self.messages))
        messages: list[ChatMessage] = [
            picture_message("x", *[SMALL_PICTURE] * before),
            {"role": "assistant", "content": "y"},
            picture_message("x", *pictures, role=role),
        ]
        return await ask(self._route, lambda server: self._can_render(server, messages))

    def append(self, *messages: ChatMessage) -> None:
        """Add messages for the next `sample` to send."""
        self.messages.extend(messages)

    async def sample(self, turn: int) -> ModelCallRecord:
        """Send what is new, take the model's reply into `messages`, and return the call as it is to be stored.

        Raises `ContextOverflow` or `ModelError`; the conversation is then as it was before, so the same turn can be tried
        again. A reply that a server aborts is continued from its ids by `sampler.sample`.
        """
        context = await self._continuation()
        if context is None:
            context = await self._ask(lambda server: self._client.render(server, self.messages, add_generation_prompt=True))
            prompt, segment = context, len(self._segments)
        else:
            segment = len(self._segments) - 1
            prompt = self._so_far.followed_by(context)
        sampled = await sample(
            self._client,
            self._route,
            prompt,
            self._sampling,
            timeout=self._call_timeout,
            pictures=pictures_in(self.messages),
        )
        completion = sampled.completion
        begins = segment == len(self._segments)
        record = sampled.record(
            turn=turn,
            segment=segment,
            context=context,
            prompt_tokens=len(prompt.ids),
            sampling=self._sampling,
            opened_by=self._why_new_segment() if begins else "",
            parent_segment=segment - 1 if begins and segment else None,
        )
        self._segments.add(record)
        self._was_cut = completion.finish_reason == "length" or completion.text.endswith(self._sampling.stop)
        self._last_id = completion.token_ids[-1] if completion.token_ids else None
        self.messages.append({"role": "assistant", "content": completion.text})
        self._answered = len(self.messages)
        return record

    def _why_new_segment(self) -> SegmentCause:
        if not len(self._segments):
            return SegmentCause.START
        if self._last_id is None:
            return SegmentCause.NO_IDS
        return SegmentCause.CUT if self._was_cut else SegmentCause.TEMPLATE

    async def _can_render(self, server: ServerAddress, messages: Sequence[ChatMessage]) -> bool:
        try:
            await self._client.render(server, messages, add_generation_prompt=True)
        except ContextOverflow:
            return False
        except ModelError as error:
            if error.status not in (400, 413):  # 413: a proxy takes no requests that are so large
                raise
            logger.info("a picture is not shown", server=server.server_id, why=str(error))
            return False
        return True

    async def _ask(self, question: Callable[[ServerAddress], Awaitable[Result]]) -> Result:
        """As `ask`. A conversation with pictures that has begun goes on at servers that see: it began at one."""

        async def of_one_that_sees(server: ServerAddress) -> Result:
            if len(self._segments) and server.picture_id is None and pictures_in(self.messages):
                raise ModelError(f"{server.model} at {server.url} takes no pictures, and there were some", retryable=True)
            return await question(server)

        return await ask(self._route, of_one_that_sees)

    async def _continuation(self) -> TokenPrompt | None:
        """What to append to the current segment, or None when a new segment must start."""
        if self._last_id is None:
            return None
        last_id, history, new = self._last_id, self.messages[: self._answered], self.messages[self._answered :]
        context = await self._ask(lambda server: self._client.turns.continuation(server, last_id, history, new))
        if context is not None and context.placed:
            whole = self._so_far.followed_by(context)
            return context if expands_alike(whole, self._route.server.picture_id) else None
        return context

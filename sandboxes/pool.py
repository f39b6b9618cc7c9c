"""Started sandboxes that wait for a rollout, so that the rollout does not have to wait for one. No Django.

A pool starts what was asked for lately: of each image as many as its target, divided among the kinds of sandbox as the last
requests were. A sandbox leaves the pool for good: whatever was used, cancelled or failed is destroyed and never comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import structlog

from sandboxes.errors import SandboxError
from sandboxes.protocol import Backend, Root, SandboxInfo, SandboxSpec, Session

logger = structlog.get_logger(__name__)

_CHECK_SECONDS = 10.0  # between looks at those that wait
_ANSWER_SECONDS = 5.0
_FORGET_SECONDS = 600.0  # what nobody asked for in this time is kept warm no more
_PAUSE_SECONDS = 10.0  # of one image, after a start that failed
_MAX_ENV_BYTES = 4096  # what a session's `set_env` takes


class Ledger(Protocol):
    """Where sandboxes are noted before they start, so that a crash leaves nothing unknown."""

    async def started(self, name: str, image: str) -> None:
        """`image` is the digest of its root, "" for the host's system. Raises SandboxError when none may be started now."""
        ...

    async def ready(self, name: str, enforced: Mapping[str, str]) -> None: ...

    async def released(self, name: str) -> None:
        """The pool wants it no more: the janitor may stop it, too."""
        ...

    async def stopped(self, name: str, reason: str) -> None: ...


@dataclass(frozen=True)
class _Kind:
    """A kind of sandbox: all of a request but the environment variables, which are set when it comes."""

    spec: SandboxSpec
    root: Root

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self._key == other._key

    @property
    def _key(self) -> Hashable:
        return (self.root, *(getattr(self.spec, f.name) for f in fields(self.spec) if f.name != "env"))


@dataclass
class _Warm:
    """A sandbox that waits. The open session keeps its dead-man timer from firing."""

    info: SandboxInfo
    session: Session


@dataclass
class _Shelf:
    """What is warm of one image, and what the last requests asked for: one for each sandbox that shall be warm."""

    recent: deque[_Kind] = field(default_factory=deque)
    asked_at: float = 0.0
    paused_until: float = 0.0
    warm: defaultdict[_Kind, list[_Warm]] = field(default_factory=lambda: defaultdict(list))

    def note(self, kind: _Kind, target: int) -> None:
        self.asked_at = time.monotonic()
        self.recent = deque([*self.recent, kind][-target:] if target else (), maxlen=target)
        while len(self.recent) < target:
            self.recent.appendleft(kind)

    def missing(self) -> _Kind | None:
        if time.monotonic() < self.paused_until:
            return None
        for kind, wanted in Counter(self.recent).items():
            if len(self.warm[kind]) < wanted:
                return kind
        return None

    def take_surplus(self) -> list[_Warm]:
        wanted = Counter(self.recent)
        surplus = []
        for kind, waiting in list(self.warm.items()):
            while len(waiting) > wanted[kind]:
                surplus.append(waiting.pop(0))
            if not wanted[kind]:
                del self.warm[kind]
        return surplus


class WarmPool:
    """The warm sandboxes of one INIT worker process."""

    def __init__(self, backend: Backend, ledger: Ledger) -> None:
        self._backend = backend
        self._ledger = ledger
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)
        self._news = asyncio.Event()
        self._endings: set[asyncio.Task[None]] = set()

    async def take(self, name: str, spec: SandboxSpec, root: Root, *, target: int) -> SandboxInfo | None:
        """A warm sandbox for `spec`, now called `name`; None when there is none, and the caller has to start one.

        `target`: how many of the spec's image shall be warm from now on.
        """
        kind = _Kind(replace(spec, env={}), root)
        shelf = self._shelves[spec.image]
        shelf.note(kind, target)
        try:
            return await self._take(shelf.warm[kind], name, spec.env)
        finally:
            self._news.set()  # only now: starting the next one would hold this one up

    async def _take(self, waiting: list[_Warm], name: str, env: Mapping[str, str]) -> SandboxInfo | None:
        if sum(len(key) + len(value.encode()) for key, value in env.items()) > _MAX_ENV_BYTES:
            return None
        while waiting:
            warm = waiting.pop(0)
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await warm.session.set_env(env)  # also without any: it may have died since it was looked at
                await self._backend.rename(warm.info.name, name)
                await warm.session.close()
            except (SandboxError, TimeoutError) as error:
                self._discard(warm, f"was of no use: {error or 'no answer'}")
            except BaseException:
                self._discard(warm, "the hand-over was cancelled")
                raise
            else:
                await asyncio.shield(self._later(self._ledger.stopped(warm.info.name, f"handed over to {name}")))
                return replace(warm.info, name=name)
        return None

    async def run(self) -> None:
        """Keep as many warm as wanted until cancelled, and then none."""
        try:
            while True:
                self._news.clear()
                await self._tend()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_SECONDS):
                        await self._news.wait()
        finally:
            for shelf in self._shelves.values():
                shelf.recent.clear()
                self._discard_surplus(shelf, "the worker ends")
            await asyncio.gather(*self._endings)

    @property
    def sizes(self) -> Mapping[str, int]:
        """How many wait now, by image."""
        return {image: sum(map(len, shelf.warm.values())) for image, shelf in self._shelves.items()}

    async def _tend(self) -> None:
        for image, shelf in list(self._shelves.items()):
            if time.monotonic() - shelf.asked_at > _FORGET_SECONDS:
                shelf.recent.clear()
            self._discard_surplus(shelf, "no longer wanted")
            if not shelf.recent:
                del self._shelves[image]
                continue
            await self._check(shelf)
            while (kind := shelf.missing()) is not None:
                try:
                    await self._start(shelf, kind)
                except Exception as error:  # a database that does not answer is no reason to give up, either
                    logger.warning("warm sandbox did not start; pausing", image=image, error=repr(error))
                    shelf.paused_until = time.monotonic() + _PAUSE_SECONDS

    async def _check(self, shelf: _Shelf) -> None:
        """Discard what does not answer any more."""
        for waiting in list(shelf.warm.values()):  # requests for other kinds come in meanwhile
            for warm in list(waiting):
                try:
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await warm.session.ping()
                except (SandboxError, TimeoutError):
                    if warm in waiting:  # nobody has taken it in the meantime
                        waiting.remove(warm)
                        self._discard(warm, "did not answer any more")

    async def _start(self, shelf: _Shelf, kind: _Kind) -> None:
        name = f"prorl-warm-{secrets.token_hex(8)}"
        noted = asyncio.ensure_future(self._ledger.started(name, kind.root.digest))
        try:
            await asyncio.shield(noted)
            info = await self._backend.start(name, kind.spec, kind.root)
            await self._ledger.ready(name, info.enforced)
            session = await self._backend.connect(name)
        except BaseException:
            self._later(self._give_up(name, noted))
            raise
        shelf.warm[kind].append(_Warm(info, session))

    async def _give_up(self, name: str, noted: asyncio.Future[None]) -> None:
        # A note that is under way may still be written after the one that says it was stopped.
        await asyncio.wait([noted])
        if noted.exception() is None:
            await self._stop(name, "did not start")

    def _discard_surplus(self, shelf: _Shelf, reason: str) -> None:
        for warm in shelf.take_surplus():
            self._discard(warm, reason)

    def _discard(self, warm: _Warm, reason: str) -> None:
        async def discard() -> None:
            await warm.session.close()
            await self._stop(warm.info.name, reason)

        self._later(discard())

    async def _stop(self, name: str, reason: str) -> None:
        """What fails here is left to the janitor: its row says that it was never proven stopped."""
        try:
            await self._ledger.released(name)
            await self._backend.stop(name)
            await self._ledger.stopped(name, reason)
        except Exception:
            logger.exception("warm sandbox not stopped; left to the janitor", sandbox=name)

    def _later(self, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Not in the caller's time, and also when the caller was cancelled."""
        task = asyncio.get_running_loop().create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

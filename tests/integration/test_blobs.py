"""Large values leave their rows: once for equal content, whole when asked for, and never while something refers to them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.utils import timezone

from rollouts.engine.errors import StoreFailed
from rollouts.engine.records import RunOutcome, ToolCallRecord, TurnRecord
from rollouts.lifecycle import Cause, Fidelity, Phase, Stage, State, Termination
from rollouts.models import Blob, BlobUnreadable, Rollout, ToolCall
from rollouts.services import blobs
from rollouts.services.claim import Claim
from rollouts.services.progress import Ran, TurnWrite, hand_over_for_evaluation, record_turns
from rollouts.storage import DurableFileStorage
from rollouts.worker.database import Database
from rollouts.worker.large_values import whole_artefacts, without_large_artefacts, without_large_outputs
from tests.integration.api_case import ApiCase, expect_problem

pytestmark = pytest.mark.django_db(transaction=True)

TEXT = "".join(f"line {number}: the same as ever\n" for number in range(10_000))  # about 300 kB
COMPLETED = Termination(Phase.RUN, Cause.COMPLETED)


@pytest.fixture(autouse=True)
def folder(blob_folder: Path) -> Path:
    return blob_folder


@pytest.fixture
def case() -> ApiCase:
    return ApiCase()


@pytest.fixture
def database() -> Iterator[Database]:
    database = Database(patience=0)
    yield database
    database.close()


def noise(size: int) -> bytes:
    """Bytes that cannot be compressed."""
    return hashlib.shake_256(b"noise").digest(size)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """No file of this process may grow beyond this: a write fails in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Pause:
    """A place where one thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


class SlowStorage(DurableFileStorage):
    """A storage whose next deletion, or the next return from a save, takes as long as a test wants."""

    before_delete: ClassVar[Pause | None] = None
    after_save: ClassVar[Pause | None] = None

    def delete(self, name: str) -> None:
        pause, SlowStorage.before_delete = SlowStorage.before_delete, None
        if pause:
            pause()
        super().delete(name)

    def save(self, name: str | None, content: Any, max_length: int | None = None) -> str:
        saved = super().save(name, content, max_length)
        pause, SlowStorage.after_save = SlowStorage.after_save, None
        if pause:
            pause()
        return saved


def at_once(*functions: Callable[[], None]) -> list[Exception]:
    """Run functions in threads of their own; what they raised."""
    raised: list[Exception] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            raised.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class TestStore:
    def test_equal_content_is_stored_once_and_compressed(self, folder: Path) -> None:
        digest = blobs.put(TEXT.encode())
        assert blobs.put(TEXT.encode()) == digest == hashlib.sha256(TEXT.encode()).hexdigest()
        blob = Blob.objects.get()
        [file] = files(folder)
        assert blob.text() == TEXT
        assert (blob.size, blob.stored_size) == (len(TEXT), file.stat().st_size)
        assert blob.stored_size < blob.size / 10
        assert file.parent.name == digest[:2]
        assert file.stat().st_mode & 0o077 == 0

    def test_what_does_not_become_smaller_is_stored_as_it_is(self) -> None:
        content = noise(100_000)
        blobs.put(content)
        blob = Blob.objects.get()
        assert (blob.encoding, blob.stored_size, blob.content()) == ("identity", len(content), content)

    def test_writers_of_the_same_content_leave_one_row_and_its_file(self, folder: Path) -> None:
        together = threading.Barrier(8)

        def write() -> None:
            together.wait()
            blobs.put(TEXT.encode())

        assert at_once(*[write] * 8) == []
        [blob], [file] = Blob.objects.all(), files(folder)
        assert str(file.relative_to(folder)) == blob.file
        assert blob.text() == TEXT

    def test_a_full_storage_is_an_infrastructure_failure_that_leaves_nothing(self, folder: Path) -> None:
        content = noise(300_000)
        with full_disk(100_000), pytest.raises(StoreFailed, match="does not take 300000 bytes"):
            blobs.put(content)
        assert not files(folder)
        assert not Blob.objects.exists()
        blobs.put(content)
        assert Blob.objects.get().content() == content

    @pytest.mark.parametrize("damage", [b"", b"not what it was", None])
    def test_damage_is_noticed_and_the_blob_named(self, folder: Path, damage: bytes | None) -> None:
        digest = blobs.put(TEXT.encode())
        [file] = files(folder)
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage)
        with pytest.raises(BlobUnreadable, match=digest):
            Blob.objects.get().content()

    def test_another_content_under_the_digest_is_noticed(self, folder: Path) -> None:
        blobs.put(b"one" * 1000)
        [file] = files(folder)
        stored = file.read_bytes()
        blobs.put(b"two" * 1000)
        other = next(path for path in files(folder) if path != file)
        other.write_bytes(stored)
        with pytest.raises(BlobUnreadable, match="another digest"):
            Blob.objects.get(sha256=hashlib.sha256(b"two" * 1000).hexdigest()).content()


def record(*outputs: str) -> TurnRecord:
    calls = [
        ToolCallRecord(turn=0, index=i, name="bash", arguments={}, raw="", output=output, started_at=0.0, duration=0.1)
        for i, output in enumerate(outputs)
    ]
    return TurnRecord(turn=0, tool_calls=calls)


def run_through(case: ApiCase, database: Database, output: str, artefacts: dict[str, Any]) -> Rollout:
    """A rollout that printed `output`, left `artefacts` and waits for its evaluation."""
    rollout = case.domain.rollout_in(State.READY)
    claim = case.domain.claim(rollout, Stage.RUN)
    turn = async_to_sync(without_large_outputs)(database, record("short", output))
    assert record_turns([TurnWrite(claim, turn)]) == [True]
    outcome = async_to_sync(without_large_artefacts)(database, RunOutcome(COMPLETED, artefacts, Fidelity.TEXT_ONLY))
    assert hand_over_for_evaluation([Ran(claim, outcome)]) == [True]
    rollout.refresh_from_db()
    return rollout


def artefacts_for_evaluation(claim: Claim, database: Database) -> dict[str, Any]:
    return async_to_sync(whole_artefacts)(database, claim.artefacts, claim.artefacts_blob)


class TestRollout:
    ARTEFACTS: dict[str, Any] = {"patch": TEXT, "files": [{"name": "a.py", "lines": 3}]}

    def test_small_values_stay_in_their_rows(self, case: ApiCase, database: Database) -> None:
        rollout = run_through(case, database, "fits", {"answer": "3"})
        assert not Blob.objects.exists()
        assert rollout.artefacts == {"answer": "3"}
        assert [call.output for call in ToolCall.objects.all()] == ["short", "fits"]

    def test_large_values_come_back_whole(self, case: ApiCase, database: Database) -> None:
        rollout = run_through(case, database, TEXT, self.ARTEFACTS)
        assert Blob.objects.count() == 2
        call = ToolCall.objects.get(index=1)
        assert len(call.output) < 10_000 and call.output.startswith(TEXT[:1000]) and call.output.endswith(TEXT[-1000:])
        assert len(rollout.artefacts["patch"]) < 10_000 and rollout.artefacts["files"] == self.ARTEFACTS["files"]

        claim = case.domain.claim(rollout, Stage.EVAL)
        assert artefacts_for_evaluation(claim, database) == self.ARTEFACTS
        shown = case.check_read_access(f"/api/v1/rollouts/{rollout.id}/trajectory/")
        assert [call["output"] for call in shown["tool_calls"]] == ["short", TEXT]
        assert case.check_read_access(f"/api/v1/rollouts/{rollout.id}/")["artefacts"] == self.ARTEFACTS

    def test_artefacts_of_many_small_values_leave_no_excerpt(self, case: ApiCase, database: Database) -> None:
        artefacts = {str(number): "x" * 20 for number in range(10_000)}
        rollout = run_through(case, database, "", artefacts)
        assert rollout.artefacts == {}
        assert artefacts_for_evaluation(case.domain.claim(rollout, Stage.EVAL), database) == artefacts

    def test_a_new_attempt_begins_without_the_artefacts_of_the_last(self, case: ApiCase, database: Database) -> None:
        rollout = run_through(case, database, "", self.ARTEFACTS)
        Rollout.objects.filter(id=rollout.id).update(state=State.QUEUED.value)
        case.domain.claim(rollout, Stage.INIT)
        rollout.refresh_from_db()
        assert (rollout.artefacts, rollout.artefacts_blob) == ({}, None)

    def test_text_that_postgres_refuses_is_stored_as_in_a_row(self, case: ApiCase, database: Database) -> None:
        run_through(case, database, TEXT + "\x00\ud800", {})
        assert ToolCall.objects.get(index=1).output_blob.text() == TEXT + "␀?"

    def test_a_full_storage_fails_the_stage_as_infrastructure(self, case: ApiCase, database: Database) -> None:
        output = noise(200_000).hex()
        with full_disk(50_000), pytest.raises(StoreFailed):
            async_to_sync(without_large_outputs)(database, record(output))
        assert not Blob.objects.exists()

    def test_what_cannot_be_read_is_no_score_and_no_empty_answer(self, case: ApiCase, database: Database, folder: Path) -> None:
        rollout = run_through(case, database, TEXT, self.ARTEFACTS)
        for file in files(folder):
            file.unlink()
        with pytest.raises(StoreFailed, match=str(rollout.artefacts_blob_id)):
            artefacts_for_evaluation(case.domain.claim(rollout, Stage.EVAL), database)
        answer = case.reader.get(f"/api/v1/rollouts/{rollout.id}/trajectory/")
        problem = expect_problem(answer, 503, "unavailable")
        assert hashlib.sha256(TEXT.encode()).hexdigest() in problem["detail"]


class TestPages:
    @pytest.fixture
    def member(self, case: ApiCase, client: Client) -> Client:
        user = User.objects.create_user("maria", password="correct horse")
        case.domain.project.members.add(user)
        client.force_login(user)
        return client

    def test_show_an_excerpt_and_offer_the_rest(self, case: ApiCase, database: Database, member: Client) -> None:
        rollout = run_through(case, database, TEXT, TestRollout.ARTEFACTS)
        page = f"/rollouts/{rollout.id}/"
        path = f"{page}turns/0/calls/1/output.txt"
        shown = member.get(page).content.decode()
        assert path in shown and len(shown) < 100_000
        answer = member.get(path)
        assert answer.content.decode() == TEXT
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert answer.headers["Content-Disposition"].startswith("attachment")
        assert member.get(f"{page}rollout.json").json()["rollout"]["artefacts"] == TestRollout.ARTEFACTS
        assert "rollout.json" in member.get(f"{page}reward/").content.decode()
        assert len(member.get(f"{page}raw/").content) < 100_000
        assert member.get(f"{page}turns/0/calls/2/output.txt").status_code == 404

    def test_downloads_are_for_members(self, case: ApiCase, database: Database, client: Client) -> None:
        rollout = run_through(case, database, TEXT, {})
        path = f"/rollouts/{rollout.id}/turns/0/calls/1/output.txt"
        assert client.get(path).status_code == 302
        client.force_login(User.objects.create_user("sam", password="correct horse"))
        assert client.get(path).status_code == 404

    def test_say_so_when_the_storage_fails(self, case: ApiCase, database: Database, member: Client, folder: Path) -> None:
        rollout = run_through(case, database, TEXT, {})
        [file] = files(folder)
        file.unlink()
        answer = member.get(f"/rollouts/{rollout.id}/turns/0/calls/1/output.txt")
        assert answer.status_code == 503 and "cannot be read" in answer.content.decode()


def refer(rollout: Rollout, digest: str, *, turn: int, index: int) -> ToolCall:
    """A tool call whose output is this blob."""
    return ToolCall.objects.create(
        rollout=rollout,
        attempt=1,
        turn=turn,
        index=index,
        name="bash",
        output_blob_id=digest,
        started_at=timezone.now(),
        duration=0.1,
    )


class TestCleaning:
    """`untouched_since` lies in the future here: no grace, so that every blob is old enough."""

    def clean(self) -> None:
        future = timezone.now() + timedelta(days=1)
        for shard in blobs.SHARDS:
            while blobs.remove_unreferenced(shard=shard, untouched_since=future):
                pass

    def test_removes_what_nothing_refers_to(self, case: ApiCase, database: Database, folder: Path) -> None:
        run_through(case, database, TEXT, TestRollout.ARTEFACTS)
        blobs.put(b"nobody's" * 1000)
        self.clean()
        assert Blob.objects.count() == 2
        assert {str(file.relative_to(folder)) for file in files(folder)} == set(Blob.objects.values_list("file", flat=True))

    def test_leaves_what_was_stored_again_a_moment_ago(self) -> None:
        digest = blobs.put(TEXT.encode())
        before = timezone.now()
        blobs.put(TEXT.encode())
        assert blobs.remove_unreferenced(shard=digest[:1], untouched_since=before) == 0
        assert Blob.objects.exists()

    def test_sweeps_files_without_a_row_once_they_are_old(self, folder: Path) -> None:
        digest = blobs.put(TEXT.encode())
        stray = folder / digest[:2] / f"{digest}.half"
        foreign = folder / digest[:2] / "README"
        foreign.write_text("not ours")
        stray.write_bytes(b"half of it")
        assert blobs.sweep_files(folder=digest[:2], older_than=timezone.now() - timedelta(days=1)) == 0
        assert blobs.sweep_files(folder=digest[:2], older_than=timezone.now() + timedelta(days=1)) == 1
        assert not stray.exists() and foreign.exists()
        assert Blob.objects.get().text() == TEXT

    @pytest.fixture
    def slow(self, settings: Any) -> Iterator[type[SlowStorage]]:
        backend = f"{SlowStorage.__module__}.{SlowStorage.__qualname__}"
        settings.STORAGES = {**settings.STORAGES, "blobs": {**settings.STORAGES["blobs"], "BACKEND": backend}}
        yield SlowStorage
        SlowStorage.before_delete = SlowStorage.after_save = None

    def test_content_stored_again_while_its_old_file_is_being_deleted_stays(self, slow: type[SlowStorage]) -> None:
        digest = blobs.put(TEXT.encode())
        pause = slow.before_delete = Pause()

        def store_again() -> None:
            assert pause.reached.wait(60)
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SET lock_timeout = '20s'")  # what is slow holds no lock
                blobs.put(TEXT.encode())
            finally:
                pause.go_on.set()

        def remove_once() -> None:
            blobs.remove_unreferenced(shard=digest[:1], untouched_since=timezone.now() + timedelta(days=1))

        assert at_once(remove_once, store_again) == []
        assert Blob.objects.get(sha256=digest).text() == TEXT

    def test_a_writer_that_was_overtaken_by_another_and_its_cleaner_still_has_its_file(
        self, slow: type[SlowStorage], folder: Path
    ) -> None:
        pause = slow.after_save = Pause()

        def come_and_go() -> None:
            assert pause.reached.wait(60)
            try:
                blobs.put(TEXT.encode())
                self.clean()
                assert not Blob.objects.exists()
            finally:
                pause.go_on.set()

        assert at_once(lambda: blobs.put(TEXT.encode()) and None, come_and_go) == []
        assert Blob.objects.get().text() == TEXT
        assert len(files(folder)) == 1

    def test_nothing_ever_refers_to_what_is_gone(self, case: ApiCase) -> None:
        """A transaction that refers to a blob when it goes cannot be committed."""
        rollout = case.domain.rollout_in(State.READY)
        digest = blobs.put(TEXT.encode())
        with pytest.raises(IntegrityError), transaction.atomic():
            refer(rollout, digest, turn=0, index=0)
            assert at_once(self.clean) == []
        assert not Blob.objects.exists() and not ToolCall.objects.exists()

    def test_writers_and_cleaners_in_one_crowd(self, case: ApiCase, folder: Path) -> None:
        """Writers store the same few contents, refer to them and let them go, while others clean."""
        rollout = case.domain.rollout_in(State.READY)
        contents = [f"{number}".encode() * 5000 for number in range(2)]
        writers_left = threading.Semaphore(0)

        def write(writer: int) -> None:
            try:
                for number in range(20):
                    content = contents[number % 2]
                    call = None
                    while call is None:
                        # There is no grace here: it may be gone before anything refers to it.
                        with contextlib.suppress(IntegrityError):
                            call = refer(rollout, blobs.put(content), turn=writer, index=number)
                    assert ToolCall.objects.get(pk=call.pk).output_blob.content() == content
                    call.delete()
            finally:
                writers_left.release()

        def clean_until_all_have_left() -> None:
            left = 0
            while left < 3:
                left += writers_left.acquire(blocking=False)
                self.clean()

        assert at_once(*[functools.partial(write, writer) for writer in range(3)], clean_until_all_have_left) == []
        named = set(Blob.objects.values_list("file", flat=True))
        assert {str(file.relative_to(folder)) for file in files(folder)} == named

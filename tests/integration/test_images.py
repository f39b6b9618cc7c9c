"""Images: registering, the life of a build, what a worker does with it, pruning, and what is refused for want of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from rollouts.services.images import prune
from sandboxes.errors import ImageUnavailable
from sandboxes.images.errors import ImageBusy, ImageRefused
from sandboxes.images.services.builds import (
    TRIES,
    Answer,
    cancel_build,
    claim_build,
    end_cancelled_build,
    give_back_build,
    note_news,
    report_build,
    request_build,
    running_names,
    take_back_lost_builds,
)
from sandboxes.images.services.prune import prune_images, sweep
from sandboxes.images.services.registry import register_image, remove_image
from sandboxes.images.services.use import image_store, resolve_image, why_unusable
from sandboxes.images.store import Entry, Store
from sandboxes.models import Image, ImageBuild, Sandbox
from sandboxes.protocol import HOST, RootKind
from tests.integration.image_case import (
    DAY,
    REPORT,
    an_entry,
    an_image,
    claimed,
    fail,
    finish,
    newest_build,
    state_of,
    stored_image,
)
from tests.unit.image_archives import Tar, open_folder

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def store(settings: Any) -> Iterator[Store]:
    with open_folder() as folder:
        settings.IMAGE_DIR = folder / "images"
        yield image_store()


def start_sandbox(digest: str) -> None:
    Sandbox.objects.create(name="s", rollout_id=uuid4(), attempt=1, node="n1", backend="b", image=digest)


def archive(path: Path, content: bytes = b"hello") -> Path:
    path.write_bytes(Tar().directory("etc").add("etc/motd", content).data())
    return path


class TestRegistering:
    def test_stores_the_settings_complete(self):
        image = register_image(name="debian-12", kind="debian", source={"suite": "bookworm"})
        assert image.source["variant"] == "minbase"
        assert (image.state, image.format, image.digest) == ("pending", "directory", "")

    @pytest.mark.parametrize(
        ("fields", "pointer"),
        [
            ({"name": "Upper"}, "/name"),
            ({"name": "a/b"}, "/name"),
            ({"name": "x" * 101}, "/name"),
            ({"kind": "zip"}, "/kind"),
            ({"source": {"path": "x"}}, "/source/path"),
            ({"format": "iso"}, "/format"),
            ({"kind": "python", "source": {"package": "six", "version": "1", "base": "gone"}}, "/source/base"),
        ],
    )
    def test_refuses_what_makes_no_sense_and_stores_nothing(self, fields: dict[str, Any], pointer: str):
        given = {"name": "busy", "kind": "tarball", "source": {"path": "/x"}, "format": "directory", **fields}
        with pytest.raises(ImageRefused) as refused:
            register_image(**given)
        assert [problem.pointer for problem in refused.value.problems] == [pointer]
        assert not Image.objects.exists()

    def test_refuses_a_taken_name(self):
        an_image()
        with pytest.raises(ImageBusy, match="busy already"):
            an_image()

    def test_an_image_that_others_build_upon_is_not_removed(self):
        base = an_image("base")
        above = register_image(name="six", kind="python", source={"package": "six", "version": "1", "base": "base"})
        with pytest.raises(ImageBusy, match="six build upon base"):
            remove_image(image=base)
        remove_image(image=above)
        remove_image(image=base)
        assert not Image.objects.exists()

    def test_an_image_that_is_being_built_is_not_removed(self):
        image = an_image()
        request_build(image=image)
        with pytest.raises(ImageBusy, match="is being built"):
            remove_image(image=image)


class TestTheLifeOfABuild:
    def test_one_that_succeeds(self):
        image = an_image()
        build = request_build(image=image, by="ann")
        assert (build.state, state_of(image)) == ("queued", "pending")
        claim = claim_build(node="n1")
        assert claim is not None
        assert state_of(image) == "building"
        assert report_build(claim=claim, report=REPORT) is Answer.GO_ON
        build.refresh_from_db()
        assert (build.state, build.progress, build.step, build.log_tail) == ("running", 0.5, "unpacking", REPORT.log_tail)
        assert finish(claim)
        build.refresh_from_db()
        assert (build.state, build.owner, build.lease_expires_at, build.digest) == ("succeeded", None, None, an_entry().digest)
        assert state_of(image) == "ready"
        assert (image.digest, image.size, image.env, image.built_as) == (
            an_entry().digest,
            5 << 20,
            {"PATH": "/opt/bin"},
            "directory",
        )

    def test_asking_again_gives_the_one_that_is_not_finished(self):
        image = an_image()
        assert request_build(image=image) == request_build(image=image, force=True)
        claim_build(node="n1")
        assert request_build(image=image).number == 1
        assert ImageBuild.objects.count() == 1

    def test_of_one_image_only_one_is_taken_and_of_several_each(self):
        first, second = an_image("first"), an_image("second")
        for image in (first, second):
            request_build(image=image)
        claims = [claim_build(node="n1"), claim_build(node="n2"), claim_build(node="n3")]
        assert [claim and claim.image for claim in claims] == ["first", "second", None]

    def test_a_failure_that_may_pass_is_tried_again_a_few_times(self):
        image = an_image()
        request_build(image=image)
        for number in range(1, TRIES + 1):
            ImageBuild.objects.update(not_before=None)
            claim = claim_build(node="n1")
            assert claim is not None
            assert fail(claim, "mirror away", retryable=True)
            build = newest_build(image)
            assert build.tries == number
        assert (build.state, build.error, state_of(image)) == ("failed", "mirror away", "failed")

    def test_the_next_try_comes_after_a_pause(self):
        image = an_image()
        fail(claimed(image), "mirror away", retryable=True)
        assert (newest_build(image).state, state_of(image)) == ("queued", "pending")
        assert newest_build(image).not_before > timezone.now()
        assert claim_build(node="n1") is None

    def test_a_failure_that_stays_is_final(self):
        image = an_image()
        fail(claimed(image), "hostile")
        assert (newest_build(image).state, newest_build(image).tries, state_of(image)) == ("failed", 1, "failed")
        request_build(image=image)
        assert (newest_build(image).number, state_of(image)) == (2, "pending")

    def test_an_image_that_is_ready_stays_so_while_it_is_built_anew_and_when_that_fails(self):
        image = an_image()
        finish(claimed(image))
        claim = claimed(image)
        assert state_of(image) == "ready"
        fail(claim, "hostile")
        assert (state_of(image), image.digest) == ("ready", an_entry().digest)
        finish(claimed(image), an_entry("b"))
        assert (state_of(image), image.digest) == ("ready", an_entry("b").digest)

    def test_a_build_that_waits_is_cancelled_at_once(self):
        image = an_image()
        build = request_build(image=image)
        assert cancel_build(build=build)
        assert not cancel_build(build=build)
        assert newest_build(image).state == "cancelled"
        assert claim_build(node="n1") is None

    def test_a_build_that_runs_is_cancelled_by_its_worker(self):
        image = an_image()
        claim = claimed(image)
        assert cancel_build(build=newest_build(image))
        assert report_build(claim=claim, report=REPORT) is Answer.CANCEL
        assert end_cancelled_build(claim=claim, report=REPORT)
        assert (newest_build(image).state, state_of(image)) == ("cancelled", "pending")

    def test_a_worker_that_stops_gives_it_back_and_no_try_is_counted(self):
        image = an_image()
        assert give_back_build(claim=claimed(image), report=REPORT)
        assert (newest_build(image).state, newest_build(image).tries, state_of(image)) == ("queued", 0, "pending")
        assert claim_build(node="n2") is not None

    def test_a_lost_worker_loses_it(self):
        image = an_image()
        lost = claimed(image)
        ImageBuild.objects.update(lease_expires_at=timezone.now() - DAY)
        assert take_back_lost_builds() == 1
        assert take_back_lost_builds() == 0
        assert "n1 fell silent" in newest_build(image).error
        ImageBuild.objects.update(not_before=None)
        claim = claim_build(node="n2")
        assert claim is not None
        assert claim.name != lost.name
        assert report_build(claim=lost, report=REPORT) is Answer.LOST
        assert not finish(lost, an_entry("b"))
        assert not fail(lost, "late")
        assert not give_back_build(claim=lost, report=REPORT)
        assert (newest_build(image).state, newest_build(image).tries, state_of(image)) == ("running", 2, "building")
        assert running_names() == {claim.name} == running_names("n2")
        assert running_names("n1") == set()

    def test_a_lost_worker_whose_build_was_to_be_cancelled_has_it_cancelled(self):
        image = an_image()
        claimed(image)
        cancel_build(build=newest_build(image))
        ImageBuild.objects.update(lease_expires_at=timezone.now() - DAY)
        assert take_back_lost_builds() == 1
        assert (newest_build(image).state, state_of(image)) == ("cancelled", "pending")

    def test_a_base_is_built_first(self):
        base = an_image("base")
        six = register_image(name="six", kind="python", source={"package": "six", "version": "1", "base": "base"})
        build = request_build(image=six)
        claims = [claim_build(node="n1"), claim_build(node="n1")]
        assert [claim and claim.image for claim in claims] == ["base", None]
        assert newest_build(six).step == "waits for base"
        assert claims[0] is not None
        finish(claims[0])
        ImageBuild.objects.filter(pk=build.pk).update(not_before=None)
        claim = claim_build(node="n1")
        assert claim is not None
        assert (claim.image, claim.base, claim.base_digest) == ("six", "base", an_entry().digest)
        assert base.builds.count() == 1

    def test_workers_are_told_of_a_build_once(self):
        image = an_image()
        assert note_news() == 0
        request_build(image=image)
        assert (note_news(), note_news()) == (1, 0)
        claim = claim_build(node="n1")
        assert claim is not None
        give_back_build(claim=claim, report=REPORT)
        assert note_news() == 1


def run_here(image: Image, *options: str) -> None:
    call_command("images", "build", image.name, "--here", *options)


@pytest.mark.django_db(transaction=True)
class TestBuildingHere:
    def test_makes_the_image_and_prints_the_log(self, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]):
        image = an_image(path=str(archive(tmp_path / "root.tar")))
        run_here(image)
        assert state_of(image) == "ready"
        usable = resolve_image("busy")
        assert usable.root.kind is RootKind.DIRECTORY
        assert usable.root.digest == image.digest
        assert (Path(usable.root.path) / "etc/motd").read_bytes() == b"hello"
        printed = capsys.readouterr().out
        assert "unpacking root.tar" in printed
        assert "busy #1 succeeded" in printed
        assert "unpacking root.tar" in store.log_path("busy", 1).read_text()
        assert store.leftovers() == []

    def test_makes_nothing_anew_when_nothing_has_changed(self, tmp_path: Path):
        image = an_image(path=str(archive(tmp_path / "root.tar")))
        for _ in range(2):
            run_here(image)
        assert "nothing has changed" in newest_build(image).log_tail
        run_here(image, "--force")
        assert "nothing has changed" not in newest_build(image).log_tail
        archive(tmp_path / "root.tar", b"other")
        before = image.digest
        run_here(image)
        assert (state_of(image), image.digest == before) == ("ready", False)

    def test_a_failure_is_said_with_exit_code_1(self, capsys: pytest.CaptureFixture[str]):
        image = an_image()
        with pytest.raises(SystemExit) as exited:
            run_here(image)
        assert exited.value.code == 1
        assert "/srv/busy.tar cannot be read" in capsys.readouterr().out
        assert (newest_build(image).state, newest_build(image).tries, state_of(image)) == ("failed", 1, "failed")
        assert "/srv/busy.tar cannot be read" in newest_build(image).error

    def test_settings_that_an_older_version_had_accepted_fail_with_the_reason(self, tmp_path: Path):
        image = an_image(path=str(archive(tmp_path / "root.tar")))
        Image.objects.update(source={"path": 5})
        with pytest.raises(SystemExit):
            run_here(image)
        assert "valid string" in newest_build(image).error

    def test_asking_only(self, capsys: pytest.CaptureFixture[str]):
        image = an_image()
        call_command("images", "build", "busy", "--no-wait")
        assert "busy #1 is queued" in capsys.readouterr().out
        call_command("images", "cancel", "busy")
        assert newest_build(image).state == "cancelled"
        with pytest.raises(CommandError, match="is not being built"):
            call_command("images", "cancel", "busy")

    def test_unknown_names_are_refused_with_the_known_ones(self):
        an_image()
        with pytest.raises(CommandError, match=r"no image 'bsy'\. Known: busy"):
            call_command("images", "build", "bsy")


class TestTheCommand:
    def test_registers_and_lists(self, capsys: pytest.CaptureFixture[str]):
        call_command("images", "list")
        call_command("images", "register", "busy", "tarball", '{"path": "/x.tar"}')
        call_command("images", "list")
        printed = capsys.readouterr().out
        assert "No image is registered." in printed
        assert "busy   tarball         pending" in printed

    @pytest.mark.parametrize("source", ["{", "[]", '{"path": "x"}'])
    def test_refuses_settings_that_do_not_fit(self, source: str):
        with pytest.raises(CommandError, match=r"JSON|/source/path"):
            call_command("images", "register", "busy", "tarball", source)
        assert not Image.objects.exists()


class TestUse:
    def test_no_image_is_the_host(self):
        assert resolve_image("").root == HOST

    def test_what_cannot_be_used_is_said(self, store: Store):
        with pytest.raises(ImageUnavailable, match="no image 'gone'"):
            resolve_image("gone")
        image = an_image("early")
        with pytest.raises(ImageUnavailable, match="'early' is pending"):
            resolve_image("early")
        finish(claimed(image))
        with pytest.raises(ImageUnavailable, match="PRORL_IMAGE_DIR"):
            resolve_image("early")

    def test_the_last_use_is_noted_at_most_once_a_minute(self, store: Store):
        image = stored_image(store)
        resolve_image("busy")
        image.refresh_from_db()
        first = image.last_used_at
        assert first is not None
        resolve_image("busy")
        image.refresh_from_db()
        assert image.last_used_at == first
        Image.objects.update(last_used_at=first - DAY)
        resolve_image("busy")
        image.refresh_from_db()
        assert image.last_used_at > first - DAY

    def test_reasons_tell_what_to_do(self, store: Store):
        stored_image(store, "fine")
        an_image("early")
        fail(claimed(an_image("broken")), "x")
        reasons = why_unusable(["fine", "early", "broken", "gone", ""])
        assert set(reasons) == {"early", "broken", "gone"}
        assert "Build it first" in reasons["early"]
        assert "log of its last build" in reasons["broken"]
        assert "register it" in reasons["gone"]


class TestPruning:
    def test_keeps_everything_unless_it_is_told_otherwise(self, store: Store):
        stored_image(store)
        assert prune(unused_for=None, most_bytes=None) == []

    def test_removes_what_was_unused_for_too_long_and_its_row_can_be_built_again(self, store: Store):
        image = stored_image(store)
        assert [item.images for item in prune(unused_for=DAY, most_bytes=None, dry_run=True)] == [["busy"]]
        assert store.digests() == [image.digest]
        assert [item.images for item in prune(unused_for=DAY, most_bytes=None)] == [["busy"]]
        assert (state_of(image), image.digest, image.size) == ("pending", "", 0)
        assert store.digests() == store.leftovers() == []
        assert request_build(image=image).number == 2

    def test_removes_the_longest_unused_until_the_rest_fits(self, store: Store):
        images = [stored_image(store, f"i{n}", b"x" * (n + 1)) for n in range(3)]
        for age, image in zip((2, 5, 3), images, strict=True):
            Image.objects.filter(pk=image.pk).update(last_used_at=timezone.now() - age * DAY)
        assert [item.images for item in prune(unused_for=None, most_bytes=2)] == [["i1"], ["i2"]]
        assert [image.name for image in Image.objects.filter(state="ready")] == ["i0"]

    def test_what_was_just_used_or_built_stays(self, store: Store):
        image = stored_image(store)
        resolve_image("busy")
        assert prune(unused_for=timedelta(0), most_bytes=0) == []
        Image.objects.update(last_used_at=None)
        os.utime(store.folder / image.digest / "manifest.json")  # built again this moment, elsewhere
        assert prune(unused_for=timedelta(0), most_bytes=0) == []
        assert state_of(image) == "ready"

    def test_what_a_running_sandbox_stands_on_stays(self, store: Store):
        image = stored_image(store)
        sandbox = Sandbox.objects.create(name="s", rollout_id=uuid4(), attempt=1, node="n1", backend="b", image=image.digest)
        assert prune(unused_for=DAY, most_bytes=0) == []
        Sandbox.objects.filter(pk=sandbox.pk).update(stopped_at=timezone.now())
        assert len(prune(unused_for=DAY, most_bytes=0)) == 1

    def test_what_a_running_sandbox_stands_on_stays_also_when_no_image_has_it_any_more(self, store: Store):
        image = stored_image(store)
        start_sandbox(image.digest)
        remove_image(image=image)
        assert prune(unused_for=None, most_bytes=None) == []
        assert store.digests() == [image.digest]

    @pytest.mark.parametrize("begin", [lambda _: resolve_image("busy"), start_sandbox])
    def test_what_is_used_while_it_is_decided_what_goes_stays(self, store: Store, begin: Callable[[str], object]):
        image = stored_image(store)

        class Busy(Store):
            def find(self, digest: str) -> Entry | None:
                if not Sandbox.objects.exists() and Image.objects.filter(last_used_at=None).exists():
                    Image.objects.update(last_used_at=timezone.now() - 2 * DAY)
                    begin(digest)
                return super().find(digest)

        assert prune_images(Busy(store.folder), wanted=[], unused_for=DAY, most_bytes=0) == []
        assert (state_of(image), store.digests()) == ("ready", [image.digest])

    def test_an_image_that_cannot_be_read_is_not_there(self, store: Store):
        image = stored_image(store)
        (store.folder / image.digest / "manifest.json").unlink()
        (store.folder / image.digest / "manifest.json").mkdir()
        with pytest.raises(ImageUnavailable, match="'busy' cannot be read on node"):
            resolve_image("busy")

    def test_a_base_that_a_build_waits_for_and_a_warm_image_stay(self, store: Store):
        stored_image(store, "base", b"1")
        stored_image(store, "warm", b"2")
        Image.objects.filter(name="warm").update(warm_target=2)
        six = register_image(name="six", kind="python", source={"package": "six", "version": "1", "base": "base"})
        request_build(image=six)
        assert prune(unused_for=DAY, most_bytes=0) == []

    def test_an_entry_that_no_image_has_goes(self, store: Store):
        image = stored_image(store)
        remove_image(image=image)
        assert [item.reason for item in prune(unused_for=None, most_bytes=None)] == ["no image has it"]
        assert store.digests() == []

    def test_one_entry_of_two_images_goes_with_both_or_stays(self, store: Store):
        image = stored_image(store)
        twin = an_image("twin")
        made = store.find(image.digest)
        assert made is not None
        finish(claimed(twin), made)
        assert prune(unused_for=DAY, most_bytes=None) == []  # the twin was built just now
        Image.objects.update(built_at=timezone.now() - 2 * DAY)
        assert [sorted(item.images) for item in prune(unused_for=DAY, most_bytes=None)] == [["busy", "twin"]]
        assert set(Image.objects.values_list("state", flat=True)) == {"pending"}

    def test_what_killed_builds_left_behind_goes_and_what_runs_stays(self, store: Store):
        claim = claimed(an_image())
        with store.workspace(claim.name), store.workspace("build-0-killed"):
            assert sweep(store) == ["build-0-killed"]
            assert store.leftovers() == [claim.name]

    def test_by_command(self, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]):
        stored_image(store)
        call_command("images", "prune", "--unused-days", "1", "--dry-run")
        call_command("images", "prune", "--unused-days", "1")
        printed = capsys.readouterr().out
        assert "1 would go" in printed
        assert "1 removed" in printed

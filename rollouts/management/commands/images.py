"""`manage.py images register|build|cancel|list|verify|prune`."""

from __future__ import annotations

import asyncio
import getpass
import json
import time
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection
from django.template.defaultfilters import filesizeformat

from rollouts.services.images import prune
from rollouts.worker.database import Database
from rollouts.worker.image_builds import ImageBuilder, builds_backend
from sandboxes.images.errors import ImageBusy, ImageRefused
from sandboxes.images.services.builds import cancel_build, claim_build, request_build
from sandboxes.images.services.registry import register_image
from sandboxes.images.services.use import image_store
from sandboxes.images.services.verification import note_verified
from sandboxes.images.sources import KINDS
from sandboxes.images.states import UNFINISHED, BuildState, Format, ImageState
from sandboxes.images.verify import verify
from sandboxes.models import Image, ImageBuild

_POLL_SECONDS = 0.5
_WORKER_SECONDS = 15.0  # until a build that nobody takes is called that
_GIB = 1 << 30
_NO_WORKER = "no worker takes it; start one with `python -m django maintain`, or use --here"


class Command(BaseCommand):
    help = "Register images, build them, look at them, check them, remove what is not needed."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        register = actions.add_parser("register", help="A new image.")
        register.add_argument("name")
        register.add_argument("kind", choices=list(KINDS))
        register.add_argument("source", help='Its settings as JSON, such as {"suite": "bookworm"}.')
        register.add_argument("--format", choices=[format.value for format in Format], default=Format.DIRECTORY.value)
        build = actions.add_parser("build", help="Build an image and follow its log.")
        build.add_argument("name")
        build.add_argument("--force", action="store_true", help="Also when nothing has changed since it was built.")
        build.add_argument("--here", action="store_true", help="In this process, without a maintenance worker.")
        build.add_argument("--no-wait", action="store_true", help="Only ask for it.")
        actions.add_parser("cancel", help="Cancel the build of an image.").add_argument("name")
        actions.add_parser("list", help="All images.")
        verifying = actions.add_parser("verify", help="Read images again, and start a sandbox of each.")
        verifying.add_argument("names", nargs="*", help="All that are ready, if none is named.")
        pruning = actions.add_parser("prune", help="Remove images that are not needed.")
        pruning.add_argument("--unused-days", type=float, help="Those that were unused for so long (PRORL_IMAGE_KEEP_DAYS).")
        pruning.add_argument("--max-gb", type=float, help="The longest unused, until the rest fits (PRORL_IMAGE_MAX_GB).")
        pruning.add_argument("--dry-run", action="store_true", help="Only say what would go.")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        try:
            getattr(self, f"_{action}")(**options)
        except ImageRefused as refused:
            raise CommandError("; ".join(f"{problem.pointer}: {problem.detail}" for problem in refused.problems)) from None
        except ImageBusy as error:
            raise CommandError(str(error)) from None

    def _register(self, *, name: str, kind: str, source: str, format: str, **_: Any) -> None:
        try:
            document = json.loads(source)
        except json.JSONDecodeError as error:
            raise CommandError(f"The settings are not JSON: {error}") from error
        if not isinstance(document, dict):
            raise CommandError('The settings are not a JSON object. Use {"name": "value"}.')
        register_image(name=name, kind=kind, source=document, format=format)
        self.stdout.write(f"{name} is registered. Build it with `prorl images build {name}`.")

    def _build(self, *, name: str, force: bool, here: bool, no_wait: bool, **_: Any) -> None:
        build = request_build(image=_find(name), force=force, by=getpass.getuser())
        if here:
            self._carry_out(build)
        elif no_wait:
            self.stdout.write(f"{build} is {build.state}.")
            return
        else:
            self.stdout.write(f"{build}; Ctrl-C stops only this view of it")
        if self._follow(build).state != BuildState.SUCCEEDED.value:
            raise SystemExit(1)

    def _carry_out(self, build: ImageBuild) -> None:
        """And what it builds upon, which was asked for with it."""
        database = Database(patience=settings.LEASE_SECONDS)
        builder = ImageBuilder(database=database, store=image_store(), backend=builds_backend())
        try:
            while ImageBuild.objects.get(pk=build.pk).state == BuildState.QUEUED.value:
                claim = claim_build(node=settings.NODE, only=build.pk) or claim_build(node=settings.NODE)
                if claim is None:
                    time.sleep(_POLL_SECONDS)
                    continue
                connection.close()  # nothing is held while it builds
                asyncio.run(builder.carry_out(claim))
        finally:
            database.close()

    def _follow(self, build: ImageBuild) -> ImageBuild:
        """Print the log as it grows, until the build is over."""
        printed, owner, begun = 0, None, time.monotonic()
        told = False
        while True:
            build = ImageBuild.objects.select_related("image").get(pk=build.pk)
            if build.owner not in (owner, None):
                if owner is not None:
                    self.stdout.write(f"try {build.tries}")
                printed, owner = 0, build.owner  # another try, with a log of its own
            new = build.log_length - printed
            if new > 0:
                cut = new - len(build.log_tail)
                self.stdout.write(f"… {cut} characters left out …\n" if cut > 0 else "", ending="")
                self.stdout.write(build.log_tail[-new:], ending="")
                self.stdout.flush()
                printed = build.log_length
            if build.finished_at is not None:
                break
            if build.state == BuildState.QUEUED.value and not told and time.monotonic() - begun > _WORKER_SECONDS:
                told = True
                self.stdout.write(
                    f"{build.step or 'no worker takes it; start one with `python -m django maintain`, or use --here'}"
                )
            time.sleep(_POLL_SECONDS)
        log = image_store().log_path(build.image.name, build.number)
        self.stdout.write(f"{build} {build.state}" + (f"; the whole log: {log}" if log.exists() else ""))
        return build

    def _cancel(self, *, name: str, **_: Any) -> None:
        build = ImageBuild.objects.filter(image=_find(name), state__in=UNFINISHED).first()
        if build is None or not cancel_build(build=build):
            raise CommandError(f"{name} is not being built.")
        self.stdout.write(f"{build} is cancelled as soon as its worker hears of it.")

    def _list(self, **_: Any) -> None:
        images = Image.objects.all()
        if not images:
            self.stdout.write("No image is registered.")
            return
        wide = max(len("image"), *(len(image.name) for image in images))
        self.stdout.write(f"{'image':{wide}}  {'kind':14}  {'state':8}  {'format':9}  {'size':>10}  last used (UTC)   digest")
        for image in images:
            size = filesizeformat(image.size).replace("\xa0", " ") if image.digest else "-"
            used = f"{image.last_used_at:%Y-%m-%d %H:%M}" if image.last_used_at else "-"
            row = f"{image.name:{wide}}  {image.kind:14}  {image.state:8}  {image.format:9}  {size:>10}  {used:16}  "
            self.stdout.write(row + (image.digest[:19] or "-"))

    def _verify(self, *, names: list[str], **_: Any) -> None:
        images = [_find(name) for name in names] if names else list(Image.objects.filter(state=ImageState.READY.value))
        store, failed = image_store(), 0
        for image in images:
            problems = [f"it is {image.state}"]
            if image.digest:
                connection.close()
                problems = asyncio.run(verify(store, image.digest, builds_backend()))
                note_verified(image=image, problems=problems)
            failed += bool(problems)
            mark = self.style.ERROR("FAILED") if problems else self.style.SUCCESS("ok    ")
            self.stdout.write(f"{mark} {image.name}" + "".join(f"\n       {problem}" for problem in problems))
        self.stdout.write(f"{len(images) - failed} well, {failed} not")
        if failed:
            raise SystemExit(1)

    def _prune(self, *, unused_days: float | None, max_gb: float | None, dry_run: bool, **_: Any) -> None:
        days = settings.IMAGE_KEEP_DAYS or None if unused_days is None else unused_days
        gigabytes = settings.IMAGE_MAX_GB or None if max_gb is None else max_gb
        gone = prune(
            unused_for=None if days is None else timedelta(days=days),
            most_bytes=None if gigabytes is None else int(gigabytes * _GIB),
            dry_run=dry_run,
        )
        for item in gone:
            names = ", ".join(item.images) or "(left over)"
            self.stdout.write(f"{names}  {item.digest[:19]}  {filesizeformat(item.size)}: {item.reason}")
        total = filesizeformat(sum(item.size for item in gone))
        self.stdout.write(f"{len(gone)} {'would go' if dry_run else 'removed'}, {total}")


def _find(name: str) -> Image:
    image = Image.objects.filter(name=name).first()
    if image is None:
        known = ", ".join(Image.objects.values_list("name", flat=True)) or "none"
        raise CommandError(f"There is no image {name!r}. Known: {known}.")
    return image

"""Images that are made of packages, and images as SIF files: really built, and used by a sandbox.

In one file, so that its tests share what takes long: a small Debian from the machine's own mirror.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends.apptainer.program import find_program
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.errors import BackendUnavailable
from sandboxes.images.build import build_image
from sandboxes.images.errors import BadSource, BuildFailed
from sandboxes.images.sources import parse_settings
from sandboxes.images.states import Format
from sandboxes.images.store import Entry, Store
from sandboxes.images.verify import verify
from sandboxes.options import NodeOptions
from sandboxes.protocol import SandboxSpec, Session
from sandboxes.registry import get_backend
from sandboxes.selfcheck.samples import FACT, TEXT, directory_root
from tests.unit.image_archives import open_folder

SECRET = "index-of-this-node.example"
PACKAGES = ["python3-venv", "git", "ca-certificates"]


class Workshop:
    """Builds images into one store, and starts sandboxes of them."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "store")
        self.backend = get_backend("bubblewrap", folder / "sandboxes", NodeOptions(full_network=True))
        self.log: list[str] = []

    async def build(self, kind: str, format: Format = Format.DIRECTORY, upon: Entry | None = None, **source: Any) -> Entry:
        self.log.clear()
        return await build_image(
            self.store,
            name=f"build-{kind}",
            kind=kind,
            settings=parse_settings(kind, source),
            format=format,
            base=upon,
            backend=self.backend,
            monitor=self,
        )

    def line(self, text: str) -> None:
        self.log.append(text)

    def progress(self, share: float, step: str) -> None:
        """The log is enough."""

    @asynccontextmanager
    async def sandbox(self, entry: Entry) -> AsyncIterator[Session]:
        try:
            await self.backend.start("try", SandboxSpec(), entry.root)
            session = await self.backend.connect("try")
            try:
                yield session
            finally:
                await session.close()
        finally:
            await self.backend.stop("try")

    async def check(self, entry: Entry) -> None:
        """It is what its digest says, and a sandbox starts from it; nothing else is left of its build."""
        assert await verify(self.store, entry.digest, self.backend) == []
        assert self.store.leftovers() == []
        assert await self.backend.list() == []


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with open_folder() as folder:
        yield Workshop(folder)


@pytest.fixture(scope="module")
def debian(workshop: Workshop) -> Entry:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    return asyncio.run(workshop.build("debian", suite="bookworm", variant="essential", packages=PACKAGES))


async def test_debian_is_put_together_from_packages(workshop: Workshop, debian: Entry):
    await workshop.check(debian)
    async with workshop.sandbox(debian) as session:
        result = await session.bash(
            "cat /etc/debian_version; git --version; ls -ld /usr/bin/passwd; touch /usr/bin/new", timeout=30
        )
    assert result.output.startswith("12")
    assert "git version" in result.output
    assert "rwsr" not in result.output
    assert result.exit_code == 0


async def test_what_mmdebstrap_says_is_in_the_error(workshop: Workshop):
    with pytest.raises(BuildFailed, match="mmdebstrap ended with status") as failed:
        await workshop.build("debian", suite="no-such-suite", variant="extract", mirror="http://127.0.0.1:9/debian")
    assert failed.value.retryable
    assert workshop.store.leftovers() == []


async def test_a_package_that_does_not_exist_is_named_and_not_looked_for_again(workshop: Workshop, debian: Entry):
    with pytest.raises(BuildFailed) as failed:
        await workshop.build("debian", suite="bookworm", variant="extract", packages=["pyhton3"])
    assert str(failed.value).splitlines()[1:] == ["E: Unable to locate package pyhton3"]
    assert not failed.value.retryable


async def test_a_version_that_does_not_exist_is_named_and_not_looked_for_again(workshop: Workshop, debian: Entry):
    with pytest.raises(BuildFailed, match=r"six==99\.0") as failed:
        await workshop.build("python", upon=debian, package="six", version="99.0", base="debian")
    assert not failed.value.retryable


async def test_programs_are_put_upon_an_image_and_leave_its_python_alone(workshop: Workshop, debian: Entry):
    settings = {"base": "debian", "requirements": ["rich==14.0.0", "markdown-it-py==3.0.0"], "without": ["pygments"]}
    entry = await workshop.build("virtualenv", upon=debian, **settings)
    await workshop.check(entry)
    assert entry.env["PATH"].endswith(":/bin:/opt/agent/bin")
    async with workshop.sandbox(entry) as session:
        result = await session.bash("markdown-it --version; command -v python3 markdown-it", timeout=30)
        assert result.output.splitlines()[1:] == ["/usr/bin/python3", "/opt/agent/bin/markdown-it"]
        result = await session.bash("ls /opt/agent/lib/python3*/site-packages", timeout=30)
        assert "rich" in result.output and "pygments" not in result.output
        assert (await session.bash("ls /opt/agent/lib/python3*/site-packages/rich/__pycache__", timeout=30)).exit_code == 0
    assert not (entry.path / "opt/build").exists()


async def test_requirements_that_contradict_each_other_are_not_tried_again(workshop: Workshop, debian: Entry):
    with pytest.raises(BuildFailed, match="unsatisfiable") as failed:
        await workshop.build("virtualenv", upon=debian, base="debian", requirements=["six==1.16.0", "six==1.17.0"])
    assert not failed.value.retryable


@pytest.fixture(scope="module")
def six(workshop: Workshop, debian: Entry) -> Entry:
    """A small real package, and one more besides."""
    settings = {"package": "six", "version": "1.16.0", "base": "debian", "requirements": ["colorama==0.4.6"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_TRUSTED_HOST", SECRET)
        return asyncio.run(workshop.build("python", upon=debian, **settings))


async def test_a_package_is_ready_to_be_worked_on(workshop: Workshop, six: Entry):
    await workshop.check(six)
    async with workshop.sandbox(six) as session:
        look = "python -c 'import colorama, six; print(six.__version__, six.__file__)'; command -v python"
        result = await session.bash(look, timeout=30)
        assert result.output == "1.16.0 /testbed/six.py\n/opt/venv/bin/python\n"
        result = await session.bash(
            "cd /testbed && sed -i 's/1.16.0/mine/' six.py && python -c 'import six; print(six.__version__)'", timeout=30
        )
        assert result.output == "mine\n"
        assert (await session.bash("git diff --stat", timeout=30)).output.startswith(" six.py | 2 +-")
    assert not (six.path / "opt/build").exists()


async def test_nothing_but_the_base_commit_can_be_reached(workshop: Workshop, six: Entry):
    async with workshop.sandbox(six) as session:

        async def git(arguments: str) -> str:
            result = await session.bash(f"git -C /testbed {arguments}", timeout=30)
            assert result.exit_code == 0, result.output
            return result.output

        assert await git("status --porcelain --ignored=no") == ""
        assert (
            await git("log --all --format='%an %ae %ad %s' --date=iso")
            == "Base base@localhost 2000-01-01 00:00:00 +0000 six 1.16.0\n"
        )
        assert (await git("rev-list --all --count")).strip() == "1"
        for nothing in ("reflog", "remote", "tag", "stash list", "fsck --unreachable --no-reflogs --no-progress", "notes list"):
            assert await git(nothing) == "", nothing
        assert await git("branch --format='%(refname)'") == "refs/heads/main\n"
        # Every object is of that one commit.
        packed = int((await git("count-objects -v")).split("count: ")[1].split()[0])
        reachable = len((await git("rev-list --all --objects --no-object-names")).splitlines())
        assert packed == reachable
    assert not (six.path / "testbed/.git/hooks").exists()
    assert not (six.path / "testbed/.git/logs").exists()


def test_of_the_network_and_the_index_nothing_is_left_in_the_image(six: Entry):
    found = subprocess.run(["grep", "-rl", SECRET, six.path], capture_output=True, text=True, check=False)
    assert found.stdout == ""


async def test_a_package_that_is_not_there_fails_with_what_pip_said(workshop: Workshop, debian: Entry):
    with pytest.raises(BuildFailed, match=r"Could not find a version that satisfies the requirement six==0\.0\.1"):
        await workshop.build("python", upon=debian, package="six", version="0.0.1", base="debian")
    assert workshop.store.leftovers() == []
    assert await workshop.backend.list() == []


async def test_a_base_without_python_is_refused_with_what_is_missing(workshop: Workshop, sample: Entry):
    with pytest.raises(BuildFailed, match="the base lacks git tar find python3"):
        await workshop.build("python", upon=sample, package="six", version="1.16.0", base="sample")
    assert await workshop.backend.list() == []


@pytest.fixture(scope="module")
def sample_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few programs of this host, as a root file system."""
    path = tmp_path_factory.mktemp("sample") / "root.tar"
    subprocess.run(["tar", "-C", directory_root().path, "-cf", path, "."], check=True)
    return path


@pytest.fixture(scope="module")
def sample(workshop: Workshop, sample_tar: Path) -> Entry:
    return asyncio.run(workshop.build("tarball", path=str(sample_tar)))


@pytest.fixture(scope="module")
def sample_sif(workshop: Workshop, sample_tar: Path) -> Entry:
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is not installed")
    return asyncio.run(workshop.build("tarball", Format.SIF, path=str(sample_tar)))


async def test_a_root_is_packed_into_a_sif_file(workshop: Workshop, sample_sif: Entry):
    assert sample_sif.path.name == "image.sif"
    await workshop.check(sample_sif)
    async with workshop.sandbox(sample_sif) as session:
        assert (await session.bash(f"cat {FACT}", timeout=30)).output == TEXT


async def test_a_sif_file_is_taken_as_it_is(workshop: Workshop, sample_sif: Entry):
    copy = await workshop.build("sif", Format.SIF, path=str(sample_sif.path))
    assert copy.digest == sample_sif.digest


async def test_a_sif_file_is_unpacked(workshop: Workshop, sample: Entry, sample_sif: Entry):
    unpacked = await workshop.build("sif", path=str(sample_sif.path))
    await workshop.check(unpacked)
    assert (unpacked.path / FACT[1:]).read_text() == TEXT
    assert unpacked.digest == sample.digest
    if sandbox_user() is not None:
        assert {path.lstat().st_uid for path in unpacked.path.rglob("*")} == {sandbox_user()}


@pytest.mark.parametrize("content", [b"", b"nothing", b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\0" + b"\0" * 200])
async def test_what_is_no_sif_file_is_refused(workshop: Workshop, tmp_path: Path, content: bytes):
    path = tmp_path / "image.sif"
    path.write_bytes(content)
    with pytest.raises(BadSource, match=r"image\.sif"):
        await workshop.build("sif", path=str(path))
    assert workshop.store.leftovers() == []


async def test_a_sif_file_serves_as_no_base(workshop: Workshop, sample_sif: Entry):
    with pytest.raises(BadSource, match="a base must be kept as a directory"):
        await workshop.build("python", upon=sample_sif, package="six", version="1.16.0", base="sample")


async def test_a_definition_is_built_by_apptainer(workshop: Workshop):
    try:
        find_program("", sandbox_user())
    except BackendUnavailable as error:
        pytest.skip(str(error))
    text = f"Bootstrap: localimage\nFrom: {directory_root().path}\n%files\n  /etc/hostname /greeting\n"
    entry = await workshop.build("definition", Format.SIF, text=text)
    await workshop.check(entry)
    async with workshop.sandbox(entry) as session:
        assert (await session.bash("cat /greeting", timeout=30)).output == Path("/etc/hostname").read_text()
    with pytest.raises(BuildFailed, match="nowhere"):
        await workshop.build("definition", text="Bootstrap: localimage\nFrom: /nowhere.sif\n")


async def test_verifying_finds_what_was_changed_and_what_does_not_start(sample_tar: Path):
    with open_folder() as folder:
        workshop = Workshop(folder)
        store, backend = workshop.store, workshop.backend
        entry = await workshop.build("tarball", path=str(sample_tar))
        (entry.path / FACT[1:]).write_text("otherwise")
        problems = await verify(store, entry.digest, backend)
        assert len(problems) == 1
        assert "its contents have changed" in problems[0]
        shutil.rmtree(entry.path)
        assert [problem.split(":")[0] for problem in await verify(store, entry.digest, backend)] == [
            f"{entry.path} cannot be read",
            "no sandbox can be started from it",
        ]
        assert await verify(store, f"sha256-{'0' * 64}", backend) == [f"{store.folder} does not have it"]
        assert await backend.list() == []

"""What images are made from, as far as it takes no network and no sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.images import build
from sandboxes.images.build import build_image, input_key
from sandboxes.images.errors import BadSource, BuildFailed, ImageRefused
from sandboxes.images.sources import KINDS, parse_settings
from sandboxes.images.states import Format
from sandboxes.images.store import Entry, Store
from sandboxes.registry import get_backend
from tests.unit.image_archives import COMPRESSIONS, Tar, digest_of, docker_archive, image_config, oci_layout, open_folder

LOWER = Tar().directory("etc").add("etc/motd", b"hello").add("etc/gone", b"x").directory("opt").add("opt/old", b"x").data()
UPPER = Tar().add("etc/.wh.gone").add("opt/.wh..wh..opq").add("opt/new", b"y").link("mtab", "/proc/mounts").data()


class Watcher:
    """Takes the log of a build, and notices when it comes to a step."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shares: list[float] = []
        self.steps: list[str] = []
        self.unpacking = threading.Event()

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, share: float, step: str) -> None:
        self.shares.append(share)
        self.steps.append(step)
        if step.startswith("unpacking"):
            self.unpacking.set()


class Workshop:
    """Builds into a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "store")
        self.watcher = Watcher()
        self._backend = get_backend("bubblewrap", folder / "sandboxes")

    async def build(self, kind: str, format: Format = Format.DIRECTORY, **source: Any) -> Entry:
        settings = parse_settings(kind, source)
        return await build_image(
            self.store,
            name="build-1",
            kind=kind,
            settings=settings,
            format=format,
            base=None,
            backend=self._backend,
            monitor=self.watcher,
        )

    def is_empty(self) -> bool:
        return self.store.digests() == [] and self.store.leftovers() == []


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    with open_folder() as folder:
        yield Workshop(folder)


def check_two_layers(entry: Entry) -> None:
    root = entry.path
    assert {str(path.relative_to(root)) for path in root.rglob("*")} == {"etc", "etc/motd", "opt", "opt/new", "mtab"}
    assert (root / "etc/motd").read_bytes() == b"hello"
    assert entry.env == {"PATH": "/opt/bin:/usr/bin", "GREETING": "hello=you"}
    assert entry.labels == {"made-by": "a test"}
    assert dict(entry.root.env)["PATH"] == "/opt/bin:/usr/bin"


class TestDockerArchives:
    @pytest.mark.parametrize("compress", COMPRESSIONS)
    async def test_layers_of_every_compression(self, workshop: Workshop, tmp_path: Path, compress: str):
        path = docker_archive(tmp_path / "image.tar", [LOWER, UPPER], compress=compress)
        check_two_layers(await workshop.build("docker_archive", path=str(path)))

    @pytest.mark.parametrize("compress", COMPRESSIONS)
    async def test_archives_that_are_compressed_as_a_whole(self, workshop: Workshop, tmp_path: Path, compress: str):
        path = docker_archive(tmp_path / "image.tar", [LOWER, UPPER])
        path.write_bytes(COMPRESSIONS[compress](path.read_bytes()))
        check_two_layers(await workshop.build("docker_archive", path=str(path)))

    async def test_of_several_images_one_must_be_named(self, workshop: Workshop, tmp_path: Path):
        config = image_config([LOWER])
        images = [{"Config": "c", "RepoTags": [tag], "Layers": ["l"]} for tag in ("busy:1", "busy:2")]
        tar = Tar().add("l", LOWER).add("c", config).add("manifest.json", json.dumps(images).encode())
        path = tmp_path / "image.tar"
        path.write_bytes(tar.data())
        with pytest.raises(BadSource, match=r"2 images could be meant.*busy:1, busy:2"):
            await workshop.build("docker_archive", path=str(path))
        with pytest.raises(BadSource, match="no images could be meant"):
            await workshop.build("docker_archive", path=str(path), reference="busy:3")
        assert (await workshop.build("docker_archive", path=str(path), reference="busy:2")).digest

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"rootfs": {"diff_ids": [digest_of(b"other")]}}, "layer 0/layer.tar is damaged"),
            ({"rootfs": {"diff_ids": []}}, "1 layers, and its configuration names 0"),
            ({"architecture": "s390x"}, "the image is for s390x"),
        ],
    )
    async def test_what_does_not_fit_together_is_refused(
        self, workshop: Workshop, tmp_path: Path, config: Mapping[str, Any], said: str
    ):
        path = docker_archive(tmp_path / "image.tar", [LOWER], **config)
        with pytest.raises(BadSource, match=said):
            await workshop.build("docker_archive", path=str(path))
        assert workshop.is_empty()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"nothing", "damaged, or no tar archive"),
            (Tar().add("x", b"1").data(), r"no manifest\.json"),
            (Tar().add("manifest.json", b"{").data(), "is not JSON"),
            (Tar().add("manifest.json", b'[{"Config": 1}]').data(), "is damaged"),
            (Tar().add("manifest.json", b'[{"Config": "c", "Layers": []}]').data(), "no file 'c'"),
            (Tar().add("manifest.json", b'[{"Config": "c", "Layers": []}]').link("c", "/etc/passwd").data(), "is no file"),
            (COMPRESSIONS["gzip"](b"x" * 1000)[:20], "cannot be read"),
        ],
        ids=["text", "empty", "cut short", "no list", "no config", "a link", "cut gzip"],
    )
    async def test_what_is_no_archive_is_refused(self, workshop: Workshop, tmp_path: Path, content: bytes, said: str):
        path = tmp_path / "image.tar"
        path.write_bytes(content)
        with pytest.raises(BadSource, match=said):
            await workshop.build("docker_archive", path=str(path))
        assert workshop.is_empty()

    async def test_a_hostile_layer_is_refused_and_leaves_nothing(self, workshop: Workshop, tmp_path: Path):
        layer = Tar().link("way", str(tmp_path)).add("way/escaped", b"x").data()
        path = docker_archive(tmp_path / "image.tar", [LOWER, layer])
        with pytest.raises(BadSource, match="a symbolic link"):
            await workshop.build("docker_archive", path=str(path))
        assert not (tmp_path / "escaped").exists()
        assert workshop.is_empty()


class TestOci:
    @pytest.mark.parametrize("compress", COMPRESSIONS)
    async def test_a_directory(self, workshop: Workshop, tmp_path: Path, compress: str):
        folder = oci_layout(tmp_path / "layout", [LOWER, UPPER], compress=compress)
        check_two_layers(await workshop.build("oci", path=str(folder)))

    async def test_an_archive_of_one(self, workshop: Workshop, tmp_path: Path):
        folder = oci_layout(tmp_path / "layout", [LOWER, UPPER])
        archive = shutil.make_archive(str(tmp_path / "layout"), "tar", folder)
        check_two_layers(await workshop.build("oci", path=archive))

    async def test_the_image_for_this_machine_is_chosen(self, workshop: Workshop, tmp_path: Path):
        folder = oci_layout(tmp_path / "layout", [LOWER, UPPER], nested=True, name="latest")
        check_two_layers(await workshop.build("oci", path=str(folder), reference="latest"))
        with pytest.raises(BadSource, match="no image 'other'; there are: latest"):
            await workshop.build("oci", path=str(folder), reference="other")

    async def test_a_damaged_blob_is_refused(self, workshop: Workshop, tmp_path: Path):
        folder = oci_layout(tmp_path / "layout", [LOWER], compress="none")
        blob = folder / "blobs/sha256" / hashlib.sha256(LOWER).hexdigest()
        blob.write_bytes(LOWER.replace(b"hello", b"hullo"))
        with pytest.raises(BadSource, match="is damaged"):
            await workshop.build("oci", path=str(folder))

    async def test_a_blob_that_leads_out_of_the_layout_is_not_there(self, workshop: Workshop, tmp_path: Path):
        folder = oci_layout(tmp_path / "layout", [LOWER], compress="none")
        blob = folder / "blobs/sha256" / hashlib.sha256(LOWER).hexdigest()
        (tmp_path / "outside").write_bytes(LOWER)
        blob.unlink()
        blob.symlink_to(tmp_path / "outside")
        with pytest.raises(BadSource, match="has no file"):
            await workshop.build("oci", path=str(folder))

    @pytest.mark.parametrize("digest", ["sha256:../../x", "md5:" + "0" * 32, "sha256:" + "0" * 64])
    async def test_digests_that_name_no_blob_are_refused(self, workshop: Workshop, tmp_path: Path, digest: str):
        (tmp_path / "index.json").write_text(json.dumps({"manifests": [{"digest": digest}]}))
        with pytest.raises(BadSource, match=r"no SHA-256 digest|has no file"):
            await workshop.build("oci", path=str(tmp_path))

    async def test_a_directory_that_is_no_layout_is_refused(self, workshop: Workshop, tmp_path: Path):
        with pytest.raises(BadSource, match=r"index\.json"):
            await workshop.build("oci", path=str(tmp_path))


class TestTarballs:
    @pytest.mark.parametrize("compress", COMPRESSIONS)
    async def test_every_compression(self, workshop: Workshop, tmp_path: Path, compress: str):
        path = tmp_path / "root.tar"
        path.write_bytes(COMPRESSIONS[compress](LOWER))
        entry = await workshop.build("tarball", path=str(path))
        assert (entry.path / "etc/motd").read_bytes() == b"hello"
        assert workshop.watcher.shares[-1] >= 0.98
        assert workshop.watcher.shares == sorted(workshop.watcher.shares)

    async def test_the_same_contents_are_one_entry(self, workshop: Workshop, tmp_path: Path):
        for name in COMPRESSIONS:
            (tmp_path / name).write_bytes(COMPRESSIONS[name](LOWER))
            await workshop.build("tarball", path=str(tmp_path / name))
        assert len(workshop.store.digests()) == 1
        assert workshop.store.leftovers() == []

    async def test_a_missing_file_is_named(self, workshop: Workshop):
        with pytest.raises(BadSource, match=r"/nowhere/root\.tar cannot be read: No such file"):
            await workshop.build("tarball", path="/nowhere/root.tar")

    async def test_a_cancelled_build_goes_on_nowhere_and_leaves_nothing(self, workshop: Workshop, tmp_path: Path):
        tar = Tar()
        for number in range(20_000):
            tar.add(f"d{number % 100}/f{number}", b"x")
        (tmp_path / "root.tar").write_bytes(tar.data())
        task = asyncio.create_task(workshop.build("tarball", path=str(tmp_path / "root.tar")))
        while not workshop.watcher.unpacking.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert workshop.is_empty()

    async def test_too_little_space_is_said_before_anything_is_done(
        self, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        (tmp_path / "root.tar").write_bytes(LOWER)
        monkeypatch.setattr(build, "RESERVE_BYTES", 1 << 60)
        with pytest.raises(BuildFailed, match="are needed, and of the"):
            await workshop.build("tarball", path=str(tmp_path / "root.tar"))
        assert workshop.watcher.lines == []


@pytest.mark.skipif(sandbox_user() is None, reason="sandboxes run as our own user")
async def test_a_store_that_sandboxes_cannot_go_to_is_refused(tmp_path: Path):
    (tmp_path / "root.tar").write_bytes(LOWER)
    tmp_path.chmod(0o700)
    with pytest.raises(BuildFailed, match=r"who cannot go to .* set PRORL_IMAGE_DIR"):
        await Workshop(tmp_path).build("tarball", path=str(tmp_path / "root.tar"))


class TestTheStore:
    async def test_an_entry_can_be_reached_and_changed_by_nobody_but_the_sandboxes(self, workshop: Workshop, tmp_path: Path):
        (tmp_path / "root.tar").write_bytes(LOWER)
        entry = await workshop.build("tarball", path=str(tmp_path / "root.tar"))
        folder = entry.path.parent
        assert folder.parent == workshop.store.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert stat.S_IMODE(workshop.store.folder.stat().st_mode) == 0o755
        if sandbox_user() is not None:
            assert entry.path.stat().st_uid == sandbox_user()

    async def test_what_is_not_complete_is_not_there(self, workshop: Workshop, tmp_path: Path):
        (tmp_path / "root.tar").write_bytes(LOWER)
        entry = await workshop.build("tarball", path=str(tmp_path / "root.tar"))
        (entry.path.parent / "manifest.json").unlink()
        assert workshop.store.find(entry.digest) is None

    def test_a_name_that_is_no_digest_is_refused(self, workshop: Workshop):
        with pytest.raises(ValueError, match="not a digest"):
            workshop.store.find("../../etc")

    async def test_a_new_entry_is_not_detached(self, workshop: Workshop, tmp_path: Path):
        (tmp_path / "root.tar").write_bytes(LOWER)
        entry = await workshop.build("tarball", path=str(tmp_path / "root.tar"))
        assert workshop.store.detach(entry.digest) is None
        assert workshop.store.find(entry.digest) is not None


class TestInputKeys:
    def key(self, kind: str = "tarball", format: Format = Format.DIRECTORY, **source: Any) -> str:
        return input_key(kind, parse_settings(kind, source), format, None)

    def test_are_of_settings_form_and_the_contents_of_files(self, tmp_path: Path):
        first, second = tmp_path / "1.tar", tmp_path / "2.tar"
        first.write_bytes(b"one")
        second.write_bytes(b"one")
        before = self.key(path=str(first))
        assert before == self.key(path=str(first))
        assert len({before, self.key(path=str(second)), self.key(path=str(first), format=Format.SIF)}) == 3
        first.write_bytes(b"two")
        assert self.key(path=str(first)) != before


class TestSettings:
    @pytest.mark.parametrize(
        ("kind", "source", "pointer"),
        [
            ("zip", {}, "/kind"),
            ("tarball", {}, "/source/path"),
            ("tarball", {"path": "relative"}, "/source/path"),
            ("tarball", {"path": "/a", "extra": 1}, "/source/extra"),
            ("debian", {"suite": "--help"}, "/source/suite"),
            ("debian", {"suite": "bookworm", "packages": ["--hook"]}, "/source/packages/0"),
            ("debian", {"suite": "bookworm", "mirror": "file:///x"}, "/source/mirror"),
            ("python", {"package": "six", "version": "1.0"}, "/source/base"),
            ("python", {"package": "-r", "version": "1.0", "base": "b"}, "/source/package"),
            ("python", {"package": "six", "version": "1.0\n-r", "base": "b"}, "/source/version"),
            (
                "python",
                {"package": "six", "version": "1.0", "base": "b", "requirements": ["-r /etc/x"]},
                "/source/requirements/0",
            ),
            ("virtualenv", {"base": "b", "requirements": []}, "/source/requirements"),
            ("virtualenv", {"base": "b", "requirements": ["six", "--index-url=x"]}, "/source/requirements/1"),
            ("virtualenv", {"base": "b", "requirements": ["six"], "path": "/usr"}, "/source/path"),
            ("virtualenv", {"base": "b", "requirements": ["six"], "path": "/opt/../usr"}, "/source/path"),
            ("definition", {"text": "From: x"}, "/source/text"),
            ("definition", {"text": "Bootstrap: docker\n%setup\n touch /x"}, "/source/text"),
            ("definition", {"text": "Bootstrap: docker\n  %pre\n touch /x"}, "/source/text"),
        ],
    )
    def test_what_is_wrong_is_named_by_a_pointer(self, kind: str, source: dict[str, Any], pointer: str):
        with pytest.raises(ImageRefused) as refused:
            parse_settings(kind, source)
        assert [problem.pointer for problem in refused.value.problems] == [pointer]

    def test_every_kind_describes_its_settings(self):
        for kind, source in KINDS.items():
            schema = source.settings.model_json_schema()
            assert schema["additionalProperties"] is False, kind
            assert parse_settings(kind, source.example)

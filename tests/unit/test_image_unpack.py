"""Unpacking archives that nobody vouches for."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.images.digest import read_contents
from sandboxes.images.errors import BadSource
from sandboxes.images.states import Format
from sandboxes.images.unpack import Unpacker, adopt
from tests.unit.image_archives import Tar

ROOM = 1 << 24


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "rootfs"
    folder.mkdir()
    return folder


def unpack(root: Path, *archives: bytes, layer: bool = False, room: int = ROOM) -> Unpacker:
    unpacker = Unpacker(root, owner=sandbox_user(), room=room)
    for archive in archives:
        unpacker.extract(io.BytesIO(archive), what="the archive", layer=layer)
    return unpacker


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


class TestWhatBelongsInARoot:
    def test_is_unpacked_as_it_is(self, root: Path):
        tar = Tar().directory("./etc", 0o750).add("./etc/motd", b"hello", mode=0o640).link("etc/mtab", "/proc/mounts")
        unpack(root, tar.hard_link("etc/motd.2", "./etc/motd").data())
        assert (root / "etc/motd").read_bytes() == b"hello"
        assert stat.S_IMODE((root / "etc/motd").stat().st_mode) == 0o640
        assert stat.S_IMODE((root / "etc").stat().st_mode) == 0o750
        assert (root / "etc/motd").stat().st_mtime == 1_000_000_000
        assert str((root / "etc/mtab").readlink()) == "/proc/mounts"
        assert (root / "etc/motd").samefile(root / "etc/motd.2")

    def test_directories_that_the_archive_leaves_out_are_made(self, root: Path):
        unpack(root, Tar().add("usr/share/doc/x", b"1").data())
        assert (root / "usr/share/doc/x").read_bytes() == b"1"
        assert stat.S_IMODE((root / "usr").stat().st_mode) == 0o755

    def test_absolute_and_dangling_links_are_kept_and_not_followed(self, root: Path):
        unpack(root, Tar().link("bin", "usr/bin").link("lib", "/usr/lib").link("odd", "../../../etc").data())
        assert [str((root / name).readlink()) for name in ("bin", "lib", "odd")] == ["usr/bin", "/usr/lib", "../../../etc"]

    def test_files_belong_to_the_user_of_the_sandboxes(self, root: Path):
        unpack(root, Tar().directory("d").add("d/f", b"1", uid=0).link("l", "d").data())
        owner = sandbox_user() if sandbox_user() is not None else os.geteuid()
        assert {path.lstat().st_uid for path in root.rglob("*")} == {owner}
        assert {path.lstat().st_gid for path in root.rglob("*")} == {owner if sandbox_user() is not None else os.getegid()}

    def test_what_their_user_could_not_read_or_leave_is_opened_to_it(self, root: Path):
        unpack(root, Tar().directory("closed", 0).add("closed/shadow", b"1", mode=0).data())
        assert stat.S_IMODE((root / "closed").stat().st_mode) == 0o700
        assert stat.S_IMODE((root / "closed/shadow").stat().st_mode) == 0o400

    def test_names_in_any_bytes_survive(self, root: Path):
        unpack(root, Tar().add(os.fsdecode(b"caf\xe9"), b"1").add("naïve 🌍", b"2").data())
        assert sorted(os.fsencode(path.name) for path in root.iterdir()) == [b"caf\xe9", "naïve 🌍".encode()]

    def test_later_entries_replace_earlier_ones_of_any_kind(self, root: Path):
        tar = Tar().add("a", b"1").directory("b").add("b/x", b"1").link("c", "b").add("d", b"1")
        tar.link("a", "b").add("b", b"2").directory("c").add("c/y", b"2").directory("d")
        unpack(root, tar.data())
        assert names(root) == {"a", "b", "c", "c/y", "d"}
        assert (root / "a").is_symlink()
        assert (root / "b").is_file()
        assert not (root / "c").is_symlink()
        assert (root / "d").is_dir()


class TestWhatDoesNot:
    @pytest.mark.parametrize(
        ("tar", "said"),
        [
            (Tar().add("/etc/passwd", b"x"), "absolute path"),
            (Tar().add("a/../../escaped", b"x"), "leads upwards"),
            (Tar().add("..", type=tarfile.DIRTYPE), "leads upwards"),
            (Tar().link("way", "/etc").add("way/escaped", b"x"), "through 'way', a symbolic link"),
            (Tar().link("way", "..").add("way/escaped", b"x"), "through 'way', a symbolic link"),
            (Tar().directory("d").link("d/way", ".").add("d/way/x", b"x"), "through 'd/way', a symbolic link"),
            (Tar().link("way", "/").directory("way/sub"), "through 'way', a symbolic link"),
            (Tar().add("f", b"x").add("f/g", b"x"), "through 'f', no directory"),
            (Tar().hard_link("passwd", "/etc/passwd"), "absolute path"),
            (Tar().hard_link("passwd", "../../../etc/passwd"), "leads upwards"),
            (Tar().link("way", "/etc").hard_link("passwd", "way/passwd"), "through 'way', a symbolic link"),
            (Tar().hard_link("passwd", "etc/passwd"), "which is not there"),
            (Tar().directory("d").hard_link("e", "d"), "a directory"),
            (Tar().hard_link("e", "."), "leads to the root"),
        ],
    )
    def test_is_refused_and_nothing_is_outside(self, root: Path, tar: Tar, said: str):
        before = set(root.parent.iterdir())
        with pytest.raises(BadSource, match=said) as refused:
            unpack(root, tar.data())
        assert "the archive" in str(refused.value)
        assert set(root.parent.iterdir()) == before

    def test_a_link_is_replaced_by_a_file_of_its_name_and_not_written_through(self, root: Path):
        outside = root.parent / "outside"
        outside.write_text("untouched")
        unpack(root, Tar().link("f", str(outside)).add("f", b"mine").data())
        assert outside.read_text() == "untouched"
        assert (root / "f").read_bytes() == b"mine"

    def test_a_hard_link_to_a_symbolic_link_links_the_link(self, root: Path):
        unpack(root, Tar().link("a", "/etc/passwd").hard_link("b", "a").data())
        assert str((root / "b").readlink()) == "/etc/passwd"

    def test_devices_are_left_out_and_setuid_is_taken_away(self, root: Path):
        tar = Tar().add("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3).add("disk", type=tarfile.BLKTYPE)
        tar.add("fifo", type=tarfile.FIFOTYPE).add("su", b"x", mode=0o6755).directory("shared", 0o7777)
        assert unpack(root, tar.data()).skipped == 3
        assert names(root) == {"su", "shared"}
        assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
        assert stat.S_IMODE((root / "shared").stat().st_mode) == 0o1777

    def test_more_than_there_is_room_for_is_refused(self, root: Path):
        with pytest.raises(BadSource, match="larger than the space"):
            unpack(root, Tar().add("a", b"x" * 600).add("b", b"x" * 600).data(), room=1000)

    @pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, Tar().add("a", b"x" * 5000).data()[:3000]])
    def test_what_is_no_archive_or_cut_off_is_refused(self, root: Path, data: bytes):
        with pytest.raises(BadSource, match="damaged, or no tar archive"):
            unpack(root, data)


class TestLayers:
    def test_a_whiteout_removes_what_an_earlier_layer_brought(self, root: Path):
        lower = Tar().directory("d").add("d/gone", b"1").add("d/kept", b"1").directory("tree").add("tree/x", b"1").data()
        unpack(root, lower, Tar().add("d/.wh.gone").add(".wh.tree").add(".wh.unknown").data(), layer=True)
        assert names(root) == {"d", "d/kept"}

    def test_an_opaque_directory_hides_earlier_layers_only(self, root: Path):
        lower = Tar().directory("d").add("d/old", b"1").directory("d/sub").add("d/sub/old", b"1").data()
        unpack(root, lower, Tar().directory("d").add("d/new", b"2").add("d/.wh..wh..opq").data(), layer=True)
        assert names(root) == {"d", "d/new"}

    def test_a_whiteout_does_not_remove_what_its_own_layer_brings(self, root: Path):
        unpack(root, Tar().add("f", b"1").data(), Tar().add("f", b"2").add(".wh.f").data(), layer=True)
        assert (root / "f").read_bytes() == b"2"

    @pytest.mark.parametrize("name", [".wh..", ".wh...", ".wh."])
    def test_a_whiteout_of_nothing_is_refused(self, root: Path, name: str):
        with pytest.raises(BadSource, match="names nothing"):
            unpack(root, Tar().add(name).data(), layer=True)

    def test_a_hard_link_may_lead_to_an_earlier_layer(self, root: Path):
        unpack(root, Tar().add("a", b"1").data(), Tar().hard_link("b", "a").data(), layer=True)
        assert (root / "b").read_bytes() == b"1"

    def test_outside_of_layers_whiteouts_are_files_like_others(self, root: Path):
        unpack(root, Tar().add("f", b"1").add(".wh.f", b"2").data())
        assert names(root) == {"f", ".wh.f"}


class TestDigest:
    def contents(self, root: Path) -> tuple[str, int]:
        return read_contents(root, Format.DIRECTORY)

    def test_is_of_names_types_modes_and_contents(self, tmp_path: Path):
        digests = set()
        variants = [
            Tar().add("f", b"1"),
            Tar().add("f", b"2"),
            Tar().add("g", b"1"),
            Tar().add("f", b"1", mode=0o755),
            Tar().link("f", "1"),
            Tar().link("f", "2"),
            Tar().directory("f"),
            Tar().add("f", b""),
            Tar().directory("f").add("f/x", b"1"),
            Tar().add("f", b"1").add("fx", b""),
        ]
        for number, tar in enumerate(variants):
            root = tmp_path / str(number)
            root.mkdir()
            unpack(root, tar.data())
            digests.add(self.contents(root).digest)
        assert len(digests) == len(variants)

    def test_is_not_of_times_or_the_order_in_the_archive(self, tmp_path: Path):
        first, second = tmp_path / "1", tmp_path / "2"
        first.mkdir()
        second.mkdir()
        unpack(first, Tar().add("a", b"1").add("b", b"22").data())
        unpack(second, Tar().add("b", b"22", mtime=5).add("a", b"1", uname="somebody").data())
        assert self.contents(first) == self.contents(second)
        assert self.contents(first).size == 3

    def test_counts_a_file_with_two_names_once(self, root: Path):
        unpack(root, Tar().add("a", b"12345").hard_link("b", "a").data())
        assert self.contents(root).size == 5


def test_what_another_program_unpacked_is_made_alike(root: Path):
    (root / "closed").mkdir()
    (root / "closed/su").write_text("x")
    (root / "closed/su").chmod(0o6755)
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to("/nowhere")
    (root / "closed").chmod(0o2500)
    adopt(root, owner=sandbox_user())
    assert names(root) == {"closed", "closed/su", "link"}
    assert stat.S_IMODE((root / "closed").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "closed/su").stat().st_mode) == 0o755
    if sandbox_user() is not None:
        assert {path.lstat().st_uid for path in [root, *root.rglob("*")]} == {sandbox_user()}

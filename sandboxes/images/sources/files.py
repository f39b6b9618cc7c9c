"""The files of a container image, in a directory or in a tar archive. No Django."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, cast

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job
from sandboxes.images.streams import DAMAGED, Watched, decompressed, is_compressed


class Files(Protocol):
    """Named by relative paths. Raises BadSource for one that is not there."""

    def size(self, name: str) -> int: ...

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...

    def __contains__(self, name: str) -> bool: ...

    def close(self) -> None: ...


class FolderFiles:
    """Files below a directory, which links in it do not leave."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def __contains__(self, name: str) -> bool:
        path = (self._folder / name).resolve()
        return path.is_relative_to(self._folder) and path.is_file()

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._path(name).open("rb") as file:
            yield file

    def _path(self, name: str) -> Path:
        if name not in self:
            raise BadSource(f"{self._folder} has no file {name!r}")
        return (self._folder / name).resolve()

    def close(self) -> None:
        """Nothing is held open."""


class TarFiles:
    """Files of a tar archive that is not compressed."""

    def __init__(self, path: Path, what: str) -> None:
        self._what = what
        try:
            with contextlib.ExitStack() as stack:
                self._tar = stack.enter_context(tarfile.open(path, "r:"))
                self._members = {str(PurePosixPath(member.name)): member for member in self._tar}
                self.close = stack.pop_all().close
        except (tarfile.TarError, *DAMAGED) as error:
            raise BadSource(f"{what} is damaged, or no tar archive: {error}") from error

    def __contains__(self, name: str) -> bool:
        return str(PurePosixPath(name)) in self._members

    def size(self, name: str) -> int:
        return self._member(name).size

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            file = self._tar.extractfile(self._member(name))
        except KeyError:
            file = None  # a link to what is not there
        if file is None:
            raise BadSource(f"{self._what}: {name!r} is no file")
        with file:
            yield file

    def _member(self, name: str) -> tarfile.TarInfo:
        try:
            return self._members[str(PurePosixPath(name))]
        except KeyError:
            raise BadSource(f"{self._what} has no file {name!r}") from None


@contextlib.asynccontextmanager
async def opened_files(job: Job, path: Path) -> AsyncIterator[Files]:
    """The files of the image at `path`. Raises BadSource."""
    files = FolderFiles(path) if path.is_dir() else await job.in_thread(_open_archive, job, path)
    try:
        yield files
    finally:
        files.close()


def _open_archive(job: Job, path: Path) -> Files:
    """Its files are read in any order, so that a compressed archive is decompressed first."""
    try:
        if not is_compressed(path):
            return TarFiles(path, str(path))
        job.step("decompressing the archive", 0.0, 0.1)
        target = job.workspace / "archive.tar"
        with path.open("rb") as raw, target.open("wb") as file:
            stream = Watched(decompressed(Watched(raw, job.meter(path.stat().st_size))), lambda n: job.check())
            shutil.copyfileobj(cast(IO[bytes], stream), file, 1 << 20)
    except DAMAGED as error:
        raise BadSource(f"{path} cannot be read: {error}") from error
    return TarFiles(target, str(path))

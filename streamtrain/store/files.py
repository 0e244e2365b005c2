"""Files below a directory that is anywhere fsspec reaches: written durably, read, listed, deleted.

It is the edge to filesystems and object stores: whatever they raise becomes a CheckpointError, or a CheckpointCorrupt
where something that should be there is missing or unreadable.
"""

import copy
import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypedDict

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from streamtrain.address import MASK, redacted, secrets_of
from streamtrain.errors import CheckpointCorrupt, CheckpointError, StreamtrainError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BLOCK = 1 << 22
# A disk that fails, or a file where a directory should be. Errors without a number are those of a decoder.
_DAMAGE = {None, errno.EIO, errno.EISDIR, errno.ENOTDIR}


class FileFacts(TypedDict):
    """Size in bytes and SHA-256, in hexadecimal, of a file."""

    bytes: int
    sha256: str


class Output(io.RawIOBase):
    """A file being written; it knows its size and SHA-256 without being read again."""

    def __init__(self, stream: IO[bytes], directory: "Directory", name: str) -> None:
        super().__init__()
        self._stream, self._directory, self._name = stream, directory, name
        self._digest = hashlib.sha256()
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: "ReadableBuffer", /) -> int:
        with self.writing():
            self._stream.write(data)
        self._digest.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size

    def writing(self) -> AbstractContextManager[None]:
        """Context in which any error means that this file cannot be written."""
        return self._directory.writing(self._name)

    def facts(self) -> FileFacts:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


class Input(io.RawIOBase):
    """A file that is read once, region by region, at random positions within one; then its SHA-256 is known."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._digest = hashlib.sha256()
        self._begin, self._region = 0, b""
        self._at = 0
        self.bytes = stream.seek(0, os.SEEK_END)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.bytes}[whence]
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Of the region; what is elsewhere is read from the file."""
        wanted = self.bytes - self._at if size is None or size < 0 else size
        begin = self._at - self._begin
        if begin >= 0 and begin + wanted <= len(self._region):
            data = self._region[begin : begin + wanted]
        else:
            self._stream.seek(self._at)
            data = self._stream.read(wanted)
        self._at += len(data)
        return data

    def next_region(self, end: int) -> None:
        """What comes after the region that there is, up to a position, becomes the region."""
        self._begin += len(self._region)
        self._stream.seek(self._begin)
        self._region = self._stream.read(max(0, end - self._begin))
        self._digest.update(self._region)

    def facts(self) -> FileFacts:
        """For which the rest of it is read; as much of it as there still is, if it became shorter meanwhile."""
        while True:
            self.next_region(self._begin + len(self._region) + _BLOCK)
            if not self._region:
                return {"bytes": self._begin, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self._stream.close()
        super().close()


class Directory:
    """A directory, which need not be there yet.

    Args:
        url: a local path, or a URL that fsspec knows, such as file://, memory:// or s3://.

    Attributes:
        url: as given, without credentials; for messages.

    Raises:
        CheckpointError: fsspec does not know the protocol, or its package is not installed.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = redacted(str(url)).rstrip("/") or "/"
        self._secrets = secrets_of(str(url))
        if isinstance(url, Path) or not re.search("::|://", url):
            try:
                self._fs, self._root = LocalFileSystem(), str(Path(url).expanduser().absolute())
            except RuntimeError as exc:
                raise CheckpointError(f"cannot use {self.url}: {exc}") from exc
            return
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except Exception as exc:  # some connect at once, and raise errors of their own
            raise CheckpointError(f"cannot use {self.url}: {self._reason(exc)}") from exc

    def __truediv__(self, name: str) -> "Directory":
        inner = copy.copy(self)
        inner.url, inner._root = f"{self.url}/{name}", self._path(name)
        return inner

    @property
    def local(self) -> Path | None:
        """Its path if it is on a local filesystem."""
        return Path(self._root) if isinstance(self._fs, LocalFileSystem) else None

    # --- writing ---

    @contextmanager
    def create(self, name: str) -> Iterator[Output]:
        """A new file, in place of an older one; it exists, and is durable, only when the block ends without an error.

        Object stores show an object when it is complete; on other filesystems that are not local, one that could not
        be written is deleted.
        """
        at = Path(self._root, name)
        path = str(at.with_name(f".{at.name}.unfinished")) if self.local else self._path(name)
        with self.writing(name):
            self._fs.makedirs(os.path.dirname(path), exist_ok=True)
            stream = self._fs.open(path, "wb")
        try:
            yield Output(stream, self, name)
            with self.writing(name):
                stream.flush()
                if self.local:
                    os.fsync(stream.fileno())
                stream.close()
                if self.local:
                    os.replace(path, at)
                    self._sync(at)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                stream.close()
            with suppress(Exception):
                self._fs.rm_file(path)
            raise

    def put(self, name: str, data: bytes) -> FileFacts:
        """Writes a file at once: there is all of it, or what was there before."""
        if self.local:
            with self.create(name) as output:
                output.write(data)
        else:
            with self.writing(name):
                self._fs.makedirs(os.path.dirname(self._path(name)), exist_ok=True)
                self._fs.pipe_file(self._path(name), data)
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def copy_from(self, source: "Directory", name: str) -> None:
        """Copies a file of another directory, below the same name; as a hard link where that is possible.

        Files of checkpoints are never changed, only replaced, so two checkpoints may share one.
        """
        if self.local and source.local and self._link(source, name):
            return
        with source.reading(name):
            stream = source._fs.open(source._path(name), "rb")
        with stream, self.create(name) as output:
            while True:
                with source.reading(name):
                    block = stream.read(_BLOCK)
                if not block:
                    break
                output.write(block)

    def _link(self, source: "Directory", name: str) -> bool:
        at = Path(self._root, name)
        with self.writing(name):
            at.parent.mkdir(parents=True, exist_ok=True)
            at.unlink(missing_ok=True)
        try:
            os.link(source._path(name), at)
        except OSError:  # another filesystem, or one without links
            return False
        with self.writing(name):
            self._sync(at)
        return True

    def delete(self, name: str) -> None:
        """Deletes a file, if it exists."""
        with self.writing(name, "delete"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
            if self.local:
                self._sync(Path(self._root, name))

    def delete_all(self) -> None:
        """Deletes the directory with everything in it, if it exists."""
        with self.writing("", "delete"), suppress(FileNotFoundError):
            self._fs.rm(self._root, recursive=True)

    def move(self, name: str, folder: "Directory") -> None:
        """Moves a directory that is right in here into another place of the same filesystem, below the same name.

        At once where that is local. Elsewhere it is copied and then deleted, so that it may be in both for a while.
        """
        with self.writing(name, "move"):
            target = folder._path(name)
            self._fs.makedirs(folder._root, exist_ok=True)
            if self.local:
                os.rename(self._path(name), target)
                folder._sync(Path(target))
                self._sync(Path(self._root, name))
            else:
                self._fs.copy(self._path(name) + "/", target + "/", recursive=True)
                (self / name).delete_all()

    def _sync(self, file: Path) -> None:
        """Makes durable that a file has its name, and that the directories which lead to it have theirs."""
        for parent in file.parents:
            sync(parent)
            if parent in Path(self._root).parents:
                return

    # --- reading ---

    @contextmanager
    def open(self, name: str) -> Iterator[pa.NativeFile]:
        """A file to be read at random positions. Reads belong in a `reading` of their own."""
        with self.reading(name):
            file = pa.OSFile(self._path(name)) if self.local else pa.PythonFile(self._fs.open(self._path(name)), "r")
        with file:
            yield file

    @contextmanager
    def open_once(self, name: str) -> Iterator[Input]:
        """The same, to be read from its beginning to its end. Reads belong in a `reading` of their own."""
        with self.reading(name):
            file = Input(self._fs.open(self._path(name), "rb"))
        with file:
            yield file

    def read(self, name: str) -> bytes:
        with self.reading(name), self._fs.open(self._path(name), "rb") as stream:
            return bytes(stream.read())

    def read_if_there(self, name: str) -> bytes | None:
        """Its content as of now, in one request; None: it is not there."""
        with self.reading(name):
            self._fs.invalidate_cache(self._path(name))
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def facts(self, name: str) -> FileFacts:
        """Size and SHA-256 of a file as it is, for which all of it is read."""
        digest, size = hashlib.sha256(), 0
        with self.reading(name), self._fs.open(self._path(name), "rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                size += len(block)
        return {"bytes": size, "sha256": digest.hexdigest()}

    def exists(self, name: str) -> bool:
        """Whether there is something of that name. fsspec's own `exists` takes any error for a no."""
        with self.reading(name):
            self._fs.invalidate_cache(self._path(name))
            try:
                self._fs.info(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def names(self) -> list[str]:
        """What is right in the directory, sorted; nothing if it is not there."""
        with self.reading(""), suppress(FileNotFoundError):
            self._fs.invalidate_cache(self._root)
            found = (self._name(path) for path in self._fs.ls(self._root, detail=False))
            return sorted(name for name in found if name)
        return []

    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file below the directory, by name relative to it."""
        with self.reading(""):
            self._fs.invalidate_cache(self._root)
            found = self._fs.find(self._root, detail=True)
            return {self._name(path): int(info["size"]) for path, info in found.items()}

    # --- errors ---

    @contextmanager
    def writing(self, name: str, verb: str = "write") -> Iterator[None]:
        """Context in which any error means that a file cannot be written, or what else the verb says."""
        try:
            yield
        except StreamtrainError:
            raise
        except Exception as exc:  # the client of every object store has errors of its own
            raise CheckpointError(f"cannot {verb} {self._shown(name)}: {self._reason(exc)}") from exc

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Context in which any error means that a file cannot be read: because it is damaged, or out of reach."""
        try:
            yield
        except StreamtrainError:
            raise
        except FileNotFoundError as exc:
            raise CheckpointCorrupt(f"{self._shown(name)} is missing") from exc
        except Exception as exc:
            damaged = isinstance(exc, pa.ArrowException | KeyError | ValueError)
            if isinstance(exc, OSError):  # object stores have EIO for their own troubles, which pass
                damaged = exc.errno in _DAMAGE and (self.local is not None or exc.errno != errno.EIO)
            kind = CheckpointCorrupt if damaged else CheckpointError
            raise kind(f"{self._shown(name)} cannot be read: {self._reason(exc)}") from exc

    def _reason(self, exc: BaseException) -> str:
        reason = str(exc) or type(exc).__name__
        for secret in self._secrets:
            reason = reason.replace(secret, MASK)
        return redacted(reason)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _name(self, path: str) -> str:
        return path[len(self._root.rstrip("/")) :].strip("/")

    def _shown(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}" if name else self.url


def sync(path: Path) -> None:
    """Makes the names in a local directory durable."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

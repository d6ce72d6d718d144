"""Whether an input is still the file that a job began with.

A job reads each input in many parts, for hours, and may be continued days later. Parts of two
versions would be mixed, and the recorded hash would be that of neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from pipeline.data.sources.object_stores import InputPath, RemoteFile, input_path
from pipeline.errors import DataError
from pipeline.files.hashes import file_hash, sampled_hash
from pipeline.files.threads import in_threads

# Of a larger file only blocks are hashed. Each job hashes its inputs before it reads them, and
# would read a file of a terabyte twice.
_HASHED_BYTES = 2**34
_SAMPLED_BLOCKS = 2**14
_CHANGED = (
    "changed during the work: expected the content that the job began with, found another one; "
    "put that back, or remove the unfinished output to begin again"
)


class FileState(NamedTuple):
    """An input when a job began.

    `identity`: what its file system or store says of it at once, and what changes when it is
    written or replaced. `digest`: a hash of its content, or the tag that a store keeps of it.
    """

    identity: str
    digest: str


def state_of(path: InputPath) -> FileState:
    """The state of a file now.

    Raises:
        DataError: it changed while it was hashed.
    """
    identity = _identity_of(path)
    state = FileState(identity, _digest_of(str(path), identity))
    if _identity_of(path) != identity:
        raise DataError(f"{path}: {_CHANGED}")
    return state


def check_unchanged(path: InputPath, state: FileState) -> None:
    """Makes sure that a file is as it was: by its identity, or else by its hash.

    A file that was copied back, or whose permissions were changed, has another identity and the
    same hash.

    Raises:
        DataError: it changed, or is gone.
    """
    try:
        identity = _identity_of(path)
        if identity == state.identity or _digest_of(str(path), identity) == state.digest:
            return
    except FileNotFoundError:
        raise DataError(f"{path}: vanished during the work; put it back") from None
    raise DataError(f"{path}: {_CHANGED}")


def check_all_unchanged(states: Iterable[tuple[str, FileState]]) -> None:
    """Compares many files, by their names, each as `check_unchanged` does."""
    # In threads, because each remote file is a request.
    for _ in in_threads(_check_named, states):
        pass


def _check_named(named: tuple[str, FileState]) -> None:
    name, state = named
    check_unchanged(input_path(name), state)


def _identity_of(path: InputPath) -> str:
    if isinstance(path, RemoteFile):
        return path.now().version()
    parts: list[str] = []
    for file in _files_of(path):
        found = file.stat()
        # The time of change, too: a copy may set the time of modification as it likes.
        numbers = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        parts.append(":".join(map(str, numbers)))
    return " ".join(parts)


# A process compares each file many times, and hashes it again only when its identity is another.
@lru_cache(maxsize=64)
def _digest_of(name: str, identity: str) -> str:
    path = input_path(name)
    if isinstance(path, RemoteFile):
        # A remote file is not read only for its hash: the tag that its store keeps stands for it.
        return path.now().identity()
    digests: list[str] = []
    for file in _files_of(path):
        if file.stat().st_size <= _HASHED_BYTES:
            digests.append(file_hash(file))
        else:
            # Reading a very large file only for its hash would take as long as tokenizing it.
            digests.append(f"sampled:{sampled_hash(file, _SAMPLED_BLOCKS)}")
    # Of two files one hash, as the manifest has one for each input.
    return digests[0] if len(digests) == 1 else sha256(" ".join(digests).encode()).hexdigest()


def _files_of(path: Path) -> list[Path]:
    """A file, and the index of tokens of Megatron-LM beside it."""
    index = path.with_suffix(".idx")
    return [path, index] if path.suffix == ".bin" and index.exists() else [path]

"""Files on object stores and servers, `s3://…`, `gs://…`, `az://…`, `https://…`: read in ranges,
never downloaded whole.

fsspec reads them. s3fs, gcsfs and adlfs are its packages for the stores of Amazon, Google and
Microsoft. They take credentials from the environment and from their own files, as everywhere; a URL
that holds one is refused, because manifests and logs name their inputs.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, Union
from urllib.parse import parse_qsl, unquote, urlsplit

from pipeline.errors import (
    TRANSIENT_FAULT,
    DataError,
    MissingPackageError,
    UserError,
    in_one_line,
)

# The extra of this project that installs what reads the URLs of a protocol.
_EXTRAS = {
    "s3": "s3", "s3a": "s3",
    "gs": "gs", "gcs": "gs",
    "az": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
_URL = re.compile(r"(?P<protocol>[a-zA-Z][\w+.-]*)://.+", re.DOTALL)
# What a parameter of a URL is called that lets its holder read the file.
_CREDENTIAL = re.compile(r"token|sig|signature|key|secret|credential|password", re.IGNORECASE)
# How much is asked for at once: a request takes as long as reading several megabytes.
_BLOCK_BYTES = 8 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 4096
# How the stores call what changes with the content of a file.
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "sha256")
# How they call when it was last written.
_TIMES = ("Last-Modified", "LastModified", "last_modified", "updated", "mtime")
_ADVICE = "check its name, the network, and the credentials in the environment"


@dataclass(frozen=True)
class RemoteFile:
    """A file that is read over the network, with the methods of a `Path` that readers need."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._path.suffixes

    @property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(unquote(urlsplit(self.url).path))

    def stat(self) -> SimpleNamespace:
        """What is known of the file: its size in bytes as `st_size`.

        Raises:
            DataError: the file cannot be read.
        """
        return SimpleNamespace(st_size=int(self._info["size"]))

    def open(self, _: str = "rb") -> BinaryIO:
        """Opens the file. What it reads is fetched in blocks.

        Raises:
            DataError: the file cannot be read.
        """
        with _faults(self.url):
            raw: Any = _system_of(self.url).open(
                # Readers go forwards: what follows a block is wanted next.
                self.url,
                "rb",
                block_size=_BLOCK_BYTES,
                cache_type="readahead",
            )
        return _Reading(raw, self.url)  # type: ignore[return-value]  # it has what readers need

    def now(self) -> RemoteFile:
        """The same file, of which nothing is known yet: its store is asked again."""
        # Packages of stores keep what they have listed.
        _system_of(self.url).invalidate_cache()
        return RemoteFile(self.url)

    def version(self) -> str:
        """What the store says of the file, and what is another after it is overwritten.

        That is its tag, or else its size and when it was written; of a store that says neither, as
        `identity`.
        """
        for name in _TIMES:
            if self._tag() is None and self._info.get(name):
                return f"{self._info['size']}:{self._info[name]}"
        return self.identity()

    def identity(self) -> str:
        """What stands for a hash of the file: the tag that its store keeps of its content.

        Of a store that keeps none, a hash of the size and of some blocks.
        """
        tag = self._tag()
        if tag is not None:
            return f"etag:{tag}"
        size = int(self._info["size"])
        last = max(0, size - _SAMPLE_BYTES)
        digest = hashlib.sha256(str(size).encode())
        system = _system_of(self.url)
        for number in range(_SAMPLES):
            start = last * number // (_SAMPLES - 1)
            stop = min(size, start + _SAMPLE_BYTES)
            with _faults(self.url):
                # Not through an open file, which would fetch a block of megabytes each time.
                digest.update(system.cat_file(self.url, start=start, end=stop))
        return f"sampled:{digest.hexdigest()}"

    def _tag(self) -> str | None:
        """What the store says of the content; None where it keeps no such tag."""
        for name in _TAGS:
            if self._info.get(name):
                # Some stores give the quotation marks of the HTTP header, others do not.
                return str(self._info[name]).strip('"')
        return None

    @cached_property
    def _info(self) -> Mapping[str, Any]:
        """What the store says of the file."""
        with _faults(self.url):
            info: Mapping[str, Any] = _system_of(self.url).info(self.url)
        if info.get("type") == "directory":
            raise DataError(
                f"{self.url}: is a folder; name its files by a pattern, such as "
                f"'{self.url}/*.jsonl'"
            )
        # Without ranges every read would fetch the whole file.
        if info.get("size") is None or info.get("partial") is False:
            raise DataError(
                f"{self.url}: its server does not answer requests for a part of it; "
                "download the file, and name the copy"
            )
        return info


InputPath = Union[Path, RemoteFile]
"""A file of documents, on this machine or read over the network."""


class _Reading(io.RawIOBase):
    """A file that is being read; a fault of the network is one line, which says that the job can go
    on."""

    def __init__(self, file: Any, url: str) -> None:
        super().__init__()
        self._file = file
        self._url = url

    def read(self, size: int = -1) -> bytes:
        with _faults(self._url):
            content: bytes = self._file.read(size)
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def is_url(name: str) -> bool:
    """Whether an input is named by a URL."""
    return _URL.fullmatch(name) is not None


def is_remote(name: str) -> bool:
    """Whether an input is read over the network. Datasets on the hub (`hf://…`) are downloaded
    instead."""
    return is_url(name) and not name.startswith(("file://", "hf://"))


def input_path(name: str) -> InputPath:
    """The file of that path or URL. `file://` leads to a file on this machine."""
    if not is_url(name):
        return Path(name)
    if name.startswith("file://"):
        return Path(unquote(urlsplit(name).path))
    return RemoteFile(name)


def matching_urls(name: str) -> list[RemoteFile]:
    """The files that a URL leads to, or a pattern of URLs, sorted.

    Raises:
        DataError: there is none, the store cannot be reached, or the URL holds a credential.
        MissingPackageError: the package that reads such URLs is not installed.
    """
    _check_without_credential(name)
    system = _system_of(name)
    if "*" not in name and "[" not in name:
        return [RemoteFile(name)]
    with _faults(name):
        found = sorted(map(str, system.glob(name)))
    if not found:
        raise DataError(f"{name}: no file matches it; {_ADVICE}")
    return [RemoteFile(str(system.unstrip_protocol(one))) for one in found]


def _check_without_credential(url: str) -> None:
    """Refuses a URL that lets its holder read the file.

    Raises:
        DataError: the URL has a password, or a parameter that is named like a credential.
    """
    parts = urlsplit(url)
    named = [name for name, _ in parse_qsl(parts.query) if _CREDENTIAL.search(name)]
    if parts.password is not None or named:
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise DataError(
            f"{shown}: its URL holds a credential, which logs and manifests would keep; "
            "leave it out, and give it as the store's package expects it in the environment"
        )


def _system_of(url: str) -> Any:  # fsspec has no type hints
    """fsspec's file system for a URL."""
    return _system(urlsplit(url).scheme.lower())


@lru_cache
def _system(protocol: str) -> Any:
    """fsspec's file system of a protocol. Raises as `matching_urls`."""
    # Here, because the import takes long, and only who names a URL should wait for it.
    import fsspec

    try:
        return fsspec.filesystem(protocol)
    except ImportError:
        extra = _EXTRAS.get(protocol)
        wanted = "install what fsspec names for it"
        if extra is not None:
            wanted = f"pip install 'scale-cpt[{extra}]'"
        raise MissingPackageError(
            f"{protocol}://: the package that reads such URLs is not installed; {wanted}"
        ) from None
    except ValueError:
        raise DataError(
            f"{protocol}://: no such protocol; name files, or URLs of s3://, gs://, az:// or "
            "https://"
        ) from None


@contextmanager
def _faults(url: str) -> Iterator[None]:
    """Makes what a store's package raises a DataError; each package has errors of its own."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise DataError(f"{url}: no such file; {_ADVICE}") from None
    except PermissionError:
        raise DataError(f"{url}: access is refused; {_ADVICE}") from None
    except Exception as fault:  # noqa: BLE001
        reason = f"{type(fault).__name__}: {in_one_line(fault):.200}"
        # Another attempt may succeed: the job says so by its exit code.
        raise DataError(
            f"{url}: cannot be read ({reason}); {_ADVICE}, and start again: finished work is kept",
            TRANSIENT_FAULT,
        ) from None

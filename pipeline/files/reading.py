"""Reading files, each fault as one typed line.

What cannot be read becomes an error of the caller's type, which names the file and ends with the
caller's advice. A missing file stays a FileNotFoundError, because what it means depends on the
caller. A fault of the file system that may pass stays an OSError, which has its own exit code.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import TRANSIENT_FAULT, UserError, exit_code_of

LONGEST_NAME = 255
"""How many bytes Linux file systems allow in a file's name."""


def read_bytes(path: Path, error: type[UserError], advice: str = "copy it again") -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file system fails, perhaps for a moment.
        UserError: an `error`, ending with `advice`, if this user cannot read it.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as fault:
        if exit_code_of(fault) == TRANSIENT_FAULT:
            raise OSError(fault.errno, fault.strerror, str(path)) from None
        raise error(f"{path}: cannot be read ({fault.strerror}); {advice}") from None


def read_text(path: Path, error: type[UserError], advice: str = "copy it again") -> str:
    """The text of a UTF-8 file.

    Raises:
        UserError: as `read_bytes`, and an `error` if the file is not UTF-8.
    """
    try:
        return read_bytes(path, error, advice).decode()
    except UnicodeDecodeError as fault:
        raise error(f"{path}: not UTF-8 ({fault.reason} at byte {fault.start}); {advice}") from None


def read_inside(folder: Path, name: str, error: type[UserError]) -> bytes:
    """The content of the file `name` of `folder`, which someone else made and others will get.

    Links into the blobs of a download by huggingface_hub, of which its snapshots consist, are
    followed.

    Raises:
        UserError: as `read_bytes`, and an `error` if it is a link to a file elsewhere.
    """
    path = folder / name
    target = path.resolve()
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise error(f"{path}: links to {target}, outside its folder; put a copy of the file there")
    return read_bytes(target, error)


def is_plain_name(name: str) -> bool:
    """Whether `name`, from an untrusted file, is a valid file name without any path."""
    if name in ("", ".", "..") or len(name.encode(errors="replace")) > LONGEST_NAME:
        return False
    return not {"/", "\\", "\0"} & set(name)

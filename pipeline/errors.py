"""The exit codes and errors of all command lines.

An error's message is one line: the file or setting, what was expected, what was found and what to
do. A traceback always means a bug.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# `slurm/common.sh` acts on these codes, and docs/faults.md lists them. A signal ends a process
# with 128 + its number.

FINISHED = 0
"""The command did its work."""
USER_ERROR = 1
"""A fault that the user must correct; the same command would fail again."""
CONFIG_ERROR = 2
"""A user error in the configuration or on the command line."""
LOST_RANK = 69
"""A rank died or hangs (`sysexits.h`: unavailable)."""
INTERNAL_FAULT = 70
"""An unexpected error; its traceback is in the log (`sysexits.h`: software)."""
SLURM_FAULT = 71
"""srun could not start the ranks, or lost them (`sysexits.h`: system error; scripts set
SLURM_EXIT_ERROR to it).
"""
FOLDER_TAKEN = 73
"""Another job works in the run folder (`sysexits.h`: cannot create)."""
TRANSIENT_FAULT = 74
"""A full or failing disk, or an allocation that fails the preflight: it may pass
(`sysexits.h`: input/output error).
"""
RESUME_LATER = 75
"""Saved, to be resumed later (`sysexits.h`: temporary failure)."""
INTERRUPTED = 130
"""Ended by Ctrl-C."""

_FINAL = (FINISHED, USER_ERROR, CONFIG_ERROR, FOLDER_TAKEN, INTERRUPTED)


def worth_another_attempt(exit_code: int) -> bool:
    """Whether the same command may succeed the next time."""
    return exit_code not in _FINAL


class UserError(Exception):
    """A fault that the user can correct: one line, and the exit code `exit_code`."""

    exit_code = USER_ERROR

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class ConfigError(UserError):
    """A run configuration, a flag or a combination of settings that cannot work."""

    exit_code = CONFIG_ERROR


class BaseModelError(UserError):
    """A pretrained model folder that is missing, damaged, or not of the model expected."""


class DataError(UserError):
    """A corpus, a tokenizer or a record that cannot be used."""


class MissingPackageError(UserError):
    """An optional package that is not installed."""


class ExtensionError(UserError):
    """An extension of another distribution that cannot be used."""

    exit_code = CONFIG_ERROR


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes differ from those that were written; an older one may be whole."""


class CheckpointStorageError(CheckpointError):
    """A checkpoint that cannot be written or read now; its content may be intact."""

    exit_code = TRANSIENT_FAULT


class OutputError(UserError):
    """An output that is something else already, which is not replaced."""


class RunFolderError(UserError):
    """The folder of a run or a study that is missing or incomplete."""


class FolderTakenError(RunFolderError):
    """A run folder that another job is using."""

    exit_code = FOLDER_TAKEN


class LayoutError(UserError):
    """Sizes that do not divide over the ranks, or an unexpected world size."""


class PreflightError(UserError):
    """An allocation that computes a wrong result, is too slow, or too small: no run starts."""


class RendezvousError(UserError):
    """Ranks that could not connect. Another attempt, at another port, may succeed."""

    exit_code = LOST_RANK


class PreservationError(UserError):
    """The widened model does not reproduce its base: training must not start."""


class DivergenceError(UserError):
    """Training that diverged: rollbacks did not help, or too many steps were not finite."""


class ForgettingError(UserError):
    """A run that exceeded its forgetting budget, and saved."""


class StudyError(UserError):
    """A run of a study that ended in a fault; the study ends with its exit code."""


class ConversionError(UserError):
    """A model that cannot be exported, or an export that differs from its source."""


# Marks that change the direction of text, with which a file name could pretend to be another one.
_DIRECTION_MARKS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_LONGEST_NAME = 4096
_USER_ERRNOS = {
    errno.EROFS,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
"""Faults of a path that the user named: another attempt would meet them again."""
_FULL_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_TRANSIENT_ERRNOS = _FULL_DISK_ERRNOS | {
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EREMOTEIO,
}
"""Faults of a file system, which may be over at another attempt."""


def exit_code_of(error: BaseException) -> int:
    """The exit code for an exception; INTERNAL_FAULT if it is neither ours nor the system's.

    A file system that refuses a path is the user's fault to correct; one that is full or fails may
    recover.
    """
    if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
        return USER_ERROR
    if _is_name_not_in_utf8(error):
        return USER_ERROR
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return TRANSIENT_FAULT
    return int(getattr(error, "exit_code", INTERNAL_FAULT))


def _is_name_not_in_utf8(error: BaseException) -> bool:
    """Whether a file's name is not UTF-8: Python keeps such bytes as surrogates."""
    return isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for the end of a message that refuses `name`; empty if `known` has no similar name."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    if not matches:
        return ""
    return f" (did you mean {matches[0]}?)"


def printable(text: str) -> str:
    """A text of unknown origin as a terminal may show it: its control characters are escaped.

    Line ends and tabs stay. Escape sequences could otherwise move the cursor or rename the window,
    and marks of direction would reorder the line.
    """
    shown = []
    for character in text:
        if _is_control(character):
            shown.append(ascii(character).strip("'"))
        else:
            shown.append(character)
    return "".join(shown)


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTION_MARKS


def in_one_line(error: BaseException) -> str:
    """An exception in one line that a terminal may show, with its type if it is a bug's."""
    return printable(_plain_line(error))


def _plain_line(error: BaseException) -> str:
    if isinstance(error, UnicodeEncodeError) and _is_name_not_in_utf8(error):
        name = error.object[:_LONGEST_NAME]
        return (
            f"{name}: expected a name in UTF-8, found another encoding; rename the file or folder, "
            "as convmv does"
        )
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and exit_code_of(error) != INTERNAL_FAULT:
        return _line_of_system_fault(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _line_of_system_fault(error: OSError) -> str:
    place = error.filename or "the output"
    if error.errno in _FULL_DISK_ERRNOS:
        free = _free_space_at(error.filename)
        return f"no space left on the disk of {place}{free}; free some and start again"
    if error.errno in _TRANSIENT_ERRNOS:
        return f"{place}: {error.strerror}; check that file system, then start again"
    return (
        f"{place}: {error.strerror}; name a place that this user can read and write, or change its "
        "permissions"
    )


def _free_space_at(path: object) -> str:
    """How much of the disk of `path` is free, for a message.

    The disk may have room where the user's quota is full.
    """
    if not isinstance(path, (str, os.PathLike)):
        return ""
    place = Path(path).absolute()
    # A temporary file is gone by now: the folders above it tell.
    for existing in (place, *place.parents):
        try:
            disk = os.statvfs(existing)
        except OSError:
            continue
        free_gb = disk.f_bavail * disk.f_frsize / 1e9
        size_gb = disk.f_blocks * disk.f_frsize / 1e9
        return f" ({free_gb:.3g} of its {size_gb:.3g} GB are free)"
    return ""


def is_full_disk(error: BaseException) -> bool:
    """Whether `error`, of the system or of safetensors, says that a disk or a quota is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL_DISK_ERRNOS
    if type(error).__name__ != "SafetensorError":
        return False
    number = re.search(r"\(os error (\d+)\)", str(error))
    return number is not None and int(number[1]) in _FULL_DISK_ERRNOS


@contextmanager
def full_disk_error_names(path: Path) -> Iterator[None]:
    """Adds the name of `path`, which the block writes, to the error of a full disk.

    The system's error has no name where the write was to an open file.

    Raises:
        OSError: with that name.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error) or getattr(error, "filename", None) is not None:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


@contextmanager
def faults_of_library(what: str, kind: type[UserError]) -> Iterator[None]:
    """Turns whatever a library raises for a damaged input into a `kind`: one line after `what`.

    Such libraries have no error of their own: they raise what their code happens to raise.

    Raises:
        UserError: of `kind`, or the block's own.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic of a Rust library is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {in_one_line(error):.300}") from None

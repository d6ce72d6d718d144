"""The exit code and the one line of every fault."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys

import pytest

from pipeline.command_line import mebibytes, run
from pipeline.errors import (
    INTERNAL_FAULT,
    PASSING_FAULT,
    USER_ERROR,
    DataError,
    StudyError,
    exit_code_of,
    in_one_line,
    worth_another_attempt,
)

CODES = {
    USER_ERROR: ("EROFS", "ENOTDIR", "EACCES", "EPERM", "EISDIR", "ENAMETOOLONG", "ELOOP"),
    PASSING_FAULT: ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EREMOTEIO"),
    INTERNAL_FAULT: ("ENOENT", "EBADF", "EINVAL", "ECONNREFUSED", "EEXIST"),
}


def ended(error: BaseException) -> int:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as end:
        run(main)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("code", CODES)
def test_a_fault_of_the_file_system_has_its_own_code_and_line(code, capsys):
    for name in CODES[code]:
        number = getattr(errno, name)
        error = OSError(number, os.strerror(number), "/some/file")
        assert exit_code_of(error) == ended(error) == code, name
        assert worth_another_attempt(code) == (code != USER_ERROR)
        printed = capsys.readouterr().err
        if code == INTERNAL_FAULT:
            assert printed.startswith("Traceback")
        else:
            assert printed == f"error: {in_one_line(error)}\n" and "/some/file" in printed


def test_a_reader_that_has_read_enough_is_no_fault():
    command = [sys.executable, "-m", "pipeline", "describe-config"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.wait() == 128 + signal.SIGPIPE
    assert not program.stderr.read()


def test_a_users_fault_is_one_line_whatever_its_code(capsys):
    assert ended(DataError("two\nlines")) == USER_ERROR
    assert ended(StudyError("a run failed", INTERNAL_FAULT)) == INTERNAL_FAULT
    assert capsys.readouterr().err == "error: two lines\nerror: a run failed\n"
    assert ended(ValueError("a bug")) == INTERNAL_FAULT
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf"])
def test_a_size_is_a_number_above_0(text):
    assert mebibytes("0.5") == 2**19
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        mebibytes(text)

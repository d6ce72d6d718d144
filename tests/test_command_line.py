"""The exit code and the one line of every fault."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup import LIBRARIES
from pipeline.command_line import (
    fraction,
    mebibytes,
    named_files,
    named_reports,
    non_negative,
    positive,
    run,
    share,
    whole_number,
)
from pipeline.errors import (
    INTERNAL_FAULT,
    TRANSIENT_FAULT,
    USER_ERROR,
    ConfigError,
    DataError,
    StudyError,
    worth_another_attempt,
)
from tests.bases import STORIES
from tests.texts import REVIEWS_HELDOUT

CODES = {
    USER_ERROR: ("EROFS", "ENOTDIR", "EACCES", "EPERM", "EISDIR", "ENAMETOOLONG", "ELOOP"),
    TRANSIENT_FAULT: (
        "ENOSPC",
        "EDQUOT",
        "EIO",
        "ESTALE",
        "ENOTCONN",
        "ETIMEDOUT",
        "EHOSTDOWN",
        "EREMOTEIO",
    ),
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
        assert ended(error) == code, name
        assert worth_another_attempt(code) == (code != USER_ERROR)
        printed = capsys.readouterr().err
        assert (
            printed.startswith("Traceback" if code == INTERNAL_FAULT else "error: ")
            and "/some/file" in printed
        )


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


def test_an_error_outside_the_project_names_a_command_and_no_page(tmp_path):
    (tmp_path / "run.yaml").write_text("name: x\n")
    command = [sys.executable, "-m", "pipeline", "config", "show", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.rstrip().endswith(
        "; scale-cpt describe-config lists every setting"
    )


DEMO = str(Path(__file__).parents[1] / "configs" / "demo.yaml")
TEXTS = str(REVIEWS_HELDOUT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("combine", "served", "korean=missing"), "combining korean into served"),
        (("evaluate", "--model", "missing", "--data", "texts.jsonl"), "evaluating missing"),
        (
            ("sample", "--base", "missing", "--output", "x", "--tokens", "9", "--max-tokens", "9"),
            "sampling text",
        ),
        (("estimate", DEMO, "--set", f"base={STORIES}"), "estimating demo"),
        (("train", DEMO, "--dry-run"), "planning demo"),
        (("upscale", DEMO, "--set", "folder=x"), "upscaling "),
        (("tokenize", DEMO, "--set", "folder=x", "--set", "data.folder=y"), "tokenizing demo"),
        (("inspect", "missing"), "inspecting missing"),
        (
            ("config", "init", "--base", "missing", "--new", TEXTS, "--old", TEXTS),
            "a first configuration for missing",
        ),
        (("train", DEMO, "--set", "folder=x"), "training "),
        (("try", DEMO, "--set", "folder=x", "--prepare"), "a small run of demo in x.try"),
        (("gate", DEMO, "--set", "folder=x"), "the gate of x"),
        (
            ("clean", DEMO, "--set", "data.corpora.korean.clean={language: ko}", "--show", "1"),
            "cleaning of korean",
        ),
        (("combinations", "--why", "lora", "compile"), "asking the checks about lora, compile"),
        (("report", "missing"), "missing: "),
    ],
)
def test_a_slow_command_says_at_once_what_it_does(arguments, said, tmp_path):
    (tmp_path / "missing").mkdir()
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", *arguments]
    imported: set[str] = set()
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
        for line in program.stderr or ():
            if not line.startswith("import time:"):
                break
            imported.add(line.rpartition("|")[2].strip().partition(".")[0])
        program.kill()
    assert said in line and "loading the libraries" in line
    assert "argparse" in imported and imported.isdisjoint(LIBRARIES)


IN_C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def tokenize(text: Path, output: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    arguments = ["--input", text, "--tokenizer", STORIES, "--output", output, "--workers", "1"]
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "tokenize", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )


def test_a_path_in_hangul_is_the_same_in_every_locale(tmp_path):
    (folder := tmp_path / "한글").mkdir()
    (folder / "글.jsonl").write_text('{"text": "Once upon a time"}\n' * 5, encoding="utf-8")
    for name, environment in (("말", {}), ("다른 말", IN_C_LOCALE)):
        done = tokenize(folder / "글.jsonl", folder / name, **environment)
        assert done.returncode == 0, done.stderr.decode()
        assert str(folder / name) in done.stdout.decode()
    ours, theirs = ((folder / name / "manifest.json").read_bytes() for name in ("말", "다른 말"))
    assert ours == theirs and "글.jsonl" in ours.decode()
    # And what was made in one locale is found in the other.
    again = tokenize(folder / "글.jsonl", folder / "말", **IN_C_LOCALE)
    assert again.returncode == 0 and "already complete" in again.stderr.decode()


@pytest.mark.parametrize("environment", [{}, IN_C_LOCALE], ids=["UTF-8", "C"])
def test_a_name_in_another_encoding_ends_in_one_line(tmp_path, environment):
    korean = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + "글".encode("euc-kr") + b".jsonl"))
    korean.write_text('{"text": "Once upon a time"}\n')
    done = tokenize(korean, tmp_path / "corpus", **environment)
    printed = done.stderr.decode()
    assert (done.returncode, printed.count("\n")) == (USER_ERROR, 1), printed
    assert (
        printed.startswith("error: ")
        and "/\\xb1\\xdb.jsonl: its name is not UTF-8; rename it" in printed
    )


def test_a_folder_whose_name_is_in_another_encoding_is_printed_as_it_is(tmp_path):
    (text := tmp_path / "text.jsonl").write_text('{"text": "Once upon a time"}\n')
    korean = "글".encode("euc-kr")
    done = tokenize(text, Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + korean)))
    assert done.returncode == 0 and b"/" + korean + b": 1 documents" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (positive, "two", "expected a whole number of 1 or more, found 'two'"),
        (positive, "0", "expected a whole number of 1 or more, found '0'"),
        (non_negative, "1.5", "expected a whole number of 0 or more, found '1.5'"),
        (whole_number(0, 64), "65", "expected a whole number from 0 to 64, found '65'"),
        (fraction, "5", "expected a number from 0 to 1, found '5'"),
        (fraction, "nan", "expected a number from 0 to 1, found 'nan'"),
        (mebibytes, "64MiB", "expected a number of MiB above 0, found '64MiB'"),
        (share, "3", "such as 0/8, found '3'"),
        (share, "8/8", "such as 0/8, found '8/8'"),
        (share, "-1/8", "such as 0/8, found '-1/8'"),
    ],
)
def test_an_argument_of_the_wrong_form_is_told_the_right_one(kind, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
        kind(text)


def test_an_argument_of_the_right_form_becomes_its_value():
    assert (positive("1"), non_negative("0"), whole_number(0, 64)("64")) == (1, 0, 64)
    assert (fraction("0.01"), mebibytes("0.5"), share("7/8")) == (0.01, 2**19, (7, 8))


def test_two_reports_of_one_name_are_refused():
    assert named_reports(["ko=a.txt", "b.txt"]) == {"ko": "a.txt", "b.txt": "b.txt"}
    with pytest.raises(ConfigError, match=r"--report-on: .* found ko for a\.txt and for b\.txt"):
        named_reports(["ko=a.txt", "ko=b.txt"])


def test_a_file_may_have_the_sign_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lang=ko.txt").touch()
    paths = ["lang=ko.txt", "hf://data/x?split=test", "texts/lang=ko/*.jsonl"]
    assert named_files("--data", [*paths, "ko=lang=ko.txt"]) == {
        **{path: path for path in paths},
        "ko": "lang=ko.txt",
    }

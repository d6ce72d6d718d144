"""The check of exports in llama.cpp, with programs that stand in for llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import serve_check
from pipeline.errors import ConfigError, ConversionError
from tests.bases import STORIES

CONVERTER = """import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).write_text(" ".join(sys.argv))
"""
PROGRAM = """#!/bin/sh
[ "$1 $3 $5" = "-m -c -f" ] || exit 2
case "$(cat "$2")" in
{cases}
esac
"""


def checkout(folder: Path, cases: dict[str, str]) -> Path:
    """A folder like a built checkout, whose program prints a perplexity by what was converted."""
    lines = [f"  *{pattern}*) echo '{text}';;" for pattern, text in cases.items()]
    program = folder / "build" / "bin" / "llama-perplexity"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(cases="\n".join(lines)))
    program.chmod(0o755)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    options = ["--llama-cpp", folder, "--export", STORIES, "--base", STORIES]
    monkeypatch.setattr(serve_check, "MAX_BYTES", 2**11)
    monkeypatch.setattr("sys.argv", ["serve_check", *map(str, options)])
    return serve_check.main()


def final(value: float) -> str:
    return f"Final estimate: PPL = {value:.4f} +/- 0.1"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> float:
    """The perplexity of the base in transformers, on the text that the check scores."""
    monkeypatch.setattr(serve_check, "MAX_BYTES", 2**11)
    text = serve_check.scored_text(str(serve_check.STORIES_TEXT))
    return serve_check.transformers_perplexity(STORIES, text, serve_check.CONTEXT)


def test_an_export_that_changes_as_its_base_does_passes(tmp_path, reference, monkeypatch, capsys):
    same = {"f16": final(reference), "q8_0": final(1.05 * reference)}
    assert check(checkout(tmp_path / "same", same), monkeypatch) == 0
    assert "q8 0 change" in capsys.readouterr().out

    worse = {
        "base.q8_0": final(reference),
        "export.q8_0": final(1.1 * reference),
        "f16": final(reference),
    }
    assert check(checkout(tmp_path / "worse", worse), monkeypatch) == 1
    assert "FAILED: q8_0: the export's perplexity changes by" in capsys.readouterr().out


def test_a_base_that_is_read_as_other_tokens_says_nothing_of_its_export(
    tmp_path, reference, monkeypatch, capsys
):
    other = {"f16": final(1.05 * reference), "q8_0": final(1.05 * reference)}
    assert check(checkout(tmp_path / "other", other), monkeypatch) == 1
    assert "FAILED: f16: the base's own perplexity changes by +5.00%" in capsys.readouterr().out


def test_what_is_not_there_or_fails_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"expected a checkout of llama\.cpp"):
        check(tmp_path, monkeypatch)
    (tmp_path / "convert_hf_to_gguf.py").touch()
    with pytest.raises(ConfigError, match="build it there: cmake -B build"):
        check(tmp_path, monkeypatch)
    silent = checkout(tmp_path / "silent", {"f16": "nan"})
    with pytest.raises(ConversionError, match=r"printed no perplexity of base\.f16\.gguf"):
        check(silent, monkeypatch)
    (silent / "convert_hf_to_gguf.py").write_text("raise SystemExit('unknown model')")
    with pytest.raises(
        ConversionError, match=r"convert_hf_to_gguf\.py: exit code 1: unknown model"
    ):
        check(silent, monkeypatch)

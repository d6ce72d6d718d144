"""make clean-check, at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.data.helpers import PROJECT


def check(*options: str | Path) -> str:
    command = [sys.executable, "-m", "tests.cleaning", "--copies", "2", *map(str, options)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout


def test_the_crawl_is_written_for_the_study(tmp_path: Path) -> None:
    check("--write", tmp_path / "texts" / "crawl.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts" / "crawl.jsonl").read_text().splitlines()]
    assert len(texts) == 2 * (10 + 19)
    assert sum("최저가 할인 쿠폰" in text for text in texts) == 2

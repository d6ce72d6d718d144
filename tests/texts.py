"""Real texts that come with the project: Korean film reviews, English stories."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
REVIEWS, REVIEWS_HELDOUT = (DATA / "ko" / f"reviews{part}.jsonl.zst" for part in ("", ".heldout"))
STORIES, STORIES_HELDOUT = (DATA / "en" / f"stories{part}.jsonl.zst" for part in ("", ".heldout"))

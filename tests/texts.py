"""Real texts that come with the project, Korean film reviews and English stories; and chats."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).parents[1] / "examples" / "data"
REVIEWS, REVIEWS_HELDOUT = (DATA / "ko" / f"reviews{part}.jsonl.zst" for part in ("", ".heldout"))
STORIES, STORIES_HELDOUT = (DATA / "en" / f"stories{part}.jsonl.zst" for part in ("", ".heldout"))


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """The messages of a chat, each given as its role and its content."""
    return [{"role": role, "content": content} for role, content in turns]


def write_chats(path: Path, *chats: object) -> str:
    """Writes records of messages; returns the file's name, as settings have it."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(path)

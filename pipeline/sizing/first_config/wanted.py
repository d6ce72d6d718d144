"""What `scale-cpt config init` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FirstRun:
    """What a first configuration is asked for.

    Attributes:
        name: of the run.
        base: a Hugging Face folder, or a model on the hub, which is fetched.
        new: files of the text to learn.
        old: files of the base's own domain.
        text_key: the field of the texts.
        old_text_key: the field of the old texts; default: text_key.
        vocabulary: the folder of a tokenizer that extends the base's; default: the base's own.
        old_chats: files of chats in languages that the base knows, which it answers itself.
        new_chats: files of chats in the new language, whose answers are learned after the texts.
        messages_key: the field of the messages in both.
        gated: whether the run has a gate, which learns from self-generated text where to stay
            closed. Without one the model trains on self-generated text, and may leave as an
            ordinary one.
    """

    name: str
    base: Path
    new: Sequence[str]
    old: Sequence[str]
    text_key: str = "text"
    old_text_key: str | None = None
    vocabulary: Path | None = None
    old_chats: Sequence[str] = ()
    new_chats: Sequence[str] = ()
    messages_key: str = "messages"
    gated: bool = True

    @property
    def has_chats(self) -> bool:
        """Whether the run reads chats, on some of which it stays near its base by KL."""
        return bool(self.old_chats or self.new_chats)

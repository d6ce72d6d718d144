"""What `scale-cpt config init` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FirstRun:
    """The wishes that a first configuration fulfils.

    Attributes:
        name: the name of the run.
        base: a Hugging Face folder, or a model on the hub, which is fetched.
        new: files of the text to learn.
        old: files of text of the base's own domain.
        text_key: the field that holds the text.
        old_text_key: the same for files of old text; default: text_key.
        vocabulary: the folder of an extended tokenizer; default: the base's own tokenizer.
        old_chats: files of chats in languages that the base knows; the base writes the answers.
        new_chats: files of chats in the new language; their answers are learned after the texts.
        messages_key: the field of the messages in files of chats.
        gated: whether the run has a gate, which learns from self-generated text to stay closed.
            Without a gate the model trains on self-generated text, and may be exported as an
            ordinary model.
        hours: how long the job may take; None: a day on CPUs, on GPUs as long as the texts take.
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
    hours: float | None = None

    @property
    def has_chats(self) -> bool:
        """Whether the run reads chats; it trains by KL on those that the base answered."""
        return bool(self.old_chats or self.new_chats)

"""How well a model answers chats that have references: `scale-cpt evaluate --chats`.

`score.py` lets a folder's model answer, `evaluator.py` is the option and a run's part of it. Chat
templates are the core's (`pipeline.data.tokenizer.chats`): corpora are made with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Extension


class Chats(Extension):
    name = "chats"

    def evaluators(self) -> Mapping[str, str]:
        return {"chats": "pipeline.extensions.chats.evaluator:CHATS"}


EXTENSION = Chats()

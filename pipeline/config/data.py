"""The section `data` of a run configuration: which texts, in which proportion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.section import Fraction, PositiveFloat, PositiveInt, Section

Role = Literal["new", "replay"]


class Corpus(Section):
    """One source of documents. Its token shards lie in `<data.folder>/<name>` and `<data.folder>/<name>.heldout`."""

    input: Annotated[list[str], Field(min_length=1)]
    """files or patterns: JSONL (.gz, .zst, .xz), Parquet, text; or folders saved by datasets"""
    heldout_input: list[str] = Field(default=[], description="files of their own for the held-out part")
    heldout_fraction: Fraction = Field(
        default=0.0, description="else this share of the documents, chosen by their hash"
    )
    text_key: str = "text"
    """the field or column that holds the text"""
    prompt_key: str | None = Field(
        default=None, description="that of a prompt before it, which is read but never predicted: loss on answers only"
    )
    role: Role = Field(default="new", description="replay: the base model's own domain")
    weight: PositiveFloat = Field(default=1.0, description="share among the corpora of the same role")
    epochs: PositiveFloat | None = Field(default=None, description="stop drawing from it after so many passes")
    token_budget: PositiveInt | None = Field(default=None, description="or after so many tokens")

    @model_validator(mode="after")
    def _one_limit_one_heldout(self) -> Corpus:
        if self.epochs is not None and self.token_budget is not None:
            raise ValueError("give epochs or token_budget, not both")
        if self.heldout_input and self.heldout_fraction:
            raise ValueError("give heldout_input or heldout_fraction, not both")
        return self


# A corpus is a folder beside the others, and `<name>.heldout` is the held-out part of `<name>`.
CorpusName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Data(Section):
    """What is read, in which proportion, and how it is packed."""

    folder: Path
    """where the token corpora lie"""
    sequence_length: PositiveInt
    """tokens a sample; at most the base's context"""
    corpora: Annotated[dict[CorpusName, Corpus], Field(min_length=1)]
    """by name"""
    replay_fraction: Fraction = 0.0
    """share of the samples drawn from the corpora of role replay"""
    document_mask: bool = True
    """attention and positions stay within a document"""

    @model_validator(mode="after")
    def _replay_has_a_source(self) -> Data:
        roles = {corpus.role for corpus in self.corpora.values()}
        if "new" not in roles:
            raise ValueError("no corpus has the role new: there is nothing to learn")
        if self.replay_fraction > 0 and "replay" not in roles:
            raise ValueError("replay_fraction is above 0 but no corpus has the role replay")
        return self

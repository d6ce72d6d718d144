"""The section `data` of a run configuration: the corpora, their proportions, and how they are packed."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.reading import Fraction, PositiveFloat, PositiveInt, Section, Texts

Role = Literal["new", "replay", "self_generated"]
CleaningStep = Literal[
    "fix_encoding",
    "language",
    "boilerplate",
    "repetition",
    "quality",
    "lines",
    "personal_data",
    "duplicates",
    "contamination",
]


CHAT_DATE = date(2025, 1, 1)
"""What chat templates are told is today, where nothing else is said."""


class Sampling(Section):
    """Text that the base writes itself, for a corpus of role self_generated (scale-cpt sample)."""

    tokens: PositiveInt
    """how many are written, at least"""
    temperature: PositiveFloat = 1.0
    """1: the base's own distribution, without top-k or top-p"""
    max_tokens: PositiveInt | None = None
    """of a document, its opening included; default: sequence_length"""
    prompts: Texts = []
    """files of documents whose beginnings the base continues, in the formats of input; default: only the token before a
    document"""
    prompt_tokens: PositiveInt | None = None
    """the beginning of an opening that is used; default: all of it, as for questions"""
    chat_template: bool = False
    """the prompts are a user's messages, framed by the tokenizer's chat template"""
    thinking: bool | None = None
    """of prompts that are chats: whether the base thinks before it answers, the template's `enable_thinking`; default:
    as the template has it"""
    system_prompts: Texts = []
    """a system's message is drawn of these for each chat that has none; default: none is added"""
    seed: int = 0
    """of the text; not the run's, because runs with other seeds read the same corpus"""

    @model_validator(mode="after")
    def _a_chat_has_messages(self) -> Sampling:
        if self.chat_template and not self.prompts:
            raise ValueError("chat_template frames messages; name files of them as prompts")
        if self.chat_template and self.prompt_tokens is not None:
            raise ValueError(
                "give chat_template or prompt_tokens, not both: a message is used as a whole"
            )
        return self


class Cleaning(Section):
    """A crawl becomes a corpus before it is tokenized (scale-cpt clean, docs/data.md)."""

    language: Literal["ko", "en"]
    """chooses the thresholds: FineWeb-2's for Korean, FineWeb's for English"""
    skip: list[CleaningStep] = []
    """steps to leave out"""
    min_words: PositiveInt | None = None
    """of a document; default: 25 words of Korean, 50 of English"""
    min_script_share: Fraction | None = None
    """of the letters that are Hangul, or Latin; default: 0.5 for Korean, 0.8 for English"""
    language_model: Literal["ft176", "glotlid"] | None = None
    """a model of fastText, lid.176 or GlotLID, which datatrove downloads: drops documents of whose language it is not
    sure"""
    min_language_score: Fraction = 0.65
    """how sure, from 0 to 1"""
    benchmarks: Texts = []
    """JSONL files, or patterns, of benchmarks; documents that share words in a row with them are dropped, as are those
    that share words with heldout_input of any corpus"""
    shared_words: PositiveInt | None = None
    """how many words in a row; default: 8 of Korean, 13 of English"""


class Source(Section):
    """Where a corpus comes from, for the model card of an export; nothing else reads it."""

    dataset: str | None = None
    """its name on the Hugging Face Hub, such as HuggingFaceFW/fineweb-2"""
    license: str | None = None
    """an identifier of the hub's, such as odc-by"""
    language: str | None = None
    """a code such as ko"""


class Corpus(Section):
    """One source of documents. Its token shards lie in `<data.folder>/<name>` and `<data.folder>/<name>.heldout`."""

    input: Texts = []
    """files or patterns: JSONL, JSON, CSV, TSV, text (.gz, .zst, .xz), Parquet, Arrow; folders that `datasets` saved;
    URLs of object stores, s3://bucket/*.parquet; or datasets on the hub,
    hf://org/name[/config][@revision][/split][?files=N]"""
    clean: Cleaning | None = None
    """what scale-cpt clean does with input before it is tokenized; default: nothing"""
    sample: Sampling | None = None
    """instead of input, for role self_generated: what the base is to write"""
    heldout_input: Texts = []
    """separate files for the held-out part; at least one corpus of a run has such a part"""
    heldout_fraction: Fraction = 0.0
    """or this share of the documents, such as 0.005, chosen by their hash"""
    text_key: str = "text"
    """the field or column that holds the text"""
    prompt_key: str | None = None
    """that of a prompt before the text, which is read but never predicted: loss on answers only"""
    messages_key: str | None = None
    """or that of a chat in JSON, a list of {role, content} or {from, value}: framed by the tokenizer's chat template,
    with the loss on the assistant's messages only. With role self_generated the prompts are such chats: the base writes
    each answer itself"""
    document: Literal["line", "file"] = "line"
    """of .txt files: what is one document, up to 32 MiB"""
    encoding: str | None = None
    """of text files that are not UTF-8, as Python names it, such as cp949 or utf-16"""
    quoting: Literal["standard", "none"] | None = None
    """of CSV and TSV; none: a row is a line, and quotation marks are ordinary characters; default: standard for CSV,
    none for TSV"""
    normalize: Literal["nfc"] | None = None
    """nfc: brings texts to Unicode's composed form before they are tokenized; default: texts stay as they are"""
    special_tokens: Literal["text", "control"] | None = None
    """what a text that spells a special token, such as </s>, becomes: ordinary text, or that token; default: text where
    the tokenizer can, and a chat with such a message is rejected"""
    max_unknown_fraction: Fraction = 0.01
    """tokenization stops where the tokenizer cannot spell more of the text"""
    allow_damaged: bool = False
    """read what precedes the damage of a truncated or damaged file; default: such a file ends the job"""
    role: Role = "new"
    """replay: the base model's own domain; rehearsal: text that the base wrote itself"""
    source: Source = Source()
    """for the model card"""
    weight: PositiveFloat = 1.0
    """share among the corpora of the same role"""
    epochs: PositiveFloat | None = None
    """stop drawing from it after this many passes"""
    token_budget: PositiveInt | None = None
    """or after this many tokens"""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Corpus:
        if self.role != "self_generated":
            if self.sample is not None:
                raise ValueError(f"sample belongs to role self_generated, not to role {self.role}")
            if not self.input:
                raise ValueError("input: name at least one file")
        elif self.sample is None or self.input or self.heldout_input or self.heldout_fraction:
            raise ValueError(
                "role self_generated: give sample, and neither input nor a held-out part; the base writes it"
            )
        elif self.prompt_key is not None:
            raise ValueError(
                "prompt_key does not apply to role self_generated; name the field of the prompts as text_key"
            )
        elif self.messages_key is not None and (
            not self.sample.prompts or self.sample.prompt_tokens is not None
        ):
            raise ValueError(
                "messages_key: chats are used whole; name files of them as prompts, without prompt_tokens"
            )
        if self.clean is not None and (self.prompt_key or self.messages_key or self.sample):
            raise ValueError("clean is for documents, without prompt_key, messages_key and sample")
        if self.messages_key is not None and self.prompt_key is not None:
            raise ValueError(
                "give prompt_key or messages_key, not both: a chat has prompts of its own"
            )
        if self.epochs is not None and self.token_budget is not None:
            raise ValueError("give epochs or token_budget, not both")
        if self.heldout_input and self.heldout_fraction:
            raise ValueError("give heldout_input or heldout_fraction, not both")
        return self


# A name is a folder of `data.folder`, where `<name>.heldout` is the held-out part of `<name>`.
CorpusName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Data(Section):
    """What is read, in which proportion, and how it is packed."""

    folder: Path
    """where the token corpora lie"""
    sequence_length: PositiveInt
    """tokens per sample; at most the base's context"""
    corpora: Annotated[dict[CorpusName, Corpus], Field(min_length=1)]
    """by name"""
    replay_fraction: Fraction = 0.0
    """share of the samples drawn from the corpora of role replay"""
    replay_loss: Literal["nll", "kl"] = "nll"
    """on these samples: the next token's negative log likelihood, or KL(base || model) as in rehearsal"""
    self_generated_fraction: Fraction = 0.0625
    """share of the samples drawn from the corpora of role self_generated, if there are any"""
    self_generated_coefficient: PositiveFloat = 1.0
    """factor of KL(base || model) in the loss"""
    temperature: Annotated[float, Field(ge=1)] | None = None
    """among the corpora of a role, also weigh each by tokens^(1 / temperature): 1 in proportion to their sizes, 3.3
    (mT5) more evenly; default: by weight alone"""
    chat_date: date = CHAT_DATE
    """what a chat template that asks for today's date (`strftime_now`) is told: tokens must not depend on the day"""
    document_mask: bool = True
    """attention and positions stay within a document"""

    @model_validator(mode="after")
    def _replay_has_a_source(self) -> Data:
        roles = {corpus.role for corpus in self.corpora.values()}
        if "new" not in roles:
            raise ValueError("no corpus has the role new: there is nothing to learn")
        if self.replay_fraction > 0 and "replay" not in roles:
            raise ValueError("replay_fraction is above 0 but no corpus has the role replay")
        if sum(self.fractions.values()) >= 1:
            raise ValueError(
                "replay_fraction and self_generated_fraction leave no sample of the role new"
            )
        return self

    @property
    def fractions(self) -> dict[Role, float]:
        """The share of the samples of each role except new."""
        roles = {corpus.role for corpus in self.corpora.values()}
        wanted: dict[Role, float] = {
            "replay": self.replay_fraction,
            "self_generated": self.self_generated_fraction,
        }
        return {role: fraction for role, fraction in wanted.items() if role in roles}

    @property
    def kl_roles(self) -> frozenset[Role]:
        """The roles whose samples train by KL(base || model)."""
        return frozenset(
            {"self_generated", "replay"} if self.replay_loss == "kl" else {"self_generated"}
        )

    @property
    def kl_fraction(self) -> float:
        """The share of the samples that train by KL(base || model)."""
        return sum(fraction for role, fraction in self.fractions.items() if role in self.kl_roles)

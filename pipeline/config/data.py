"""The section `data` of a run configuration: the corpora, their proportions, and their packing."""

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


# Not today's date: the same command would make other tokens tomorrow, and a resumed run refuses a
# corpus that changed.
CHAT_DATE = date(2025, 1, 1)
"""Default of data.chat_date, the date that chat templates are told is today's."""

ChatStart = Literal["template", "tokenizer"]


class Sampling(Section):
    """Text that the base writes itself, for a corpus of role self_generated (scale-cpt sample)."""

    tokens: PositiveInt
    """fewest tokens that the base writes"""
    temperature: PositiveFloat = 1.0
    """sampling temperature, without top-k or top-p"""
    max_tokens: PositiveInt | None = None
    """longest document, with its prompt; default: data.sequence_length"""
    prompts: Texts = []
    """files of documents that the base continues, as for `input`; default: it writes whole
    documents"""
    prompt_tokens: PositiveInt | None = None
    """first tokens of each prompt that are used; default: all"""
    chat_template: bool = False
    """each prompt is a user's message, framed by the chat template"""
    thinking: bool | None = None
    """whether the base thinks before it answers a chat; default: the template's"""
    system_prompts: Texts = []
    """system messages, one drawn for each chat without one"""
    seed: int = 0
    """seed of the text, apart from the run's, so that runs can share it"""

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
    """Filters that make a corpus of a web crawl before tokenization (scale-cpt clean,
    docs/data.md)."""

    language: Literal["ko", "en"]
    """language of the crawl, and so the thresholds: FineWeb-2's for Korean, FineWeb's for
    English"""
    skip: list[CleaningStep] = []
    """steps that are left out (docs/data.md)"""
    min_words: PositiveInt | None = None
    """fewest words of a document; default: 25 for Korean, 50 for English"""
    min_script_share: Fraction | None = None
    """smallest share of letters in Hangul (ko) or Latin (en); default: 0.5 and 0.8"""
    language_model: Literal["ft176", "glotlid"] | None = None
    """fastText identifier (lid.176 or GlotLID, downloaded by datatrove) that drops other languages;
    default: none"""
    min_language_score: Fraction = 0.65
    """its lowest confidence with which a document is kept, from 0 to 1"""
    benchmarks: Texts = []
    """files (JSONL, JSON, CSV, TSV, Parquet, Arrow) from which documents may not share
    `shared_words` words in a row, as from every `heldout_input`"""
    shared_words: PositiveInt | None = None
    """default: 8 for Korean, 13 for English"""


class Source(Section):
    """Where a corpus comes from, for the model card of an export; nothing else reads it."""

    dataset: str | None = None
    """its name on the hub, such as HuggingFaceFW/fineweb-2"""
    license: str | None = None
    """its licence's identifier on the hub, such as odc-by"""
    language: str | None = None
    """code of its language, such as ko"""


class Corpus(Section):
    """One source of documents, tokenized into `<data.folder>/<name>` and `<name>.heldout`."""

    input: Texts = []
    """files, patterns, URLs, or datasets on the hub (docs/data.md)"""
    clean: Cleaning | None = None
    """how scale-cpt clean filters `input` before tokenization; default: it does not"""
    sample: Sampling | None = None
    """for role self_generated, in place of `input`: the text that the base writes"""
    heldout_input: Texts = []
    """files of the held-out part, which at least one corpus has"""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """in its place: share of `input` that is held out, by documents' hashes"""
    text_key: str = "text"
    """field or column of the text"""
    prompt_key: str | None = None
    """field or column of a prompt, which is read and not learned"""
    messages_key: str | None = None
    """field or column of a chat, a list of {role, content} or {from, value}: its answers are
    learned, or with role self_generated written by the base"""
    document: Literal["line", "file"] = "line"
    """a document of a .txt file: a line, or the file of up to 32 MiB"""
    encoding: str | None = None
    """Python's name of the files' encoding, such as cp949; default: UTF-8"""
    quoting: Literal["standard", "none"] | None = None
    """quotation marks in CSV and TSV enclose cells (standard), or are characters (none); default:
    standard for CSV, none for TSV"""
    normalize: Literal["nfc"] | None = None
    """nfc composes texts before they are tokenized"""
    special_tokens: Literal["text", "control"] | None = None
    """what the spelling of a special token, such as `</s>`, becomes: text, or that token; default:
    text where the tokenizer can; a chat with it is rejected"""
    max_unknown_fraction: Fraction = 0.01
    """largest share of unknown tokens, beyond which tokenization stops"""
    allow_damaged: bool = False
    """reads a damaged file up to its damage, in place of ending the job"""
    role: Role = "new"
    """text to learn (new), of the base's own domain (replay), or written by the base
    (self_generated)"""
    source: Source = Source()
    """origin of the corpus, for the model card"""
    weight: PositiveFloat = 1.0
    """weight among the corpora of its role when samples are drawn"""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """passes, after which no more is drawn; default: no limit"""
    token_budget: PositiveInt | None = None
    """tokens, after which no more is drawn; default: no limit"""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Corpus:
        if self.role == "self_generated":
            self._check_self_generated()
        elif self.sample is not None:
            raise ValueError(f"sample belongs to role self_generated, not to role {self.role}")
        elif not self.input:
            raise ValueError("input: name at least one file")

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

    def _check_self_generated(self) -> None:
        """Checks a corpus of role self_generated.

        Raises:
            ValueError: a setting does not apply to text that the base writes.
        """
        is_read = self.input or self.heldout_input or self.heldout_fraction
        if self.sample is None or is_read:
            raise ValueError(
                "role self_generated: give sample, and neither input nor a held-out part; "
                "the base writes it"
            )
        if self.prompt_key is not None:
            raise ValueError(
                "prompt_key does not apply to role self_generated; "
                "name the field of the prompts as text_key"
            )
        if self.messages_key is not None:
            has_chats = self.sample.prompts and self.sample.prompt_tokens is None
            if not has_chats:
                raise ValueError(
                    "messages_key: chats are used whole; "
                    "name files of them as prompts, without prompt_tokens"
                )


# A name is that of a folder in `data.folder`, beside `<name>.heldout`: it may have no dot.
CorpusName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Data(Section):
    """The corpora, the proportions in which samples are drawn from them, and their packing."""

    folder: Path
    """for the tokenized corpora"""
    sequence_length: PositiveInt
    """tokens per sample, at most the base's context"""
    corpora: Annotated[dict[CorpusName, Corpus], Field(min_length=1)]
    """the corpora, by name"""
    replay_fraction: Fraction = 0.0
    """share of the samples from corpora of role replay"""
    replay_loss: Literal["nll", "kl"] = "nll"
    """loss on role replay: next-token likelihood, or KL(base || model) as on self-generated text"""
    self_generated_fraction: Fraction = 0.0625
    """share of the samples from corpora of role self_generated, if there are any"""
    kl_coefficient: PositiveFloat = 1.0
    """factor on KL(base || model) in the loss"""
    temperature: Annotated[float, Field(ge=1)] | None = None
    """multiplies a corpus's weight by tokens^(1 / temperature): 1 draws in proportion to size, 3.3
    (mT5) more evenly; default: only `weight` counts"""
    chat_date: date = CHAT_DATE
    """today's date for chat templates (`strftime_now`), so that tokens do not depend on the day"""
    chat_start: ChatStart = "template"
    """what a chat begins with: what its template writes, as servers send it, or the tokenizer's
    start token"""
    document_mask: bool = True
    """whether attention and positions stay within a document"""

    @model_validator(mode="after")
    def _replay_has_a_source(self) -> Data:
        roles = self._roles()
        if "new" not in roles:
            raise ValueError("no corpus has the role new: there is nothing to learn")
        if self.replay_fraction > 0 and "replay" not in roles:
            raise ValueError("replay_fraction is above 0 but no corpus has the role replay")
        if sum(self.fractions.values()) >= 1:
            raise ValueError(
                "replay_fraction and self_generated_fraction leave no sample of the role new"
            )
        return self

    def _roles(self) -> set[Role]:
        return {corpus.role for corpus in self.corpora.values()}

    @property
    def fractions(self) -> dict[Role, float]:
        """The share of the samples of each role except new."""
        roles = self._roles()
        fractions: dict[Role, float] = {}
        # Only roles that have a corpus: the share of the others goes to the new text.
        if "replay" in roles:
            fractions["replay"] = self.replay_fraction
        if "self_generated" in roles:
            fractions["self_generated"] = self.self_generated_fraction
        return fractions

    @property
    def kl_roles(self) -> frozenset[Role]:
        """The roles whose samples train by KL(base || model)."""
        if self.replay_loss == "kl":
            return frozenset({"self_generated", "replay"})
        return frozenset({"self_generated"})

    @property
    def kl_fraction(self) -> float:
        """The share of the samples that train by KL(base || model)."""
        return sum(fraction for role, fraction in self.fractions.items() if role in self.kl_roles)

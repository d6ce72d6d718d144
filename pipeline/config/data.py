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
    """smallest number of tokens that the base writes; the last document may exceed it"""
    temperature: PositiveFloat = 1.0
    """sampling temperature, without top-k or top-p; 1 samples from the base's own distribution"""
    max_tokens: PositiveInt | None = None
    """longest document in tokens, its prompt included; default: data.sequence_length"""
    prompts: Texts = []
    """files of documents that the base continues, in the formats of `input`; default: it writes
    whole documents"""
    prompt_tokens: PositiveInt | None = None
    """first tokens of each prompt that are used; default: all, for prompts that are questions"""
    chat_template: bool = False
    """whether each prompt is a user's message, framed by the tokenizer's chat template"""
    thinking: bool | None = None
    """for chats: whether the base thinks before it answers (`enable_thinking` of the template);
    default: the template's"""
    system_prompts: Texts = []
    """system messages, one of which is added at random to each chat without one"""
    seed: int = 0
    """seed of the sampled text, apart from the run's `seed`, so that runs can share the corpus"""

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
    """language of the crawl, which chooses the thresholds: FineWeb-2's for Korean, FineWeb's for
    English"""
    skip: list[CleaningStep] = []
    """cleaning steps that are left out"""
    min_words: PositiveInt | None = None
    """fewest words of a document that is kept; default: 25 for Korean, 50 for English"""
    min_script_share: Fraction | None = None
    """smallest share of a document's letters that are Hangul (ko) or Latin (en); default: 0.5 for
    Korean, 0.8 for English"""
    language_model: Literal["ft176", "glotlid"] | None = None
    """fastText identifier (lid.176 or GlotLID, which datatrove downloads) that drops documents in
    other languages; default: none"""
    min_language_score: Fraction = 0.65
    """lowest confidence of `language_model`, from 0 to 1, with which a document is kept"""
    benchmarks: Texts = []
    """files or patterns of benchmarks (JSONL, JSON, CSV, TSV, Parquet, Arrow): documents that share
    `shared_words` words in a row with them are dropped, as always with every `heldout_input`"""
    shared_words: PositiveInt | None = None
    """words in a row that count as copied; default: 8 for Korean, 13 for English"""


class Source(Section):
    """Where a corpus comes from, for the model card of an export; nothing else reads it."""

    dataset: str | None = None
    """name of the dataset on the Hugging Face Hub, such as HuggingFaceFW/fineweb-2"""
    license: str | None = None
    """license of the dataset by its identifier on the hub, such as odc-by"""
    language: str | None = None
    """code of the dataset's language, such as ko"""


class Corpus(Section):
    """One source of documents, tokenized into `<data.folder>/<name>` and `<name>.heldout`."""

    input: Texts = []
    """files, patterns, URLs of object stores, or datasets on the hub, in the formats of
    docs/data.md"""
    clean: Cleaning | None = None
    """how scale-cpt clean filters the documents of `input` before they are tokenized; default: no
    filter"""
    sample: Sampling | None = None
    """for role self_generated, in place of `input`: the text that the base writes"""
    heldout_input: Texts = []
    """files of the held-out part; at least one corpus of a run has a held-out part"""
    heldout_fraction: Fraction = 0.0
    """in place of heldout_input: share of the documents of `input` that is held out, by their hash,
    such as 0.005"""
    text_key: str = "text"
    """field or column that holds the text"""
    prompt_key: str | None = None
    """field or column with a prompt, which is read and not learned; default: no prompts"""
    messages_key: str | None = None
    """field or column with a chat, a list of {role, content} or {from, value}; the loss is on the
    assistant's messages; with role self_generated the base writes each answer; default: no chats"""
    document: Literal["line", "file"] = "line"
    """what one document of a .txt file is: a line, or the whole file of up to 32 MiB"""
    encoding: str | None = None
    """Python's name of the encoding of text files, such as cp949; default: UTF-8"""
    quoting: Literal["standard", "none"] | None = None
    """quotation marks in CSV and TSV: enclose cells that may span lines (standard), or are ordinary
    characters (none); default: standard for CSV, none for TSV"""
    normalize: Literal["nfc"] | None = None
    """nfc: composes texts before they are tokenized; default: texts stay as they are"""
    special_tokens: Literal["text", "control"] | None = None
    """what the spelling of a special token, such as </s>, in a text becomes: text, or that token;
    default: text where the tokenizer can; a chat with it is rejected"""
    max_unknown_fraction: Fraction = 0.01
    """largest share of unknown tokens; tokenization stops beyond it"""
    allow_damaged: bool = False
    """whether a damaged file is read up to its damage; if not, it ends the job"""
    role: Role = "new"
    """new (text to learn), replay (the base's own domain), or self_generated (text that the base
    writes)"""
    source: Source = Source()
    """origin of the corpus, named on the export's model card"""
    weight: PositiveFloat = 1.0
    """weight of the corpus among all corpora of its role when samples are drawn"""
    epochs: PositiveFloat | None = None
    """passes over the corpus after which no more is drawn from it; default: no limit"""
    token_budget: PositiveInt | None = None
    """tokens after which no more is drawn from it; default: no limit"""

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
    """folder of the tokenized corpora"""
    sequence_length: PositiveInt
    """tokens per sample, at most the base's context"""
    corpora: Annotated[dict[CorpusName, Corpus], Field(min_length=1)]
    """corpora of the run, each under its name"""
    replay_fraction: Fraction = 0.0
    """share of the samples drawn from the corpora of role replay"""
    replay_loss: Literal["nll", "kl"] = "nll"
    """loss on samples of role replay: the next token's negative log likelihood (nll), or KL(base ||
    model) as on self-generated text"""
    self_generated_fraction: Fraction = 0.0625
    """share of the samples drawn from the corpora of role self_generated, if there are any"""
    kl_coefficient: PositiveFloat = 1.0
    """coefficient of KL(base || model) in the loss, on all samples that have this loss"""
    temperature: Annotated[float, Field(ge=1)] | None = None
    """the weight of a corpus within its role is multiplied by tokens^(1 / temperature): 1 draws in
    proportion to size, 3.3 (mT5) more evenly; default: only `weight` counts"""
    chat_date: date = CHAT_DATE
    """date that chat templates get as today's (`strftime_now`), so that tokens do not depend on the
    day"""
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

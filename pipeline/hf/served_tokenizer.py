"""The tokenizer that `transformers` makes of a folder, as every server does, compared with that of
training.

`AutoTokenizer` goes by the class that tokenizer_config.json names, and by the model's type: many
classes build their own tokenizer from the vocabulary of tokenizer.json, and cut numbers, spaces or
new lines otherwise than that file says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer

from pipeline import log
from pipeline.data.sources.records import Keys
from pipeline.data.sources.streams import COMPRESSIONS
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.input_files import input_files, is_here
from pipeline.data.tokenizer.document_end import json_beside, spelling_of
from pipeline.data.tokenizer.encoders import SentencePieceEncoder
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import ConversionError, DataError, faults_of_library
from pipeline.files.json_files import read_object, write_json
from pipeline.hf.probe_texts import PROBE_TEXTS
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.tokenizer_files import add_tokenizer_json, copy_tokenizer

SOURCE_BYTES = 2**20
"""How much of each source is compared."""
_LONGEST_TEXT = 2**14
# A compressed file is read to its end before its first document is known.
_LARGEST_COMPRESSED = 2**26
_MOST_FILES = 4
_MOST_SPECIAL_TOKENS = 512
_SHOWN_IDS = 12
_SHOWN_CHARACTERS = 24
# What classes of tokenizers are known to cut in different ways.
_PROBES = (
    "In 1984, 12,345.67 of 1000000 people had 3.14159.",
    "  two spaces  in front,   three between\tand a tab ",
    "a line\nanother\r\n\n\nafter two empty ones\n",
    "\n",
    " ",
    " one in front",
    "one behind ",
    "I can't, they'll, WE'RE",
    "2024년 3월 15일, 1234567원을  냈다.\n정말 재미있어요ㅋㅋㅋ!!",
    "日本語と中文、Русский, العربية",
    "e\u0301 é ﬁ ½ Ａ",
    "👩‍👩‍👧 def f(x):\n        return x**2",
)
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class TokenDifference:
    """A text of which training and `AutoTokenizer` have different ids."""

    text: str
    training: Sequence[int]
    served: Sequence[int]

    def __str__(self) -> str:
        alike = 0
        for training_id, served_id in zip(self.training, self.served, strict=False):
            if training_id != served_id:
                break
            alike += 1
        text = self.text[: 4 * _SHOWN_CHARACTERS]
        training = _shown(self.training, alike)
        served = _shown(self.served, alike)
        return f"{text!r} is {training} in training, {served} for AutoTokenizer"


def _shown(ids: Sequence[int], alike: int) -> str:
    """The ids from shortly before the first that differs, after so many that are `alike`."""
    start = max(0, alike - 2)
    stop = start + _SHOWN_IDS
    shown = [str(number) for number in ids[start:stop]]
    if start > 0:
        shown.insert(0, "…")
    if stop < len(ids):
        shown.append("…")
    return f"[{', '.join(shown)}]"


def texts_of(
    sources: Mapping[str, Sequence[str]], keys: Mapping[str, Keys] | None = None
) -> Iterator[str]:
    """The beginnings of sources (lists of files), as far as they are here and can be read without a
    long wait.
    """
    for name, inputs in sources.items():
        with suppress(DataError):  # whoever needs these texts reports what is wrong with them
            if not is_here(inputs):
                continue
            quick: list[str] = []
            for file, size in input_files(inputs).items():
                if file.suffix not in COMPRESSIONS or size <= _LARGEST_COMPRESSED:
                    quick.append(str(file))
            if not quick:
                continue
            own_keys = (keys or {}).get(name, Keys())
            for document in good_documents(quick[:_MOST_FILES], own_keys, max_bytes=SOURCE_BYTES):
                yield document.whole_text[:_LONGEST_TEXT]


def served_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """What `AutoTokenizer` makes of the folder.

    Raises:
        DataError: it cannot be loaded.
    """
    with faults_of_library(f"{folder}: transformers cannot load its tokenizer", DataError):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )


def first_difference(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Iterable[str] = (),
    *,
    trust_remote_code: bool = False,
) -> TokenDifference | None:
    """The first text of which `AutoTokenizer` of `folder` has other ids than `tokenizer`, made
    short.

    Compared are `texts`, and texts with numbers, spaces, new lines and every special token. The ids
    include what stands before a text.

    Raises:
        DataError: a tokenizer cannot be loaded or cannot encode a text.
    """
    served = served_tokenizer(folder, trust_remote_code=trust_remote_code)
    training = _training_ids(tokenizer)
    all_texts = chain(_PROBES, PROBE_TEXTS.values(), _special_texts(folder, tokenizer), texts)

    def served_ids(batch: Sequence[str]) -> list[list[int]]:
        with faults_of_library(f"{folder}: AutoTokenizer cannot encode a text", DataError):
            found = served(list(batch), padding=False, truncation=False, verbose=False)["input_ids"]
        return [list(ids) for ids in found]

    def difference_of(text: str) -> TokenDifference | None:
        expected = training([text])[0]
        found = served_ids([text])[0]
        if expected == found:
            return None
        return TokenDifference(text, expected, found)

    compared = (text for text in all_texts if not _is_ambiguous(text, tokenizer))
    while True:
        batch = list(islice(compared, 256))
        if not batch:
            return None
        for text, expected, found in zip(batch, training(batch), served_ids(batch), strict=True):
            if expected != found:
                return _shortened(TokenDifference(text, expected, found), difference_of)


def check_export(
    folder: Path, tokenizer: Tokenizer, texts: Iterable[str] = (), *, advice: str = ""
) -> None:
    """Compares `AutoTokenizer` of an export with the tokenizer of training.

    Raises:
        ConversionError: they have other ids for a text.
    """
    found = first_difference(folder, tokenizer, texts)
    if found is not None:
        raise ConversionError(
            f"{folder}: its ids are not those of training: {found}; "
            f"{advice or export_advice(tokenizer)}"
        )


def export_advice(tokenizer: Tokenizer) -> str:
    """What to do about an export whose ids would differ."""
    if isinstance(tokenizer.reference, SentencePieceEncoder):
        return (
            f"{tokenizer.path} has no tokenizer.json with the same ids: write one (scale-cpt "
            "tokenizer --convert), "
            "and tokenize and train with that; not kept"
        )
    return (
        f"correct the files beside {tokenizer.path}: tokenizer_config.json must name only tokens "
        "that tokenizer.json has, with the same settings; a merged model may also have a class of "
        "its own, then use --format scale; not kept"
    )


def warn_of_base(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Iterable[str] = (),
    *,
    trust_remote_code: bool = False,
) -> str | None:
    """Logs a warning, and returns it, where `AutoTokenizer` of a base has other ids than its
    tokenizer.json.
    """
    try:
        found = first_difference(folder, tokenizer, texts, trust_remote_code=trust_remote_code)
    except DataError as fault:
        warning = f"{fault}; it is not compared with {tokenizer.path}, which is used here"
    else:
        if found is None:
            return None
        warning = (
            f"{folder}: AutoTokenizer has other ids than {tokenizer.path}, which is used here and "
            f"in exports: {found}"
        )
    _logger.warning("%s", warning)
    return warning


def write_exported_tokenizer(folder: Path, source: Path, model_type: str) -> None:
    """Writes into `folder` the tokenizer of the folder or file `source` as an export has it, for a
    type of model.
    """
    if source.is_dir():
        copy_tokenizer(folder, source)
        add_tokenizer_json(folder, source)
    write_json(folder / "config.json", {"model_type": model_type})


def check_future_export(
    source: Path, tokenizer: Tokenizer, model_type: str, texts: Iterable[str] = ()
) -> None:
    """Compares what `AutoTokenizer` will be in an export with the tokenizer of training.

    Raises:
        ConversionError: an export with the tokenizer of the folder `source` would be refused.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_exported_tokenizer(folder, source, model_type)
        found = first_difference(folder, tokenizer, texts)
    if found is not None:
        raise ConversionError(
            f"{source}: an export would have other ids than training: {found}; "
            f"{export_advice(tokenizer)}"
        )


def tokenizer_as_trained(folder: Path, tokenizer: Tokenizer) -> Any:
    """A tokenizer of `transformers` with the ids of `tokenizer`, which is that of the folder,
    whatever its class.

    Where the library cannot have all of them, as of some models of SentencePiece, a warning says
    so.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copied = Path(temporary)
        write_exported_tokenizer(copied, folder, ScaleConfig.model_type)
        found = first_difference(copied, tokenizer)
        if found is not None:
            _logger.warning(
                "%s: scored with ids that are not all those of training: %s", folder, found
            )
        return served_tokenizer(copied)


def _training_ids(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    """Encodes texts as the tokenizer's own file says, with what it puts around them."""
    if isinstance(tokenizer.reference, SentencePieceEncoder):
        processor = tokenizer.reference.model.processor
        start = list(tokenizer.document_start)

        def encoded_by_sentencepiece(texts: Sequence[str]) -> list[list[int]]:
            return [start + ids for ids in processor.encode(list(texts))]

        return encoded_by_sentencepiece
    # An own copy: the tokenizer's may be set to read special tokens as text. It has no dropout.
    with faults_of_library(f"{tokenizer.path}: cannot read this tokenizer.json", DataError):
        library = tokenizers.Tokenizer.from_str(tokenizer.reference.library.to_str())
        library.no_truncation()
        library.no_padding()

    def encoded_by_tokenizers(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in library.encode_batch(list(texts))]

    return encoded_by_tokenizers


def _special_texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that spell the special tokens that the folder's files name."""
    described = json_beside(folder / "tokenizer.json", "tokenizer_config.json")
    values = [value for key, value in described.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        several = described.get(key) or []
        if isinstance(several, dict):
            several = several.values()
        values += several
    if not isinstance(tokenizer.reference, SentencePieceEncoder):
        values += read_object(tokenizer.path, DataError).get("added_tokens") or []
    names: dict[str, None] = {}  # each once, in order
    for value in values:
        name = spelling_of(value)
        if name and name.strip():
            names[name] = None
    for name in islice(names, _MOST_SPECIAL_TOKENS):
        yield f"one{name}둘 {name} three\n{name}"


def _is_ambiguous(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text spells a control token, which is plain text for SentencePiece and never for
    `tokenizers`.
    """
    if not isinstance(tokenizer.reference, SentencePieceEncoder):
        return False
    return any(token in text for token in tokenizer.reference.model.reserved_tokens)


def _shortened(
    found: TokenDifference, difference_of: Callable[[str], TokenDifference | None]
) -> TokenDifference:
    """The difference in a part of its text, as short as leaving thirds of it out gives."""
    while len(found.text) > _SHOWN_CHARACTERS:
        # They overlap, so that whatever is short lies in one of them.
        sixth = len(found.text) // 6
        parts = (found.text[: 4 * sixth], found.text[sixth : 5 * sixth], found.text[2 * sixth :])
        for part in parts:
            shorter = difference_of(part)
            if shorter is not None:
                break
        else:
            return found
        found = shorter
    return found

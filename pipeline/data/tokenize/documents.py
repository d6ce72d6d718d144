"""The usable documents of inputs: all of them, their beginning, or a sample from random places."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from pipeline.data.sources.records import Document, Keys, Rejected
from pipeline.data.sources.streams import encoding_advice
from pipeline.data.tokenize.input_files import BY_LINES, input_files, named_files
from pipeline.data.tokenize.units import Unit, default_unit_bytes, split_file, unit_records
from pipeline.errors import DataError

# The most files that a sample comes from.
_SAMPLED_FILES = 16
# The fewest bytes that a sample reads at a place.
_SAMPLED_BYTES = 2**16


def good_documents(
    inputs: Sequence[str], keys: Keys, *, max_bytes: int | None = None
) -> Iterator[Document]:
    """Streams the usable documents of the inputs; with `max_bytes`, about equally much of the
    beginning of each file.

    Raises:
        DataError: there is none, or an input cannot be read.
    """
    files = input_files(inputs)
    most = math.inf if max_bytes is None else max_bytes // len(files)
    is_empty = True
    first_bad: Rejected | None = None
    for file, size in files.items():
        taken = 0
        units = split_file(file, 0, keys, default_unit_bytes(size))
        # One chain over the file's units, so that a break ends the file.
        for record in chain.from_iterable(unit_records(unit, keys) for unit in units):
            if isinstance(record, Rejected):
                first_bad = first_bad or record
                continue
            is_empty = False
            yield record
            taken += record.utf8_bytes
            if taken >= most:
                break
    if is_empty:
        fault = _no_document(inputs, keys, first_bad)
        raise fault


def texts(
    inputs: Sequence[str],
    *,
    text_key: str = "text",
    max_bytes: int | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """Streams the texts of the usable documents of the inputs, about `max_bytes` of them.

    That is the beginning of each file, or with `seed` random places in some of the files.
    """
    keys = Keys(text_key)
    documents: Iterable[Document]
    if seed is not None and max_bytes is not None:
        documents, _ = sampled_documents(inputs, keys, max_bytes, seed=seed)
    else:
        documents = good_documents(inputs, keys, max_bytes=max_bytes)
    return (document.text for document in documents)


def sampled_documents(
    inputs: Sequence[str], keys: Keys, max_bytes: int, *, seed: int = 0
) -> tuple[list[Document], float]:
    """Usable documents from random places all over the inputs, and how many times as much the
    inputs hold.

    Raises:
        DataError: there is none, or an input cannot be read.
    """  # noqa: DOC501
    files = input_files(inputs)
    draw = random.Random(seed)
    opened = draw.sample([*files], min(_SAMPLED_FILES, len(files)))
    units: list[Unit] = []
    for number, file in enumerate(opened):
        unit_bytes = max(_SAMPLED_BYTES, files[file] // 1024)
        units += split_file(file, number, keys, unit_bytes)

    documents: list[Document] = []
    first_bad: Rejected | None = None
    read = 0
    for place, size in _sampled_places(units, keys, max_bytes, draw):
        taken = 0
        for record in unit_records(place, keys):
            if isinstance(record, Rejected):
                first_bad = first_bad or record
                continue
            documents.append(record)
            taken += record.utf8_bytes
            if taken >= size and place.kind not in BY_LINES:
                break
        else:
            # All of the place was read, keys and brackets of JSON included.
            taken = place.size
        read += min(taken, place.size)
    if not documents:
        raise _no_document(inputs, keys, first_bad)
    # First from what was read to the files that were opened, then to all files.
    scale_of_opened = max(1.0, sum(unit.size for unit in units) / max(1, read))
    scale = sum(files.values()) / sum(files[file] for file in opened)
    return documents, scale * scale_of_opened


def _sampled_places(
    units: Sequence[Unit], keys: Keys, max_bytes: int, draw: random.Random
) -> list[tuple[Unit, int]]:
    """Randomly drawn units, each with the bytes to read there, `max_bytes` together.

    They come in the order of their files, so that a compressed file is read forwards.
    """
    share = _share_of_each([unit.size for unit in units], max_bytes)
    places: list[tuple[Unit, int]] = []
    wanted = max_bytes
    # Every unit once, in random order.
    for unit in draw.sample(units, len(units)):
        if wanted <= 0:
            break
        size = min(unit.size, share)
        place = unit
        if unit.kind in BY_LINES and keys.document != "file":
            # A unit of lines can end anywhere, so no more is read than is wanted.
            place = replace(unit, stop=unit.start + size, size=size)
        places.append((place, size))
        wanted -= size
    return sorted(places, key=lambda drawn: (drawn[0].path, drawn[0].start))


def _share_of_each(sizes: Sequence[int], wanted: int) -> int:
    """How much to read of each of several units, of these sizes, so that they give `wanted` bytes
    together."""
    # From the smallest on: what a small unit lacks of its share, the larger ones give.
    left = wanted
    for number, size in enumerate(sorted(sizes)):
        share = -(-left // (len(sizes) - number))  # rounded up
        if size >= share:
            return max(_SAMPLED_BYTES, share)
        left -= size
    return max([_SAMPLED_BYTES, *sizes])


def _no_document(inputs: Sequence[str], keys: Keys, first_bad: Rejected | None) -> DataError:
    fault = "" if first_bad is None else f": {first_bad}"
    advice = encoding_advice(named_files(inputs)) if keys.encoding is None else None
    if advice is None and first_bad is not None and first_bad.reason == "no_text_key":
        its_keys = first_bad.excerpt.decode(errors="replace")
        fault = ": " + " ".join(its_keys.split())
        advice = "set text_key to the one that holds the text, or messages_key for chats"
    if advice is None:
        advice = "give records a string under that key, or set text_key, or messages_key for chats"
    return DataError(
        f"{', '.join(inputs)}: no usable document under the text_key {keys.text!r}{fault}; {advice}"
    )

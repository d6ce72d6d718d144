"""How well a model answers chats that have references: exact match, whether answers end by themselves, their length."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson
import torch
from transformers import GenerationConfig

from pipeline import log
from pipeline.config.data import CHAT_DATE
from pipeline.data.sources.lines import lines
from pipeline.data.sources.object_stores import InputPath
from pipeline.data.sources.streams import open_stream
from pipeline.data.tokenize.units import input_files
from pipeline.data.tokenizer.chats import chat_template, message_of
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.batches import first_alike, frequencies_of, frequency_context
from pipeline.evaluation.tokens import check_served_ids
from pipeline.hf.folder import load_hf_model, taken_ends
from pipeline.log import progress_bar

DEFAULT_ANSWER_TOKENS = 256
# Of prompts and answers in a batch.
_BATCH_TOKENS = 2**13
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class ChatScore:
    """A model's greedy answers to the chats of a file."""

    chats: int
    exact_match: float
    """the share that end and are the reference; thoughts before them and white space around them aside"""
    ended: float
    """the share that end by themselves, before the limit of tokens"""
    answer_tokens: float
    """the mean length, thoughts included, without the end"""


class Chat(NamedTuple):
    """Messages up to where the assistant answers, its answer as a reference, and the place in the file for errors."""

    messages: list[dict[str, Any]]
    reference: str
    where: str


def read_chats(names: Sequence[str]) -> dict[str, list[Chat]]:
    """The chats of each JSONL file, by its name without the folder and what follows the first dot.

    Raises:
        ConfigError: two files have the same name.
        DataError: a line is no chat whose last message is the assistant's, or a file has no chat.
    """
    found: dict[str, list[Chat]] = {}
    for name in names:
        short = Path(name).name.partition(".")[0]
        if short in found:
            raise ConfigError(
                f"--chats {name}: the results of two files would be called {short}; rename one"
            )
        found[short] = [chat for file in input_files([name]) for chat in _chats_in(file)]
        if not found[short]:
            raise DataError(
                f"{name}: holds no chat; expected JSONL, an object with `messages` in each line"
            )
    return found


def _chats_in(file: InputPath) -> Iterator[Chat]:
    stream = open_stream(file)
    for number, line in enumerate(lines(stream, 0, sys.maxsize), start=1):
        if not line.content.strip():
            continue
        where = f"{file}, line {number}"
        try:
            messages = [message_of(found) for found in orjson.loads(line.content)["messages"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            messages = []
        *before, last = [message for message in messages if message] or [{}]
        is_whole = len(before) + 1 == len(messages) > 1
        if not is_whole or last["role"] != "assistant" or not last["content"].strip():
            raise DataError(
                f"{where}: expected an object with `messages`, a list of objects with role and content, of which the "
                "last is the assistant's and not empty: the reference"
            )
        yield Chat(before, last["content"], where)
    if stream.fault:
        raise DataError(f"{file}: {stream.fault.replace('_', ' ')}; copy it again")


def score_chats(
    folder: Path,
    files: Mapping[str, Sequence[Chat]],
    *,
    max_answer_tokens: int = DEFAULT_ANSWER_TOKENS,
    chat_date: date = CHAT_DATE,
    trust_remote_code: bool = False,
) -> dict[str, ChatScore]:
    """The score of the model in `folder` on the chats of each file, by its name; on a GPU if there is one.

    Chats are framed by the template of the folder's tokenizer, which is told that today is `chat_date`. An answer ends
    at any `eos_token_id` of the model's generation_config.json; nothing else of that file is used.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        DataError: its tokenizer has no chat template, or that cannot frame a chat, or a chat leaves no room to answer.
    """
    template, tokenizer = chat_template(folder, today=chat_date), load_tokenizer(folder)
    check_served_ids(folder, tokenizer, trust_remote_code=trust_remote_code)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _logger.info("loading %s", folder)
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    context = int(getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    left = []
    for name, chats in files.items():
        for chat in chats:
            try:
                text = template.opened(chat.messages)
            except DataError as fault:
                raise DataError(f"{chat.where}: {fault}") from None
            ids = tokenizer.reference.encode([text]).ids.tolist()
            if not 0 < len(ids) < context:
                raise DataError(
                    f"{chat.where}: its {len(ids)} tokens leave no room to answer in a context of {context}"
                )
            left.append((name, ids, chat.reference))
    left.sort(key=lambda prompt: -len(prompt[1]))  # little padding
    changes_at = frequency_context(model.config)

    def limit_and_frequencies(prompt: tuple[str, list[int], str]) -> tuple[int, int]:
        """How long an answer may be, and what else a chat shares with others of its batch."""
        length = len(prompt[1])
        limit = min(max_answer_tokens, context - length)
        return limit, frequencies_of(length, limit, changes_at)

    ends = taken_ends(model) or list(tokenizer.document_end[-1:])
    found: dict[str, list[tuple[bool, bool, int]]] = {name: [] for name in files}
    with progress_bar(str(folder), len(left), " chats") as bar:
        while left:
            width = len(left[0][1])
            new, _ = limit_and_frequencies(left[0])
            rows = max(1, _BATCH_TOKENS // (width + new))
            batch = first_alike(left, limit_and_frequencies, rows)
            left = left[len(batch) :]
            answers = _answers(model, [ids for _, ids, _ in batch], ends, new)
            for (name, _, reference), ids in zip(batch, answers, strict=True):
                length = next((at for at, id_ in enumerate(ids) if id_ in ends), None)
                is_right = length is not None and _said(tokenizer.decode(ids[:length])) == _said(
                    reference
                )
                found[name].append((is_right, length is not None, len(ids[:length])))
            bar.update(len(batch))
    return {
        name: ChatScore(len(own), *map(fmean, zip(*own, strict=True)))
        for name, own in found.items()
    }


def _said(answer: str) -> str:
    """What follows the thoughts, of which some templates have opened the block already."""
    return answer.rpartition("</think>")[2].strip()


@torch.inference_mode()
def _answers(
    model: Any, prompts: Sequence[list[int]], ends: list[int], new: int
) -> list[list[int]]:
    """The likeliest continuations of at most `new` tokens, with what follows their ends."""
    width = max(map(len, prompts))
    tokens = torch.tensor(
        [[ends[0]] * (width - len(ids)) + ids for ids in prompts], device=model.device
    )
    given = torch.tensor(
        [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device
    )
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new, eos_token_id=ends, pad_token_id=ends[0]
    )
    written: torch.Tensor = model.generate(tokens, attention_mask=given, generation_config=settings)
    return written[:, width:].tolist()


def chat_rows(scores: Mapping[str, Mapping[str, ChatScore]]) -> tuple[list[str], list[list[str]]]:
    """The head of a table and its rows, one per model and file. `scores` is by the model's name, then the file's."""
    rows = []
    for model, files in scores.items():
        for name, score in files.items():
            shares = f"{score.exact_match:.1%}", f"{score.ended:.1%}"
            label = name if len(scores) == 1 else f"{model}: {name}"
            rows.append([label, f"{score.chats:,}", *shares, f"{score.answer_tokens:.1f}"])
    return ["", "chats", "exact match", "answers that end", "tokens"], rows

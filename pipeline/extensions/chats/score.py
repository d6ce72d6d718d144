"""How well a model answers chats that have references, with greedy answers.

The scores are exact match, the share of answers that end by themselves, and their length.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from transformers import GenerationConfig

from pipeline import log
from pipeline.config.data import CHAT_DATE
from pipeline.data.sources.lines import lines
from pipeline.data.sources.object_stores import InputPath
from pipeline.data.sources.streams import open_stream
from pipeline.data.tokenize.input_files import input_files
from pipeline.data.tokenizer.chat_messages import message_of
from pipeline.data.tokenizer.chats import ChatTemplate, chat_template
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.batches import first_alike, frequencies_of, frequency_context
from pipeline.evaluation.tokens import check_served_ids
from pipeline.hf.load import load_hf_model, pop_eos_token_ids
from pipeline.log import progress_bar

DEFAULT_ANSWER_TOKENS = 256
_BATCH_TOKENS = 2**13
"""Tokens of a batch, prompts and answers together."""
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class ChatScore:
    """A model's greedy answers to the chats of a file."""

    chats: int
    exact_match: float
    """the share of answers that end and equal the reference, without thoughts before them and white
    space around them; the template's end of a turn may follow, as in training"""
    ended: float
    """the share of answers that end by themselves, before the limit of tokens"""
    answer_tokens: float
    """the mean length of the answers, with thoughts and without the end"""


class Chat(NamedTuple):
    """The messages before the assistant's answer, and the answer, which is the reference.

    Attributes:
        messages: what the model reads.
        reference: the answer that counts as right.
        where: file and line, for errors.
        tools: what the record has as `tools`, for the template.
    """

    messages: list[dict[str, Any]]
    reference: str
    where: str
    tools: object = None


class _Prompt(NamedTuple):
    """A chat of the file `name`, framed and tokenized."""

    name: str
    ids: list[int]
    right: frozenset[str]
    """answers that count as right, without thoughts and white space around them"""


class _Answer(NamedTuple):
    is_right: bool
    has_ended: bool
    length: int
    """in tokens, without the end"""


def read_chats(names: Sequence[str]) -> dict[str, list[Chat]]:
    """The chats of each JSONL file, by the file's name without its folder and extensions.

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
        found[short] = []
        for file in input_files([name]):
            found[short] += _chats_in(file)
        if not found[short]:
            raise DataError(
                f"{name}: holds no chat; expected JSONL, an object with `messages` in each line"
            )
    return found


def _chats_in(file: InputPath) -> Iterator[Chat]:
    """The chats of a JSONL file, one a line; empty lines are passed over."""
    stream = open_stream(file)
    for number, line in enumerate(lines(stream, 0, sys.maxsize), start=1):
        if not line.content.strip():
            continue
        where = f"{file}, line {number}"
        messages, tools = _messages_in(line.content)
        if len(messages) < 2 or not _is_answer(messages[-1]):
            raise DataError(
                f"{where}: expected an object with `messages`, a list of objects with role and "
                "content, of which the last is the assistant's and not empty: the reference"
            )
        yield Chat(messages[:-1], messages[-1]["content"], where, tools)
    if stream.fault:
        raise DataError(f"{file}: {stream.fault.replace('_', ' ')}; copy it again")


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip())


def _messages_in(line: bytes) -> tuple[list[dict[str, Any]], object]:
    """The messages and the tools of a line of JSON.

    There are no messages if the line or one of them is malformed.
    """
    messages: list[dict[str, Any]] = []
    try:
        record = orjson.loads(line)
        for found in record["messages"]:
            message = message_of(found)
            if message is None:
                return [], None
            messages.append(message)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return [], None
    return messages, record.get("tools")


def score_chats(
    folder: Path,
    files: Mapping[str, Sequence[Chat]],
    *,
    max_answer_tokens: int = DEFAULT_ANSWER_TOKENS,
    chat_date: date = CHAT_DATE,
    trust_remote_code: bool = False,
) -> dict[str, ChatScore]:
    """The score of the model in `folder` on the chats of each file, by its name.

    The model runs on a GPU if there is one. Chats are framed by the template of the folder's
    tokenizer, which is told that today is `chat_date`. An answer ends at any `eos_token_id` of the
    model's generation_config.json; nothing else of that file is used.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        DataError: its tokenizer has no chat template, or the template cannot frame a chat, or a
            chat leaves no space to answer in the model's context.
    """
    template = chat_template(folder, today=chat_date)
    tokenizer = load_tokenizer(folder)
    check_served_ids(folder, tokenizer, trust_remote_code=trust_remote_code)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _logger.info("loading %s", folder)
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    # A state-space model has no such limit.
    context = int(getattr(model.config, "max_position_embeddings", None) or sys.maxsize)

    waiting = _framed(files, template, tokenizer, context)
    # The longest first: batches of similar lengths have little padding, and one that does not fit
    # into memory fails at the start.
    waiting.sort(key=lambda prompt: len(prompt.ids), reverse=True)
    changes_at = frequency_context(model.config)

    def limit_and_frequencies(prompt: _Prompt) -> tuple[int, int]:
        """The limit of an answer's length, and the rotary frequencies: equal within a batch."""
        length = len(prompt.ids)
        limit = min(max_answer_tokens, context - length)
        return limit, frequencies_of(length, limit, changes_at)

    # A model without eos_token_id ends its answers as documents end in training.
    ends = pop_eos_token_ids(model) or list(tokenizer.document_end[-1:])
    answers: dict[str, list[_Answer]] = defaultdict(list)
    with progress_bar(str(folder), len(waiting), " chats") as bar:
        while waiting:
            longest = len(waiting[0].ids)
            limit, _ = limit_and_frequencies(waiting[0])
            rows = max(1, _BATCH_TOKENS // (longest + limit))
            batch = first_alike(waiting, limit_and_frequencies, rows)
            waiting = waiting[len(batch) :]
            written = _answers(model, batch, ends, limit)
            for prompt, ids in zip(batch, written, strict=True):
                answers[prompt.name].append(_judged(ids, ends, prompt.right, tokenizer))
            bar.update(len(batch))

    # In the order of the files, not in that of the batches.
    scores: dict[str, ChatScore] = {}
    for name in files:
        scores[name] = _score_of(answers[name])
    return scores


def _score_of(answers: Sequence[_Answer]) -> ChatScore:
    """The score of the answers to the chats of one file."""
    right = 0
    ended = 0
    tokens = 0
    for answer in answers:
        right += answer.is_right
        ended += answer.has_ended
        tokens += answer.length
    count = len(answers)
    return ChatScore(
        chats=count,
        exact_match=right / count,
        ended=ended / count,
        answer_tokens=tokens / count,
    )


def _framed(
    files: Mapping[str, Sequence[Chat]], template: ChatTemplate, tokenizer: Tokenizer, context: int
) -> list[_Prompt]:
    """The chats of all files as token ids, up to where the assistant answers."""
    prompts: list[_Prompt] = []
    for name, chats in files.items():
        for chat in chats:
            try:
                tools = template.tools_in(chat.tools)
                text = template.opened(chat.messages, tools)
            except DataError as fault:
                raise DataError(f"{chat.where}: {fault}") from None
            ids = tokenizer.reference.encode([text]).ids.tolist()
            if not 0 < len(ids) < context:
                raise DataError(
                    f"{chat.where}: its {len(ids)} tokens leave no space to answer in a context of "
                    f"{context}"
                )
            prompts.append(_Prompt(name, ids, _right_answers(chat, tools, template)))
    return prompts


def _right_answers(
    chat: Chat, tools: Sequence[Any] | None, template: ChatTemplate
) -> frozenset[str]:
    """The reference, and the reference as a corpus of chats would have it.

    There the template's end of a turn stands before the end of the document. A model that ends its
    documents with another token than its turns writes both.
    """
    right = {_said(chat.reference)}
    answer = {"role": "assistant", "content": chat.reference}
    # A template may refuse this chat as a corpus, such as one that has no generation prompt.
    with contextlib.suppress(DataError):
        _, as_trained = template.prompt_and_answer([*chat.messages, answer], tools)
        right.add(_said(as_trained))
    return frozenset(right)


def _judged(
    ids: list[int], ends: list[int], right: frozenset[str], tokenizer: Tokenizer
) -> _Answer:
    """An answer up to the first of its `ends`, compared with those that are `right`."""
    for place, id_ in enumerate(ids):
        if id_ in ends:
            # As text, not as ids: several sequences of tokens may spell one text.
            is_right = _said(tokenizer.decode(ids[:place])) in right
            return _Answer(is_right, has_ended=True, length=place)
    # An answer that was cut by the limit is never right.
    return _Answer(is_right=False, has_ended=False, length=len(ids))


def _said(answer: str) -> str:
    """The answer without the thoughts before it.

    Only the end of the thoughts is looked for: some templates write the opening <think> themselves.
    """
    return answer.rpartition("</think>")[2].strip()


@torch.inference_mode()
def _answers(model: Any, prompts: Sequence[_Prompt], ends: list[int], new: int) -> list[list[int]]:
    """Greedy continuations of at most `new` tokens, with the padding that follows their ends."""
    width = max(len(prompt.ids) for prompt in prompts)
    rows: list[list[int]] = []
    masks: list[list[int]] = []
    for prompt in prompts:
        # Padding is on the left, so that all answers begin at the same column.
        padding = width - len(prompt.ids)
        rows.append([ends[0]] * padding + prompt.ids)
        masks.append([0] * padding + [1] * len(prompt.ids))
    tokens = torch.tensor(rows, device=model.device)
    mask = torch.tensor(masks, device=model.device)
    settings = GenerationConfig(
        # Not the model's own generation config: its temperature or repetition penalty would decide
        # the comparison of two models.
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    written: torch.Tensor = model.generate(tokens, attention_mask=mask, generation_config=settings)
    return written[:, width:].tolist()


def chat_rows(scores: Mapping[str, Mapping[str, ChatScore]]) -> tuple[list[str], list[list[str]]]:
    """The head of a table, and its rows: one for each model and file.

    scores: by the name of the model, then of the file.
    """
    rows: list[list[str]] = []
    for model, files in scores.items():
        for name, score in files.items():
            label = name if len(scores) == 1 else f"{model}: {name}"
            rows.append(
                [
                    label,
                    f"{score.chats:,}",
                    f"{score.exact_match:.1%}",
                    f"{score.ended:.1%}",
                    f"{score.answer_tokens:.1f}",
                ]
            )
    return ["", "chats", "exact match", "answers that end", "tokens"], rows

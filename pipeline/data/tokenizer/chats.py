"""Chats, lists of messages, as prompts and answers: framed by the tokenizer's chat template.

Each message of the assistant becomes a document of its own, with everything before it as the
prompt: the loss is on answers only, and each is learned once. The template is a stranger's program;
transformers renders it in a sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import orjson

from pipeline import log
from pipeline.config.data import CHAT_DATE
from pipeline.data.sources.records import EXCERPT_BYTES, Document, Record, Rejected, record_of
from pipeline.data.tokenizer.document_end import json_beside
from pipeline.data.tokenizer.encoders import HuggingFaceEncoder
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.tokenizer_file import json_file
from pipeline.errors import DataError, faults_of_library, in_one_line
from pipeline.files.json_files import json_hash
from pipeline.files.reading import read_text

TEMPLATE = "chat_template.jinja"
# The roles of ShareGPT's names of who speaks; messages there hold `from` and `value`.
_ROLES = {
    "human": "user",
    "user": "user",
    "system": "system",
    "tool": "tool",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
# What templates of Qwen3, SmolLM3, GLM-4.5 and others call it.
_THINKING = "enable_thinking"
# What transformers calls its clock in a template.
_CLOCK = "strftime_now"
# What Jinja itself draws at random.
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")
_NOT_USABLE: Final = "messages_not_usable"
_ADVICE = (
    "take the tokenizer of a chat model, or render the chats yourself into a prompt and an answer"
)
_logger = log.get_logger(__name__)


class ChatTemplate:
    """The chat template of the tokenizer at `path`.

    `thinking` is its `enable_thinking`: whether the model thinks before it answers; None leaves
    that to the template. Chats without a system's message get one of `systems`, which the `seed`
    and their first message decide. A template that asks for today's date is told `today`: what it
    renders does not depend on the day.

    A message that spells a special token, which would end it, is refused unless `keeps_control`.

    Attributes:
        date: that date, as YYYY-MM-DD; None where the template does not ask.

    Raises:
        DataError: the tokenizer has no template, or no `enable_thinking`, or the template draws at
            random, or the tokenizer's library does not see special tokens in a text.
    """

    def __init__(
        self,
        path: Path,
        thinking: bool | None = None,
        systems: Sequence[str] = (),
        seed: int = 0,
        today: date = CHAT_DATE,
        *,
        keeps_control: bool = False,
    ) -> None:
        self.path = path
        self._systems = systems
        self._seed = seed
        self._today = today
        self._keeps_control = keeps_control
        file = json_file(path)
        described = json_beside(file, "tokenizer_config.json")
        source = template_in(file.parent, described)
        if not source:
            raise DataError(f"{file.parent}: its tokenizer has no chat template; {_ADVICE}")
        if thinking is not None and _THINKING not in source:
            raise DataError(
                f"{file.parent}: its chat template has no {_THINKING}; leave thinking out"
            )
        if _RANDOM.search(source):
            raise DataError(
                f"{file.parent}: its chat template draws at random (`random`, `lipsum`): the same "
                "command would make other tokens; write what it is to say into the template"
            )
        self.source = source
        self.date: str | None = None
        if _CLOCK in source:
            self.date = today.isoformat()
            message = "%s: its chat template asks for today's date; it is told %s"
            _logger.info(message, path, self.date)
        # What transformers gives a template: the special tokens, such as bos_token.
        self._variables: dict[str, Any] = {}
        for name, token in described.items():
            if name.endswith("_token") and isinstance(token, dict):
                self._variables[name] = token.get("content")
            elif name.endswith("_token") and isinstance(token, str):
                self._variables[name] = token
        if thinking is not None:
            self._variables[_THINKING] = thinking

    @property
    def fingerprint(self) -> str:
        """A hash of what decides how a chat is rendered."""
        decides: list[Any] = [self.source, self._variables]
        if self.date is not None:
            decides.append(self.date)
        return json_hash(decides)

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """What every document gets before and after it, as text.

        A template that writes them is cut there.
        """
        tokenizer = load_tokenizer(self.path)
        return tokenizer.decode(tokenizer.document_start), tokenizer.decode(tokenizer.document_end)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """What finds the special tokens of the tokenizer in a text."""
        reference = load_tokenizer(self.path).reference
        assert isinstance(reference, HuggingFaceEncoder), "json_file refuses others"
        spellings: list[str] = []
        for token in reference.library.get_added_tokens_decoder().values():
            if token.special:
                spellings.append(re.escape(str(token.content)))
        return re.compile("|".join(spellings)) if spellings else None

    def records(self, offset: int, found: object) -> Iterator[Record]:
        """A document for each message of the assistant in `found`, or why there is none.

        A message with `weight: 0`, or `train: false`, is only read.
        """
        try:
            conversation = orjson.dumps(found, default=str).decode()
        except (TypeError, UnicodeError) as fault:
            # Such as a lone surrogate.
            excerpt = repr(found)[:EXCERPT_BYTES].encode()
            yield Rejected(offset, _NOT_USABLE, excerpt, in_one_line(fault))
            return
        excerpt = conversation.encode()[:EXCERPT_BYTES]
        fault_of_chat = self._fault_of_chat(found)
        if fault_of_chat is not None:
            yield Rejected(offset, _NOT_USABLE, excerpt, fault_of_chat)
            return
        assert isinstance(found, list), "_fault_of_chat refuses others"
        chat: list[dict[str, Any]] = []
        for message in found:
            translated = message_of(message)
            assert translated is not None, "_fault_of_chat refuses others"
            chat.append(translated)
        # A first message has nothing before it that could be its prompt.
        answers = [at for at, message in enumerate(chat) if at > 0 and _is_learned(message)]
        if not answers:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in chat))
            detail = f"no message of the role assistant to learn; roles: {roles}"
            yield Rejected(offset, "no_answer", excerpt, detail)
            return
        start, end = self._frame
        for at in answers:
            try:
                prompt = self.opened(chat[:at])
                whole = self._rendered(chat[: at + 1], is_open=False)
            except DataError as fault:
                # Templates refuse what their model never saw, such as two users in a row.
                reason = in_one_line(fault)[-EXCERPT_BYTES:]
                yield Rejected(offset, _NOT_USABLE, reason.encode(), f"up to message {at}")
                return
            if not whole.startswith(prompt):
                detail = f"the template changes what precedes message {at}"
                yield Rejected(offset, _NOT_USABLE, excerpt, detail)
                return
            answer = whole[len(prompt) :]
            if not self._marks_answer(chat[: at + 1], prompt, answer):
                detail = (
                    "the template has no generation prompt: what it writes before message "
                    f"{at}, {answer[:20]!r}, would be learned as part of the answer"
                )
                yield Rejected(offset, _NOT_USABLE, excerpt, detail)
                return
            # The template's own end of a turn stays: it is what the model learns to stop with. Only
            # what every document gets anyway is cut off.
            answer = answer.rstrip().removesuffix(end)
            record = record_of(offset, answer, prompt.removeprefix(start))
            if isinstance(record, Document):
                yield record._replace(group=conversation, has_control=True)
            else:
                yield record._replace(detail=f"message {at}: {record.detail}".rstrip(": "))

    def _marks_answer(self, chat: list[dict[str, Any]], prompt: str, answer: str) -> bool:
        """Whether the template's generation prompt ends where the last message of `chat` begins.

        A server asks with that generation prompt. Where the template has none, a message may follow
        what is before it at once, as in Llama 2's; a header of its own must not come between.

        Args:
            chat: the messages up to an answer, and the answer.
            prompt: what the template makes of those before the answer.
            answer: what follows in the whole chat.
        """
        content = chat[-1]["content"].strip()
        if answer.lstrip().startswith(content):
            return True
        # The template writes something before the content, such as an empty thought: rendered a
        # second time, because it matters only then whether the generation prompt is empty.
        return self._rendered(chat[:-1], is_open=False) != prompt

    def _fault_of_chat(self, found: object) -> str | None:
        """What is wrong with a value that should be a list of messages; None if it can be used."""
        if not isinstance(found, list):
            return f"expected a list, found {type(found).__name__}"
        for number, message in enumerate(found):
            fault = self._fault_of(message)
            if fault is not None:
                return f"message {number}: {fault}"
        return None

    def _fault_of(self, message: object) -> str | None:
        """What is wrong with a message; None if it can be used."""
        if not isinstance(message, dict):
            return f"expected an object, found {type(message).__name__}"
        translated = message_of(message)
        if translated is None:
            return _fault_of_keys(message)
        if message.get("weight", 1) not in (0, 1, None):
            return f"weight: expected 0 or 1, found {message['weight']!r:.60}"
        if self._keeps_control or self._special is None:
            return None
        special = self._special.search(translated["content"])
        if special is not None:
            what = f"spells {special.group()}, a special token"
            return f"{what}; remove it, or set special_tokens: control"
        return None

    def opened(self, messages: list[dict[str, str]]) -> str:
        """The text up to where the assistant answers.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._rendered(messages, is_open=True)

    def _rendered(self, messages: list[dict[str, str]], *, is_open: bool) -> str:
        # The import takes a second, and only chats need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._systems and messages[0]["role"] != "system":
            # By the first message, not by a count: the same chat has the same system message in any
            # order and any unit.
            drawn = int(json_hash([self._seed, messages[0]["content"]]), 16) % len(self._systems)
            messages = [{"role": "system", "content": self._systems[drawn]}, *messages]
        fault = f"{self.path}: its chat template cannot frame a message"
        with faults_of_library(fault, DataError), self._told_date():
            texts, _ = render_jinja_template(
                conversations=[messages],
                chat_template=self.source,
                add_generation_prompt=is_open,
                **self._variables,
            )
        return str(texts[0])

    @contextmanager
    def _told_date(self) -> Iterator[None]:
        """Within the block, `strftime_now` of this template formats the fixed date.

        transformers takes no function as a variable of a template. It keeps compiled templates,
        each in an environment of its own, where others in this process, such as lm-eval, must find
        its clock again.
        """
        if self.date is None:
            yield
            return
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # transformers keeps compiled templates, so that this is the one that it renders.
        names = _compile_jinja_template(self.source).environment.globals
        clock = names[_CLOCK]
        names[_CLOCK] = self._today.strftime
        try:
            yield
        finally:
            names[_CLOCK] = clock


@lru_cache(maxsize=4)
def chat_template(
    path: Path,
    thinking: bool | None = None,
    systems: tuple[str, ...] = (),
    seed: int = 0,
    today: date = CHAT_DATE,
    *,
    keeps_control: bool = False,
) -> ChatTemplate:
    """The chat template of the tokenizer at `path`, read once: see `ChatTemplate`."""
    return ChatTemplate(path, thinking, systems, seed, today, keeps_control=keeps_control)


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that the model is to learn."""
    return (
        message["role"] == "assistant"
        and message.get("weight") != 0
        and message.get("train") is not False
    )


def template_in(folder: Path, described: Mapping[str, Any]) -> str | None:
    """The chat template of a tokenizer's folder; of several, the default one.

    `described` is the content of its tokenizer_config.json.

    Raises:
        DataError: its file cannot be read.
    """
    try:
        return read_text(folder / TEMPLATE, DataError)
    except FileNotFoundError:
        found = described.get("chat_template")
    if isinstance(found, list):
        return _default_template(found)
    return found if isinstance(found, str) else None


def _default_template(several: Sequence[object]) -> str | None:
    """Of several templates with names the one that is named default."""
    for one in several:
        if isinstance(one, dict) and one.get("name") == "default":
            found = one.get("template")
            return found if isinstance(found, str) else None
    return None


def message_of(found: object) -> dict[str, Any] | None:
    """A message of a chat, one of ShareGPT's translated; None for anything else."""
    if not isinstance(found, dict):
        return None
    if found.keys() >= {"from", "value"}:
        found = {**found, "role": _ROLES.get(str(found["from"])), "content": found["value"]}
    if not isinstance(found.get("role"), str) or not isinstance(found.get("content"), str):
        return None
    return found


def _fault_of_keys(message: Mapping[str, Any]) -> str:
    """Why `message_of` refuses an object: an unknown speaker, or an entry that is no string."""
    names = ("role", "content")
    if "from" in message and "value" in message:
        names = ("from", "value")
    for name in names:
        if not isinstance(message.get(name), str):
            return f"{name}: expected a string, found {type(message.get(name)).__name__}"
    return f"from: expected one of {', '.join(_ROLES)}, found {message['from']!r:.60}"

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
from pipeline.config.data import CHAT_DATE, ChatStart
from pipeline.data.sources.records import EXCERPT_BYTES, Document, Record, Rejected, record_of
from pipeline.data.tokenizer.chat_messages import (
    ChatError,
    check_learned,
    fault_of_keys,
    is_learned,
    joined,
    message_of,
    strings_in,
    without_nulls,
)
from pipeline.data.tokenizer.document_end import json_beside
from pipeline.data.tokenizer.encoders import HuggingFaceEncoder
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.tokenizer_file import json_file
from pipeline.errors import DataError, faults_of_library, in_one_line
from pipeline.files.json_files import json_hash
from pipeline.files.reading import read_text

TEMPLATE = "chat_template.jinja"
# What templates of Qwen3, SmolLM3, GLM-4.5 and others call it.
_THINKING = "enable_thinking"
# What transformers calls its clock in a template.
_CLOCK = "strftime_now"
# What transformers calls the tools in a template.
_TOOLS = re.compile(r"\btools\b")
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
    `start`: whether a chat begins as the template has it, or with the token that the tokenizer puts
    before every text.

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
        start: ChatStart = "template",
    ) -> None:
        self.path = path
        self._start = start
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
        if self._start != "template":
            decides.append({"start": self._start})
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

    def records(
        self, offset: int, found: object, beside: Mapping[str, object] = {}
    ) -> Iterator[Record]:
        """A document for each message of the assistant in `found`, or why there is none.

        A message with `weight: 0`, or `train: false`, is only read; and so is the prompt of TRL's
        records of prompt and completion, which hold the latter in `beside`. There are also the
        `tools` that the template describes.
        """
        completion = beside.get("completion", [])
        try:
            conversation = orjson.dumps(joined(found, completion), default=str).decode()
        except (TypeError, UnicodeError) as fault:
            # Such as a lone surrogate.
            excerpt = repr(found)[:EXCERPT_BYTES].encode()
            yield Rejected(offset, _NOT_USABLE, excerpt, in_one_line(fault))
            return
        excerpt = conversation.encode()[:EXCERPT_BYTES]
        try:
            prompt = self._messages_in(found)
            chat = [*prompt, *self._messages_in(completion, len(prompt))]
            tools = self.tools_in(beside.get("tools"))
        except ChatError as fault:
            yield Rejected(offset, _NOT_USABLE, excerpt, str(fault))
            return
        # Of messages alone each answer is learned, of a prompt and its completion those in the
        # latter. A first message has nothing before it that could be its prompt.
        first = len(prompt) if completion else 1
        answers = [at for at in range(max(first, 1), len(chat)) if is_learned(chat[at])]
        if not answers:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in chat))
            detail = f"no message of the role assistant to learn; roles: {roles}"
            yield Rejected(offset, "no_answer", excerpt, detail)
            return
        for at in answers:
            try:
                record = self._record_of(offset, chat[: at + 1], tools)
            except ChatError as fault:
                yield Rejected(offset, _NOT_USABLE, excerpt, str(fault))
                return
            except DataError as fault:
                # Templates refuse what their model never saw, such as two users in a row.
                reason = in_one_line(fault)[-EXCERPT_BYTES:]
                yield Rejected(offset, _NOT_USABLE, reason.encode(), f"up to message {at}")
                return
            if isinstance(record, Document):
                yield record._replace(group=conversation, has_control=True)
            else:
                yield record._replace(detail=f"message {at}: {record.detail}".rstrip(": "))

    def _record_of(
        self, offset: int, chat: list[dict[str, Any]], tools: Sequence[Any] | None
    ) -> Record:
        """The document of the last message of `chat`, behind those before it.

        Raises:
            DataError: the template refuses the messages.
            ChatError: the answer cannot be told from what precedes it.
        """
        prompt, answer = self.prompt_and_answer(chat, tools)
        # The template's own end of a turn stays: it is what the model learns to stop with. Only
        # what every document gets anyway is cut off.
        _, end = self._frame
        answer = answer.rstrip().removesuffix(end)
        start, rest = self._begun(prompt)
        record = record_of(offset, answer, rest)
        return record._replace(start=start) if isinstance(record, Document) else record

    def _split_start(self, text: str) -> tuple[str, str]:
        """The token with which the template begins a chat, or nothing, and what follows it."""
        start, _ = self._frame
        written = start or str(self._variables.get("bos_token") or "")
        if written and text.startswith(written):
            return written, text.removeprefix(written)
        return "", text

    def _begun(self, text: str) -> tuple[str, str]:
        """What a rendered chat begins with, by the setting, and what follows it."""
        written, rest = self._split_start(text)
        if self._start == "template":
            return written, rest
        start, _ = self._frame
        return start, rest

    def say_start(self) -> None:
        """Says in the log where the template begins a chat otherwise than the tokenizer a text."""
        start, _ = self._frame
        try:
            text = self._rendered([{"role": "user", "content": "a"}], None, is_open=True)
        except DataError:
            # It wants other messages, which the chats may be.
            return
        written, _ = self._split_start(text)
        if written != start:
            message = (
                "%s: its chat template begins chats with %s, its tokenizer other texts with %s; "
                "chats begin as the %s has it (chat_start)"
            )
            names = (written or "no token", start or "no token")
            _logger.info(message, self.path, *names, self._start)

    def prompt_and_answer(
        self, chat: list[dict[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[str, str]:
        """The text up to where the last message of `chat` begins, and from there on.

        Raises:
            DataError: the template refuses the messages.
            ChatError: the answer cannot be told from what precedes it.
        """
        at = len(chat) - 1
        prompt = self._rendered(chat[:at], tools, is_open=True)
        whole = self._rendered(chat, tools, is_open=False)
        if not whole.startswith(prompt):
            raise ChatError(f"the template changes what precedes message {at}")
        answer = whole[len(prompt) :]
        if not self._marks_answer(chat, tools, prompt, answer):
            raise ChatError(
                "the template has no generation prompt: what it writes before message "
                f"{at}, {answer[:20]!r}, would be learned as part of the answer"
            )
        return prompt, answer

    def _marks_answer(
        self, chat: list[dict[str, Any]], tools: Sequence[Any] | None, prompt: str, answer: str
    ) -> bool:
        """Whether the template's generation prompt ends where the last message of `chat` begins.

        A server asks with that generation prompt. Where the template has none, a message may follow
        what is before it at once, as in Llama 2's; a header of its own must not come between.

        Args:
            chat: the messages up to an answer, and the answer.
            tools: what the template is told of tools.
            prompt: what the template makes of those before the answer.
            answer: what follows in the whole chat.
        """
        content = chat[-1]["content"].strip()
        if answer.lstrip().startswith(content):
            return True
        # The template writes something before the content, such as an empty thought: rendered a
        # second time, because it matters only then whether the generation prompt is empty.
        return self._rendered(chat[:-1], tools, is_open=False) != prompt

    def _messages_in(self, found: object, first: int = 0) -> list[dict[str, Any]]:
        """The messages of a list, as the template reads them; the first is number `first`.

        Raises:
            ChatError: it is no list of messages, or one of them cannot be used.
        """
        if not isinstance(found, list):
            raise ChatError(f"expected a list, found {type(found).__name__}")
        messages: list[dict[str, Any]] = []
        for number, one in enumerate(found, start=first):
            try:
                messages.append(self._message_in(one))
            except ChatError as fault:
                raise ChatError(f"message {number}: {fault}") from None
        return messages

    def _message_in(self, found: object) -> dict[str, Any]:
        """A message as the template reads it.

        Raises:
            ChatError: it cannot be used.
        """
        if not isinstance(found, dict):
            raise ChatError(f"expected an object, found {type(found).__name__}")
        message = message_of(found)
        if message is None:
            raise ChatError(fault_of_keys(found))
        check_learned(message)
        self._check_spelling(message)
        return message

    def _check_spelling(self, found: object) -> None:
        """Makes sure that no string in a message, or in tools, spells a special token.

        A role is written by the template, too, and so are the arguments of calls.

        Raises:
            ChatError: one does.
        """
        if self._keeps_control or self._special is None:
            return
        for text in strings_in(found):
            special = self._special.search(text)
            if special is not None:
                raise ChatError(
                    f"spells {special.group()}, a special token; remove it, or set "
                    "special_tokens: control"
                )

    def tools_in(self, found: object) -> list[Any] | None:
        """The tools of a record, a list or its JSON, for the template; None where there are none.

        Raises:
            ChatError: they are no list of objects, or the template does not describe tools.
        """
        tools = found
        if isinstance(tools, (str, bytes)):
            # Parquet has no type for tools, whose parameters differ: datasets hold them as JSON.
            try:
                tools = orjson.loads(tools) if tools.strip() else None
            except orjson.JSONDecodeError:
                raise ChatError(f"tools: expected JSON, found {found!r:.60}") from None
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ChatError(f"tools: expected a list of objects, found {tools!r:.60}")
        if not _TOOLS.search(self.source):
            raise ChatError(
                "has tools, of which the chat template says nothing; take a template that "
                "describes tools, or remove them"
            )
        self._check_spelling(tools)
        described: list[Any] = without_nulls(tools)
        return described

    def opened(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """The text up to where the assistant answers.

        Raises:
            DataError: the template refuses the messages.
        """
        return "".join(self._begun(self._rendered(messages, tools, is_open=True)))

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, *, is_open: bool
    ) -> str:
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
                tools=None if tools is None else [*tools],
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
    start: ChatStart = "template",
) -> ChatTemplate:
    """The chat template of the tokenizer at `path`, read once: see `ChatTemplate`."""
    return ChatTemplate(
        path, thinking, systems, seed, today, keeps_control=keeps_control, start=start
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

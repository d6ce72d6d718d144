"""The messages of chats, as people bring them: roles, ShareGPT's names, nulls, what is learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import DataError

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
# What says of an answer whether it is learned, and its values.
_IS_LEARNED_KEYS = ("weight", "train")
_LEARNED = (True, "true", "1", None)
_ONLY_READ = (False, "false", "0")


class ChatError(DataError):
    """A chat that is rejected; its text is the reason."""


def message_of(found: object) -> dict[str, Any] | None:
    """A message of a chat, one of ShareGPT's translated; None for anything else.

    A key whose value is null counts as absent.
    """
    if not isinstance(found, dict):
        return None
    message: dict[str, Any] = without_nulls(found)
    if message.keys() >= {"from", "value"}:
        message["role"] = _ROLES.get(str(message["from"]))
        message["content"] = message["value"]
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        return None
    return message


def fault_of_keys(message: Mapping[str, Any]) -> str:
    """Why `message_of` refuses an object: an unknown speaker, or an entry that is no string."""
    names = ("role", "content")
    if "from" in message and "value" in message:
        names = ("from", "value")
    for name in names:
        if not isinstance(message.get(name), str):
            return f"{name}: expected a string, found {type(message.get(name)).__name__}"
    return f"from: expected one of {', '.join(_ROLES)}, found {message['from']!r:.60}"


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that the model is to learn."""
    if message["role"] != "assistant":
        return False
    return all(_plain(message.get(key)) in _LEARNED for key in _IS_LEARNED_KEYS)


def check_learned(message: Mapping[str, Any]) -> None:
    """Makes sure that a message says plainly whether it is learned.

    Raises:
        ChatError: it does not.
    """
    for key in _IS_LEARNED_KEYS:
        if _plain(message.get(key)) not in (*_LEARNED, *_ONLY_READ):
            expected = "0 or 1" if key == "weight" else "true or false"
            raise ChatError(f"{key}: expected {expected}, found {message[key]!r:.60}")


def _plain(value: object) -> object:
    """A value that says yes or no; of a string its lower case, since tables often hold strings."""
    return value.strip().lower() if isinstance(value, str) else value


def joined(found: object, completion: object) -> object:
    """The messages of a chat and of its completion."""
    if isinstance(found, list) and isinstance(completion, list):
        return [*found, *completion]
    return found


def strings_in(value: object) -> Iterator[str]:
    """The strings in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from strings_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings_in(one)


def without_nulls(value: Any) -> Any:
    """A value of JSON without the keys whose value is null.

    Parquet, and `datasets`, give every record all keys that any of them has.
    """
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value

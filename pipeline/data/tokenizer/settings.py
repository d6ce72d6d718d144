"""Settings with which every version of `transformers` reads a tokenizer.json as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AS_IT_IS = "PreTrainedTokenizerFast"
"""The class that reads tokenizer.json as it is.

Version 5 calls it TokenizersBackend, and knows both names.
"""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Settings by which `transformers` would build parts of the tokenizer anew.
_REBUILDING = ("add_prefix_space", "add_bos_token", "add_eos_token")
# How `transformers` adds a special token that its settings name by its spelling alone.
_ADDED_BY_NAME = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def read_as_it_is(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `config` of a tokenizer_config.json, changed so that a tokenizer.json
    `described` is read as it is.

    They name its class. What the file says itself is left out: `transformers` would build those
    parts anew. Special tokens that are not as the library adds them by their names are described as
    in the file.
    """
    settings = dict(config)
    for key in _REBUILDING:
        settings.pop(key, None)
    settings["tokenizer_class"] = AS_IT_IS
    prefix = _prefix_space(described.get("pre_tokenizer"))
    if prefix is not None:
        settings["add_prefix_space"] = prefix
    added: dict[object, Mapping[str, Any]] = {}
    for token in described.get("added_tokens") or ():
        added[token.get("content")] = token
    for key, value in settings.items():
        spelled = value.get("content") if isinstance(value, dict) else value
        if not key.endswith("_token") or not isinstance(spelled, str) or spelled not in added:
            continue
        # The flags as in the file: a token that is named alone would get the library's own.
        flags = {flag: bool(added[spelled].get(flag)) for flag in _FLAGS}
        if flags != _ADDED_BY_NAME or isinstance(value, dict):
            settings[key] = {"__type": "AddedToken", "content": spelled, **flags}
    return settings


def _prefix_space(part: object) -> bool | None:
    """Whether a pre-tokenizer, or one that it is a sequence of, puts a space before a text.

    None where it does not say.
    """
    if not isinstance(part, dict):
        return None
    if "add_prefix_space" in part:
        return bool(part["add_prefix_space"])
    for inner in part.get("pretokenizers") or ():
        found = _prefix_space(inner)
        if found is not None:
            return found
    return None

"""The settings beside a tokenizer.json with which every version of `transformers` reads that file as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AS_IT_IS = "PreTrainedTokenizerFast"
"""The class that reads tokenizer.json as it is; version 5 calls it TokenizersBackend, and knows both names."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# How `transformers` adds a special token that its settings name by its spelling alone.
_ADDED_BY_NAME = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def read_as_it_is(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `config` of a tokenizer_config.json, changed so that a tokenizer.json `described` is read as it is.

    They name its class. What the file says itself is left out: `transformers` would build those parts anew. Special
    tokens that are not as the library adds them by their names are described as in the file.
    """
    rebuilding = ("add_prefix_space", "add_bos_token", "add_eos_token")
    settings = {key: value for key, value in config.items() if key not in rebuilding}
    settings["tokenizer_class"] = AS_IT_IS
    prefix = _prefix_space(described.get("pre_tokenizer"))
    if prefix is not None:
        settings["add_prefix_space"] = prefix
    added = {token.get("content"): token for token in described.get("added_tokens") or ()}
    for key, value in settings.items():
        spelled = value.get("content") if isinstance(value, dict) else value
        token = added.get(spelled) if key.endswith("_token") and isinstance(spelled, str) else None
        if token is None:
            continue
        flags = {flag: bool(token.get(flag)) for flag in _FLAGS}
        if flags != _ADDED_BY_NAME or isinstance(value, dict):
            settings[key] = {"__type": "AddedToken", "content": spelled, **flags}
    return settings


def _prefix_space(part: object) -> bool | None:
    """Whether a pre-tokenizer, or one that it is a sequence of, puts a space before a text; None: it does not say."""
    if not isinstance(part, dict):
        return None
    if "add_prefix_space" in part:
        return bool(part["add_prefix_space"])
    found = map(_prefix_space, part.get("pretokenizers") or ())
    return next((one for one in found if one is not None), None)

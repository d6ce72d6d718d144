"""What a base's folder says of itself: its card, and its name on the hub.

A stranger may have written both: only plain values of known fields are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from pipeline import log
from pipeline.errors import BaseModelError, faults_of_library
from pipeline.files.json_files import read_object
from pipeline.files.reading import read_text
from pipeline.hub import source_of

CARD = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# The first part of a relative path on the machine where somebody saved the model.
_LOCAL_FOLDERS = re.compile(
    r"(?i)(\w*(models?|checkpoints?|ckpts?|outputs?|runs?|results?|exports?|weights|data)"
    r"|home|mnt|tmp|work|workspace|scratch|content|saved|hf|cache)/.*"
)
_logger = log.get_logger(__name__)


def card_of(base: Path) -> dict[str, Any]:
    """The front matter of the base's card; empty if there is none, or none that can be read."""
    path = base / CARD
    if not path.exists():
        return {}
    try:
        with faults_of_library(f"{path}: its front matter cannot be read", BaseModelError):
            return dict(ModelCard(read_text(path, BaseModelError)).data.to_dict())
    except BaseModelError as error:
        _logger.warning("%s; the model card does not name the base's licence", error)
        return {}


def hub_name(base: Path) -> str | None:
    """The base's name on the hub, `org/name`; None where nothing says it.

    A folder of the hub's cache has its name in its path. Another one may have it in config.json, as
    `_name_or_path`, where transformers writes what the model was loaded from. Where that is a path,
    the card may name the model on the hub that the folder was made from.
    """
    source = source_of(base)
    if source is not None:
        return source.partition("@")[0]
    named = read_object(base / "config.json", BaseModelError).get("_name_or_path")
    if _is_hub_name(named):
        return str(named)
    return base_named_in(card_of(base))


def base_named_in(card: Mapping[str, Any]) -> str | None:
    """The base on the hub, `org/name`, that the front matter of a card names; None without one."""
    named = card.get("base_model")
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    if _is_hub_name(named):
        return str(named)
    return None


def _is_hub_name(named: object) -> bool:
    """Whether this is `org/name` on the hub, and no path of any machine."""
    if not isinstance(named, str) or not _HUB_NAME.fullmatch(named):
        return False
    path = Path(named)
    # As for a setting `base`: where there is a folder `mine`, `mine/model` is a path.
    is_here = path.exists() or path.parent.is_dir()
    return not is_here and not _LOCAL_FOLDERS.fullmatch(named)

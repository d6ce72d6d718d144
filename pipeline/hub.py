"""The folder of a model that is named otherwise: on the Hugging Face hub, or as a GGUF file.

A model of the hub, `org/name` or `org/name@revision`, is fetched into its cache. A GGUF file is
dequantized (pipeline/gguf/).

Weights in safetensors, tokenizers, JSON, the card and the terms of use are fetched, never Python.
The cache names a folder after the commit, so that every record of the path holds it. HF_HOME,
HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN work as everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from pipeline import log
from pipeline.errors import BaseModelError, faults_of_library
from pipeline.gguf.file import SUFFIX
from pipeline.gguf.folder import dequantized_folder

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*?)(?:@(?P<revision>[\w][\w./-]*))?")
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "*.txt")
# An export passes them on, and its own card quotes the base's (pipeline/hf/base_files.py).
_TERMS = (
    "README.md",
    "LICEN[CS]E*",
    "[Ll]icen[cs]e*",
    "NOTICE*",
    "COPYRIGHT*",
    "COPYING*",
    "*USE_POLICY*",
)
_WEIGHTS = "*.safetensors"
# Subfolders hold the weights once more, in formats of other programs; so do Mistral's consolidated
# files.
_IGNORED = ("*/*", "consolidated*")
ADVICE = (
    "check its name and revision, `hf auth login` and, where there is no network or "
    "HF_HUB_OFFLINE is set, HF_HOME"
)
_logger = log.get_logger(__name__)


def model_folder(path: Path, *, weights: bool = True) -> Path:
    """The folder of a model on this machine; fetches the model if `path` is its name on the hub.

    A GGUF file's model is dequantized into a folder of `runs/bases`, the first time.

    `path` is no name on the hub if it exists, or if its first part is a folder here: where there is
    a folder `models`, a missing `models/mine` must not become a stranger's model.

    Args:
        weights: whether the weights are fetched too. The other files are few and small: they
            describe the architecture and the tokenizer.

    Raises:
        BaseModelError: the hub has no such model or revision, does not let this user read it, or
            cannot be reached while the cache lacks it; or no base can be made of a GGUF file.
        MissingPackageError: the package that reads GGUF files is not installed.
    """
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return dequantized_folder(path)
    named = _NAME.fullmatch(str(path))
    if path.exists() or named is None or Path(named["repo"]).parent.is_dir():
        return path
    # Imported here: a user of a local folder does not wait for the import.
    from huggingface_hub import snapshot_download

    patterns = [*_DESCRIPTION, *_TERMS]
    if weights:
        patterns.append(_WEIGHTS)
    what = (
        f"{path}: no such folder here, and cannot be fetched from the Hugging Face hub ({ADVICE})"
    )
    with faults_of_library(what, BaseModelError):
        # Its folder is named after the commit: a branch that moves during a run does not change the
        # base.
        fetched = snapshot_download(
            named["repo"],
            revision=named["revision"],
            allow_patterns=patterns,
            ignore_patterns=list(_IGNORED),
        )
    _logger.info("%s: %s on the hub, in %s", path, source_of(Path(fetched)), fetched)
    return Path(fetched)


def source_of(folder: Path) -> str | None:
    """`org/name@commit` of a folder in the hub's cache, or of a link to one; None for another."""
    snapshot = folder.resolve()
    cached = snapshot.parent.parent.name
    if snapshot.parent.name != "snapshots" or not cached.startswith("models--"):
        return None
    return f"{cached.removeprefix('models--').replace('--', '/', 1)}@{snapshot.name}"

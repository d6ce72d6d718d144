"""Publishes a verified export on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from pipeline.conversion.hf_folder import ADAPTER_CONFIG
from pipeline.errors import ConversionError, faults_of_library
from pipeline.files import read_object


def check_name(name: str, option: str) -> None:
    """Raises ConversionError if `name` can be no model on the hub."""
    with faults_of_library(f"{option} {name!r}: expected a name such as organisation/model", ConversionError):
        validate_repo_id(name)


def check_can_push(name: str) -> None:
    """Raises ConversionError if `name` is no repository's, or there is no way to push to it. Asks nobody."""
    check_name(name, "--push")
    if constants.HF_HUB_OFFLINE:
        raise ConversionError("--push: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if huggingface_hub.get_token() is None:
        raise ConversionError("--push: no token; log in with `hf auth login`, or set HF_TOKEN to one that may write")


def push(folder: Path, name: str, *, private: bool) -> str:
    """Uploads the export in `folder` to the model `name`, which is made if there is none; returns its address.

    Raises:
        ConversionError: it is refused or fails, or the folder holds adapters of a base that only this machine has.
    """
    adapters = folder / ADAPTER_CONFIG
    base = read_object(adapters, ConversionError)["base_model_name_or_path"] if adapters.exists() else ""
    if Path(base).is_absolute():
        raise ConversionError(
            f"{folder}: adapters whose base is {base}, which others do not have; convert again with --base-name "
            "organisation/model"
        )
    with faults_of_library(f"--push {name}", ConversionError):
        hub = huggingface_hub.HfApi()
        address = hub.create_repo(name, private=private, exist_ok=True)
        message, local = f"Upload {folder.name}", ["conversion.json"]  # it names paths of this machine
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=local)
    return str(address)

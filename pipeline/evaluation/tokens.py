"""Whether `AutoTokenizer`, by which users load a folder, gives the ids that are evaluated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.data.tokenizer.load import Tokenizer
from pipeline.files.folders import holds
from pipeline.hf.folder_kinds import COMBINATION, EXPORT
from pipeline.hf.served_tokenizer import check_export, warn_of_base


def check_served_ids(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Iterable[str] = (),
    *,
    trust_remote_code: bool = False,
) -> None:
    """Compares the ids of `AutoTokenizer` of a folder with those of `tokenizer`, on `texts`.

    Training and evaluation use `tokenizer`. For a base a difference is only a warning.

    Raises:
        ConversionError: the folder is an export, and the two differ.
    """
    if holds(EXPORT, folder) or holds(COMBINATION, folder):
        check_export(folder, tokenizer, texts, advice="convert the run again")
    else:
        warn_of_base(folder, tokenizer, texts, trust_remote_code=trust_remote_code)

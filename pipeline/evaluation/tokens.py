"""Whether users of a folder get the ids that it is evaluated with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.combination.combine import COMBINATION
from pipeline.conversion.convert import EXPORT
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.files.folders import holds
from pipeline.hf.served_tokenizer import check_export, warn_of_base


def check_served_ids(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Iterable[str] = (),
    *,
    trust_remote_code: bool = False,
) -> None:
    """Compares what `AutoTokenizer` makes of the folder with its `tokenizer`.

    Evaluation and training read `tokenizer`. For a base a difference is a warning.

    Raises:
        ConversionError: the folder is an export, and the two differ.
    """
    if holds(EXPORT, folder) or holds(COMBINATION, folder):
        check_export(folder, tokenizer, texts, advice="convert the run again")
    else:
        warn_of_base(folder, tokenizer, texts, trust_remote_code=trust_remote_code)

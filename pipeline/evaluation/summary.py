"""The summary of a finished run: its scores before and after, its cost, and the paths of its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.config.method import ScaleMethod, title_of
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import EXPORT, HF_FOLDER, VERIFICATION
from pipeline.conversion.model_card import add_to_card, markdown_table
from pipeline.data.tokenize.corpora import check_heldout, heldout_corpora
from pipeline.data.tokenize.units import input_files
from pipeline.errors import CheckpointError, ConversionError, UserError
from pipeline.evaluation.chats import DEFAULT_ANSWER_TOKENS, chat_rows, read_chats, score_chats
from pipeline.evaluation.perplexity import DEFAULT_BYTES, Prefix, Score, score_folder
from pipeline.evaluation.table import score_table, table
from pipeline.files import file_hash, read_object, write_json
from pipeline.gating.folder import GATE_FOLDER, open_record
from pipeline.run_folder.status import TRAINING

SUMMARY = "summary.json"
_logger = log.get_logger(__name__)


def summarise(
    config: RunConfig,
    *,
    max_bytes: int = DEFAULT_BYTES,
    prefix: Prefix = "document",
    chats: Sequence[str] = (),
    max_answer_tokens: int = DEFAULT_ANSWER_TOKENS,
) -> str:
    """Scores the base and the exported model on the run's held-out texts; writes `summary.json` into its folder.

    `max_bytes` and `prefix` are those of `score_folder`, `chats` are files of chats, whose results the model card gets
    too. With `chats` the perplexities of an earlier summary of the same base, export and texts stay as they are, and
    without `chats` its answers. Returns a table of the results, and where they are.

    Raises:
        CheckpointError: the training of the run is not finished.
        ConversionError: it is not converted.
    """
    hf_folder, context = config.folder / HF_FOLDER, config.data.sequence_length
    _logger.info("%s: evaluating the base and the export", config.folder)
    training = _result(
        config.folder / TRAINING, CheckpointError, "the run must be trained to its end first"
    )
    verification = _result(hf_folder / VERIFICATION, ConversionError, "run scale-cpt convert first")
    gate = open_record(config.folder / GATE_FOLDER) if config.gate is not None else None
    asked, folders = read_chats(chats), {"before": config.base, "after": hf_folder}
    scored_for = _scored_for(config, max_bytes=max_bytes, prefix=prefix)
    earlier = _earlier(config.folder / SUMMARY, scored_for)
    if asked and earlier is not None:
        _logger.info(
            "%s: its perplexities stay; without --chats they are scored again",
            config.folder / SUMMARY,
        )
        scores = {
            when: {name: Score(**one) for name, one in of.items()}
            for when, of in earlier["scores"].items()
        }
    else:
        scores = {
            when: score_folder(
                folder, heldout_corpora(config), context=context, max_bytes=max_bytes, prefix=prefix
            )
            for when, folder in folders.items()
        }
    answered: dict[str, Any] = {} if earlier is None else earlier["chats"]
    if asked:
        answered = {
            when: score_chats(
                folder, asked, max_answer_tokens=max_answer_tokens, chat_date=config.data.chat_date
            )
            for when, folder in folders.items()
        }
    fraction = training["trainable_parameters"] / training["total_parameters"]
    values = training | {
        "trained_fraction": fraction,
        "export_max_abs_logit_difference": verification["max_abs"],
        "hf_folder": str(hf_folder),
        "scores": scores,
        "scored_for": scored_for,
        "chats": answered,
    }
    if gate is not None:
        values["gate_open"] = {name: text.open_fraction for name, text in gate.heldout.items()}
        values["closed_max_abs_logit_difference"] = gate.closed_max_abs_logit_difference
    write_json(config.folder / SUMMARY, values)

    method = config.method
    name = title_of(method.variant if isinstance(method, ScaleMethod) else method.name)
    notes = [
        f"{name} trained {fraction:.1%} of the parameters. Whole documents, in windows that overlap; the log of"
    ]
    notes.append("training scores packed sequences, which cut them.")
    if config.vocabulary is not None:
        notes.append("Two tokenizers: only bits per byte can be compared.")
    tables = [score_table({"base": scores["before"], name: scores["after"]})]
    if asked:
        head, lines = chat_rows({"base": answered["before"], name: answered["after"]})
        tables.append(table(head, lines))
        add_to_card(hf_folder, "Chats", markdown_table(["greedy answers", *head[1:]], lines))
    paths = {"Hugging Face folder": hf_folder, "this summary": config.folder / SUMMARY}
    return "\n".join(
        [
            "\n\n".join(tables),
            "",
            *notes,
            "",
            *(f"{label:<20} {path}" for label, path in paths.items()),
        ]
    )


def _scored_for(config: RunConfig, *, max_bytes: int, prefix: Prefix) -> dict[str, Any]:
    """What the scores of a run depend on: the base, the export, the held-out texts, and how they are scored."""
    texts = {name: input_files(corpus.input) for name, corpus in check_heldout(config).items()}
    return {
        "base": str(config.base),
        "base_config": file_hash(config.base / "config.json"),
        "export": file_hash(config.folder / HF_FOLDER / VERIFICATION),
        "export_record": file_hash(config.folder / HF_FOLDER / EXPORT.record),
        "context": config.data.sequence_length,
        "max_bytes": max_bytes,
        "prefix": prefix,
        "texts": {
            name: [[str(file), size, file.stat().st_mtime_ns] for file, size in files.items()]
            for name, files in texts.items()
        },
    }


def _earlier(path: Path, scored_for: dict[str, Any]) -> dict[str, Any] | None:
    """The summary at `path`, if it is of the same base, export and texts; None where there is none."""
    try:
        found = read_object(path, ConversionError)
    except (FileNotFoundError, ConversionError):  # a damaged one is made again
        return None
    same = found.get("scored_for") == scored_for and isinstance(found.get("scores"), dict)
    return found if same and isinstance(found.get("chats"), dict) else None


def _result(path: Path, error: type[UserError], advice: str) -> dict[str, Any]:
    try:
        return read_object(path, error)
    except FileNotFoundError:
        raise error(f"{path}: no such file; {advice}") from None

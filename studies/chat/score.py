"""Scores the models of a finished chat study: held-out chats, and perplexity of both languages.

    python -m studies.chat.score runs/chat/full --texts runs/chat/texts --plain runs/chat/plain

Every chosen run is converted, if it is not yet, and a gated one also without its gate, unless open
tokens have weights of their own. --plain names the study that trains the base as it was before its
chats, for the chat vector: its fully fine-tuned weights, plus what the chats changed in the base's.
Prints a table and writes it, as STUDY/chats.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline import command_line, log
from pipeline.config.method import ScaleMethod
from pipeline.config.run import load_config
from pipeline.conversion.convert import convert, latest_conversion, run_sources
from pipeline.conversion.export_format import VERIFICATION
from pipeline.conversion.model_card import markdown_table
from pipeline.conversion.probe_texts import probe_maker
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import RunFolderError
from pipeline.evaluation.perplexity import score_folder
from pipeline.evaluation.table import over_seeds
from pipeline.extensions.chats.score import Chat, read_chats, score_chats
from pipeline.files.folders import published_folder
from pipeline.files.json_files import json_hash, read_object, write_json
from pipeline.files.publishing import write_text
from pipeline.hf.base_files import copy_base_files
from pipeline.hf.load import load_hf_model
from pipeline.run_folder.metrics import readable
from studies.report.results import read_rows

HELDOUT = {
    "Korean": "examples/data/ko/*.heldout.jsonl.zst",
    "English": "examples/data/en/gutenberg.heldout.jsonl.zst",
}
KINDS = ("english", "korean")
ANSWER_TOKENS = 48
_PERCENT = "{:.1%}".format
_TOKENS = "{:.1f}".format
FIGURES: dict[str, Callable[[float], str]] = {
    "Korean: perplexity": readable,
    "English: perplexity": readable,
    "chats: exact": _PERCENT,
    "chats: end": _PERCENT,
    "chats: tokens": _TOKENS,
    "Korean chats: exact": _PERCENT,
    "Korean chats: end": _PERCENT,
    "Korean chats: tokens": _TOKENS,
    "chats: to the bit": _PERCENT,
}
"""The columns of the table, each with the form of its figures; see `share_as_closed` for the last.
"""
TABLE = "chats.md"
SCORES = "chat_scores.json"
_WEIGHTS = "model.safetensors"
logger = log.get_logger(__name__)


def exported(run: Path, *, gated: bool) -> Path:
    """The export of a run, made unless it is there; of a gated run with or without its gate."""
    config = load_config(run / "run.yaml")
    conversion = latest_conversion(config)
    if not gated and conversion.gate is not None:
        # Beside the gated export, which stays.
        conversion = replace(conversion, gate=None, output=run / "hf_without_gate", overwrite=True)
    if not (conversion.output / VERIFICATION).exists():
        convert(conversion, probe_maker(*run_sources(config)))
    return conversion.output


def models(study: Path, plain: Path | None) -> Iterator[tuple[str, float | None, Path]]:
    """Label, learning rate and folder of every model to score, the base first."""
    rows = [row for row in read_rows(study) if row.chosen and row.folder is not None]
    if not rows:
        raise RunFolderError(
            f"{study}: none of its runs has a folder; run the study on this machine"
        )
    base = load_config(study / str(rows[0].folder) / "run.yaml").base
    yield "Base", None, base
    for row in rows:
        run = study / str(row.folder)
        config = load_config(run / "run.yaml")
        has_open_weights = isinstance(config.method, ScaleMethod) and config.method.has_open_weights
        if not has_open_weights:
            yield row.label, row.learning_rate, exported(run, gated=False)
        if config.gate is not None:
            yield f"{row.label} + gate", row.learning_rate, exported(run, gated=True)
    if plain is None:
        return
    for row in read_rows(plain):
        run = plain / str(row.folder)
        before_chats = load_config(run / "run.yaml").base
        with_chats = with_chat_vector(exported(run, gated=False), base, before_chats)
        yield "Chat vector", row.learning_rate, with_chats


def with_chat_vector(trained: Path, chat: Path, plain: Path) -> Path:
    """The model in `trained`, whose base was `plain`, plus `chat` minus `plain`."""
    output = trained.parent / "hf_chat_vector"
    if output.exists():
        return output
    weights = load_file(trained / _WEIGHTS)
    of_chat = load_file(chat / _WEIGHTS)
    of_plain = load_file(plain / _WEIGHTS)
    # The chat vector is what chats changed in the base (Huang et al. 2024).
    summed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        summed[name] = weight + of_chat[name] - of_plain[name]
    with published_folder(output, None) as folder:
        copy_base_files(folder, chat, chat)
        (folder / "config.json").write_bytes((chat / "config.json").read_bytes())
        save_file(summed, folder / _WEIGHTS, {"format": "pt"})
    return output


@torch.inference_mode()
def share_as_closed(folder: Path, chats: Sequence[Chat]) -> float | None:
    """The share of chats, answers included, whose logits are those of a gate that never opens.

    They are compared to the last bit. A gate that never opens gives the base's logits, which
    `scale-cpt gate` has checked. None: the export in `folder` has no gate.
    """
    open_export = load_hf_model(folder, device="cpu")
    if getattr(open_export.config, "gate_layer", None) is None:
        return None
    closed_export = load_hf_model(folder, device="cpu")
    closed_export.token_gate.threshold = math.inf
    # New tokens would open whatever their score.
    closed_export.token_gate.is_open_id = None
    template = chat_template(folder)
    encoder = load_tokenizer(folder).reference
    # Chats of a length are a batch: without padding both exports compute the same products.
    by_length: dict[int, list[list[int]]] = {}
    for chat in chats:
        ids = encoder.encode([template.opened(chat.messages) + chat.reference]).ids.tolist()
        by_length.setdefault(len(ids), []).append(ids)
    alike = 0
    for rows in by_length.values():
        tokens = torch.tensor(rows)
        is_equal = open_export(tokens).logits == closed_export(tokens).logits
        alike += int(is_equal.flatten(1).all(1).sum())
    return alike / len(chats)


def scored(folder: Path, chats: dict[str, list[Chat]], max_bytes: int) -> list[float | None]:
    """The figures of the model in `folder`, in the order of FIGURES.

    The folder's file SCORES keeps them until the folder is written anew, or the chats, `max_bytes`
    or the figures change.
    """
    asked: dict[str, list[Any]] = {}
    for name, of_kind in chats.items():
        asked[name] = [(chat.messages, chat.reference) for chat in of_kind]
    made_of = {"chats": json_hash(asked), "max_bytes": max_bytes, "figures": list(FIGURES)}
    path = folder / SCORES
    if path.exists():
        kept = read_object(path, RunFolderError)
        if kept.get("made_of") == made_of:
            return list(kept["values"])

    logger.info("scoring %s", folder)
    answers = score_chats(folder, chats, max_answer_tokens=ANSWER_TOKENS)
    texts = {name: good_documents([pattern], Keys()) for name, pattern in HELDOUT.items()}
    perplexities = score_folder(folder, texts, context=128, max_bytes=max_bytes)
    # In the order of FIGURES: perplexities, then the figures of each kind of chats.
    values: list[float | None] = [score.perplexity for score in perplexities.values()]
    for answer in answers.values():
        values += [answer.exact_match, answer.ended, answer.answer_tokens]
    values.append(share_as_closed(folder, chats[KINDS[0]]))
    write_json(path, {"made_of": made_of, "values": values})
    return values


def scores_table(found: dict[tuple[str, float | None], list[list[float | None]]]) -> str:
    """A line for each label and learning rate, with the mean and deviation over seeds."""
    lines: list[list[str]] = []
    for (label, rate), seeds in found.items():
        line = [label, "" if rate is None else f"{rate:g}"]
        for column, form in enumerate(FIGURES.values()):
            present: list[float] = []
            for values in seeds:
                value = values[column]
                if value is not None:
                    present.append(value)
            line.append(over_seeds(present, form) if present else "")
        lines.append(line)
    return markdown_table(["", "rate", *FIGURES], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("study", type=Path, help="the study's folder, the `folder` of its YAML file")
    add("--texts", type=Path, required=True, help="the folder that make_chats wrote")
    add("--plain", type=Path, help="the folder of the study on the base without chats")
    add(
        "--max-bytes",
        type=int,
        default=2**17,
        help="how many bytes of the text of each language are scored (default 131072)",
    )
    options = parser.parse_args()
    chats = read_chats([str(options.texts / f"{kind}.jsonl") for kind in KINDS])
    found: dict[tuple[str, float | None], list[list[float | None]]] = {}
    for label, rate, folder in models(options.study, options.plain):
        found.setdefault((label, rate), []).append(scored(folder, chats, options.max_bytes))
    table = scores_table(found)
    write_text(options.study / TABLE, f"{table}\n")
    print(table)


if __name__ == "__main__":
    command_line.run(main)

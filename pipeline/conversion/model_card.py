"""The model card of an export: what it is made of, under which terms, how it was trained, and what was measured.

The front matter is what the Hugging Face Hub reads. What it says of the base comes from the base's own card, which a
stranger may have written: only plain values of known fields are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from pipeline import log
from pipeline.config.method import title_of
from pipeline.conversion import ServedPrecision
from pipeline.conversion.base_files import terms_in
from pipeline.conversion.hf_folder import Export, dtype_name
from pipeline.conversion.precisions import Loss
from pipeline.conversion.trained_model import TrainedModel
from pipeline.conversion.verify import Report
from pipeline.errors import BaseModelError, faults_of_library
from pipeline.files import read_text
from pipeline.run_folder.metrics import METRICS, read_metrics, validations_in

CARD = "README.md"
_ONE_LINE = re.compile(r"[^\n\r]{1,200}")
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*")
_LOADED_BY = {
    "stock": ("transformers", "AutoModelForCausalLM.from_pretrained(folder)"),
    "scale": ("transformers", "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)"),
    "peft": ("peft", "AutoPeftModelForCausalLM.from_pretrained(folder)"),
}
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Measured:
    """What the conversion found: its verification, what precisions cost, and the command line that can be repeated."""

    report: Report
    costs: Mapping[ServedPrecision, Loss]
    command: str


def model_card(model: TrainedModel, export: Export, measured: Measured, base_name: str | None) -> str:
    """The text of the card; `base_name` is the base's on the hub, if that is known."""
    base, sources = _card_of(model.base.path), [source for source, _ in _trained_on(model) if source]
    languages = base.get("language")
    languages = [one for one in (languages if isinstance(languages, list) else [languages]) if isinstance(one, str)]
    languages = [one for one in languages if _LANGUAGE.fullmatch(one)]
    data = ModelCardData(
        base_model=base_name,
        base_model_relation=base_name and ("adapter" if export.format == "peft" else "finetune"),
        language=_each_once([*languages, *(source.get("language") for source in sources)]) or None,
        datasets=_each_once(source.get("dataset") for source in sources) or None,
        library_name=_LOADED_BY[export.format][0],
        pipeline_tag="text-generation",
        tags=["continual-pretraining", "scale-cpt", _kind(model)],
        **_terms(model.base.path, base),
    )
    body = "\n\n".join(_body(model, export, measured, base_name or model.base.path.resolve().name))
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def _terms(base: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the front matter on the base's licence."""
    files = terms_in(base)
    stated = {name: card.get(name) for name in ("license", "license_name", "license_link")}
    found = {name: text for name, text in stated.items() if isinstance(text, str) and _ONE_LINE.fullmatch(text)}
    link = found.get("license_link", "")
    if link not in files and not link.startswith("https://"):
        found.pop("license_link", None)
    licence = next((name for name in files if name.lower().startswith("licen")), None)
    if "license" not in found and licence is not None:
        return {"license": "other", "license_name": "the base's", "license_link": licence}
    return found


def _card_of(base: Path) -> dict[str, Any]:
    """The front matter of the base's card; empty if there is none, or none that can be read."""
    path = base / CARD
    try:
        with faults_of_library(f"{path}: its front matter cannot be read", BaseModelError):
            return dict(ModelCard(read_text(path, BaseModelError)).data.to_dict())
    except BaseModelError as error:
        if path.exists():
            _logger.warning("%s; the model card does not name the base's licence", error)
        return {}


def _trained_on(model: TrainedModel) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """The source of each corpus that trained, as far as the run's configuration says, with its row of the table."""
    data = model.manifest.run.data
    for name, corpus in data["corpora"].items():
        source = {key: value for key, value in dict(corpus.get("source") or {}).items() if isinstance(value, str)}
        role = corpus["role"]
        if role == "new":
            what = "new text"
        elif share := data.get(f"{role}_fraction", 0):
            what = f"{role}, {100 * share:.3g} % of the samples"
        else:
            continue
        stated = [source.get(key, "not stated") for key in ("dataset", "license")]
        if role == "rehearsal":
            stated = ["text that the base wrote", "as the base"]
        yield source, (name, what, *stated)


def _body(model: TrainedModel, export: Export, measured: Measured, base: str) -> Iterator[str]:
    """The paragraphs and tables."""
    run, position = model.manifest.run, model.manifest.position
    library, load = _LOADED_BY[export.format]
    yield f"# {run.name}"
    yield (
        f"`{base}`, trained further with the method {title_of(_kind(model))} by scale-cpt, on {position.tokens_seen:,} "
        f"tokens in {position.step:,} steps. The terms of use are those of the base, and of the texts below."
    )
    yield (
        f"```python\nfrom transformers import AutoTokenizer\nfrom {library} import {load.partition('.')[0]}\n\n"
        f'folder = "{run.name}"  # this repository, or a folder with its files\nmodel = {load}\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```"
    )
    yield "## Method"
    yield from _method(model, export)
    yield "## Text"
    yield _table(("corpus", "role", "dataset", "licence"), (row for _, row in _trained_on(model)))
    yield "## Figures"
    yield from _training(model)
    yield from _conversion(measured, library)
    yield "Nothing else was measured: no benchmark, and nothing on safety."


def _method(model: TrainedModel, export: Export) -> Iterator[str]:
    run, (trained, total) = model.manifest.run, model.counts
    settings = {name: value for name, value in run.method.items() if value is not None and name != "expansion"}
    rows = {
        **settings,
        "base in training": "as published" if run.base_precision == "bf16" else run.base_precision,
        "gate": "none" if model.gate is None else f"before layer {model.gate.layer}, on {model.gate.features}",
        "trained parameters": f"{trained:,} of {total:,}",
        "format": f"{export.format}, {dtype_name(export.dtype)}",
    }
    yield _table(("setting", "value"), ((name, _plain(value)) for name, value in rows.items()))
    if model.plan is not None:
        widths, added = asdict(model.spec.widths), asdict(model.plan.expansion)
        # A stock export may have more than the sum: zeros.
        whole = export.config if export.format == "stock" else {name: widths[name] + added[name] for name in widths}
        yield _table(("width", "base", "added", "here"), ((it, widths[it], added[it], whole[it]) for it in widths))


def _training(model: TrainedModel) -> Iterator[str]:
    validations = validations_in(read_metrics(model.checkpoint.parent.parent / METRICS))
    validations = [one for one in validations if one.step <= model.manifest.position.step]
    if len(validations) > 1:
        before, after = validations[0], validations[-1]
        yield f"Held-out text before training and after step {after.step:,}, from the run's own `{METRICS}`:"
        yield _table(
            ("corpus", "figure", "before", "after"),
            (
                (corpus, name.replace("_", " "), _figure(before.figures[corpus][name]), _figure(figures[name]))
                for corpus, figures in after.figures.items()
                for name in ("perplexity", "bits_per_byte")
                if name in figures and name in before.figures.get(corpus, {})
            ),
        )


def _conversion(measured: Measured, library: str) -> Iterator[str]:
    yield (
        f"The first held-out documents, by the model that trained and by this one as {library} loads it. Made by "
        f"`{measured.command}`:"
    )
    texts = measured.report.texts
    rows: list[list[object]] = [
        [name, it.tokens, _figure(it.training_perplexity), _figure(it.exported_perplexity), f"{it.top1_agreement:.2%}"]
        for name, it in texts.items()
    ]
    yield _table(("text", "tokens", "perplexity in training", "here", "same likeliest token"), rows)
    yield "The same with weights rounded as a server stores them; last, by what perplexity grows here and in the base:"
    rows = [
        [
            name,
            *(_figure(loss.perplexities[it]) for it in texts),
            _figure(loss.export_factor),
            _figure(loss.base_factor),
        ]
        for name, loss in measured.costs.items()
    ]
    yield _table(("type", *texts, "factor", "the base's"), rows)


def _kind(model: TrainedModel) -> str:
    return str(model.manifest.run.method.get("variant") or model.settings.name)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _each_once(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))

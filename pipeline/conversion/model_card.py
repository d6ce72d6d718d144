"""The model card of an export.

It names the base, the terms of use, the training, and the figures that were measured. The hub reads
its front matter, which takes entries from the base's own card. A stranger may have written that
card: only plain values of known fields are taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pipeline.checkpoint.manifest import CheckpointManifest, stages_begun
from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import title_of
from pipeline.conversion.verify import Report
from pipeline.errors import ConversionError
from pipeline.files.publishing import write_text
from pipeline.files.reading import read_text
from pipeline.hf.base_card import CARD, card_of, hub_name
from pipeline.hf.base_files import terms_in
from pipeline.hf.write import Export, dtype_name
from pipeline.model.spec import scale_in
from pipeline.scale.plan import added_widths

LORA_TARGETS = ("expansion_to_base", "base_to_expansion", "expansion_to_expansion")
"""The modules of a gated export that adapters may change: its closed text does not depend on them.
"""
# Values of a stranger's card: a line break in one could add entries to the front matter.
_ONE_LINE = re.compile(r"[^\n\r]{1,200}")
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*")


@dataclass(frozen=True)
class CardSections:
    """What a card says of one format alone.

    Attributes:
        relation: how the folder is related to its base, in the hub's words.
        library: the library that loads it.
        loading: the lines of Python that load it, of the line that sets `folder` and the base's
            name; None: as transformers loads a model.
        settings: rows of the table on the method.
        on_training: the paragraph on training it further; None: what the model itself says.
    """

    relation: str = "finetune"
    library: str = "transformers"
    loading: Callable[[str, str], list[str]] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    on_training: str | None = None


def model_card(model: TrainedModel, export: Export, report: Report, sections: CardSections) -> str:
    """The card of an export that was verified with `report`, as the contents of its README.md.

    `sections` is what its format adds.
    """
    run = model.manifest.run
    position = model.manifest.position
    base_name = base_hub_name(model)
    corpora, _ = _corpora(model.manifest)
    figures: list[tuple[object, ...]] = []
    for name, text in report.texts.items():
        figures.append((name, text.tokens, text.training_perplexity, text.exported_perplexity))
    paragraphs = [
        f"---\n{_front_matter(model, sections).to_yaml()}\n---",
        f"# {run.name}",
        f"`{base_name or model.base.path.resolve().name}`, trained further with the method "
        f"{title_of(_kind(model))} by scale-cpt, on {position.tokens_seen:,} tokens in "
        f"{position.step:,} steps. The terms of use are those of the base, and of the texts below.",
        _loading(run.name, export, base_name or "the base's folder", sections),
        "## Method",
        markdown_table(("setting", "value"), _settings(model, export, sections).items()),
        "## Text",
        markdown_table(("corpus", "role", "dataset", "licence"), corpora),
        "## Figures",
        "The first held-out documents, by the model that trained and by this one as transformers "
        "loads it:",
        markdown_table(("text", "tokens", "perplexity in training", "here"), figures),
        "`verification.json` has more. Nothing else was measured: no benchmark, and nothing on "
        "safety.",
        *_on_further_training(model, export, sections),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _kind(model: TrainedModel) -> str:
    """The variant of SCALE, or the name of another method."""
    return str(model.manifest.run.method.get("variant") or model.settings.name)


def base_hub_name(model: TrainedModel) -> str | None:
    """The base's name on the hub, without a revision; None where it is not known."""
    recorded = model.manifest.run.base.hub
    if recorded is not None:
        return recorded.partition("@")[0]
    return hub_name(model.base.path)


def _loading(name: str, export: Export, base: str, sections: CardSections) -> str:
    """How the folder is loaded: a block of Python."""
    folder = f'folder = "{name}"  # this repository, or a folder with its files'
    if sections.loading is not None:
        lines = sections.loading(folder, base)
    else:
        options = ", trust_remote_code=True" if export.code else ""
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            folder,
            f"model = AutoModelForCausalLM.from_pretrained(folder{options})",
            # Without the option it asks whether to trust the code of the model's configuration.
            f"tokenizer = AutoTokenizer.from_pretrained(folder{options})",
        ]
    code = "\n".join(lines)
    return f"```python\n{code}\n```"


def _front_matter(model: TrainedModel, sections: CardSections) -> ModelCardData:
    """What the hub reads of the card."""
    base_name = base_hub_name(model)
    card = card_of(model.base.path)
    _, sources = _corpora(model.manifest)
    languages: list[str | None] = []
    stated = card.get("language")
    if not isinstance(stated, list):
        # A card may name one language without a list.
        stated = [stated]
    for language in stated:
        if isinstance(language, str) and _LANGUAGE.fullmatch(language):
            languages.append(language)
    languages += [source.get("language") for source in sources]
    return ModelCardData(
        base_model=base_name,
        # None without a name: there is no base on the hub to be related to.
        base_model_relation=base_name and sections.relation,
        language=_each_once(languages),
        datasets=_each_once(source.get("dataset") for source in sources),
        library_name=sections.library,
        pipeline_tag="text-generation",
        tags=["continual-pretraining", "scale-cpt", _kind(model)],
        **licence_of(model.base.path, card),
    )


def _settings(model: TrainedModel, export: Export, sections: CardSections) -> dict[str, Any]:
    """The rows of the table on the method."""
    run = model.manifest.run
    settings: dict[str, Any] = {}
    for name, value in run.method.items():
        if value is not None and name != "expansion":
            settings[name] = value
    settings["base in training"] = run.base_precision
    if run.base_precision == "bf16":
        settings["base in training"] = "as published"
    settings["gate"] = "none"
    if model.gate is not None:
        settings["gate"] = f"before layer {model.gate.layer}, on {model.gate.features}"
    trained, total = model.counts
    settings["trained parameters"] = f"{trained:,} of {total:,}"
    settings["format"] = f"{export.format}, {dtype_name(export.dtype)}"
    settings |= sections.settings
    if export.config.get("own_rows"):
        settings["rows of embedding and output"] = f"{export.config['own_rows']:,}"
    widths = added_widths(model.plan)
    if widths is not None:
        base = asdict(model.spec.widths)
        added = asdict(widths)
        for name in base:
            settings[name] = f"{base[name]} + {added[name]}"
    return settings


def _on_further_training(model: TrainedModel, export: Export, sections: CardSections) -> list[str]:
    """The section for users who train the folder with other tools; empty if nothing is special."""
    heading = "## Training it further"
    sentences = on_stored_scale(export)
    if sentences:
        text = ""
        for sentence in sentences:
            text += f" {sentence[0].upper()}{sentence[1:]}."
        return [heading, text.lstrip()]
    if sections.on_training is not None:
        return [heading, sections.on_training]
    if model.gate is None:
        return []
    if added_widths(model.plan) is None:
        return [
            heading,
            "Text for which the gate stays closed remains the base's to the last bit as long as "
            "only the parameters named `adapter`, `own`, `own_rows` and `own_input` change.",
        ]
    targets = ", ".join(f'"{name}"' for name in LORA_TARGETS)
    return [
        heading,
        "Text for which the gate stays closed remains the base's to the last bit as long as only "
        "the expansion's blocks change. With LoRA these are:",
        f"```python\nLoraConfig(target_modules=[{targets}])\n```",
        'Adapters on all linear maps (`"all-linear"`) change the base\'s own, and so every text.',
    ]


def on_stored_scale(export: Export) -> list[str]:
    """Sentences on whether other tools can train an export that stores added channels at a small
    scale; none for other exports.
    """
    scale = export.stored_scale
    if scale is None:
        return []
    stored = f"the channels that were added are stored times 2^{math.log2(scale):.0f}"
    if scale < scale_in(export.dtype, for_training=True):
        return [
            f"{stored}, for serving: training by any other tool than scale-cpt destroys the model "
            "in its first step, as AdamW moves a weight by about the learning rate, however small "
            "the weight is",
            "for such training, convert the checkpoint with --for training, or in 16 bits",
        ]
    return [f"{stored}: other tools can train this folder, with a learning rate of at most 1e-4"]


def add_to_card(folder: Path, heading: str, text: str) -> None:
    """Adds a section to the end of the card in `folder`.

    An earlier section of that heading is removed, with all that follows it.
    """
    card = read_text(folder / CARD, ConversionError).partition(f"\n## {heading}\n")[0].rstrip()
    write_text(folder / CARD, f"{card}\n\n## {heading}\n\n{text}\n")


def licence_of(base: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the front matter on the base's licence.

    They are the base card's. Without a licence there, a licence file of the base is named.
    """
    files = terms_in(base)
    found: dict[str, str] = {}
    for name in ("license", "license_name", "license_link"):
        text = card.get(name)
        if isinstance(text, str) and _ONE_LINE.fullmatch(text):
            found[name] = text
    # A relative link is kept only to a file that is copied into the export.
    link = found.get("license_link", "")
    if link not in files and not link.startswith("https://"):
        found.pop("license_link", None)
    if "license" in found:
        return found
    for name in files:
        if name.lower().startswith("licen"):
            return {"license": "other", "license_name": "the base's", "license_link": name}
    return found


def _corpora(
    manifest: CheckpointManifest,
) -> tuple[list[tuple[str, ...]], list[dict[str, str]]]:
    """A row for each corpus that was trained on, and its `source` in the run's configuration."""
    rows: list[tuple[str, ...]] = []
    sources: list[dict[str, str]] = []
    for name, corpus in manifest.run.data["corpora"].items():
        role = corpus["role"]
        use = _use_of(name, role, manifest)
        if use is None:
            continue
        source: dict[str, str] = {}
        for key, value in (corpus.get("source") or {}).items():
            if value:
                source[key] = value
        sources.append(source)
        if role == "self_generated":
            rows.append((name, use, "text that the base wrote", "as the base"))
        else:
            dataset = source.get("dataset", "not stated")
            rows.append((name, use, dataset, source.get("license", "not stated")))
    return rows, sources


def _use_of(name: str, role: str, manifest: CheckpointManifest) -> str | None:
    """The role of a corpus, and the share of the samples that its role had, by stage if the stages
    differ; None if it was not trained on."""
    shares = _shares(name, role, manifest)
    if not any(shares.values()):
        return None
    what = "new text" if role == "new" else role
    is_alike = len(set(shares.values())) == 1
    parts: list[str] = []
    for stage, share in shares.items():
        if share == 0:
            continue
        part = ""
        if role != "new":
            part = f"{100 * share:.3g} % of the samples"
        if not is_alike:
            part = f"{part} in stage {stage}".lstrip()
        if part and part not in parts:
            parts.append(part)
    return ", ".join([what, *parts])


def _shares(name: str, role: str, manifest: CheckpointManifest) -> dict[str, float]:
    """The share of the samples that the role of a corpus had in each stage that has begun.

    It is 0 where the corpus was not read, and 1 for new text. A run without stages counts as one
    stage without a name.
    """
    run = manifest.run
    if not run.stages:
        if role == "new":
            return {"": 1.0}
        return {"": run.data.get(f"{role}_fraction", 0.0)}
    shares: dict[str, float] = {}
    for stage in stages_begun(run.stages, manifest.position.step):
        if stage.weights.get(name, 0.0) == 0:
            shares[stage.name] = 0.0
        elif role == "new":
            shares[stage.name] = 1.0
        else:
            shares[stage.name] = stage.fractions.get(role, 0.0)
    return shares


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown; floats with four digits."""
    lines = [_markdown_row(head), _markdown_row(["---"] * len(head))]
    for row in rows:
        lines.append(_markdown_row(row))
    return "\n".join(lines)


def _markdown_row(cells: Iterable[object]) -> str:
    texts: list[str] = []
    for cell in cells:
        texts.append(f"{cell:.4g}" if isinstance(cell, float) else str(cell))
    return f"| {' | '.join(texts)} |"


def _each_once(values: Iterable[str | None]) -> list[str] | None:
    return list(dict.fromkeys(value for value in values if value)) or None

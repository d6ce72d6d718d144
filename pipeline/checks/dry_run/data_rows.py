"""The corpora and the tokenizer of a run, for the dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.checks.dry_run.run_plan import Row, times_in_run
from pipeline.checks.inputs import RunInputs
from pipeline.data.corpus.manifest import MANIFEST as CORPUS_MANIFEST
from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.tokenize.corpora import is_tokenized, train_folder
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import UserError
from pipeline.hf.served_tokenizer import warn_of_base


def corpus_rows(inputs: RunInputs) -> Iterator[Row]:
    """Each corpus's size and epochs, and how many held-out sequences a validation has."""
    config = inputs.config
    data = config.data
    samples = inputs.get_or_none("samples") if is_tokenized(data) else None
    epochs: Mapping[str, float] = {}
    if samples is not None:
        schedule = inputs.stages[-1].config.schedule
        last = samples.training[-1]
        stop = last.first + schedule.steps * schedule.global_batch_size
        epochs = last.samples.epochs_after(stop)
    for name, corpus in data.corpora.items():
        folder = train_folder(data, name)
        text = "not made yet"
        if (folder / CORPUS_MANIFEST).exists():
            text = f"{load_manifest(folder).tokens:,} tokens"
        if samples is not None:
            text += f", {epochs[name]:.3g} epochs" if epochs.get(name) else ", not read"
        yield f"corpus {name}", f"{corpus.role}, {text}"

    text = f"{1 + times_in_run(config, config.validation.every_steps):,} times"
    heldout = {} if samples is None else samples.heldout
    if heldout:
        most = config.validation.max_sequences
        counts: list[str] = []
        for name, part in heldout.items():
            counts.append(f"{min(len(part), most)} of {name}")
        text += f", sequences: {', '.join(counts)}"
    yield "validation", text


def tokenizer_rows(inputs: RunInputs) -> Iterator[Row]:
    """Whether transformers' AutoTokenizer of the base has the ids of its tokenizer.json."""
    base = inputs.config.base
    if not base.is_dir() or inputs.get_or_none("tokenizer") is None:
        return
    try:
        warning = warn_of_base(base, load_tokenizer(base), inputs.compared_texts)
    except UserError as fault:
        warning = str(fault)
    equal = "the base's AutoTokenizer has the same ids on all texts that were compared"
    yield "tokenizer", warning or equal

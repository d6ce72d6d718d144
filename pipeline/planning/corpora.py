"""What a run will read: of which corpora there are tokens already, and how often each will be gone through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config.run import RunConfig
from pipeline.data import manifest as manifests
from pipeline.data.corpora import corpus_jobs, is_tokenized, train_folder
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.units import input_files
from pipeline.planning.faults import Faults
from pipeline.training.inputs import Samples, open_samples


@dataclass(frozen=True)
class CorpusPlan:
    """One corpus of a run. `tokens` and `epochs` are None until it is tokenized; `epochs` also if it is not drawn from.

    `validation_sequences` are those of its held-out part that each validation reads.
    """

    name: str
    role: str
    tokens: int | None
    epochs: float | None
    validation_sequences: int | None


def plan_corpora(config: RunConfig, tokenizer: Tokenizer | None, faults: Faults) -> tuple[CorpusPlan, ...]:
    """The corpora of the run, and in `faults` what is wrong with them, or with what they are made of.

    `tokenizer` is the base's, or None where that is not here: then any will do.
    """
    samples = _open_all(config, tokenizer, faults) if is_tokenized(config.data) else None
    epochs = samples.training.epochs_after(samples_needed(config)) if samples else {}
    if samples is None and not faults.met:
        for job in corpus_jobs(config.data, config.base):
            faults.attempt(lambda job=job: input_files(job.inputs))  # type: ignore[misc]
    return tuple(_plans(config, samples, epochs))


def samples_needed(config: RunConfig) -> int:
    """How many samples the whole run reads."""
    return config.schedule.steps * config.schedule.global_batch_size


def _open_all(config: RunConfig, tokenizer: Tokenizer | None, faults: Faults) -> Samples | None:
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    samples = faults.attempt(lambda: open_samples(config, fingerprint))
    for name in config.data.corpora:
        faults.attempt(lambda name=name: TokenCorpus(train_folder(config.data, name)).check())  # type: ignore[misc]
    return samples


def _plans(config: RunConfig, samples: Samples | None, epochs: dict[str, float]) -> Iterator[CorpusPlan]:
    for name, corpus in config.data.corpora.items():
        heldout = samples.heldout.get(name) if samples else None
        yield CorpusPlan(
            name=name,
            role=corpus.role,
            tokens=manifests.load_manifest(train_folder(config.data, name)).tokens if samples else None,
            epochs=epochs.get(name),
            validation_sequences=min(len(heldout), config.validation.max_sequences) if heldout is not None else None,
        )

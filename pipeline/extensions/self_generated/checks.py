"""The checks of a run's self-generated corpora."""

from __future__ import annotations

from pipeline.checks.inputs import RunInputs
from pipeline.data.tokenize.corpus_folder import finished
from pipeline.errors import UserError
from pipeline.extensions.self_generated.corpus import check_sampling, plan_of, sampling_jobs


def check_sampling_settings(inputs: RunInputs) -> None:
    """The settings of self-generated text fit the base and its tokenizer."""
    # A sequence length beyond the base's context is reported by `check_model`.
    longest = min(inputs.config.data.sequence_length, inputs.spec.longest_document)
    for corpus in inputs.config.data.corpora.values():
        if corpus.sample is not None:
            max_tokens = corpus.sample.max_tokens or longest
            check_sampling(corpus.sample, max_tokens, inputs.tokenizer, inputs.spec)


def check_self_generated(inputs: RunInputs) -> list[UserError]:
    """Corpora of self-generated text that were begun are those of the configuration."""
    if inputs.get_or_none("base") is None or inputs.get_or_none("tokenizer") is None:
        return []  # Checks of their own report it.
    faults: list[UserError] = []
    for job in sampling_jobs(inputs.config):
        try:
            finished(job.output, plan_of(job))
        except UserError as fault:
            faults.append(fault)
    return faults

"""The stages of a run's job, from tokenization to evaluation, and the inputs yet to be made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.config.data import Corpus
from pipeline.config.method import starts_from_expansion
from pipeline.config.run import RunConfig
from pipeline.data.tokenize.corpora import unfinished_corpora
from pipeline.expansion_folder import MANIFEST


def job_stages(config: RunConfig) -> Iterator[str]:
    """The stages of slurm/cpt_korean.sh that this run needs, in order."""
    yield "tokenize"
    if _any_is_sampled(config.data.corpora.values()):
        yield "sample"
    if starts_from_expansion(config.method):
        yield "upscale"
    yield "train"
    if config.gate is not None:
        yield "gate"
    yield "convert"
    yield "evaluate"


def _any_is_sampled(corpora: Iterable[Corpus]) -> bool:
    """Whether the base writes the text of one of these corpora."""
    return any(corpus.sample is not None for corpus in corpora)


def inputs_to_make(config: RunConfig) -> Iterator[str]:
    """The inputs that earlier stages have not made yet."""
    data = config.data
    unfinished = [data.corpora[name] for name in unfinished_corpora(data)]
    if any(corpus.sample is None for corpus in unfinished):
        yield f"{data.folder}: the token corpora (scale-cpt tokenize)"
    if _any_is_sampled(unfinished):
        yield f"{data.folder}: the text that the base writes (scale-cpt sample)"
    expansion = config.initial_expansion_folder
    if starts_from_expansion(config.method) and not (expansion / MANIFEST).exists():
        yield f"{expansion}: the initial expansion (scale-cpt upscale)"

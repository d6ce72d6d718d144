"""A base from nothing: random weights of a given architecture, and a tokenizer, as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer
from transformers.utils import logging

from pipeline import log
from pipeline.config.method import FullFineTuning, Method
from pipeline.config.run import Role, RunConfig, load_config, parse_config
from pipeline.conversion.convert import HF_FOLDER
from pipeline.data.corpora import has_heldout
from pipeline.data.tokenizer import load_tokenizer, tokenizer_file
from pipeline.data.tokenizer_training import texts, train_sentencepiece
from pipeline.errors import ConfigError
from pipeline.experiments.study import SCRATCH, TOKENS, NewTokenizer, RunSettings, Scratch, Study, TokenizerText
from pipeline.files import file_hash, published_folder, write_json, write_text
from pipeline.model.from_hf import read_spec
from pipeline.sizing.checks import check_fits
from pipeline.sizing.matching import Matcher

_TOKENIZER_CONFIG = "tokenizer_config.json"
_MADE_OF = "made_of.json"
_logger = log.get_logger(__name__)


def make_scratch(scratch: Scratch, folder: Path) -> None:
    """Makes the base in `folder`; does nothing where it is.

    Raises:
        ConfigError: what is there was made of something else.
        BaseModelError: the architecture is none that can be trained.
        DataError: the tokenizer cannot be read, or not be trained on these texts.
    """
    spec = read_spec(scratch.architecture)
    made_of = _made_of(scratch)
    if folder.exists():
        _check_same(folder, made_of)
        return
    with published_folder(folder) as unfinished:
        if isinstance(scratch.tokenizer, Path):
            _copy_tokenizer(scratch.tokenizer, unfinished)
        else:
            _train_tokenizer(scratch.tokenizer, unfinished)
        _write_weights(scratch, unfinished)
        write_json(unfinished / _MADE_OF, made_of)
    _logger.info("wrote a random base of %d layers to %s", spec.num_layers, folder)


def _made_of(scratch: Scratch) -> dict[str, Any]:
    """What decides the base, however the places of its texts are written."""
    values = scratch.model_dump(mode="json")
    architecture = scratch.architecture / "config.json" if scratch.architecture.is_dir() else scratch.architecture
    values["architecture"] = json.loads(architecture.read_text(encoding="utf-8"))
    if isinstance(scratch.tokenizer, Path):
        values["tokenizer"] = file_hash(tokenizer_file(scratch.tokenizer))
    else:
        for part in values["tokenizer"]["texts"]:
            part["input"] = [str(Path(place).resolve()) for place in part["input"]]
    return values


def _check_same(folder: Path, made_of: Mapping[str, Any]) -> None:
    path = folder / _MADE_OF
    if not path.exists():  # a base that was made before this file was
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if other := [key for key in made_of if found[key] != made_of[key]]:
        raise ConfigError(
            f"{path}: this base was made of another {' and '.join(other)} than scratch says now; remove the study's "
            f"folder {folder.parent}, or give the study another one"
        )


def _write_weights(scratch: Scratch, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    config = AutoConfig.from_pretrained(scratch.architecture, local_files_only=True, trust_remote_code=False)
    config.vocab_size = max(tokenizer.vocab_size, config.vocab_size)
    config.eos_token_id = tokenizer.document_end[-1]
    config.bos_token_id = [*tokenizer.document_start, config.eos_token_id][0]
    torch.manual_seed(scratch.seed)
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _train_tokenizer(wanted: NewTokenizer, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tokenizer.model"
        train_sentencepiece(
            _sample(wanted.texts),
            model,
            vocab_size=wanted.vocab_size,
            model_type="bpe",
            threads=len(os.sched_getaffinity(0)),
        )
        # The two libraries differ where a text begins with spaces: one file decides for us and for transformers.
        LlamaTokenizer.from_pretrained(scratch).backend_tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def _sample(parts: Iterable[TokenizerText]) -> Iterator[str]:
    return chain.from_iterable(
        texts(part.input, text_key=part.text_key, max_bytes=int(part.mib * 2**20)) for part in parts
    )


def _copy_tokenizer(path: Path, folder: Path) -> None:
    source = tokenizer_file(path)
    tokenizer = load_tokenizer(source)
    shutil.copyfile(source, folder / ("tokenizer.model" if source.suffix == ".model" else "tokenizer.json"))
    if (source.parent / _TOKENIZER_CONFIG).is_file():
        shutil.copyfile(source.parent / _TOKENIZER_CONFIG, folder / _TOKENIZER_CONFIG)
    else:
        end = tokenizer.decode(tokenizer.document_end)
        write_json(folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})


# --- The runs of a study, each an ordinary run configuration in a folder of its own ---------------------------------

CONFIG = "run.yaml"


@dataclass(frozen=True)
class StudyRun:
    """One run: its settings as they are written, and what they describe."""

    settings: RunSettings
    config: RunConfig

    @property
    def path(self) -> Path:
        """Its configuration on the disk."""
        return self.config.folder / CONFIG

    def check_same(self) -> None:
        """Raises ConfigError where the folder holds a run with other settings, which would be taken for this one."""
        if not self.path.exists():
            return
        found, wanted = _compared(load_config(self.path)), _compared(self.config)
        if other := [key for key in wanted if found[key] != wanted[key]]:
            raise ConfigError(
                f"{self.path}: this run was made with other settings than the study has now ({', '.join(other)}); "
                f"remove the folder {self.config.folder}, or give the study another one"
            )

    def write(self) -> None:
        """Puts the configuration into the run's folder.

        Raises:
            ConfigError: the folder holds a run with other settings.
        """
        if (self.config.folder / "checkpoints").exists():
            self.check_same()
        if self.path.exists() and load_config(self.path) == self.config:
            return
        self.config.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path, yaml.safe_dump(self.settings, allow_unicode=True, sort_keys=False))


@dataclass(frozen=True)
class Trial:
    """A compared run: which method, at which learning rate, with which seed."""

    method: str
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.method}.lr_{self.learning_rate:g}.seed_{self.seed}"


class StudyRuns:
    """Makes the runs that `study` describes; `source` is its file, for errors."""

    def __init__(self, study: Study, source: str) -> None:
        self.study = study
        self.source = source
        self.stages = self._stages()
        self._check_trials()

    @property
    def base(self) -> Path:
        """The base of the compared runs."""
        return self.stages[-1].config.folder / HF_FOLDER if self.stages else self._first_base

    @property
    def _first_base(self) -> Path:
        return self.study.base or self.study.folder / SCRATCH

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The section `method` of each compared method; the base's architecture must be known."""
        compared = self.study.methods
        methods = {name: one.method for name, one in compared.items() if one.method is not None}
        # In the order of the study, so that tables have it.
        return {name: methods.get(name) or self._matched(name) for name in compared}

    def check_fits_base(self) -> None:
        """Raises ConfigError where the base, if it is there, cannot be trained by one of the methods, before hours of
        the others; those that are `matched` are made to fit."""
        if not self.base.exists():
            return
        spec = read_spec(self.base)
        for name, compared in self.study.methods.items():
            if compared.method is None:
                continue
            run = self._trial(Trial(name, compared.learning_rates[0], self.study.seeds[0]), compared.method)
            try:
                check_fits(run.config, spec)
            except ConfigError as error:
                raise ConfigError(f"{self.source}: methods.{name}: {error}") from None

    def trial(self, trial: Trial) -> StudyRun:
        """The run of that trial."""
        return self._trial(trial, self.methods[trial.method])

    @cached_property
    def _matcher(self) -> Matcher:
        reference = self.study.match or next(iter(self.study.methods))
        method = self.study.methods[reference].method or FullFineTuning(name="fft")
        run = self._trial(Trial(reference, 1.0, 0), method)
        return Matcher(run.config, read_spec(self.base))

    def _matched(self, name: str) -> Method:
        wanted = self.study.methods[name].matched
        if wanted is None:
            raise AssertionError(f"{name} has a section of its own")
        (match,) = self._matcher.match([wanted])
        _logger.info(
            "%s: %s trained parameters, %+.1f %% off those of %s: %s",
            self.study.methods[name].label,
            f"{match.trained:,}",
            100 * match.off,
            self.study.match,
            match.settings.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        )
        return match.settings

    def _stages(self) -> list[StudyRun]:
        runs: list[StudyRun] = []
        base = self._first_base
        for name, stage in self.study.stages.items():
            settings = _merged({"method": {"name": "fft"}}, stage.settings)
            runs.append(self._run(name, base, settings, f"stages.{name}.settings"))
            base = runs[-1].config.folder / HF_FOLDER
        return runs

    def _check_trials(self) -> None:
        """Raises ConfigError where no run could be made, before anything starts."""
        for name, compared in self.study.methods.items():
            method = compared.method or FullFineTuning(name="fft")  # its size follows later, and has no faults
            run = self._trial(Trial(name, compared.learning_rates[0], self.study.seeds[0]), method)
            if not measured_corpora(run.config, "new"):
                raise ConfigError(
                    f"{self.source}: settings.data.corpora: expected a held-out part of a corpus of role new, by which "
                    "learning rates are chosen, found none; set heldout_input or heldout_fraction"
                )

    def _trial(self, trial: Trial, method: Method) -> StudyRun:
        settings = _merged(
            self.study.settings,
            {
                "method": method.model_dump(mode="json", exclude_none=True),
                "seed": trial.seed,
                "schedule": {"learning_rate": trial.learning_rate},
            },
        )
        return self._run(str(trial), self.base, settings, f"settings, for {trial.method}")

    def _run(self, name: str, base: Path, settings: RunSettings, where: str) -> StudyRun:
        folder = self.study.folder / name
        own = {"name": f"{self.study.name}.{name}", "folder": str(folder), "base": str(base)}
        shared = {"data": {"folder": str(self.study.folder / TOKENS)}}
        values = _merged(own, _merged(shared, settings))
        return StudyRun(values, parse_config(values, source=f"{self.source}: {where}"))


def measured_corpora(config: RunConfig, role: Role) -> list[str]:
    """The corpora of that role of which the run holds a part out."""
    data = config.data
    return [name for name, corpus in data.corpora.items() if corpus.role == role and has_heldout(data, name)]


def _compared(config: RunConfig) -> dict[str, Any]:
    """The sections of a configuration, however the places of its texts are written."""
    values = config.model_dump()
    for corpus in values["data"]["corpora"].values():
        for part in ("input", "heldout_input"):
            corpus[part] = [str(Path(place).resolve()) for place in corpus[part]]
    return values


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> RunSettings:
    """`settings` with `changes`, section by section."""
    merged = dict(settings)
    for key, value in changes.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping) and key != "method"
        merged[key] = _merged(inner, value) if both and inner is not None else value
    return merged

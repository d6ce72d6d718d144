"""Which tokens get rows of their own: exact counts of the corpora of role new."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.run import load_config
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize import token_counts
from pipeline.data.tokenize.corpora import train_folder
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.methods.own_tokens import check_min_count, own_tokens_of
from pipeline.methods.scale import Scale, upscale
from pipeline.model.from_hf import open_base
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.topology import SINGLE
from pipeline.scale.widened_linear import WidenedLinear
from tests.bases import STORIES
from tests.programs import scale_cpt
from tests.training.runs import write_config
from tests.widened import scale_settings

VOCAB_SIZE = 512


def run_with(tmp_path, tokens, open_rows: Any, **changes: Any):
    method = scale_settings("adapt", open_rows=open_rows).model_dump(mode="json")
    return load_config(write_config(tmp_path, tokens, method=method, gate={}, **changes))


def chosen(config, **options):
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    return own_tokens_of(config, VOCAB_SIZE, **{"tokenizer_fingerprint": fingerprint, **options})


@pytest.mark.parametrize("at_once", [7, 2**24])
def test_tokens_are_counted_in_new_text_alone(tokens, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(token_counts, "_READ_TOKENS", at_once)
    config = run_with(tmp_path, tokens, {"min_count": 5})
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    folder = train_folder(config.data, "korean")
    corpus = TokenCorpus(folder, tokenizer_fingerprint=fingerprint)
    counts = Counter(corpus.read(0, corpus.tokens).tolist())
    expected = sorted(token for token, count in counts.items() if count >= 5)
    assert 0 < len(expected) < VOCAB_SIZE
    assert chosen(config) == tuple(expected)


def test_all_tokens_need_no_corpus(tmp_path):
    config = run_with(tmp_path, tmp_path / "none", "all")
    assert chosen(config) == tuple(range(VOCAB_SIZE))


def test_without_own_rows_none_are_chosen(tmp_path):
    assert chosen(load_config(write_config(tmp_path, tmp_path / "none"))) is None


def test_a_count_that_no_token_reaches_is_refused_with_the_largest(tokens, tmp_path):
    config = run_with(tmp_path, tokens, {"min_count": 10**9})
    with pytest.raises(ConfigError, match=r"min_count: expected at most \d+, how often the most"):
        chosen(config)


def little_text(tmp_path, min_count: int):
    """A run on three documents, not tokenized yet."""
    text = tmp_path / "little.jsonl"
    text.write_text(
        "".join(f'{{"text": "Once upon a {word}."}}\n' for word in ("day", "dog", "cat"))
    )
    return run_with(
        tmp_path,
        tmp_path / "tokens",
        {"min_count": min_count},
        data__corpora__korean={"input": [str(text)], "role": "new"},
    )


def test_little_text_is_refused_before_it_is_tokenized(tmp_path):
    """By the dry run and by the first stage, not by the third."""
    config = little_text(tmp_path, 20)
    tokenizer = load_tokenizer(config.tokenizer)
    with pytest.raises(
        ConfigError, match=r"min_count: expected at most (\d+), how often the most"
    ) as error:
        check_min_count(config, VOCAB_SIZE, tokenizer)
    highest = int(re.findall(r"at most (\d+)", str(error.value))[0])
    assert 3 <= highest < 20

    planned = scale_cpt("train", "--dry-run", config.folder / "run.yaml", "--gpus=1")
    assert planned.returncode == 1 and str(error.value) in planned.stdout, planned.stdout
    tokenized = scale_cpt("tokenize", config.folder / "run.yaml")
    assert tokenized.returncode != 0 and str(error.value) in tokenized.stderr
    assert not (tmp_path / "tokens" / "korean").exists()

    check_min_count(little_text(tmp_path, highest), VOCAB_SIZE, tokenizer)
    with pytest.raises(ConfigError):
        check_min_count(little_text(tmp_path, highest + 1), VOCAB_SIZE, tokenizer)


def test_a_corpus_of_another_tokenizer_or_none_is_refused(tokens, tmp_path):
    with pytest.raises(DataError, match="tokenizer"):
        chosen(run_with(tmp_path, tokens, {"min_count": 5}), tokenizer_fingerprint="another")
    with pytest.raises(DataError) as error:
        chosen(run_with(tmp_path, tmp_path / "none", {"min_count": 5}))
    assert "\n" not in str(error.value)


def test_new_tokens_of_a_run_are_not_counted(tokens, tmp_path, monkeypatch):
    """They have rows in any case; their ids come after the base's."""
    config = run_with(tmp_path, tokens, {"min_count": 5})
    all_ids = chosen(config)
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    base_rows = all_ids[-1]
    with pytest.raises(DataError, match=f"base and vocabulary have {base_rows} rows"):
        own_tokens_of(config, base_rows, tokenizer_fingerprint=fingerprint)
    record = SimpleNamespace(tokens=[None] * (VOCAB_SIZE - base_rows))
    monkeypatch.setattr(token_counts, "read_vocabulary", lambda folder: record)
    extended = config.model_copy(update={"vocabulary": SimpleNamespace(folder=tmp_path)})
    found = own_tokens_of(extended, base_rows, tokenizer_fingerprint=fingerprint)
    assert found == all_ids[:-1]


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_experts_have_no_low_rank_differences_and_all_other_maps_have(base, name, tmp_path):
    settings = scale_settings("adapt", l_fp=0, low_rank=2)
    model = Scale(settings, tmp_path, 0).build(base(name).spec, SINGLE, "none")
    without: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, WidenedLinear) and module.adapter is None:
            without.add(path)
    assert not without
    names = [path for path, module in model.named_modules() if isinstance(module, LowRankAdapter)]
    assert names and not any(".experts." in path for path in names)


OPEN_ROWS: dict[str, Any] = {"method__open_rows": {"min_count": 5}}
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("rows", OPEN_ROWS, "method.open_rows, open_gains, low_rank: .* add a section gate"),
    ("gains", {"method__open_gains": True}, "method.open_rows, .* add a section gate"),
    ("low rank", {"method__low_rank": 2}, "method.open_rows, .* add a section gate"),
    (
        "freeze",
        {"method": {"name": "freeze", "frozen_layers": 1, "open_gains": True}, "gate": {}},
        "method.open_gains: unknown key",
    ),
    (
        "every count",
        {"method__open_rows": {"min_count": 10**9}, "gate": {}},
        r"method.open_rows.min_count: expected at most \d+, .*found 1000000000",
    ),
    (
        "rank",
        {"method__low_rank": 33, "gate": {}},
        r"method.low_rank: expected at most 32, .*map layers.3.attention.key, found 33",
    ),
    (
        "rank of lora",
        {
            "method": {"name": "lora", "rank": 33, "open_rows": {"min_count": 5}},
            "gate": {},
        },
        "method.rank: expected at most 32, .*, found 33",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "changes", "fault"), FAULTS)
def test_a_fault_ends_the_command_in_one_line(name, changes, fault, tokens, tmp_path):
    done = scale_cpt("upscale", write_config(tmp_path, tokens, **changes))
    assert done.returncode in (1, 2)  # 2: the configuration is at fault
    lines = done.stderr.splitlines()
    assert re.search(fault, lines[-1]), lines
    assert not any(line.startswith("Traceback") for line in lines)
    assert not (tmp_path / "expansion").exists()


@pytest.mark.full
def test_counts_of_another_tokenizer_end_the_command_in_one_line(tokens, tmp_path):
    other = shutil.copytree(STORIES, tmp_path / "base")
    described = json.loads((other / "tokenizer.json").read_text())
    described["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(described))
    run = write_config(tmp_path / "run", tokens, **OPEN_ROWS, gate={}, base=str(other))
    done = scale_cpt("upscale", run)
    assert done.returncode in (1, 2)  # 2: the configuration is at fault
    lines = done.stderr.splitlines()
    assert "tokenizer" in lines[-1] and "tokenize" in lines[-1], lines


@pytest.mark.full
def test_the_dry_run_finds_a_rank_above_the_maps(tokens, tmp_path):
    run = write_config(tmp_path, tokens, method__low_rank=33, gate={})
    done = scale_cpt("train", run, "--dry-run")
    assert done.returncode in (1, 2) and "method.low_rank: expected at most 32" in done.stdout


def test_a_first_layer_beyond_the_last_is_refused(tmp_path):
    settings = scale_settings("preserve", open_gains=True, open_first_layer=99)
    with pytest.raises(ConfigError, match="open_first_layer: 99 leaves none of the base's"):
        upscale(settings, open_base(STORIES), tmp_path, 0)

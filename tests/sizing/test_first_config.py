"""A first configuration fits its base, its texts and its machine, and says what it is."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict

import pytest
import yaml

from pipeline import cli
from pipeline.config.run import load_config, parse_config
from pipeline.dry_run import make_plan
from pipeline.errors import ConfigError, DataError, LayoutError
from pipeline.model.from_hf import open_base
from pipeline.model.stock_model import stock_widths
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.first_config import propose
from tests.bases import STORIES
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

NEW, OLD = [str(REVIEWS_HELDOUT)], [str(STORIES_HELDOUT)]


@pytest.mark.parametrize(
    ("cluster", "on_cpu"),
    [(Cluster(2, gpus_per_node=2, gpu_memory_gib=4.0), True), (Cluster(1), False), (Cluster(24), False)],
)
def test_it_starts_and_its_text_describes_it(cluster, on_cpu, tmp_path, monkeypatch):
    config, text = propose("first", STORIES, NEW, OLD, cluster, on_cpu=on_cpu)
    assert parse_config(yaml.safe_load(text), source="text") == config
    monkeypatch.chdir(tmp_path)
    assert make_plan(config, cluster).faults == ()
    schedule, data = config.schedule, config.data
    assert schedule.global_batch_size % (cluster.gpus * schedule.micro_batch_size) == 0
    added = config.method.expansion
    assert (added.hidden_size, added.intermediate_size, added.num_attention_heads, config.method.l_fp) == (16, 24, 2, 1)
    spec = open_base(STORIES).spec
    own, whole = plan_expansion(config.method, spec.widths, spec.num_layers).expansion, asdict(spec.widths)
    assert asdict(stock_widths(own, spec)) == {name: whole[name] + added for name, added in asdict(own).items()}
    assert config.deepspeed.name == ("zero1_fp32.json" if on_cpu else "zero1.json")
    assert config.gate is not None and set(data.fractions) == {"replay", "rehearsal"}
    assert 1e-3 < schedule.learning_rate < 1e-2
    # 0.8 MB of Korean that this tokenizer cuts into bytes, read four times.
    assert 2e6 < schedule.steps * schedule.global_batch_size * data.sequence_length < 5e6


def test_a_smaller_memory_takes_smaller_micro_batches_and_then_no_run(tmp_path):
    def micro_batch(gib: float) -> int:
        cluster = Cluster(1, gpu_memory_gib=gib)
        return propose("first", STORIES, NEW, OLD, cluster, on_cpu=True)[0].schedule.micro_batch_size

    assert micro_batch(4.0) > micro_batch(0.05) >= 1
    with pytest.raises(LayoutError, match="does not fit on 1 GPUs"):
        micro_batch(0.001)


def test_a_base_without_a_start_token_continues_old_texts(tmp_path, monkeypatch):
    base = tmp_path / "base"
    shutil.copytree(STORIES, base)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (base / name).exists():
            values = json.loads((base / name).read_text())
            (base / name).write_text(json.dumps({**values, "add_bos_token": False}))
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    cluster = Cluster(1)
    config, _ = propose("first", base, NEW, OLD, cluster, on_cpu=True)
    assert config.data.corpora["own_text"].sample.openings == OLD
    monkeypatch.chdir(tmp_path)
    assert make_plan(config, cluster).faults == ()


def test_the_command_writes_a_file_once_and_shows_the_dry_run(tmp_path, monkeypatch, capsys):
    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["scale-cpt", "config", "init", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    monkeypatch.chdir(tmp_path)
    texts = ["--new", *NEW, "--old", *OLD]
    assert call("--base", STORIES, *texts, "--gpus", 1) == 0
    assert "none found" in capsys.readouterr().out
    assert load_config(tmp_path / "stories260K.yaml").name == "stories260K"
    assert call("--base", STORIES, *texts) == ConfigError.exit_code
    assert "exists already" in capsys.readouterr().err
    assert call("--base", STORIES, "--new", "none.jsonl", "--old", *OLD, "--output", "b.yaml") == DataError.exit_code
    assert not (tmp_path / "b.yaml").exists()

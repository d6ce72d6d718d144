"""A first configuration fits its base, its texts and its machine, and says what it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.config.run import load_config, parse_config
from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, DataError, LayoutError
from pipeline.extensions.first_config.commented_yaml import method_comment
from pipeline.extensions.first_config.method import method_under_gate, scale_method
from pipeline.extensions.first_config.propose import propose
from pipeline.extensions.first_config.texts import measure
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.merged_model import merged_widths
from pipeline.scale.plan import Widths, plan_expansion
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.cpu_speed import multiplies_bf16
from tests.bases import STORIES
from tests.data.helpers import documents, tokenize
from tests.extensions.self_generated.helpers import copied_stories
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT, chat, write_chats

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
NEW, OLD = [str(REVIEWS_HELDOUT)], [str(STORIES_HELDOUT)]
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads")


def test_it_names_the_full_difference_and_its_state_where_a_run_may_leave_so():
    wanted = FirstRun("first", STORIES, NEW, OLD)
    _, text = propose(wanted, Cluster(1))
    gib = 260_032 * 12 / 2**30  # 12 bytes of state for each of the base's parameters
    assert f"{gib:.3g} GiB over all ranks" in text
    assert "--format difference" in text
    _, text = propose(replace(wanted, gated=False), Cluster(1))
    assert "difference" not in text


@pytest.mark.parametrize(
    "cluster",
    [Cluster(2, gpus_per_node=2, gpu_memory_gib=4.0, on_cpu=True), Cluster(1), Cluster(24)],
)
def test_it_starts_and_its_text_describes_it(cluster, tmp_path, monkeypatch):
    config, text = propose(FirstRun("first", STORIES, NEW, OLD), cluster)
    assert parse_config(yaml.safe_load(text), source="text") == config
    monkeypatch.chdir(tmp_path)
    assert make_plan(config, cluster).faults == []
    schedule, data = config.schedule, config.data
    assert schedule.global_batch_size % (cluster.gpus * schedule.micro_batch_size) == 0
    assert (config.method.name, config.method.rank) == ("lora", 8)
    assert config.method.open_rows is not None and config.method.open_gains
    in_bf16 = not cluster.on_cpu or multiplies_bf16()
    assert config.deepspeed.name in {"zero1_fp32.json", "zero1.json"}
    assert in_bf16 or config.deepspeed.name == "zero1_fp32.json"
    assert config.compile != cluster.on_cpu and ("Compiled layers" in text) == config.compile
    assert config.gate is not None and data.fractions == {"replay": 0, "self_generated": 0}
    assert schedule.optimizer == "adamw" and "Muon (docs" not in text
    assert schedule.learning_rate == pytest.approx(1e-3 * (2048 / 64) ** 0.5, rel=0.05)
    assert "(open_rows)" in text and "(open_gains)" in text
    # 0.8 MB of Korean that this tokenizer cuts into bytes, read four times.
    assert 2e6 < schedule.steps * schedule.global_batch_size * data.sequence_length < 5e6


def test_a_smaller_memory_takes_smaller_micro_batches_and_then_no_run():
    runs = [
        propose(FirstRun("first", STORIES, NEW, OLD), Cluster(1, gpu_memory_gib=gib, on_cpu=True))[
            0
        ]
        for gib in (4.0, 0.03)
    ]
    assert runs[0].schedule.micro_batch_size > runs[1].schedule.micro_batch_size
    with pytest.raises(LayoutError, match=r"does not fit on 1 CPU processes .* would fit with a"):
        propose(FirstRun("first", STORIES, NEW, OLD), Cluster(1, gpu_memory_gib=0.001, on_cpu=True))


def test_a_base_without_a_start_token_continues_old_texts(tmp_path, monkeypatch):
    changes = {"tokenizer_config": {"add_bos_token": False}, "tokenizer": {"post_processor": None}}
    base = copied_stories(tmp_path / "base", **changes)
    cluster = Cluster(1, on_cpu=True)
    config, text = propose(FirstRun("first", base, NEW, OLD), cluster)
    assert "&id" not in text and config.data.corpora["self_generated"].sample.prompts == OLD
    monkeypatch.chdir(tmp_path)
    assert make_plan(config, cluster).faults == []


def test_the_command_writes_a_file_once_and_shows_the_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init = ("config", "init", "--base", STORIES, "--old", *OLD, "--gpus", 1)
    assert "none found" in scale_cpt(*init, "--new", *NEW).stdout
    assert load_config(tmp_path / "stories260K.yaml").name == "stories260K"
    again = scale_cpt(*init, "--new", *NEW)
    assert again.returncode == ConfigError.exit_code and "exists already" in again.stderr
    assert (
        scale_cpt(*init, "--new", "none.jsonl", "--output", "b.yaml").returncode
        == DataError.exit_code
    )
    assert not (tmp_path / "b.yaml").exists()


def test_widths_grow_as_the_papers():
    """Llama-3.2-1B of the paper: 2048 to 2304, 8192 to 9216, 32 to 36 heads, 3 of 16 layers without
    W12."""
    method = scale_method(read_spec(ROOT / "configs" / "bases" / "llama-3.2-1b.json"))
    assert method.pop("expansion") == dict(zip(WIDTHS, (256, 1024, 4), strict=True))
    assert method == {"name": "scale", "variant": "adapt", "l_fp": 3}


def test_under_a_gate_a_dense_base_gets_low_rank_differences_and_a_mixture_an_expansion():
    bases = ROOT / "configs" / "bases"
    llama = read_spec(bases / "llama-3.2-1b.json")
    own = {"open_rows": {"min_count": 20}, "open_gains": True}
    assert method_under_gate(llama, with_rows=True) == {"name": "lora", "rank": 256, **own}
    mixture = read_spec(bases / "qwen3-moe-96m.json")
    method = method_under_gate(mixture, with_rows=False)
    assert method["low_rank"] == 8 and "open_rows" not in method and method["open_gains"]
    assert (method["variant"], method["l_fp"], method["norm"]) == ("adapt", 0, "base")


def test_no_rank_is_above_that_of_the_narrowest_map_and_twice_the_rank_is_named_where_it_fits():
    """Large bases have narrow keys and values: eight heads of 128 in a Llama 405B."""
    spec = read_spec(ROOT / "configs" / "bases" / "llama-3.1-70b.json")
    values = {"method": method_under_gate(spec, with_rows=False), "gate": {}}
    assert values["method"]["rank"] == 1024
    assert "twice the rank" not in method_comment(values, spec)
    large = replace(spec, widths=replace(spec.widths, hidden_size=16384, num_attention_heads=128))
    assert method_under_gate(large, with_rows=False)["rank"] == 1024
    narrow = replace(spec, widths=Widths(16, 40, 4, 1), head_dim=4)
    assert method_under_gate(narrow, with_rows=False)["rank"] == 4

    spec = read_spec(ROOT / "configs" / "bases" / "llama-3.1-8b.json")
    values = {"method": method_under_gate(spec, with_rows=False), "gate": {}}
    comment = method_comment(values, spec)
    assert "of rank 512 for a hidden size of 4096" in comment and "twice the rank" in comment


def test_without_a_gate_self_generated_text_is_learned_and_the_model_may_leave_as_an_ordinary_one():
    run = FirstRun("plain", STORIES, NEW, OLD, gated=False)
    config, text = propose(run, Cluster(1, on_cpu=True))
    assert "hidden 64 by 25%, FFN 172 by 14%, attention heads 8 by 25%" in text
    spec = open_base(STORIES).spec
    added = plan_expansion(config.method, spec.widths, spec.num_layers).expansion
    whole = asdict(spec.widths)
    assert asdict(merged_widths(added, spec)) == {
        name: whole[name] + width for name, width in asdict(added).items()
    }
    assert config.gate is None and config.data.fractions["self_generated"] > 0
    assert config.schedule.optimizer == "adamw"
    assert dict(make_plan(config, Cluster(1, on_cpu=True)).rows)["export"].startswith("merged")


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.parquet"])
def test_the_tokens_of_a_corpus_are_estimated_from_places_all_over_it(name, tmp_path):
    """Its first half is of other text than its second; the sample is about a quarter."""
    rows = [{"text": f"{number} " + "소설 " * 400} for number in range(4000)]
    rows += [{"text": text} for text in documents(8000, words=200)]
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    else:
        lines = b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows)
        path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)
    tokens = tokenize(tmp_path / "corpus", path).tokens
    assert measure([str(path)], load_tokenizer(STORIES)).tokens == pytest.approx(tokens, rel=0.1)


def test_text_under_another_key_and_an_extended_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for old, new in ((REVIEWS_HELDOUT, "new.jsonl"), (STORIES_HELDOUT, "old.jsonl")):
        content = zstandard.ZstdDecompressor().decompressobj().decompress(old.read_bytes())
        (tmp_path / new).write_bytes(content.replace(b'"text":', b'"body":'))
    learn = (
        "--corpus",
        "new.jsonl",
        "--old-texts",
        "old.jsonl",
        "--text-key",
        "body",
        "--add",
        500,
    )
    assert (
        scale_cpt("vocabulary", "--base", STORIES, *learn, "--output", "vocabulary").returncode == 0
    )
    texts = ("--text-key", "body", "--new", "new.jsonl", "--old", "old.jsonl")
    read = []
    for vocabulary in ((), ("--vocabulary", "vocabulary")):
        output = ("--gpus", 1, "--output", f"run{len(read)}.yaml")
        scale_cpt("config", "init", "--base", STORIES, *texts, *output, *vocabulary)
        config = load_config(Path(f"run{len(read)}.yaml"))
        read.append(
            config.schedule.steps * config.schedule.global_batch_size * config.data.sequence_length
        )
    assert config.tokenizer == Path("vocabulary") and config.gate is not None
    assert config.data.corpora["new"].text_key == "body"
    assert 4000 < read[1] < read[0] / 2


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_chat_model_keeps_its_chats_and_learns_to_answer_in_the_new_language(
    tmp_path, monkeypatch
):
    cluster = Cluster(1, on_cpu=True)
    base = copied_stories(tmp_path / "base")
    old = write_chats(tmp_path / "old.jsonl", *[chat(("user", "Hi"), ("assistant", "Yes."))] * 90)
    new = write_chats(tmp_path / "new.jsonl", *[chat(("user", "네"), ("assistant", "예."))] * 90)
    wanted = FirstRun("first", base, NEW, OLD)
    with pytest.raises(DataError, match="has no chat template"):
        propose(replace(wanted, new_chats=[new]), cluster)

    (base / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    chat_template.cache_clear()
    plain, text = propose(wanted, cluster)
    assert "--old-chats keeps its chats, and --new-chats" in text
    assert not plain.stages

    config, text = propose(replace(wanted, old_chats=[old], new_chats=[new]), cluster)
    assert "--old-chats" not in text
    assert parse_config(yaml.safe_load(text), source="text") == config
    monkeypatch.chdir(tmp_path)
    assert make_plan(config, cluster).faults == []
    assert config.data.corpora["self_generated_chats"].sample.prompts == [old]
    assert config.gate_negatives == ["self_generated", "self_generated_chats"]
    texts, chats = config.stages
    assert texts.steps == plain.schedule.steps
    assert config.schedule.steps == texts.steps + chats.steps
    assert texts.weights == {"new_chats": 0}
    assert chats.weights == {"new": 1, "new_chats": 3, "self_generated_new_chats": 0}
    assert config.data.fractions["self_generated"] == 0.125
    assert config.data.corpora["self_generated_new_chats"].weight == 2
    assert chats.learning_rate == pytest.approx(config.schedule.learning_rate / 3, rel=0.1)


def test_the_proposal_for_three_documents_can_be_upscaled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} 새 글입니다"}) + "\n" for number in range(3))
    )
    init = ("config", "init", "--base", STORIES, "--new", "new.jsonl", "--old", *OLD)
    done = scale_cpt(*init, "--hours", "1000", "--output", "run.yaml")
    assert done.returncode == 0 and "none found" in done.stdout, done.stderr
    config = load_config(Path("run.yaml"))
    assert config.method.open_rows.min_count < 20
    for command in ("tokenize", "upscale"):
        done = scale_cpt(command, "run.yaml")
        assert done.returncode == 0, done.stderr


def test_a_path_that_is_not_there_is_told_before_the_libraries_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"--base": str(STORIES), "--new": NEW[0], "--old": OLD[0]}
    for option in given:
        words = [word for pair in (given | {option: "missing.jsonl"}).items() for word in pair]
        done = scale_cpt("config", "init", *words, "--output", "run.yaml")
        assert done.returncode != 0 and "missing.jsonl" in done.stderr
        assert "loading the libraries" not in done.stderr, done.stderr
    assert not (tmp_path / "run.yaml").exists()

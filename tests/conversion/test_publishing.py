"""A folder that one may publish: its card, what it keeps of its base, how libraries load it again,
and the hub."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checkpoint.manifest import StageRecord, load_manifest
from pipeline.conversion.convert import convert
from pipeline.conversion.model_card import _corpora, licence_of
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.errors import BaseModelError, ConversionError
from pipeline.hf.base_card import card_of, hub_name
from pipeline.hf.base_files import copy_base_files
from pipeline.hf.load import load_hf_model
from pipeline.hub import source_of
from pipeline.model.from_hf import open_base
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save_many, scale, without_this_project
from tests.distributed import run_ranks
from tests.extensions.self_generated.helpers import copied_stories
from tests.files import change_json
from tests.widened import some_tokens

METHODS = {"merged": scale("preserve", norm="base"), "scale": scale("adapt")}
CARD = """---
license: other
license_name: stories
license_link: LICENSE.txt
language:
- en
---
# Stories
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = shutil.copytree(STORIES, tmp_path_factory.mktemp("base") / "stories")
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE.txt").write_text("Do as you like.")
    (folder / "USE_POLICY.md").write_text("Do no harm.")
    return folder


@pytest.fixture(scope="module")
def checkpoints(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_many, 1, [(base, method, folder / name) for name, method in METHODS.items()])
    return {name: checkpoint_in(folder / name) for name in METHODS}


@pytest.fixture(scope="module")
def exports(base, checkpoints, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("exports"), {}
    for name, checkpoint in checkpoints.items():
        made[name] = folder / name
        convert(Conversion(checkpoint, base, made[name], format=name), probe_maker({}))
    return made


def front_matter(folder: Path) -> dict:
    _, front, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front)


@pytest.mark.parametrize("format", METHODS)
def test_the_card_says_what_it_is_and_what_was_measured(format, exports):
    front, text = front_matter(exports[format]), (exports[format] / "README.md").read_text()
    assert front == {
        "license": "other",
        "license_name": "stories",
        "license_link": "LICENSE.txt",
        "language": ["en", "ko"],
        "datasets": ["e9t/nsmc"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [
            "continual-pretraining",
            "scale-cpt",
            {"merged": "preserve", "scale": "adapt"}[format],
        ],
    }
    assert "| new | new text | e9t/nsmc | cc0-1.0 |" in text
    assert "| hidden_size | 64 + " in text
    found = json.loads((exports[format] / "verification.json").read_text())["texts"]["english"]
    assert f"| english | {found['tokens']} | {found['training_perplexity']:.4g} |" in text
    assert ("trust_remote_code=True" in text) == (format == "scale")
    kept = {path.name: path.read_bytes() for path in exports[format].iterdir()}
    assert kept["LICENSE.txt"] == b"Do as you like." and kept["USE_POLICY.md"] == b"Do no harm."
    for name in ("tokenizer.json", "generation_config.json"):
        assert kept[name] == (STORIES / name).read_bytes()


@pytest.mark.parametrize("format", METHODS)
def test_the_code_of_the_card_runs_and_asks_nothing(format, exports, tmp_path):
    card = (exports[format] / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    asked = tmp_path / "asked"
    # transformers goes on when nobody answers: an exception would not be seen.
    program = (
        "import builtins, pathlib, sys\n"
        f"builtins.input = lambda text: pathlib.Path({str(asked)!r}).write_text(text) and 'n'\n"
        f"{code.replace(chr(34) + 'test' + chr(34), 'sys.argv[1]')}"
        "print(type(model).__name__, len(tokenizer('Once upon a time').input_ids))\n"
    )
    assert "sys.argv[1]" in program
    done = without_this_project(program, exports[format], tmp_path)
    assert (
        done.stdout.split()[0]
        == {"merged": "LlamaForCausalLM", "scale": "ScaleForCausalLM"}[format]
    )
    assert not asked.exists()


@pytest.mark.parametrize(
    ("format", "options", "expected"),
    [
        (
            "auto",
            {"options": {"bits": 8}},
            "--bits belongs to the format difference, found format scale",
        ),
        ("expansion", {"dtype": torch.bfloat16}, "--dtype .* found format expansion, which has"),
        ("expansion", {"tp_size": 8}, "--tensor-parallel-size 8 .* found format expansion"),
    ],
)
def test_an_option_that_its_format_does_not_have_is_refused(
    format, options, expected, base, checkpoints, tmp_path
):
    asked = Conversion(checkpoints["scale"], base, tmp_path / "hf", format, **options)
    with pytest.raises(ConversionError, match=expected):
        convert(asked, probe_maker({}))
    assert not (tmp_path / "hf").exists()


def test_the_card_names_the_base_that_training_had_from_the_hub(base, checkpoints, tmp_path):
    """Wherever it lies now."""
    checkpoint = shutil.copytree(
        checkpoints["scale"], tmp_path / "checkpoints" / checkpoints["scale"].name
    )
    manifest = load_manifest(checkpoint)
    record = manifest.run.base.model_copy(update={"hub": "someone/stories@abc"})
    manifest.model_copy(update={"run": manifest.run.model_copy(update={"base": record})}).save(
        checkpoint
    )
    convert(Conversion(checkpoint, base, tmp_path / "hf"), probe_maker({}))
    front = front_matter(tmp_path / "hf")
    assert (front["base_model"], front["base_model_relation"]) == ("someone/stories", "finetune")


def test_the_card_of_a_run_in_stages_has_what_each_stage_read(checkpoints):
    """And not what a stage is yet to read; the section `data` alone names no share of replay."""
    manifest = load_manifest(checkpoints["scale"])
    common = {"trains": ("output",), "global_batch_size": 1, "sequence_length": 8}
    stages = []
    for name, weights, fractions in (
        ("rows", {"new": 1.0}, {}),
        ("maps", {"new": 1.0, "old": 2.0}, {"replay": 0.25}),
        ("last", {"new": 1.0, "later": 1.0}, {"replay": 0.5}),
    ):
        stage = {"name": name, "steps": 1, "weights": weights, "fractions": fractions, **common}
        stages.append(StageRecord(passage_steps=0, **stage))
    corpora = dict(manifest.run.data["corpora"])
    for name in ("old", "later"):
        source = {"dataset": f"someone/{name}", "license": "cc-by-sa-4.0"}
        corpora[name] = {"role": "replay", "source": source}
    data = {**manifest.run.data, "corpora": corpora, "replay_fraction": 0.0}
    run = manifest.run.model_copy(update={"data": data, "stages": tuple(stages)})
    assert manifest.position.step == 2

    rows, sources = _corpora(manifest.model_copy(update={"run": run}))
    assert rows == [
        ("new", "new text", "e9t/nsmc", "cc0-1.0"),
        ("old", "replay, 25 % of the samples in stage maps", "someone/old", "cc-by-sa-4.0"),
    ]
    assert [source["dataset"] for source in sources] == ["e9t/nsmc", "someone/old"]


@pytest.mark.parametrize(
    ("config_name", "card_name", "expected"),
    [
        ("someone/stories", "other/model", "someone/stories"),
        ("/home/me/stories", "other/model", "other/model"),
        ("models/stories", ["other/model"], "other/model"),
        ("here/stories", None, None),
        ("../stories", ["two/models", "other/model"], None),
        ("stories", "runs/first/hf", None),
        (7, {"a": "b"}, None),
    ],
)
def test_the_card_names_a_base_in_a_folder_and_no_path(
    config_name, card_name, expected, base, checkpoints, tmp_path, monkeypatch
):
    """From its config.json or its card; a folder `here` is beside the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    moved = shutil.copytree(base, tmp_path / "base")
    change_json(moved / "config.json", _name_or_path=config_name)
    if card_name is not None:
        front = yaml.safe_dump({"license": "mit", "base_model": card_name})
        (moved / "README.md").write_text(f"---\n{front}---\n")
    assert hub_name(moved) == expected


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: mit\nlicense_link: ../../secret\n---\n", {"license": "mit"}),
        ("---\nlicense: 'mit\n\n  |'\n---\n", {}),
        ("---\nlicense: !!python/object/apply:os.mkdir [made]\n---\n", None),
        ("---\n- a list\n---\n", None),
        ("---\nlicense: mit\n x: {\n---\n", None),
    ],
)
def test_terms_in_a_strangers_card(card, expected, tmp_path, monkeypatch, caplog):
    """None: the card cannot be read, and a warning says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path, card_of(tmp_path)) == (expected or {})
    assert not (tmp_path / "made").exists()
    assert ("front matter cannot be read" in caplog.text) == (expected is None)
    (tmp_path / "LICENSE").write_text("Do as you like.")
    if "license" not in (expected or {}):
        assert licence_of(tmp_path, card_of(tmp_path))["license_link"] == "LICENSE"


def kept_of(base: Path, folder: Path) -> set[str]:
    folder.mkdir()
    copy_base_files(folder, base, base)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_which_files_are_kept(tmp_path):
    base = tmp_path / "base"
    (base / "additional_chat_templates").mkdir(parents=True)
    kept = "LICENSE LICENCE-MODEL.md Notice USE_POLICY.md COPYING.txt generation_config.json tokenizer.model vocab.txt"
    kept += " tokenizer.model.v3 qwen.tiktoken tekken.json additional_chat_templates/tool_use.jinja"
    others = [
        "licensed.py",
        "modeling.py",
        "model.safetensors",
        "LICENSE\n.py",
        "evil_tokenizer.json",
        "README.md",
    ]
    for name in [*kept.split(), *others]:
        (base / name).write_text("{}")
    assert kept_of(base, tmp_path / "out") == set(kept.split())


@pytest.mark.parametrize("where", ["file", "config", "both", "several"])
def test_a_chat_template_is_where_every_server_looks(where, tmp_path):
    held = {
        "config": TEMPLATE,
        "both": "another",
        "several": [{"name": "default", "template": TEMPLATE}],
    }.get(where)
    code = {"auto_map": {"AutoTokenizer": ["evil/repo--tokenizer.Evil", None]}}
    changes = code | ({"chat_template": held} if held else {})
    base = copied_stories(tmp_path / "base", tokenizer_config=changes)
    if where in ("file", "both"):
        (base / "chat_template.jinja").write_text(TEMPLATE)
    kept_of(base, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert (
        config["chat_template"] == (held if where == "several" else TEMPLATE)
        and "auto_map" not in config
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        == "Hello"
    )


def test_an_exports_tokenizer_has_no_dropout(tmp_path):
    model = json.loads((STORIES / "tokenizer.json").read_text())["model"]
    base = copied_stories(tmp_path / "base", tokenizer={"model": model | {"dropout": 0.5}})
    kept_of(base, tmp_path / "out")
    text = "Once upon a time there was a little dog"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = AutoTokenizer.from_pretrained(STORIES)([text])["input_ids"]
    assert tokenizer([text] * 20)["input_ids"] == expected * 20


@pytest.mark.parametrize("name", ["LICENSE", "additional_chat_templates"])
def test_links_out_of_the_base_are_not_followed_but_those_of_a_downloaded_snapshot(name, tmp_path):
    cached = tmp_path / "hub" / "models--someone--stories"
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(STORIES, cached / "blobs")
    for blob in (cached / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert {"tokenizer.json", "generation_config.json"} <= kept_of(snapshot, tmp_path / "out")
    (tmp_path / "linked").symlink_to(snapshot)
    assert source_of(tmp_path / "linked") == "someone/stories@abc" and source_of(STORIES) is None

    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "token.jinja").write_text("hf_secret")
    (snapshot / name).symlink_to(secret / "token.jinja" if name == "LICENSE" else secret)
    with pytest.raises(BaseModelError, match="outside its folder"):
        kept_of(snapshot, tmp_path / "another")


@torch.no_grad()
@pytest.mark.parametrize("format", METHODS)
def test_what_libraries_save_again_is_the_same_model(format, exports, tmp_path, monkeypatch):
    """From another working directory, as the public classes load it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load = partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=format == "scale")
    model = load(exports[format]).eval()
    tokens = some_tokens(load_hf_model(STORIES).config, 2, 24)
    expected = model(tokens).logits
    model.save_pretrained("again")
    assert torch.equal(load("again").eval()(tokens).logits, expected)
    if format == "merged":  # what a second round of widening reads
        assert open_base(Path("again")).spec == open_base(exports[format]).spec

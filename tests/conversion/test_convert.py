"""A conversion from beginning to end: verified, published completely or not at all, and not done
twice."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.conversion.verify import GRANTED, Report, check
from pipeline.data.sources.records import Keys
from pipeline.errors import BaseModelError, CheckpointError, ConversionError
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.configuration_scale import NEEDED
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save, scale
from tests.distributed import run_ranks
from tests.files import change_json, cut, flip_bit
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

TEXTS = {"english": [str(STORIES_HELDOUT)], "korean": [str(REVIEWS_HELDOUT)]}

VERIFIED = r"verified in \w+: .* same likeliest token [\d.]+ %; rounding to \w+ alone makes \S+, \S+ and [\d.]+ %"


@pytest.fixture(scope="module")
def published(models, tmp_path_factory):
    """A verified conversion, for tests that change copies of it."""
    checkpoint = models("stories260K", "adapt separate").checkpoint
    done = Conversion(checkpoint, STORIES, tmp_path_factory.mktemp("published") / "hf")
    assert convert(done, probe_maker({}))
    return done


@pytest.fixture(scope="module")
def described(models, tmp_path_factory):
    """A conversion whose base has a chat template, settings of generation, terms and a card."""
    folder = tmp_path_factory.mktemp("described")
    base = Path(shutil.copytree(STORIES, folder / "base"))
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (base / "LICENSE").write_text("As you like.")
    (base / "README.md").write_text("---\nlicense: mit\n---\nA base.")
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    done = Conversion(models("stories260K", "adapt separate").checkpoint, base, folder / "hf")
    assert convert(done, probe_maker({}))
    return done


@pytest.fixture
def conversion(models, tmp_path):
    return Conversion(
        models("stories260K", "adapt separate").checkpoint, STORIES, tmp_path / "made" / "hf"
    )


@pytest.mark.parametrize(
    ("method", "written"), [("adapt separate", "scale"), ("adapt norm base", "merged")]
)
def test_a_published_folder_is_verified_on_both_languages(method, written, models, conversion):
    assert convert(
        replace(conversion, checkpoint=models("stories260K", method).checkpoint), probe_maker(TEXTS)
    )
    report = json.loads((conversion.output / "verification.json").read_text())
    assert set(report["texts"]) == {"english", "korean"}
    assert report["max_abs"] <= max(1e-4, 4 * report["rounding"]["max_abs"]) < 1e-2
    assert report["kl"] < 1e-6 and report["top1_agreement"] > 0.999
    assert written == "merged" or report["max_abs"] < 1e-5
    for text in report["texts"].values():
        assert text["tokens"] == 1024
        assert text["exported_perplexity"] == pytest.approx(text["training_perplexity"], rel=1e-4)
    assert (
        report["texts"]["english"]["training_perplexity"]
        < report["texts"]["korean"]["training_perplexity"]
    )
    record = json.loads((conversion.output / "conversion.json").read_text())
    assert record["written_format"] == written and record["position"]["step"] == 2
    assert {"tokenizer.json", "generation_config.json"} <= {
        path.name for path in conversion.output.iterdir()
    }
    assert [path.name for path in conversion.output.parent.iterdir()] == ["hf"]


def test_no_file_of_an_export_names_a_path_of_this_machine(published):
    """So that the folder can be published as it is."""
    places = {str(published.checkpoint), str(published.base), str(published.output.parent)}
    for file in published.output.iterdir():
        content = file.read_bytes()
        for place in places:
            assert place.encode() not in content, file.name
    record = json.loads((published.output / "conversion.json").read_text())
    assert record["run"] == "test"
    assert record["checkpoint"] == "step_00000002"


@pytest.mark.parametrize(("purpose", "scale"), [("serving", 2**-12), ("training", 2**-6)])
def test_a_folder_says_whether_other_tools_can_train_it(purpose, scale, models, conversion, caplog):
    """Both are verified: even the larger scale changes the model by far less than a conversion may."""
    checkpoint = models("stories260K", "adapt norm base").checkpoint
    asked = replace(conversion, checkpoint=checkpoint, dtype=torch.float32, purpose=purpose)
    with caplog.at_level("INFO"):
        assert convert(asked, probe_maker({})) and not convert(asked, probe_maker({}))
    said = f"times 2^{math.log2(scale):.0f}"
    for text in (caplog.text, (asked.output / "README.md").read_text()):
        assert said in text and ("--for training" in text) == (purpose == "serving")
    assert (
        json.loads((asked.output / "config.json").read_text())["widened_residual"]["scale"] == scale
    )
    assert json.loads((asked.output / "verification.json").read_text())["scaling"]["kl"] < 1e-3
    other = {"serving": "training", "training": "serving"}[purpose]
    assert convert(replace(asked, purpose=other), probe_maker({})), "another request"


def test_answers_are_compared_after_their_prompts(conversion, tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"prompt": "Once upon a time, there was a dog. The dog", "answer": "was very happy."}\n'
    )
    assert convert(
        conversion, probe_maker({"asked": [str(path)]}, {"asked": Keys("answer", "prompt")})
    )
    report = json.loads((conversion.output / "verification.json").read_text())
    assert report["texts"]["asked"]["tokens"] > 15


def test_the_same_conversion_is_not_done_twice(published, tmp_path):
    probe = probe_maker({})
    again = replace(published, output=shutil.copytree(published.output, tmp_path / "hf"))
    before = (again.output / "model.safetensors").stat().st_mtime_ns
    assert not convert(again, probe)
    assert (again.output / "model.safetensors").stat().st_mtime_ns == before
    change_json(again.output / "conversion.json", code="of another version")
    assert convert(again, probe) and not convert(again, probe)
    assert convert(replace(again, dtype=torch.bfloat16), probe)
    assert load_hf_model(again.output).dtype == torch.bfloat16


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A checkpoint without noise: the expansion hardly matters."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run_ranks(save, 1, STORIES, scale("adapt"), folder, 1, None, 2, 0.0)
    return checkpoint_in(folder)


@pytest.mark.parametrize(
    ("dtype", "accepted", "refused"),
    [
        (torch.float32, 1 + 2e-6, 1 + 1e-4),
        (torch.bfloat16, 1.02, 1.1),
        (torch.float16, 1.003, 1.03),
    ],
)
def test_a_model_that_differs_by_more_than_rounding_is_not_published(
    dtype, accepted, refused, calm, conversion
):
    """Every logit times a factor: hardly any token changes its rank, and few their probability by
    much."""
    conversion = replace(conversion, checkpoint=calm, dtype=dtype)

    def disturbed(factor: float, model):
        (partial_folder,) = conversion.output.parent.iterdir()
        tensors = load_file(partial_folder / "model.safetensors")
        for name in ("final_norm.base.weight", "final_norm.expansion.weight"):
            tensors[name] = (tensors[name].double() * factor).to(dtype)
        save_file(tensors, partial_folder / "model.safetensors", {"format": "pt"})
        return probe_maker({})(model)

    with pytest.raises(
        ConversionError, match=r"differs from the trained one by .* \(at most .*; not kept"
    ):
        convert(conversion, partial(disturbed, refused))
    assert list(conversion.output.parent.iterdir()) == []
    assert convert(conversion, partial(disturbed, accepted))


@pytest.mark.parametrize("nan", ["kl", "max_abs"])
def test_an_export_that_computes_nan_is_not_published(nan):
    with pytest.raises(ConversionError, match="folder: the exported model differs"):
        check(Report(**{nan: math.nan}), GRANTED[torch.bfloat16], "folder")


def test_a_missing_tensor_is_not_filled_in(published, tmp_path):
    folder = shutil.copytree(published.output, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.0.ffn.up.base_to_expansion.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        BaseModelError, match=r"missing keys: layers\.0\.ffn\.up\.base_to_expansion\.weight"
    ):
        load_hf_model(folder)


def test_a_changed_file_is_noticed(conversion, tmp_path):
    copied = shutil.copytree(conversion.checkpoint, tmp_path / "copy")
    flip_bit(min(copied.glob("rank_*")))
    with pytest.raises(CheckpointError, match="not what was written"):
        convert(replace(conversion, checkpoint=copied), probe_maker({}))
    assert not conversion.output.exists()


@pytest.mark.parametrize("to", ["auto", "expansion"])
def test_a_base_whose_config_changed_is_refused(to, conversion, tmp_path):
    base = shutil.copytree(STORIES, tmp_path / "base")
    change_json(base / "config.json", rms_norm_eps=0.5)
    changed = replace(conversion, base=base, format=to)
    with pytest.raises(
        BaseModelError,
        match=r"base: its config.json has another norm_eps \(expected 1e-05, found 0.5",
    ):
        convert(changed, probe_maker({}))
    copied = shutil.copytree(conversion.checkpoint, tmp_path / "copy")
    manifest = json.loads((copied / "manifest.json").read_text())
    # As an earlier version wrote it.
    del manifest["run"]["base"]["architecture"], manifest["checksum"]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert convert(replace(conversion, checkpoint=copied, format=to), probe_maker({}))


def test_code_of_the_base_is_neither_copied_nor_named(conversion, tmp_path):
    base = shutil.copytree(STORIES, tmp_path / "base")
    (base / "modeling_evil.py").write_text("raise SystemExit('run')")
    change_json(base / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    convert(replace(conversion, base=base, format="scale"), probe_maker({}))
    assert not (conversion.output / "modeling_evil.py").exists()
    assert "evil" not in (conversion.output / "config.json").read_text()


def test_the_folder_says_which_transformers_it_needs(published, monkeypatch):
    assert (
        json.loads((published.output / "config.json").read_text())["transformers_version"] == NEEDED
    )
    monkeypatch.setattr("importlib.metadata.version", lambda _: "4.57.0")
    needed = f"transformers>={re.escape(NEEDED)} is required .*found transformers==4.57.0"
    with pytest.raises(ImportError, match=needed):
        runpy.run_path(str(published.output / "configuration_scale.py"))


def test_the_command_line(models, tmp_path):
    checkpoint = models("stories260K", "adapt norm base").checkpoint
    named = ["--checkpoint", checkpoint, "--base", STORIES, "--format", "merged", "--dtype", "bf16"]
    named += ["--for", "training"]
    done = scale_cpt("convert", *named, "--output", tmp_path / "out", "--text", *TEXTS["english"])
    assert done.returncode == 0 and re.search(VERIFIED, done.stderr), done.stderr
    assert type(load_hf_model(tmp_path / "out")).__name__ == "LlamaForCausalLM"
    assert (
        json.loads((tmp_path / "out" / "conversion.json").read_text())["asked_purpose"]
        == "training"
    )
    text = ["--text", "nothing.jsonl"]
    again = scale_cpt("convert", *named, "--output", tmp_path / "out", *text)
    assert again.returncode == 0, "it is done already: the text is not read"
    done = scale_cpt("convert", *named, "--output", tmp_path / "second", *text)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: nothing.jsonl: no such file")
    assert not (tmp_path / "second").exists()


def test_the_old_name_of_a_format_is_told_the_new_one():
    done = scale_cpt("convert", "configs/demo.yaml", "--format", "stock")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--format: expected merged, which stock is called now, found stock" in line


CHANGES_OF_THE_BASE = {
    "chat template": lambda base: (base / "chat_template.jinja").write_text("{{ 'other' }}"),
    "template removed": lambda base: (base / "chat_template.jinja").unlink(),
    "generation": lambda base: (base / "generation_config.json").write_text('{"top_k": 5}'),
    "entry of config.json": lambda base: change_json(base / "config.json", eos_token_id=[2, 3]),
    "terms": lambda base: (base / "LICENSE").write_text("Ask first."),
    "terms added": lambda base: (base / "NOTICE").write_text("Of somebody."),
    "card": lambda base: (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n"),
    "tokenizer settings": lambda base: change_json(base / "tokenizer_config.json", more=1),
}


@pytest.mark.parametrize("what", CHANGES_OF_THE_BASE)
def test_it_is_converted_again_after_a_file_of_the_base_changed(described, tmp_path, what):
    base = Path(shutil.copytree(described.base, tmp_path / "base"))
    again = replace(
        described, base=base, output=Path(shutil.copytree(described.output, tmp_path / "hf"))
    )
    probe = probe_maker({})
    assert not convert(again, probe)
    CHANGES_OF_THE_BASE[what](base)
    assert convert(again, probe) and not convert(again, probe)


CHANGES_OF_THE_EXPORT = {
    "weights gone": (lambda hf: (hf / "model.safetensors").unlink(), "model.safetensors: missing"),
    "weights cut": (lambda hf: cut(hf / "model.safetensors"), "of another size"),
    "weights damaged": (lambda hf: flip_bit(hf / "model.safetensors"), "another SHA-256"),
    "settings gone": (lambda hf: (hf / "config.json").unlink(), "config.json: missing"),
    "code changed": (lambda hf: flip_bit(hf / "modeling_scale.py"), "another SHA-256"),
    "tokenizer gone": (lambda hf: (hf / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "files unknown": (lambda hf: change_json(hf / "conversion.json", files=None), "nothing says"),
}


@pytest.mark.parametrize("what", CHANGES_OF_THE_EXPORT)
def test_an_export_that_is_not_as_it_was_written_is_made_again(published, tmp_path, caplog, what):
    change, message = CHANGES_OF_THE_EXPORT[what]
    again = replace(published, output=Path(shutil.copytree(published.output, tmp_path / "hf")))
    change(again.output)
    with caplog.at_level("INFO"):
        assert convert(again, probe_maker({}))
    assert f"converting again: {again.output}" in caplog.text and message in caplog.text
    assert not convert(again, probe_maker({}))
    for file in published.output.iterdir():
        assert (again.output / file.name).is_file(), file.name


def test_what_a_user_adds_to_an_export_stays(published, tmp_path):
    again = replace(published, output=Path(shutil.copytree(published.output, tmp_path / "hf")))
    card = again.output / "README.md"
    card.write_text(card.read_text() + "\n## Our scores\n")
    (again.output / "notes.txt").write_text("ours")
    assert not convert(again, probe_maker({}))
    assert card.read_text().endswith("## Our scores\n")


def test_an_exported_expansion_that_was_damaged_is_made_again(published, tmp_path):
    asked = replace(published, format="expansion", output=tmp_path / "expansion")
    assert convert(asked, probe_maker({})) and not convert(asked, probe_maker({}))
    for change in (Path.unlink, flip_bit):
        change(asked.output / "expansion-00001.safetensors")
        assert convert(asked, probe_maker({})) and not convert(asked, probe_maker({}))

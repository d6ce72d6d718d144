"""The expansion on disk: a run reads exactly what was written, and refuses anything else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import expansion_folder
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.expansion_folder import MANIFEST, open_expansion
from pipeline.methods.scale import Scale, upscale
from pipeline.model.from_hf import is_base, open_base
from pipeline.parallel.topology import SINGLE
from tests.bases import CONFIGS, random_model
from tests.files import change_json
from tests.widened import SEED, scale_settings, widened

ADAPT = scale_settings("adapt", collaborative_modules="both")


@pytest.fixture
def folder(base, tmp_path):
    path = tmp_path / "run" / "initial_expansion"
    upscale(ADAPT, base("llama"), path, SEED)
    return path


def load(base_folder, folder, settings=ADAPT, seed=SEED):
    method = Scale(settings, folder, seed)
    model = method.build(base_folder.spec, SINGLE, "none")
    method.load(model, base_folder, SINGLE)
    return model


def weights_file(folder):
    return folder / "expansion-00001.safetensors"


def tensors_of(folder):
    """The manifest's list of tensors, with the file of each."""
    return json.loads((folder / MANIFEST).read_text())["tensors"]


def test_a_run_loads_what_was_computed(base, folder):
    loaded = dict(load(base("llama"), folder).named_parameters())
    for name, parameter in widened(base("llama"), ADAPT).named_parameters():
        assert torch.equal(loaded[name], parameter), name


def test_the_folder_holds_the_expansion_only_and_is_the_same_whenever_it_is_made(
    base, folder, tmp_path
):
    names = open_expansion(folder).names
    assert names
    assert not [name for name in names if is_base(name)]
    upscale(ADAPT, base("llama"), tmp_path / "again", SEED)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["initial_expansion"]


def test_a_router_and_norm_may_change_after_the_expansion_is_made(base, folder):
    load(base("llama"), folder, scale_settings("adapt", collaborative_modules="both", norm="base"))


def test_an_expansion_made_by_other_settings_is_refused(base, folder):
    with pytest.raises(CheckpointError, match="made with another method"):
        load(base("llama"), folder, scale_settings("route", collaborative_modules="both"))
    with pytest.raises(CheckpointError, match="made with another seed"):
        load(base("llama"), folder, seed=SEED + 1)


def test_an_expansion_of_another_base_is_refused(folder, tmp_path):
    random_model(CONFIGS["llama"], seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(
        BaseModelError, match=r"made of the base .* with other weights than the run's base"
    ):
        load(open_base(tmp_path / "other"), folder)


@pytest.mark.parametrize("changes", [{"rms_norm_eps": 0.5}, {"max_position_embeddings": 256}])
def test_an_expansion_of_a_base_whose_config_changed_is_refused(base, folder, tmp_path, changes):
    changed = shutil.copytree(base("llama").path, tmp_path / "changed")
    change_json(changed / "config.json", **changes)
    with pytest.raises(
        BaseModelError,
        match=r"initial_expansion: the config.json of its base .* had another \w+ \(expected",
    ):
        load(open_base(changed), folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["base_architecture"], manifest["checksum"]  # as an earlier version wrote it
    (folder / MANIFEST).write_text(json.dumps(manifest))
    load(open_base(changed), folder)


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-64])


def misshape(folder):
    tensors = load_file(weights_file(folder))
    tensors["output.expansion"] = tensors["output.expansion"][:1].clone()  # would be broadcast
    save_file(tensors, weights_file(folder))


def lead_outside(folder):
    shutil.copy(weights_file(folder), folder.parent / "outside.safetensors")
    outside = dict.fromkeys(tensors_of(folder), "../outside.safetensors")
    change_json(folder / MANIFEST, tensors=outside, checksum=None)


def forget_a_tensor(folder):
    others = dict(list(tensors_of(folder).items())[1:])
    change_json(folder / MANIFEST, tensors=others, checksum=None)


DAMAGE = {
    "no folder": (shutil.rmtree, "holds no expansion; make one with scale-cpt upscale"),
    "manifest cut off": (lambda folder: cut_off(folder / MANIFEST), "manifest.json: not JSON"),
    "another format": (
        lambda folder: change_json(folder / MANIFEST, format="2"),
        "manifest.json: format: ",
    ),
    "another seed": (
        lambda folder: change_json(folder / MANIFEST, seed=123),
        "manifest.json: does not match its checksum",
    ),
    "a tensor not listed": (forget_a_tensor, "manifest.json: lists no"),
    "a tensor of another shape": (misshape, "output.expansion has shape"),
    "a pickle in their place": (
        lambda folder: torch.save([], weights_file(folder)),
        "damaged or missing",
    ),
    "files outside": (lead_outside, "names files outside its folder; do not use it"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(base, folder, fault):
    damage, message = DAMAGE[fault]
    damage(folder)
    with pytest.raises(CheckpointError) as refusal:
        load(base("llama"), folder)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_manifest_of_an_earlier_version_has_no_checksum(base, folder):
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    (folder / MANIFEST).write_text(json.dumps(content))
    load(base("llama"), folder)


def test_large_expansions_are_spread_over_files_and_a_rank_finds_the_changed_one(
    base, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(expansion_folder, "FILE_BYTES", 4096)
    upscale(ADAPT, base("llama"), tmp_path / "spread", SEED)
    assert len(list((tmp_path / "spread").glob("*.safetensors"))) > 3
    whole = dict(load(base("llama"), folder).named_parameters())
    for name, parameter in load(base("llama"), tmp_path / "spread").named_parameters():
        assert torch.equal(whole[name], parameter), name
    expansion = open_expansion(tmp_path / "spread")
    expansion.check_files()
    changed = weights_file(expansion.path)
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x7f")
    expansion.check_files(slice(1, None, 2))
    with pytest.raises(CheckpointError, match=r"expansion-00001.safetensors: damaged or missing"):
        expansion.check_files(slice(0, None, 2))

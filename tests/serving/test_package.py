"""The package in serving/: it holds the model code, and loads exports without the code in their
folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.configuration_scale import NEEDED
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.hf.write import code_files
from tests.widened import some_tokens

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LOAD = """
import sys, torch, scale_cpt_serving
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
assert type(model) is scale_cpt_serving.ScaleForCausalLM and "pipeline" not in sys.modules
assert AutoConfig.for_model("scale_combined", expansions={}).names() == []
torch.save(model(torch.load(sys.argv[2])).logits.detach(), sys.argv[3])
"""


@pytest.fixture(scope="module")
def folder(exports, tmp_path_factory) -> Path:
    """A routed export, whose own code would end the process."""
    folder = shutil.copytree(
        exports("stories260K", "route stories")[0], tmp_path_factory.mktemp("served") / "hf"
    )
    (folder / "modeling_scale.py").write_text("raise SystemExit('the code in the folder ran')\n")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel, unpacked as pip would."""
    folder = tmp_path_factory.mktemp("package")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run(
        [*build, "--wheel-dir", str(folder), str(ROOT / "serving")], check=True, capture_output=True
    )
    (wheel,) = folder.glob("scale_cpt_serving-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_package_holds_the_modelling_files(installed):
    for code in code_files(CombinedForCausalLM):
        copied = installed / "scale_cpt_serving" / "remote_code" / code.name
        assert copied.read_bytes() == code.read_bytes() and not copied.parent.is_symlink()
    (metadata,) = installed.glob("*.dist-info")
    assert f"transformers<6,>={NEEDED[:3]}" in (metadata / "METADATA").read_text().replace(" ", "")
    assert (
        "[vllm.general_plugins]\nscale = scale_cpt_serving:register"
        in (metadata / "entry_points.txt").read_text()
    )


def test_an_export_is_loaded_without_the_code_in_its_folder(folder, installed, tmp_path):
    tokens = some_tokens(load_hf_model(folder).config, 2, 20)
    torch.save(tokens, tmp_path / "tokens.pt")
    command = [
        sys.executable,
        "-c",
        LOAD,
        str(folder),
        str(tmp_path / "tokens.pt"),
        str(tmp_path / "logits.pt"),
    ]
    environment = {
        "PYTHONPATH": str(installed),
        "PATH": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = load_hf_model(folder)(tokens).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_servers_read_the_sizes_of_caches_from_the_configuration(folder):
    """What vLLM checks of any model: the size of a head, and that key/value heads divide query
    heads."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (12, 6)
    assert (
        config["num_attention_heads"] % config["num_key_value_heads"] == 0
        and config["head_dim"] == 8
    )
    layer = load_hf_model(folder).layers[0].attention
    assert layer.query.base.out_features + layer.query.base_to_expansion.out_features == 12 * 8
    assert layer.key.base.out_features + layer.key.base_to_expansion.out_features == 6 * 8

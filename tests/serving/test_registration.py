"""What the package in serving/ registers with transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.hf.load import OWN_MODELS

SERVING = Path(__file__).parents[2] / "serving"
REGISTERED = """
import sys
import scale_cpt_serving
from transformers import AutoConfig, AutoModelForCausalLM
for model_type in sys.argv[1:]:
    config = AutoConfig.for_model(model_type)
    print(AutoModelForCausalLM._model_mapping[type(config)].__name__)
assert "pipeline" not in sys.modules
"""


def test_all_models_with_code_of_ours_are_registered(tmp_path):
    """In a process of its own: in this one, `pipeline` has registered them."""
    types = [config.model_type for config in OWN_MODELS]
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED, *types],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(SERVING), "PATH": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [model.__name__ for model in OWN_MODELS.values()]


def test_the_readme_names_them():
    readme = (SERVING / "README.md").read_text()
    project = (SERVING / "pyproject.toml").read_text()
    for config in OWN_MODELS:
        assert f"`{config.model_type}`" in readme
        assert config.model_type in project

"""FlashAttention 4 is taken where the GPU, the heads and the installed version allow it, and where it
is asked for a run without it does not start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError, MissingPackageError
from pipeline.model.flash_attention import (
    DISTRIBUTION,
    SUPPORTED_VERSIONS,
    activate_flash_attention,
    choose_flash_attention,
    device_capability,
    installed_version,
)
from pipeline.model.from_hf import read_spec

ROOT = Path(__file__).parents[2]
LLAMA = read_spec(ROOT / "configs" / "bases" / "llama-3.2-1b.json")
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
BF16, VERSION = torch.bfloat16, "4.0.0b18"

CASES = [
    # head size, dtype, capability, version; what decides, or None where it is taken
    (64, BF16, HOPPER, VERSION, None),
    (128, torch.float16, BLACKWELL, "4.0.0b16", None),
    (256, BF16, HOPPER, VERSION, None),
    (256, BF16, BLACKWELL, VERSION, "up to 128, found 256"),
    (264, BF16, HOPPER, VERSION, "up to 256, found 264"),
    (36, BF16, HOPPER, VERSION, "a multiple of 8 up to 256, found 36"),
    (64, torch.float32, HOPPER, VERSION, "the run is in float32"),
    (64, BF16, AMPERE, VERSION, "found 8.0"),
    (64, BF16, (12, 0), VERSION, "found 12.0"),
    (64, BF16, HOPPER, None, "is not installed"),
    (64, BF16, HOPPER, "4.0.0b36", "found 4.0.0b36"),
    (64, BF16, HOPPER, "4.0.0b15", "found 4.0.0b15"),
    (64, BF16, HOPPER, "4.0.0", "found 4.0.0"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_taken_where_everything_fits(case):
    head_dim, dtype, capability, version, reason = case
    spec = replace(LLAMA, head_dim=head_dim)
    given = spec, dtype, capability, version
    chosen = choose_flash_attention("auto", *given)
    assert chosen.fa4 == (reason is None)
    assert (reason or f"FlashAttention 4 ({DISTRIBUTION} {version})") in chosen.text
    assert not choose_flash_attention("torch", *given).fa4
    if reason is None:
        assert choose_flash_attention("fa4", *given) == chosen
        return
    of_the_package = version is None or "found 4." in reason
    fault = MissingPackageError if of_the_package else ConfigError
    with pytest.raises(fault, match=r"^flash_attention: ") as refused:
        choose_flash_attention("fa4", *given)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert ("pip install 'scale-cpt[flash]'" in str(refused.value)) == of_the_package


def test_capped_scores_and_transformers_modules_keep_their_kernels():
    capped = replace(LLAMA, attention_softcap=50.0)
    assert "caps" in choose_flash_attention("auto", capped, BF16, HOPPER, VERSION).text

    class Hosted:
        library_attention = "transformers computes it"

    chosen = choose_flash_attention("auto", Hosted(), BF16, HOPPER, VERSION)
    assert not chosen.fa4 and "transformers" in chosen.text


def test_a_plan_for_unknown_gpus_says_which_ones_take_it():
    chosen = choose_flash_attention("auto", LLAMA, BF16, None, VERSION)
    assert chosen.fa4 and "compute capability 9 or 10" in chosen.text
    # A head of 256 is taken on Hopper.
    large = replace(LLAMA, head_dim=256)
    assert choose_flash_attention("fa4", large, BF16, None, VERSION).fa4


def test_a_missing_package_is_one_line():
    assert installed_version() is None and device_capability("cpu") is None
    with pytest.raises(MissingPackageError, match=r"scale-cpt\[flash\]") as refused:
        activate_flash_attention()
    assert "\n" not in str(refused.value)


def test_the_extra_names_the_versions_that_are_taken():
    assert f'FLASH = ["{DISTRIBUTION}{SUPPORTED_VERSIONS}"]' in (ROOT / "setup.py").read_text()

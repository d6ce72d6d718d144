"""The time of a training step beside a hosted base, relative to the native family.

    python -m benchmarks.hosted_step

Both decoders have the same small Llama as base and an expansion of the same widths: `native` runs
it with this project's layers, `transformers` with those of transformers, as a base of a type that
this project does not know. Timed are a forward and a backward pass in fp32, without the optimizer,
in milliseconds of processor time. The two take turns, and the least time of each counts, so that
other load on the machine hardly does. The last line is the ratio of the two: 1 is no difference.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.base import BaseCode
from pipeline.config.method import ScaleMethod
from pipeline.model.bases import build_decoder, load_base, open_base
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import is_base
from pipeline.scale.plan import plan_expansion

# An eighth of each width, trained from the middle of the layers on.
METHOD = ScaleMethod.model_validate(
    {
        "name": "scale",
        "variant": "adapt",
        "l_fp": 2,
        "collaborative_modules": "both",
        "expansion": {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2},
    }
)


CODES: tuple[BaseCode, ...] = get_args(BaseCode)


def make_decoder(folder: Path, code: BaseCode) -> CausalDecoder:
    """The base in `folder`, widened; `code` as the setting `base_code`."""
    base = open_base(folder, code)
    plan = plan_expansion(METHOD, base.spec.widths, base.spec.num_layers)
    model = build_decoder(base.spec, plan)
    load_base(model, base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_base(name))
        if not is_base(name):
            # Memory that was never set may hold tiny numbers, with which processors are slow.
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def step_seconds(model: CausalDecoder, tokens: torch.Tensor) -> float:
    """The processor seconds, over all threads, of a forward and a backward pass."""
    started = time.process_time()
    model(tokens, tokens).total.backward()
    model.zero_grad()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of each")
    options = parser.parse_args()
    # Wide enough that matrix products take most of the time, and quick to build.
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    models: dict[BaseCode, CausalDecoder] = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        for code in CODES:
            models[code] = make_decoder(Path(folder), code)
    tokens = torch.randint(0, config.vocab_size, (4, 256))
    least = dict.fromkeys(models, float("inf"))
    for _ in range(options.steps):
        for code, model in models.items():
            least[code] = min(least[code], step_seconds(model, tokens))
    ratio = least["transformers"] / least["native"]
    for code, seconds in least.items():
        print(f"{code}: {1e3 * seconds:.0f} ms a step")
    print(f"hosted / native: {ratio:.2f}")


if __name__ == "__main__":
    main()

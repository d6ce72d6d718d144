"""The time of a training step beside a hosted base, relative to the native family.

    python -m benchmarks.hosted_step

Both decoders have the same Llama as base and an expansion of the same widths. They take turns, and the
least processor time of each counts, so that other load on the machine hardly does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.method import ScaleMethod
from pipeline.hosted.bases import build_decoder, load_base, open_base
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import is_base
from pipeline.scale.plan import plan_expansion

METHOD = ScaleMethod.model_validate(
    {
        "name": "scale",
        "variant": "adapt",
        "l_fp": 2,
        "collaborative_modules": "both",
        "expansion": {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2},
    }
)


def make_decoder(folder: Path, code: str) -> CausalDecoder:
    """The base in `folder`, widened; `code` as the setting `base_code`."""
    base = open_base(folder, "native" if code == "native" else "transformers")
    plan = plan_expansion(METHOD, base.spec.widths, base.spec.num_layers)
    model = build_decoder(base.spec, plan)
    load_base(model, base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_base(name))
        if not is_base(name):
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def step_seconds(model: CausalDecoder, tokens: torch.Tensor) -> float:
    """The processor seconds, over all threads, of a forward and a backward pass."""
    started = time.process_time()
    model(tokens, tokens).total.backward()
    model.zero_grad()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of each")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    with tempfile.TemporaryDirectory() as name:
        LlamaForCausalLM(config).save_pretrained(name)
        models = {code: make_decoder(Path(name), code) for code in ("native", "transformers")}
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

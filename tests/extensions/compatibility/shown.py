"""Which test shows that two features of `scale-cpt combinations` work together.

The matrix of training runs (`tests/training/journeys.py`) shows most pairs. Two features need no
run of each pair: a gate is fitted to a checkpoint, whose parameters are the same at every layout,
and `init_expansion` names another folder of what every run reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pipeline.extensions.compatibility.features import METHODS, SETTINGS
from tests.training.journeys import JOURNEYS, Journey
from tests.training.journeys import METHODS as METHODS_OF_JOURNEYS

OPEN_WEIGHTS = ("open rows", "open gains", "low rank")
EXPERTS_OVER_RANKS = "experts over ranks"
"""It needs a mixture, and so is not among `all`."""
NOT_TRIED = (
    "vocabulary",
    "gate",
    *OPEN_WEIGHTS,
    "asynchronous",
    "muon",
    "init_expansion",
)
"""What no test has tried together with experts over ranks; the head of docs/combinations.md says
so."""
GROUPS: dict[str, tuple[str, ...]] = {
    "methods": tuple(METHODS),
    "SCALE": ("preserve", "adapt", "route"),
    "layouts": ("ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel", "sequence parallel"),
    "open weights": OPEN_WEIGHTS,
    "all": (
        *METHODS,
        *(name for name in SETTINGS if name != EXPERTS_OVER_RANKS),
        "mixture",
        "widened",
    ),
}
IN_JOURNEYS: dict[str, tuple[str, Any]] = {
    **{name: ("method", name) for name in METHODS_OF_JOURNEYS},
    **{f"ZeRO-{stage}": ("zero", stage) for stage in (1, 2, 3)},
    "sequence parallel": ("sequence_parallel", True),
    "vocabulary": ("vocabulary", True),
    "self-generated text": ("replay_loss", "kl"),
    **dict.fromkeys(OPEN_WEIGHTS, ("own_weights", True)),
    "fp8": ("base_precision", "fp8"),
    "nf4": ("base_precision", "nf4"),
    "norm: base": ("norm", "base"),
    "recomputing": ("activation_checkpointing", "all"),
    "asynchronous": ("asynchronous", True),
    "muon": ("optimizer", "muon"),
}
"""The setting of a journey, and its value, that a feature is."""
MATRIX = "tests/training/test_journeys.py::test_it_resumes_to_the_bit"

SHOWN: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (("all",), ("all",), MATRIX),
    (
        ("nf4",),
        ("tensor parallel", "sequence parallel"),
        "tests/model/test_tensor_parallel.py::test_ranks_compute_what_one_process_computes",
    ),
    (
        ("gate",),
        ("SCALE",),
        "tests/extensions/gate/test_exactness.py::test_a_gate_that_never_opens_leaves_the_base",
    ),
    (
        ("gate",),
        ("fft",),
        "tests/extensions/full_difference/test_gate.py::test_it_is_trained_gated_exported_and_evaluated",
    ),
    (
        ("gate",),
        ("lora",),
        "tests/model/test_open_weights.py::test_the_base_stays_and_open_tokens_change",
    ),
    (
        ("gate",),
        ("vocabulary",),
        "tests/extensions/gate/test_new_pieces.py::test_a_run_with_a_vocabulary_keeps_the_base_through_training_conversion_and_generation",
    ),
    (
        ("gate",),
        ("self-generated text",),
        "tests/extensions/gate/test_fit_run.py::test_text_that_the_base_wrote_is_taken_before_text_that_is_replayed",
    ),
    (
        ("gate",),
        ("norm: base", "fp8", "nf4"),
        "tests/extensions/gate/test_fit_run.py::test_the_gate_keeps_the_old_text_and_opens_for_the_new",
    ),
    (
        ("gate",),
        ("layouts", "recomputing", "asynchronous", "compile", "init_expansion"),
        "tests/checkpoint/test_rank_files.py::test_every_parameter_and_moment_is_read_back",
    ),
    (("gate",), ("muon",), "tests/training/test_journeys.py::test_it_is_exported_as_it_trained"),
    (
        ("open weights",),
        ("gate",),
        "tests/extensions/gate/test_own_weights.py::test_it_is_trained_gated_exported_and_evaluated",
    ),
    (
        ("open weights",),
        ("vocabulary",),
        "tests/extensions/gate/test_new_pieces.py::test_own_rows_of_old_tokens_stand_beside_the_rows_of_new_ones",
    ),
    (
        ("open weights",),
        ("mixture",),
        "tests/conversion/test_own_weights.py::test_logits_are_those_of_the_trained_model",
    ),
    (("open weights",), ("compile",), "tests/model/test_compile.py::test_every_feature_compiles"),
    (
        ("open weights",),
        ("init_expansion",),
        "tests/conversion/test_own_weights.py::test_an_expansion_carries_them",
    ),
    (
        ("open weights",),
        ("widened",),
        "tests/conversion/test_own_weights.py::test_a_base_that_was_widened_before",
    ),
    (
        ("compile",),
        ("SCALE", "nf4"),
        "tests/model/test_compile.py::test_layers_are_compiled_once_for_all_batches",
    ),
    (
        ("compile",),
        (
            "fft",
            "lora",
            "llama_pro",
            "freeze",
            "vocabulary",
            "self-generated text",
            "fp8",
            "norm: base",
            "recomputing",
        ),
        "tests/model/test_compile.py::test_every_feature_compiles",
    ),
    (
        ("compile",),
        ("tensor parallel", "sequence parallel"),
        "tests/model/test_compile.py::test_ranks_compile",
    ),
    (
        ("compile",),
        ("ZeRO-1", "ZeRO-2", "asynchronous", "muon", "init_expansion", "widened"),
        "tests/conversion/test_second_round.py::test_a_compiled_run_of_either_kind_resumes",
    ),
    (
        ("init_expansion",),
        ("all",),
        "tests/training/test_journeys.py::test_a_second_expansion_starts_from_an_exported_one_of_the_same_tokens",
    ),
    (
        ("mixture",),
        (
            "methods",
            "layouts",
            "self-generated text",
            "nf4",
            "norm: base",
            "recomputing",
            "asynchronous",
            "muon",
            "init_expansion",
        ),
        "tests/training/test_mixture.py::test_it_resumes_to_the_bit_from_its_base",
    ),
    (
        ("mixture",),
        ("vocabulary",),
        "tests/model/test_new_tokens.py::test_loss_and_gradients_equal_plain_cross_entropy",
    ),
    (
        ("mixture",),
        ("fp8",),
        "tests/model/test_tensor_parallel.py::test_ranks_compute_what_one_process_computes",
    ),
    (
        ("mixture",),
        ("gate",),
        "tests/extensions/gate/test_exactness.py::test_a_gate_that_never_opens_leaves_the_base",
    ),
    (
        ("widened",),
        ("methods",),
        "tests/conversion/test_second_round.py::test_every_method_trains_on_top_and_is_exported_again",
    ),
    (
        ("widened",),
        ("mixture",),
        "tests/conversion/test_formats.py::test_what_transformers_loads_is_the_model_that_trained",
    ),
    (
        ("widened",),
        ("gate", "vocabulary"),
        "tests/extensions/gate/test_new_pieces.py::test_the_next_run_extends_the_first_ones_export_again",
    ),
    (
        ("widened",),
        ("muon",),
        "tests/conversion/test_second_round.py::test_a_compiled_run_of_either_kind_resumes",
    ),
    (
        ("widened",),
        (
            "layouts",
            "self-generated text",
            "fp8",
            "nf4",
            "norm: base",
            "recomputing",
            "asynchronous",
        ),
        "tests/conversion/test_second_round.py::test_it_is_a_base_like_any_other",
    ),
    (
        ("experts over ranks",),
        ("preserve", "adapt", "route", "lora"),
        "tests/training/test_expert_parallel.py::test_it_trains_as_with_all_experts_on_every_rank",
    ),
    (
        ("experts over ranks",),
        ("ZeRO-1", "ZeRO-2", "ZeRO-3"),
        "tests/training/test_expert_parallel.py::test_it_trains_as_with_all_experts_on_every_rank",
    ),
    (
        ("experts over ranks",),
        ("tensor parallel", "sequence parallel"),
        "tests/model/test_expert_parallel.py::test_every_layout_computes_what_one_process_computes",
    ),
    (
        ("experts over ranks",),
        ("nf4", "recomputing", "self-generated text"),
        "tests/training/test_expert_parallel.py::test_it_trains_as_with_all_experts_on_every_rank",
    ),
    (
        ("experts over ranks",),
        ("fp8", "norm: base"),
        "tests/model/test_expert_parallel.py::test_every_layout_computes_what_one_process_computes",
    ),
]


def shown_pairs() -> dict[frozenset[str], str]:
    """The test that shows each pair of features, the last one named."""
    shown: dict[frozenset[str], str] = {}
    for these, those, test in SHOWN:
        for pair in itertools.product(_spelled_out(these), _spelled_out(those)):
            # The matrix is named for groups of settings: it shows the pairs that a row has.
            if test != MATRIX or any(_is_in(journey, pair) for journey in JOURNEYS):
                shown[frozenset(pair)] = test
    return shown


def _spelled_out(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        yield from GROUPS.get(name, (name,))


def _is_in(journey: Journey, pair: tuple[str, ...]) -> bool:
    """Whether a row of the matrix has all these features."""
    for name in pair:
        if name == "tensor parallel":
            has_it = journey.layout.tp_size > 1
        else:
            setting, value = IN_JOURNEYS.get(name, ("method", None))
            has_it = getattr(journey, setting) == value
        if not has_it:
            return False
    return True

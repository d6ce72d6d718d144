"""What `pipeline.training.deepspeed_internals` replaces in DeepSpeed exists: a new version would ignore it in silence.

Attributes that are only read need no test of their own: a run without them ends in an AttributeError.
"""

from __future__ import annotations

import inspect

import deepspeed
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine


def test_what_is_replaced_exists():
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert "self._copy_recovery_script(save_path)" in inspect.getsource(deepspeed.DeepSpeedEngine)
    assert "self.checkpoint_engine.save(" in inspect.getsource(deepspeed.DeepSpeedEngine)
    assert "self._zero_init_param(param)" in inspect.getsource(deepspeed.zero.Init)
    assert list(inspect.signature(TorchCheckpointEngine.save).parameters) == ["self", "state_dict", "path"]

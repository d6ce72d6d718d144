"""What `pipeline.training.deepspeed_internals` replaces in DeepSpeed exists: a new version would ignore it in silence.

Attributes that are only read need no test of their own: a run without them ends in an AttributeError.
"""

from __future__ import annotations

import inspect

import deepspeed


def test_what_is_replaced_exists():
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert "self._zero_init_param(param)" in inspect.getsource(deepspeed.zero.Init)

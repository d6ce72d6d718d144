"""All uses of DeepSpeed's undocumented attributes, but for the shape that ZeRO-3 gives a parameter,
which `pipeline.parallel.parameters` reads.

Tried with DeepSpeed 0.19.8. The tests of training and conversion check that each attribute still
means the same.
"""

from __future__ import annotations

import logging
import warnings

# DeepSpeed calls torch's collectives by names that torch is about to retire.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a record of DeepSpeed's is more than that it does not know an optimizer.

    It warns of each optimizer that is not its own, such as Muon, and says nothing a user could do.
    """
    return "untested optimizer" not in record.getMessage()


logging.getLogger("DeepSpeed").addFilter(_is_of_use)

"""Imported by a fork server before anything else.

Python ends a fork server only when all of its workers have ended, however they hang; the kernel ends it at once.
"""

from __future__ import annotations

from pipeline.data.workers import end_with_parent

end_with_parent()

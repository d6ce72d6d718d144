"""All tests here run on one thread."""

from __future__ import annotations

import pytest

from tests import threads


@pytest.fixture(scope="package", autouse=True)
def one_thread_in_this_package():
    with threads.one_thread():
        yield

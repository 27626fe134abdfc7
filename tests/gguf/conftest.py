"""Without the packages that write and read GGUF there is nothing to test."""

from __future__ import annotations

import pytest
from forks import prove_in_forks

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


@pytest.fixture(scope="session", autouse=True)
def _proofs_in_forks() -> None:
    prove_in_forks()

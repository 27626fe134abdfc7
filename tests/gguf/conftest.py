"""Without the packages that write and read GGUF there is nothing to test."""

from __future__ import annotations

import pytest
from forks import prove_in_forks

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

_proofs_in_forks = pytest.fixture(scope="session", autouse=True)(prove_in_forks)

"""Without the packages that write and read GGUF there is nothing to serve."""

from __future__ import annotations

import pytest
from forks import prove_in_forks

for _package in ("gguf", "xllamacpp", "openai"):
    pytest.importorskip(_package)

_proofs_in_forks = pytest.fixture(scope="session", autouse=True)(prove_in_forks)

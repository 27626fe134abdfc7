"""What ``finalize`` writes is loaded in forks here, too, where it is called as a function."""

from __future__ import annotations

import pytest
from forks import prove_in_forks

_proofs_in_forks = pytest.fixture(scope="session", autouse=True)(prove_in_forks)

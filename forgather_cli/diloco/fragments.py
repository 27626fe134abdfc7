"""Which parameters are exchanged together where a model is sent in fragments (Streaming DiLoCo, arXiv:2501.18512)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from forgather_cli.errors import SetupError

Shapes = Mapping[str, tuple[int, ...]]
"""Full shapes of the trainable parameters, by full name."""


def fragments(shapes: Shapes, count: int) -> list[frozenset[str]]:
    """The names of each fragment: layer i is in fragment i mod ``count``, what is in no layer in the smallest one.

    Server and workers divide alike. Raises SetupError where the model has too few parameters for so many.
    """
    found: list[set[str]] = [set() for _ in range(count)]
    layers = {name: next((part for part in name.split(".") if part.isdecimal()), None) for name in sorted(shapes)}
    for name, layer in layers.items():
        if layer is not None:
            found[int(layer) % count].add(name)
    for name in sorted((name for name in layers if layers[name] is None), key=lambda name: -math.prod(shapes[name])):
        min(found, key=lambda names: sum(math.prod(shapes[each]) for each in names)).add(name)
    if not all(found):
        raise SetupError(
            f"diloco.num_fragments: this model cannot be sent in {count} parts, got {count}; choose at most its "
            "number of layers"
        )
    return [frozenset(names) for names in found]

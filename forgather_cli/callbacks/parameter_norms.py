"""ParameterNormLogger: L2 and spectral norm of every parameter, whose rows may be spread over ranks.

Legend: M matrices, C columns of the widest, K steps.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.config.schema import ParameterNormSettings
from forgather_cli.errors import ConfigError
from forgather_cli.shards import box_of, local

logger = logging.getLogger(__name__)

_NOTHING_LEFT = 1e-6  # of the largest value seen: what remains of a vector in fp32 when its directions are used up


class ParameterNormLogger(BuiltIn[ParameterNormSettings]):
    """Writes the L2 norms of the full parameters, and the spectral norms of those that are matrices, at each
    evaluation to ``parameter_norms.jsonl``.

    Spectral norms take ``power_iter_steps`` steps from where the last evaluation ended, the first time twice as many.
    Where they ended is part of the checkpoint, and serves under every strategy.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError if there is nothing to write."""
        super().__init__(*args, **kwargs)
        if not (self.settings.log_norms or self.settings.log_spectral_norms):
            raise ConfigError(
                "callbacks.parameter_norms: log_norms and log_spectral_norms are both false, got nothing to log; set "
                "one of them to true or leave the callback out (~callbacks.parameter_norms)"
            )
        self._parameters: FullParameters | None = None
        self._spectral: SpectralNorms | None = None
        self._vectors: dict[str, Tensor] = {}  # where the next measurement begins, until there are spectral norms
        self._is_warm = False

    @cached_property
    def _file(self) -> RecordFile:
        return RecordFile(self.run.parameter_norms)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begin(kwargs["trainer"])
        if state.is_world_process_zero:
            self._file.begin(state.resumed_step)
            if args.eval_strategy == "no" and not args.eval_on_save:
                logger.warning("parameter_norms: written at evaluations, of which eval_strategy=no leaves none")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._parameters is None:  # an evaluation without training
            self._begin(kwargs["trainer"])
        values = self._measure()
        if state.is_world_process_zero:
            self._file.add(values, step=state.global_step, epoch=state.epoch)

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.abandon(state.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"vectors": self._vectors if self._spectral is None else self._spectral.vectors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._vectors = state["vectors"]
        if self._spectral is not None:
            self._is_warm = self._spectral.load(self._vectors)

    def _begin(self, trainer: Any) -> None:
        """Collective."""
        self._parameters = FullParameters(trainer)
        if self.settings.log_spectral_norms:
            self._vectors = self.state_dict()["vectors"]
            self._spectral = SpectralNorms(self._parameters)
            self._is_warm = self._spectral.load(self._vectors)

    def _measure(self) -> dict[str, dict[str, float]]:
        """Collective. The norms by name."""
        assert self._parameters is not None
        found: dict[str, tuple[list[str], Tensor]] = {}
        if self.settings.log_norms:
            found["norms"] = list(self._parameters.shapes), self._parameters.weights().sqrt_()
        if self._spectral is not None:
            steps = self.settings.power_iter_steps
            found["spectral_norms"] = (
                self._spectral.names,
                self._spectral.measure(steps if self._is_warm else 2 * steps),
            )
            self._is_warm = True
        numbers = iter(torch.cat([values for _, values in found.values()]).tolist())
        return {key: {name: next(numbers) for name in names} for key, (names, _) in found.items()}


class SpectralNorms:
    """Power iteration on W^T W for all matrices at once, each from the vector where the last measurement ended.

    A step multiplies by W and W^T and sums one buffer over ranks, which is all that W's rows have to do with each
    other. The iterates of a measurement are combined as Lanczos (1950) does (Golub & Van Loan, Matrix Computations,
    10.1): from the same products 20 steps come within 0.1 % of a random matrix's norm, where the last iterate alone
    is 2 % off. They are kept meanwhile: K x M x C x 4 bytes.
    """

    def __init__(self, parameters: FullParameters) -> None:
        shapes = [(place, name, shape) for place, (name, shape) in enumerate(parameters.shapes.items())]
        matrices = [(place, name, shape[1]) for place, name, shape in shapes if len(shape) == 2 and min(shape) > 0]
        rows = {place: row for row, (place, _, _) in enumerate(matrices)}
        self._parameters = parameters
        self._columns = {name: columns for _, name, columns in matrices}
        self._held = [(rows[place], p) for place, p in parameters.held if place in rows]
        cut = [place for place, name, _ in matrices if name in parameters.cut_by_columns]
        self._cut = {rows[place]: n for n, place in enumerate(cut)}
        """The matrices of which no rank holds whole rows, and their number among these."""
        self._longest = max((shapes[place][2][0] for place in cut), default=0)
        self._vectors: Tensor | None = None  # (M, C), rows of length 1, zeros behind a matrix's columns

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @torch.no_grad()
    def measure(self, steps: int) -> Tensor:
        """Collective. Spectral norms, (M,) float64 on the device; NaN for a matrix that is not finite."""
        start = self._start()
        basis = start.new_zeros(steps, *start.shape)  # (K, M, C), orthonormal for each matrix
        diagonal, beside = start.new_zeros(steps, len(start)), start.new_zeros(steps, len(start))
        vector = start
        for step in range(steps):
            basis[step] = vector
            product = self._multiplied(vector)
            diagonal[step] = (vector * product).sum(1)
            for _ in range(
                2
            ):  # rounding left by a single pass grows (Giraud et al. 2005, doi 10.1007/s00211-005-0615-4)
                overlap = torch.einsum("kmc,mc->km", basis[: step + 1], product)
                product -= torch.einsum("kmc,km->mc", basis[: step + 1], overlap)
            beside[step] = torch.linalg.vector_norm(product, dim=1)
            goes_on = beside[step] > _NOTHING_LEFT * diagonal[: step + 1].amax(0)
            vector = torch.where(goes_on[:, None], product / beside[step][:, None], 0)
            beside[step] *= goes_on
        squares, directions = _largest(diagonal.double(), beside.double())
        found = torch.einsum("kmc,mk->mc", basis, directions.to(basis))
        lengths = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        self._vectors = torch.where(lengths > 0.5, found / lengths, start)  # a matrix of zeros or NaN has none
        return squares.sqrt()

    def _multiplied(self, vectors: Tensor) -> Tensor:
        """Collective. W^T W times each matrix's vector, (M, C)."""
        products = torch.zeros_like(vectors)
        of_cut = vectors.new_zeros(len(self._cut), self._longest)
        for row, parameter in self._held:
            if row in self._cut:  # W's rows times the vector are sums over the ranks that hold their columns
                rows, columns = box_of(parameter).slices
                of_cut[self._cut[row], rows] = local(parameter).float() @ vectors[row, columns]
        if self._cut:
            self._parameters.whole(of_cut)
        for row, parameter in self._held:
            matrix, (rows, columns) = local(parameter).float(), box_of(parameter).slices
            product = of_cut[self._cut[row], rows] if row in self._cut else matrix @ vectors[row, columns]
            products[row, columns] = matrix.T @ product
        return self._parameters.whole(products)

    def _start(self) -> Tensor:
        if self._vectors is None:
            self.load({})
        assert self._vectors is not None
        return self._vectors

    def load(self, vectors: Mapping[str, Tensor]) -> bool:
        """Begin at these vectors, by name; at random ones, equal on all ranks, where one is missing or does not fit.

        True if all were there.
        """
        filled = torch.zeros(len(self._columns), max(self._columns.values(), default=0))
        complete = True
        for row, (name, columns) in zip(filled, self._columns.items(), strict=True):
            vector = vectors.get(name)
            if vector is None or vector.shape != (columns,):
                complete = False
                vector = torch.randn(columns, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
                vector /= torch.linalg.vector_norm(vector)
            row[:columns] = vector
        self._vectors = filled.to(self._parameters.device)
        return complete

    def vectors(self) -> dict[str, Tensor]:
        """Where the next measurement begins, by name, on the host; equal on all ranks. Empty before the first."""
        if self._vectors is None:
            return {}
        rows = zip(self._vectors.cpu(), self._columns.items(), strict=True)
        return {name: row[:columns].clone() for row, (name, columns) in rows}


def _largest(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue (M,) and its eigenvector (M, K) of tridiagonal matrices, whose diagonals are (K, M).

    NaN and a zero vector for one that is not finite, which ``eigh`` refuses.
    """
    tridiagonal = torch.diag_embed(diagonal.T)
    for offset in (-1, 1):
        tridiagonal += torch.diag_embed(beside[:-1].T, offset)
    finite = tridiagonal.isfinite().all(2).all(1)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], tridiagonal, 0))
    largest = torch.where(finite, values[:, -1].clamp(min=0), torch.nan)
    return largest, torch.where(finite[:, None], vectors[:, :, -1], 0)

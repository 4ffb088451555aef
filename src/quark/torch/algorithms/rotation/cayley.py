"""Steps on orthogonal matrices, by the Cayley transform.

    Y = G R^T - R G^T, halved                  G = dL/dR; Y is skew-symmetric
    R <- (I + t/2 Y)^-1 (I - t/2 Y) R          orthogonal for every t, and downhill for small ones
    t = rate / ||Y||_1                         rate 1 is the longest step that the paper takes

Li et al. 2020 (arXiv:2002.01113); SpinQuant, Liu et al. 2024 (arXiv:2405.16406), equations 3 and 4. The length of a
step does not depend on the scale of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quark.core.solvers.hadamard import Rotation


def cayley_step(matrix: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
    """The next matrix.

    Args:
        matrix: R, float64, (n, n), orthogonal.
        gradient: G, of what is made smaller.
        rate: Length of the step, between 0 and 1.
    """
    half = 0.5 * gradient.to(matrix) @ matrix.T
    skew = half - half.T
    step = rate / skew.abs().sum(0).max().clamp(min=torch.finfo(torch.float32).tiny)
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    # The eigenvalues of I + t/2 Y have the real part 1, so nothing is to be checked, for which a device is waited for.
    left, right = identity + step / 2 * skew, (identity - step / 2 * skew) @ matrix
    turned: torch.Tensor = torch.linalg.solve_ex(left, right)[0]
    return turned


@dataclass(frozen=True)
class MatrixRotation:
    """x Q along the last axis, block by block, for a Q that was learned.

    Attributes:
        matrix: Q, orthogonal, (size, size).
    """

    matrix: torch.Tensor

    def apply(self, x: Any) -> Any:
        """Return x Q in the dtype of x."""
        return in_blocks(x, self.matrix.to(x.device, x.dtype))


def in_blocks(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """X Q along the last axis, which is a multiple of the rows of Q."""
    return (x.reshape(-1, len(matrix)) @ matrix).reshape(x.shape)


def keeping_mean(matrix: torch.Tensor) -> torch.Tensor:
    """Q = H diag(1, R) H^T of an R one smaller: the sum of each row vector is left as it is."""
    size = len(matrix) + 1
    basis = torch.from_numpy(Rotation(size).matrix()).to(matrix)  # its first column is constant
    kept, turned = basis[:, :1], basis[:, 1:]
    return kept @ kept.T + turned @ matrix @ turned.T

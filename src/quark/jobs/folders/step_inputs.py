"""Calibration data of a network of diffusers: recorded calls of it, with all their arguments by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import CalibrationError, ConfigError
from quark.torch.model.calibration_data import stored_batches
from quark.torch.model.calibration_data.model_arguments import positional_parameters


@dataclass(frozen=True)
class StepInputs:
    """What a network takes, as `ModelInputs` says it of a model of transformers.

    Attributes:
        model_class: Its class.
        dtype: That it computes in; None: of calls as they were recorded.
    """

    model_class: Any
    dtype: Any = None
    reads_text = False
    taken = "spread evenly over all"

    @property
    def names(self) -> list[str]:
        """The arguments of the network."""
        return [parameter.name for parameter in positional_parameters(self.model_class.forward) or ()][1:]

    def words(self, ids: Sequence[int]) -> list[str]:
        """Raises ConfigError: a network reads no tokens."""
        raise ConfigError(
            f"{self.model_class.__name__} reads no tokens, but the text of {len(ids)} tokens was asked for."
        )

    def read(
        self, data: Path, limit: int, length: int, packing: bool | None = None, seed: int | None = None
    ) -> Sequence[dict[str, Any]]:
        """Recorded calls, of more than `limit` as many as that, spread evenly over all.

        Args:
            data: See `stored_batches`.
            limit: Most calls.
            length, packing: Of texts, which a network does not read.
            seed: Of a choice by chance, which there is none of here.

        Raises:
            CalibrationError: These are no recorded calls of the network.
            ConfigError: An option that says how texts are taken.
        """
        for flag, value in {"--packing": packing, "--seed": seed}.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} does not apply to recorded steps, which are taken evenly. Possible: leave it out."
                )
        if data.suffix != ".npz" and not data.is_dir():
            raise CalibrationError(
                f"{data} has no recorded steps of {self.model_class.__name__} ({', '.join(self.names[:4])} ...). "
                "Possible: a folder of .npz files as quark.torch.record_steps writes them, or one .npz file."
            )
        return stored_batches(data, self.model_class, limit, self.dtype)

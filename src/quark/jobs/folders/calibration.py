"""Calibration data of a model folder: `--calib`, how samples are taken, and the text of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.goals.efforts import DEFAULT_TEXT
from quark.jobs.request import LENGTH, SAMPLES, SAMPLES_OF_PACKAGE, FolderRequest

if TYPE_CHECKING:
    from quark.jobs.folders.model_inputs import ModelInputs, StepInputs
    from quark.torch.algorithms import Algorithm


@dataclass(frozen=True)
class Calibration:
    """The options of calibration data.

    Attributes:
        path: A file, a folder, or the name of a dataset; None: none is given.
        samples: Most samples; None: `most`.
        length: Tokens in a sample of text; None: `LENGTH`.
        packing, seed: See `ModelInputs.read`.
        synthetic: How many texts the model writes beside them; None: none.
        asked: Whether these are asked for; else a model that cannot write them does without.
    """

    path: Path | None = None
    samples: int | None = None
    length: int | None = None
    packing: bool | None = None
    seed: int | None = None
    synthetic: int | None = None
    asked: bool = True

    @classmethod
    def of(cls, request: FolderRequest) -> Calibration:
        """Return the options of a request."""
        return cls(request.calib, request.samples, request.length, request.packing, request.seed, request.synthetic)

    @property
    def is_default(self) -> bool:
        """True where the data are the text of the package."""
        return self.path == DEFAULT_TEXT

    @property
    def most(self) -> int:
        """Most samples that are taken."""
        return self.samples or (SAMPLES_OF_PACKAGE if self.is_default else SAMPLES)

    def or_default(self, why: str) -> Calibration:
        """These data, or the text of the package where there are none, which is logged.

        Args:
            why: What needs data: "the algorithm 'gptq'".
        """
        if self.path is not None:
            return self
        logger.info(
            "%s needs calibration data, and no --calib is given: the text of the package is taken. A text like those "
            "that the model will meet serves it better.",
            why[0].upper() + why[1:],
        )
        return replace(self, path=DEFAULT_TEXT)

    def read(self, inputs: ModelInputs | StepInputs) -> Sequence[Any] | None:
        """The samples; None without data. Raises as `ModelInputs.read` does."""
        samples = self.samples_of(inputs)
        if samples is not None:
            logger.info("Calibration data: %s.", self.described(samples, inputs.taken))
        return samples

    def samples_of(self, inputs: ModelInputs | StepInputs) -> Sequence[Any] | None:
        """The samples, without a log line; None without data. Raises as `ModelInputs.read` does."""
        if self.path is None:
            given = {
                "--samples": self.samples, "--length": self.length, "--packing": self.packing, "--seed": self.seed,
                "--synthetic": self.synthetic,
            }  # fmt: skip
            for flag, value in given.items():
                if value is not None:
                    raise ConfigError(f"{flag} describes calibration data, but none are given. Possible: --calib.")
            return None
        if self.length is not None and "input_ids" not in inputs.names:
            raise ConfigError(
                f"--length counts tokens, and {inputs.model_class.__name__} takes no tokens. Possible: leave it out."
            )
        if self.is_default and not inputs.reads_text:
            raise CalibrationError(
                f"{inputs.model_class.__name__} needs calibration data, and takes no text such as the package has: "
                "pass --calib, a folder of images or audio, or arrays by name (.npz)."
            )
        return inputs.read(self.path, self.most, self.length or LENGTH, packing=self.packing, seed=self.seed)

    def with_synthetic(self, model: Any, samples: Sequence[Any] | None) -> Sequence[Any] | None:
        """The samples, followed by what the float model writes; raises as `synthetic_batches` does."""
        if self.synthetic is None or samples is None:
            return samples
        from quark.torch.calibration.synthetic_data import synthetic_batches

        try:
            return [*samples, *synthetic_batches(model, samples, self.synthetic, self.seed or 0)]
        except (CalibrationError, NotSupportedError) as error:
            if self.asked:
                raise
            logger.warning("Without texts of the model's own: %s", error)
            return samples

    def joined(
        self, model: Any, samples: Sequence[Any] | None, algorithms: Sequence[Algorithm]
    ) -> Sequence[Any] | None:
        """The samples, those that are not packed several to a batch where that changes no result.

        Args:
            model: The float model, which reads them.
            samples: Of `read`.
            algorithms: What else reads them. One that draws batches, or learns from what the model says of a next
                token, gets a sample at a time.
        """
        if self.packing is not False or samples is None or any(a.learns or not a.sums for a in algorithms):
            return samples
        from quark.torch.model.calibration_data import joined_texts

        batches = joined_texts(model, samples, self.length or LENGTH)
        if batches is None or len(batches) == len(samples):
            return samples
        logger.info("%d samples run in %d batches; each is read alone.", len(samples), len(batches))
        return batches

    def described(self, samples: Sequence[Any], taken: str) -> str:
        """Return the samples in words.

        Args:
            samples: Of `samples_of`.
            taken: Which of all they are where no seed chose them; `ModelInputs.taken`.
        """
        name = "the text of the package" if self.is_default else str(self.path)
        lengths = _lengths(samples)
        packed = ""
        if lengths and not isinstance(samples[0], dict):  # windows of text; arguments by name are samples as they are
            whole = min(lengths) == max(lengths) and (len(lengths) > 1 or lengths[0] == (self.length or LENGTH))
            packed = ", not packed" if self.packing is False else ", packed" if whole else ""
        taken = taken if self.seed is None else f"by chance (seed {self.seed})"
        written = "" if self.synthetic is None else f", and {self.synthetic} that the model writes"
        return f"{name}, {counted(samples)}{packed}, {taken}{written}"


NO_DATA = Calibration()
"""Where nothing is said of data."""


def counted(samples: Sequence[Any]) -> str:
    """How many samples there are, and of how many tokens: "1 sample of 256 tokens"."""
    from quark.torch.llm.answers import AnsweredTexts  # imports torch: where there are samples, it is loaded

    if isinstance(samples, AnsweredTexts):
        return str(samples)
    number, lengths = f"{len(samples)} sample{'s' if len(samples) != 1 else ''}", _lengths(samples)
    if not lengths:
        return number
    low, high = min(lengths), max(lengths)
    return f"{number} of {high} tokens" if low == high else f"{number} of {low} to {high} tokens"


def _lengths(samples: Sequence[Any]) -> list[int]:
    """The token ids of each sample that has some."""
    ids: list[Any] = [sample.get("input_ids") if isinstance(sample, dict) else sample for sample in samples]
    return [int(x.shape[-1]) for x in ids if getattr(x, "ndim", 0) == 2 and not x.is_floating_point()]

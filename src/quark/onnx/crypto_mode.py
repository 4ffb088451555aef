"""CryptoMode: a model comes as a ModelProto, goes as one, and leaves nothing in clear on the disk or in the log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx

from quark.base.files import check_file
from quark.base.log import logger, severity
from quark.base.telemetry import onnxruntime_is_silent
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import all_in_memory
from quark.onnx.config.settings import Settings
from quark.onnx_ops.encryption import KEY_VARIABLE, environment_key, save_encrypted

ERROR = 3


def check_crypto(source: Any, output: Any, settings: Settings) -> None:
    """Refuse what would put something about the model on the disk, and an output that cannot be written.

    Raises:
        ConfigError: The model is no ModelProto, an option writes a file, or ONNX Runtime may do so.
    """
    if not onnxruntime_is_silent():
        raise ConfigError(
            "CryptoMode=True keeps everything about the model off the disk; ONNX Runtime, its telemetry on, writes "
            "texts of errors to it. Possible: ORT_DISABLE_TELEMETRY=1, which is another value here."
        )
    if not isinstance(source, onnx.ModelProto):
        raise ConfigError(f"CryptoMode=True takes an onnx.ModelProto, got {type(source).__name__}.")
    writes = {
        "use_external_data_format": settings.external_data,
        "Statistics": settings.calibration.statistics,
        "preprocessed_model_path": settings.prepared_file,
        "SaveTensorHistFig": settings.calibration.figures,
        "SaveAndRestore": settings.calibration.range_file,
        **{
            f"{type(algorithm).__name__}.{name}": getattr(algorithm, name, None)
            for algorithm in settings.algorithms
            for name in ("cache_dir", "sensitivity_cache_file")
        },
    }
    for name, value in writes.items():
        if value:
            raise ConfigError(f"CryptoMode=True keeps everything about the model off the disk; {name} writes to it.")
    if output is not None and _encrypts(settings):
        check_file(output, overwrite=True)


@contextmanager
def discreet(settings: Settings) -> Iterator[None]:
    """In crypto mode: nothing but errors is logged, and all activations stay in memory."""
    if not settings.crypto:
        yield
        return
    with severity(ERROR), all_in_memory():
        yield


def write_encrypted(model: onnx.ModelProto, output: str | os.PathLike[str], settings: Settings) -> None:
    """Write the output of crypto mode, where there is an algorithm and a key."""
    if _encrypts(settings):
        save_encrypted(model, output)
    else:
        logger.warning(
            f"CryptoMode: {output} is not written, the model is returned. "
            f"To write it encrypted: EncryptionAlgorithm='AES-256', and a key in {KEY_VARIABLE}."
        )


def _encrypts(settings: Settings) -> bool:
    return settings.encrypt and environment_key() is not None

"""Models of several configurations, each made, compared with the float one and gone: in memory, or block by block."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quark.base.files import scratch_folder
from quark.jobs.folders.compared.measure import FolderComparison, compare_outputs
from quark.jobs.folders.compared.pairs import open_pair
from quark.jobs.folders.export import Export
from quark.jobs.folders.models import load_model, open_folder
from quark.jobs.request import Loading
from quark.jobs.words import GGUF
from quark.torch import ModelQuantizer
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.flows.compared.coded_layers import coded_layers
from quark.torch.flows.from_disk import stream
from quark.torch.flows.parted import PartedModel
from quark.torch.model.passes import prepare


class Candidates:
    """The quantized models of one float model.

    Args:
        folder: Of the float model.
        loading: How it is loaded.
        streams: Whether a block of it is in memory at a time; a quantized model lies in the place for temporary files
            then, until it is compared.
    """

    def __init__(self, folder: OpenedFolder, loading: Loading, streams: bool) -> None:
        self.folder, self.loading, self.streams = folder, loading, streams

    @cached_property
    def before(self) -> PartedModel:
        """The float model in memory."""
        return PartedModel(load_model(self.folder, self.loading, dequantize=True))

    def compared(
        self, config: QConfig, form: str, samples: Sequence[Any] | None, batches: Sequence[Any]
    ) -> FolderComparison:
        """How near the model that a configuration makes is to the float one.

        Args:
            config: The configuration.
            form: The format that it is for.
            samples: Calibration data.
            batches: What both run on.

        Raises:
            QuarkError: The configuration does not fit the model, or needs data.
        """
        if not self.streams:
            quantizer = ModelQuantizer(config)
            made = load_model(self.folder, self.loading, dequantize=True)
            after = quantizer.freeze(quantizer.quantize_as_planned(made, samples))
            prepare(self.before.model, coded_layers(after).__contains__)
            return compare_outputs(self.before, PartedModel(after), batches)
        with scratch_folder(Path(tempfile.gettempdir())) as place:
            path = place / ("candidate.gguf" if form == GGUF else "candidate")
            target = Export(self.folder.path, path, form, "real_quantized", "reorder", "5GB", force=False).target()
            stream(
                config, self.folder, path, samples, device=self.loading.device, target=target,
                keep_unexpected=self.loading.keep_unexpected,
            )  # fmt: skip
            quantized = path if form == GGUF else open_folder(path, self.folder.trust_remote_code)
            pair = open_pair(self.folder, quantized, self.loading, stream=True)
            return compare_outputs(*pair, batches)

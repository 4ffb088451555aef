"""Scales weighed by the second moments of an importance matrix file: no data is needed.

With data, the second moment of each input channel weighs the error of the weights that read it (`ImportanceScale`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.core.checks import naming
from quark.core.solvers.importance import weighted_qparams
from quark.errors import FormatError, NotSupportedError
from quark.gguf import expert_of, read_imatrix
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_weights import weight_quantizer, weight_spec
from quark.torch.algorithms.rounding.fix_scales import chosen_layers, fix_scales
from quark.torch.layers import QuantLayer


class ImportanceScale(Algorithm):
    """Scales under which sum_i E[x_i^2] (w_i - Q(w_i))^2 is least; see `core/solvers/importance.py`.

    A solver named after it (GPTQ) rounds on these scales.
    """

    solves_after_blocks = True

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        layers = chosen_layers(group, block, self.config.inside_layer_modules)
        if layers:
            with naming(", ".join(layers)):
                fix_scales(layers, block, dict.fromkeys(layers, group.mean_square))


class Imatrix(Algorithm):
    """Scales under which sum_i m_i (w_i - Q(w_i))^2 is least, m the mean squares of a file; see `ImatrixConfig`.

    A solver named after it (GPTQ) rounds on these scales.
    """

    reads_inputs: ClassVar[bool] = False

    def prepare(self, model: nn.Module, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
        """Find the moments of each layer that the file speaks of; scales of others are searched as without a file.

        Raises:
            FormatError: The file is none, is of another model, or lacks a layer of the blocks.
        """
        moments = read_imatrix(self.config.file)
        linear = {n: layer for n, layer in layers.items() if isinstance(layer, nn.Linear)}
        found = {n: self._moments(n, cast(Any, x), moments) for n, x in linear.items() if not weight_spec(x).is_cast}
        self._found = {name: rows for name, rows in found.items() if rows is not None}
        logger.info("Scales of %d layers are weighed by %s.", len(self._found), self.config.file)

    def on_weights(self, layers: Mapping[str, QuantLayer]) -> None:
        for name, layer in cast(Mapping[str, Any], layers).items():
            if name in self._found and weight_quantizer(layer).params is None:
                if layer.weight.is_meta:
                    raise NotSupportedError(
                        f"{name} lies on disk by the model's device_map, and is weighed before the first block. "
                        "Possible: a device_map with that part on the CPU, or quark quantize --stream of the folder."
                    )
                importance = torch.from_numpy(self._found[name].copy()).to(layer.weight.device)
                with naming(name):
                    params = weighted_qparams(layer.weight.detach(), importance, weight_spec(layer))
                    weight_quantizer(layer).store(params)

    def _moments(self, name: str, layer: Any, moments: Mapping[str, NumpyArray]) -> NumpyArray | None:
        """Those of what a layer reads; None where the file has none."""
        file, tensor = self.config.file, self.config.tensors.get(name, name)
        if tensor not in moments:
            if not tensor.startswith("blk."):
                return None  # the head, of which few files speak
            raise FormatError(
                f"{file} has no {tensor!r} ({name}): it was made for another model. It has {list(moments)[:3]}."
            )
        columns, expert = layer.weight.shape[1], expert_of(name) or 0
        rows = moments[tensor].reshape(-1)
        first = expert * columns if rows.size > columns else 0
        if rows.size % columns or first + columns > rows.size:
            raise FormatError(f"{file}: {tensor} has {rows.size} values; {name} reads {columns} columns.")
        return rows[first : first + columns]

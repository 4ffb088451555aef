"""ModelQuantizer: the flow on one page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from quark.base.checked import snapshot
from quark.base.libraries.transformers import is_transformers_model
from quark.base.log import logger, severity
from quark.base.steps import step
from quark.core.names.patterns import unmatched_as_documented
from quark.core.quantize import fake_quantize
from quark.errors import ConfigError, NotSupportedError
from quark.torch.calibration.calibrate import calibrate_activations, calibrate_weights, share_scales
from quark.torch.calibration.distributed import check_devices
from quark.torch.calibration.expert_tokens import ExpertCalibration
from quark.torch.calibration.reached import check_reached
from quark.torch.calibration.surroundings import own_arithmetic
from quark.torch.checkpoint.carried import carried_beside, plan_carried
from quark.torch.checkpoint.opened import OpenedFolder, opened_from
from quark.torch.checkpoint.quantized_before import layers_quantized_before, with_quantized_before
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.config.tensor.enums import QuantFlow, QuantizationMode
from quark.torch.flows.file2file import quantize_files
from quark.torch.flows.replaced import attention_quantized, prepared, replaced
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.cache_rules import check_cache_config
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks.offloading import Offloaded, has_device_map, onloaded
from quark.torch.model.calibration_data import calibration_data
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.tied_weights import overlapping
from quark.torch.plan import Plan, make_plan
from quark.torch.writers.folder import FolderTarget

if TYPE_CHECKING:
    from quark.torch.algorithms import Algorithm
    from quark.torch.kernels.kernel import KernelOptions


class ModelQuantizer:
    """Quantizes a PyTorch model in place.

    Args:
        config: How the layers are quantized. It is copied: the quantizer never changes it, and later changes of yours
            have no effect. The name of a scheme, such as "uint4_wo_128", stands for this scheme for all linear layers
            except the output head and routers.
        multi_device: Accepted for AMD Quark's signature. A model on several devices needs no flag.

    Raises:
        ConfigError: The config is not a `QConfig`, or its fields contradict each other.
        NotSupportedError: The config asks for something that is not part of this version.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        >>> quantizer = ModelQuantizer("int8_wo")
        >>> model = quantizer.freeze(quantizer.quantize_model(model))
        >>> model(torch.randn(2, 128)).shape
        torch.Size([2, 32])
    """

    def __init__(self, config: QConfig | str, multi_device: bool = False) -> None:
        if isinstance(config, str):
            config = LLMTemplate.get("auto").get_config(config)
        if not isinstance(config, QConfig):
            raise ConfigError(f"ModelQuantizer takes a QConfig or the name of a scheme, got {type(config).__name__}.")
        self.config = snapshot(config)
        check_cache_config(self.config)
        _algorithms(self.config)

    @step("Model Quantization")
    def quantize_model(self, model: nn.Module, dataloader: Iterable[Any] | None = None) -> nn.Module:
        """Replace the layers that the config names by quantized ones, and find their scales.

        Args:
            model: A float model in float32, float16 or bfloat16, on any device. Its layers are replaced in place. After
                an error, the model has its float layers again. If an algorithm has changed weights by then, the message
                says so. Layers that are quantized already (of a loaded checkpoint) stay unchanged. In `fx_graph_mode`,
                pass the result of `torch.export.export(...).module()`.
            dataloader: Calibration batches for static activations and for algorithms, None if neither is used. A batch
                is a tensor, such as token ids (samples, tokens) or images (samples, channels, height, width), a dict of
                arguments of `forward`, a BatchEncoding, or a tuple.

        Returns:
            The same model. Its attribute `quant_errors` lists the error of the output of each block before and after
            each algorithm.

        Raises:
            ConfigError: The config does not fit the model. A pattern that matches no layer is a warning.
            ShapeError: A group size does not divide a layer.
            CalibrationError: Calibration data are missing, do not fit the model, or do not reach a layer.
            NonFiniteError: A weight or an activation has NaN or infinity.
            NotSupportedError, StructureError: An algorithm cannot run on this model.
        """
        with unmatched_as_documented():
            return self.quantize_as_planned(model, dataloader)

    def quantize_as_planned(
        self, model: nn.Module, dataloader: Iterable[Any] | None = None, plan: Plan | None = None
    ) -> nn.Module:
        """Quantize as `quantize_model` does, by a plan that was made of the folder of a model of transformers.

        Args:
            model, dataloader: As there.
            plan: Of the same config; None: it is made of the model.

        Raises:
            ConfigError: As there, and for a pattern that matches no layer.
        """
        if self.config.quant_flow is QuantFlow.file2file:
            raise ConfigError("quant_flow=file2file takes no model: call direct_quantize_checkpoint(source, output).")
        in_graph = self.config.quant_mode is QuantizationMode.fx_graph_mode  # which says itself what it takes
        if not in_graph and not isinstance(model, nn.Module):
            raise ConfigError(
                f"quantize_model takes a torch.nn.Module, got {model!r:.60}. A folder: load it with transformers' "
                "from_pretrained, or call direct_quantize_checkpoint(folder, output)."
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigError("A TorchScript module has no layers to replace: give the nn.Module that it was made of.")
        data: Iterable[Any] | None = calibration_data(model, dataloader)
        level = self.config.log_severity_level if self.config.log_severity_level != 1 else None
        # Tensors of inference mode have no versions, by which layers that read one tensor are told.
        with severity(level), torch.inference_mode(False), own_arithmetic():
            if in_graph:
                from quark.torch.graph.quantize import quantize_graph  # with all that graphs need

                return quantize_graph(model, self.config, data)
            if isinstance(model, fx.GraphModule):
                raise ConfigError("This is an exported graph: pass quant_mode=QuantizationMode.fx_graph_mode.")
            algorithms, before = (
                _algorithms(self.config),
                layers_quantized_before(model, self.config.keep_prequantized_layers),
            )
            if algorithms and isinstance(dataloader, Iterator) and data is not None:
                data = list(data)  # read more than once
            with onloaded(model) as offloaded, prepared(model, self.config):
                _refuse_by_place(self.config, model, offloaded, algorithms)
                if plan is None:
                    with offloaded.staying():
                        elsewhere = weights_read_elsewhere(model, data)
                    carried = _carried(self.config, model)
                    plan = make_plan(self.config, model, read_elsewhere=elsewhere, beside=carried)
                    plan = plan_carried(self.config, model, plan, carried)
                if left := plan.without_form(model):
                    logger.info("In float, as these classes have no quantized form: %s.", left)
                with replaced(model, plan) as layers, attention_quantized(model, self.config, plan, layers):
                    self._calibrate(model, layers, algorithms, data, offloaded)
            config, plan = with_quantized_before(_recorded(snapshot(self.config), algorithms), plan, before)
            model.quant_config, model.quant_plan = config, plan  # type: ignore[assignment]
            model.quant_errors = [errors for algorithm in algorithms for errors in algorithm.errors]  # type: ignore[assignment]
            model.quark_quantized = True  # type: ignore[assignment]
            logger.info("Model quantization has been completed.")
        return model

    def _calibrate(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantLayer],
        algorithms: Sequence[Algorithm],
        data: Iterable[Any] | None,
        offloaded: Offloaded,
    ) -> None:
        """Run the algorithms; find the scales of weights and activations."""
        check_reached(model, layers, data)
        groups = sibling_groups(model, self.config.shared_scale_groups)
        # What works block by block costs half a second to import.
        if self.config.quant_flow is QuantFlow.per_block:
            from quark.torch.algorithms.block_weights import blocks_of
            from quark.torch.flows.per_block import OnDevice, quantize_blocks

            mapped = has_device_map(model)
            weights = blocks_of(offloaded) if mapped else OnDevice(model, resident=self.config.gpu_resident_blocks)
            quantize_blocks(model, layers, algorithms, data, self.config, weights)
        elif algorithms:
            from quark.torch.algorithms.block_sweep import sweep
            from quark.torch.algorithms.block_weights import blocks_of

            experts = ExpertCalibration(self.config.sync_moe_expert_input_amax, self.config.calibrate_all_experts)
            sweep(model, layers, algorithms, data, groups, experts, blocks_of(offloaded))
        if offloaded.parts:
            for name, layer in layers.items():
                with offloaded.onloading(name):
                    calibrate_weights({name: layer})
        calibrate_weights(layers)
        share_scales(layers, groups)
        calibrate_activations(model, layers, data, self.config)
        for algorithm in algorithms:
            algorithm.finish(model, layers)

    @staticmethod
    @step("Freeze Model")
    def freeze(
        model: nn.Module, quantize: bool | None = None, runtime_options: KernelOptions | None = None
    ) -> nn.Module:
        """Write the quantized values into the weights and biases, so that a forward no longer quantizes them.

        Args:
            model: A model from `quantize_model`.
            quantize: None or True writes the values. False keeps the float weights and quantizes them in each forward.
                In both cases, learned scales (LSQ, TQT) no longer change.
            runtime_options: The kernels that replace frozen linear layers, as in `accelerate`; None: no kernels.

        Returns:
            The same model. Freezing it twice changes nothing.

        Raises:
            ConfigError: The model has no quantized layer, or `runtime_options` are given with `quantize=False`.
            NotSupportedError: `runtime_options` are given for a graph.
        """
        if runtime_options is not None:
            if not hasattr(runtime_options, "kernels"):
                raise ConfigError(f"runtime_options takes RuntimeOptions(), got {runtime_options!r:.60}.")
            kernels = runtime_options.kernels()
            if isinstance(model, fx.GraphModule):
                raise NotSupportedError("freeze(runtime_options=...) takes no graph: kernels replace layers. Leave it.")
        if isinstance(model, fx.GraphModule):
            from quark.torch.graph.quantize import freeze_graph

            return freeze_graph(model, quantize is not False)
        layers = quantized_layers(model)
        if not layers:
            raise ConfigError("freeze needs a model from quantize_model; this one has no quantized layer.")
        for module in model.modules():
            if isinstance(module, FakeQuantize):
                module.stop_learning()
        if quantize is False:
            if runtime_options is not None:
                raise ConfigError(
                    "freeze(quantize=False, runtime_options=...): kernels compute with quantized weights."
                )
            return model
        with onloaded(model) as offloaded:
            shared = overlapping(x for m in model.modules() for x in (*m.parameters(False), *m.buffers(False)))
            for name, layer in layers.items():
                with offloaded.onloading(name):
                    for role in ("weight", "bias"):
                        _freeze(layer, role, shared)
        if runtime_options is not None:
            from quark.torch.kernels.accelerate import accelerate

            accelerate(model, kernels=kernels)
        return model

    @step("File-to-File Quantization")
    def direct_quantize_checkpoint(
        self,
        pretrained_model_path: str | os.PathLike[str],
        save_path: str | os.PathLike[str],
        keep_excluded_layers_as_original_model_state: bool = False,
        *,
        weight_converters: object | None = None,
        device: str | list[str] | None = None,
        presharded_weights: object | None = None,
        workers: int | None = None,
        overwrite: bool | None = None,
        keep_unexpected: bool = False,
        **options: Any,
    ) -> None:
        """Quantize the files of a checkpoint tensor by tensor, without the model in memory.

        Args:
            pretrained_model_path: Folder of a float, FP8-block or compressed-tensors checkpoint.
            save_path: Folder to write.
            keep_excluded_layers_as_original_model_state: True is not part of this version. Excluded layers are stored
                in the dtype of the model.
            weight_converters, presharded_weights: Not part of this version.
            device: A device or a list of devices that compute; None: the CPU.
            workers: Threads for each device; None: as many as keep it busy.
            overwrite: As for `export_safetensors`.
            keep_unexpected: Copy tensors that the class of the model has no place for.
            options: Of `export_safetensors`: `custom_mode`, `reader`, `weight_format`, `max_shard_size` and others.

        Raises:
            NotSupportedError: The config needs calibration data, or an argument is not part of this version.
            FormatError: A file is missing, damaged, or not of a known checkpoint.
            OutputError: The folder cannot be written, or exists and may not be replaced.
        """
        for name, value in (("weight_converters", weight_converters), ("presharded_weights", presharded_weights)):
            if value is not None:
                raise NotSupportedError(f"direct_quantize_checkpoint({name}=...) is not part of this version.")
        if keep_excluded_layers_as_original_model_state:
            raise NotSupportedError("keep_excluded_layers_as_original_model_state is not part of this version.")
        devices = [device] if isinstance(device, str) else list(device or ["cpu"])
        with unmatched_as_documented():
            quantize_files(
                self.config, OpenedFolder(Path(pretrained_model_path)), Path(save_path), devices=devices,
                workers=workers, overwrite=overwrite, keep_unexpected=keep_unexpected, target=FolderTarget(**options),
            )  # fmt: skip


def _algorithms(config: QConfig) -> list[Algorithm]:
    if not config.algo_config:
        return []
    # Half a second, which is not spent where no algorithm runs.
    from quark.torch.algorithms import algorithms_of

    return algorithms_of(config.algo_config)


def _carried(config: QConfig, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The layers that the folder of a model holds and its class does not build, where a config names layers."""
    named = bool(config.layer_quant_config or config.exclude) and is_transformers_model(model)
    return carried_beside(model, opened_from(model)) if named else {}


def _refuse_by_place(config: QConfig, model: nn.Module, offloaded: Offloaded, algorithms: Sequence[Algorithm]) -> None:
    """Raise for what a model with a device_map cannot have, where it lies as that says; or for a GPU of others."""
    check_devices({parameter.device for parameter in model.parameters()})
    if has_device_map(model) and config.gpu_resident_blocks:
        raise ConfigError(
            "gpu_resident_blocks does not apply to a model with a device_map, which decides itself what stays on a "
            "device. Leave it at 0."
        )
    whole = [algorithm for algorithm in algorithms if algorithm.needs_whole]
    if offloaded.on_disk and whole:
        raise NotSupportedError(
            f"{type(whole[0].config).__name__} needs the whole model in memory, and a part of it lies on disk by its "
            "device_map. Possible: a device_map with that part on the CPU, or an algorithm that works block by block "
            "(GPTQ, AWQ, AutoRound, ...)."
        )


def _freeze(layer: QuantLayer, role: str, shared: set[int]) -> None:
    quantizer = layer.quantizer(role)
    if not isinstance(quantizer, FakeQuantize) or quantizer.mode is not Mode.quantize:
        return
    parameter: nn.Parameter = getattr(layer, role)
    if id(parameter) in shared:
        # A tied weight (lm_head and embedding), or a view of another: only this layer's use of it is quantized.
        parameter = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        setattr(layer, role, parameter)
    data = parameter.detach()
    with torch.no_grad():
        fake_quantize(data, quantizer.params, quantizer.spec, out=data)
    quantizer.mode = Mode.frozen


def _recorded(config: QConfig, algorithms: Sequence[Algorithm]) -> QConfig:
    """The config with what the algorithms did in place of what they were asked for."""
    asked = config.algo_config or []
    done = [algorithm.recorded(each) for algorithm, each in zip(algorithms, asked, strict=True)]
    return replace(config, algo_config=[each for each in done if each is not None] or None)

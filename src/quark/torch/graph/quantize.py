"""Graph mode on one page: prepare the graph, place the quantizers, calibrate; later, freeze.

Masked positions count nowhere in a graph of one length either, whose batches cannot be cut: quantizers see the rows of
real positions, see `quark.core.observers.real_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from quark.core.array import NumpyArray
from quark.core.observers.real_rows import rows_at
from quark.core.quantize import fake_quantize
from quark.errors import ConfigError, NotSupportedError
from quark.torch.calibration.calibrate import calibrate_tensor, calibrate_tensors
from quark.torch.config.config import QConfig
from quark.torch.graph.batch_norm import attribute, fold_batch_norms, put
from quark.torch.graph.operators import DEQUANT_STUB, QUANT_STUB, is_call, remove_inplace
from quark.torch.graph.plan import make_graph_plan
from quark.torch.graph.quantizers.insert_quantizers import QuantizerInserter
from quark.torch.graph.quantizers.kv_cache import insert_caches
from quark.torch.graph.training import PRESERVED, allow_training, drop_counters, keep, set_training
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.model.calibration_data import ModelArguments, real_positions

_HOW = "model = torch.export.export(model.eval(), args).module()"


def quantize_graph(model: nn.Module, config: QConfig, dataloader: Iterable[Any] | None) -> nn.Module:
    """Quantize an exported graph in place; on any error it is as it was. See ModelQuantizer.quantize_model."""
    graph = exported(model)
    refuse_unsupported(config)
    with _restored_on_error(graph):
        prepare(graph)
        plan = make_graph_plan(config, graph)
        caches = insert_caches(graph, plan.operators, config)
        inserter = QuantizerInserter(graph, plan)
        inserter.run()
        for node in list(graph.graph.nodes):
            if is_call(node, QUANT_STUB, DEQUANT_STUB):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        graph.recompile()
        for path, (name, quantizer) in inserter.parameters.items():
            calibrate_tensor(path.removesuffix("_quantizer"), attribute(graph, name).detach(), quantizer)
        live = {**inserter.activations, **caches}
        everything = [*live.values(), *(q for _, q in inserter.parameters.values())]
        names = {path.removesuffix("_quantizer"): q for path, q in live.items()}
        allow_training(graph)
        with _observing_real_rows(graph, names.values()):
            calibrate_tensors(graph, names, everything, dataloader, config)
        keep(graph, "quant_config", config)
        keep(graph, "quark_quantized", True)
    return graph


def exported(model: nn.Module) -> fx.GraphModule:
    """The model, if it is what torch.export makes. Raises ConfigError with the line to write."""
    if not isinstance(model, fx.GraphModule):
        what = f"got {type(model).__name__}" if isinstance(model, nn.Module) else f"got an {type(model).__name__}"
        raise ConfigError(f"fx_graph_mode quantizes an exported graph, {what}. Write: {_HOW}")
    for node in model.graph.nodes:
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, FakeQuantize):
            raise ConfigError("This graph is quantized already; export the float model again.")
        foreign = node.op == "call_function" and not _is_exported(node.target)
        if foreign or node.op == "call_method" or (module is not None and type(module).__name__ != "GuardsFn"):
            raise ConfigError(f"This graph is not from torch.export (it calls {node.target}). Write: {_HOW}")
    return model


def _is_exported(target: Any) -> bool:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return True
    # Sizes are Python numbers, which Python's own functions and torch.sym_* compute.
    return getattr(target, "__module__", "") in ("_operator", "math") or target.__name__.startswith(("sym_", "_check"))


def refuse_unsupported(config: QConfig) -> None:
    """Raise for options of eager mode that a graph does not have."""
    eager = ("algo_config", "softmax_quant_spec", "shared_scale_groups")
    for name in (*eager, "sync_moe_expert_input_amax", "calibrate_all_experts"):
        if getattr(config, name):
            raise NotSupportedError(f"{name} is not part of fx_graph_mode; leave it at its default, or use eager_mode.")
    if config.kv_cache_quant_config and not config.kv_cache_post_rope:
        raise NotSupportedError(
            "kv_cache_post_rope=False is not part of fx_graph_mode, which quantizes keys and values where attention "
            "reads them. Possible: True, or output_tensors of the layers."
        )


def prepare(model: fx.GraphModule) -> None:
    """Bring the float graph into the form that is quantized; what it computes in evaluation stays the same."""
    drop_counters(model)
    set_training(model, False)
    remove_inplace(model)
    fold_batch_norms(model)
    model.recompile()


def freeze_graph(model: fx.GraphModule, write: bool = True) -> fx.GraphModule:
    """Fix learned scales and, unless told not to, write the quantized values into weights and biases.

    Parameters are replaced, never written to: the eager model that was exported shares them.
    """
    called = [node for node in model.graph.nodes if node.op == "call_module"]
    modules = [(node, model.get_submodule(node.target)) for node in called]
    quantizers = [(node, module) for node, module in modules if isinstance(module, FakeQuantize)]
    if not quantizers:
        raise ConfigError("freeze needs a model from quantize_model; this one has no quantizers.")
    for node, quantizer in quantizers:
        quantizer.stop_learning()
        # A parameter that is read as an input, added for one, may share its quantizer with live tensors.
        own = str(node.target).endswith(("weight_quantizer", "bias_quantizer"))
        if write and own and quantizer.mode is Mode.quantize:
            _freeze(model, node, quantizer)
    model.recompile()
    return model


def _freeze(model: fx.GraphModule, node: fx.Node, quantizer: FakeQuantize) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = attribute(model, str(source.target))
    with torch.no_grad():
        frozen = fake_quantize(value.detach().contiguous(), quantizer.params, quantizer.spec)
    name = str(source.target)
    if len(source.users) > 1:
        # Others read the float values: this quantizer gets a parameter of its own.
        name = f"{str(node.target).removesuffix('_quantizer')}_quantized"
    put(model, name, nn.Parameter(frozen, value.requires_grad))
    if name != source.target:
        with model.graph.inserting_before(node):
            node.replace_input_with(source, model.graph.get_attr(name))
    quantizer.mode = Mode.frozen


@contextmanager
def _restored_on_error(model: fx.GraphModule) -> Iterator[None]:
    """Put graph, modules and parameters back if the body fails."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [(m, {table: dict(getattr(m, table)) for table in tables}, m.training) for m in model.modules()]
    original, methods = model.graph, {name: model.__dict__.get(name) for name in ("train", "eval")}
    model.graph = fx.Graph(tracer_cls=original._tracer_cls)  # nodes of its own
    model.graph.output(model.graph.graph_copy(original, {}))
    model.graph._codegen = original._codegen
    try:
        yield
    except BaseException:
        for module, saved, training in before:
            for table, entries in saved.items():
                getattr(module, table).clear()
                getattr(module, table).update(entries)
            module.training = training
        model.__dict__.update(methods)
        model.meta.pop(PRESERVED, None)
        model.graph = original
        raise


# Real rows ------------------------------------------------------------------------------------------------------------


@contextmanager
def _observing_real_rows(graph: nn.Module, quantizers: Iterable[FakeQuantize]) -> Iterator[None]:
    """Within: quantizers of a graph observe rows of real positions alone, and hand on all."""
    arguments, real = ModelArguments.of(graph), list[NumpyArray]()
    whole: dict[nn.Module, torch.Tensor] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real[:] = [one.numpy() for one in real_positions(kwargs or args, arguments)]

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        if not real or not isinstance(module, FakeQuantize) or module.mode is not Mode.observe:
            return None
        whole[module] = args[0]
        return (rows_at(args[0], real), *args[1:])

    def after(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        return whole.pop(module, None)

    with ExitStack() as hooks:
        hooks.enter_context(graph.register_forward_pre_hook(begin, with_kwargs=True))
        for quantizer in quantizers:
            hooks.enter_context(quantizer.register_forward_pre_hook(before))
            hooks.enter_context(quantizer.register_forward_hook(after))
        yield

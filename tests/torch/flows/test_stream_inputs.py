"""What the first block reads while the weights of a streamed model are not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import StructureError
from quark.torch import LLMTemplate
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.checkpoint_job import CheckpointJob
from quark.torch.flows.from_disk import FromDisk
from quark.torch.flows.replaced import replaced
from quark.torch.flows.weights_on_disk import in_folder
from quark.torch.model.meta_model import fill_buffers
from quark.torch.writers.folder import QUARK
from tests.models.doors import HYBRID, float_folder
from tests.models.families import MOE

IDS = torch.tensor([[3, 5, 7, 11]])


class _ReachedError(Exception):
    pass


def first_inputs(model: nn.Module) -> torch.Tensor:
    """What the first block is given; the model runs up to it."""
    given: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((*args, *kwargs.values())[0].clone())
        raise _ReachedError

    handle = model.get_submodule("model.layers.0").register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), pytest.raises(_ReachedError):
            model(IDS)
    finally:
        handle.remove()
    return given[0]


@contextmanager
def on_disk(source: Path) -> Iterator[tuple[Any, FromDisk]]:
    config = LLMTemplate.get("auto").get_config("int8_wo")
    job = CheckpointJob(config, OpenedFolder(source), QUARK)
    with replaced(job.model, job.plan):
        found = job.contents()
        fill_buffers(job.model)
        yield job.model, FromDisk(job.model, in_folder(found.sources, found.ties, job.checkpoint), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MOE, "llama", *(n for n in HYBRID if n != "nemotron_h")])
def test_the_first_forward_gives_the_first_block_what_the_model_in_memory_does(name: str, tmp_path: Path) -> None:
    """Llama 4 puts its tokens where the weight of its embedding is, before it calls that."""
    source = float_folder(name, tmp_path / "float")
    with on_disk(source) as (model, weights), weights.around(["model.layers.0", "model.layers.1"]):
        found = first_inputs(model)
    assert torch.equal(found, first_inputs(load_float_model(OpenedFolder(source))))


@pytest.mark.slow
def test_inputs_on_the_device_of_weights_that_are_not_read_are_refused(tmp_path: Path) -> None:
    source = float_folder("llama", tmp_path / "float")
    names = ["model.layers.0", "model.layers.1"]
    with on_disk(source) as (model, weights), weights.around(names):
        hidden = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
        model.model.norm(hidden)
        for name in ("model.norm", "model.layers.1"):
            with pytest.raises(StructureError, match=f"{name}: .*not read yet. Possible"):
                model.get_submodule(name)(hidden.to("meta"))

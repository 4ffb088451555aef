"""The pretended GPU holds a program to what CUDA holds it to, and counts what it says it counts."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from tests.pretended_gpu import DeviceTensor, PretendedGpu, on_host


def ids(case: Any) -> str:
    return getattr(case, "__name__", "")


def mixed_add(x: torch.Tensor) -> Any:
    return x + torch.ones(3)


def mixed_cat(x: torch.Tensor) -> Any:
    return torch.cat([x, torch.ones(3, 3)])


def two_devices(x: torch.Tensor) -> Any:
    return x + torch.ones(3, device="cuda:1")


def into_the_host(x: torch.Tensor) -> Any:
    return torch.ones(3).add_(x[0, 0])


def host_indexed(x: torch.Tensor) -> Any:
    return torch.ones(3)[x[0] > 0]


def as_numpy(x: torch.Tensor) -> Any:
    return x.numpy()


def as_array(x: torch.Tensor) -> Any:
    return np.asarray(x)


def host_generator(x: torch.Tensor) -> Any:
    return torch.rand(3, device="cuda", generator=torch.Generator())


def device_generator(x: torch.Tensor) -> Any:
    return torch.rand(3, generator=torch.Generator(device="cuda"))


def third_device(x: torch.Tensor) -> Any:
    return torch.ones(3, device="cuda:2")


def no_data(x: torch.Tensor) -> Any:
    return torch.empty(3, device="meta").to("cuda")


def mixed_layer(x: torch.Tensor) -> Any:
    return nn.Linear(3, 3)(x)


def assigned(x: torch.Tensor) -> Any:
    return torch.where(x > 0, x, torch.zeros(3))


REFUSED = [
    mixed_add, mixed_cat, two_devices, into_the_host, host_indexed, as_numpy, as_array, host_generator,
    device_generator, third_device, no_data, mixed_layer, assigned,
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=ids)
def test_what_cuda_refuses_is_refused(case: Any) -> None:
    with PretendedGpu(count=2):
        x = torch.randn(3, 3).to("cuda")
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            case(x)


def test_an_address_is_refused_where_compiled_code_takes_it() -> None:
    from quark.core.solvers.columns import columns

    with PretendedGpu():
        x = torch.randn(3, 3).to("cuda")
        assert x.data_ptr() == x[:1].data_ptr() != x[1:].data_ptr()  # it tells tensors apart
        with pytest.raises(RuntimeError, match="compiled code"):
            columns._address(x)


def test_factories_and_moves_say_where() -> None:
    with PretendedGpu(count=2) as gpu:
        x = torch.randn(3, 3).to("cuda")
        made = (
            torch.zeros(2, device="cuda"), torch.tensor([1.0, 2.0], device=x.device), x.new_ones(2), torch.ones_like(x),
            torch.as_tensor(3.0, device=x.device), torch.arange(3, device="cuda"), x.new_tensor([1.0]), x.cuda(),
            torch.ones(3).cuda(), x.to(torch.float16), torch.ones(3).to(x), F.one_hot(torch.tensor([1]).to("cuda")),
        )  # fmt: skip
        assert {str(each.device) for each in made} == {"cuda:0"}
        assert x.to("cuda") is x and str(x.to("cuda:1").device) == "cuda:1"
        assert x.cpu().device.type == "cpu" and torch.zeros_like(x, device="cpu").device.type == "cpu"
        assert x.to("meta").is_meta and not x.is_meta and x.is_cuda
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda
        assert torch.equal(on_host(torch.tensor([5.0], device="cuda")), torch.tensor([5.0]))
        x[[0, 2]] = 7
        assert on_host(x)[0].eq(7).all() and on_host(x[range(1)]).eq(7).all()
        assert (x + torch.tensor(1.0)).is_cuda and x[torch.tensor([0])].is_cuda  # what CUDA takes
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: torch.ones(2).to("cuda").is_cuda).result()
        assert torch.cuda.is_available() and torch.cuda.device_count() == gpu.count == 2
        drawn = torch.rand(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
        assert torch.equal(on_host(drawn), torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_modules_keep_their_parameters_and_what_is_tied() -> None:
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight  # type: ignore[union-attr]
    weight = tied[0].weight
    with PretendedGpu() as gpu:
        tied.to("cuda")
        assert tied[0].weight is weight is tied[1].weight and isinstance(weight, DeviceTensor)
        assert isinstance(weight, nn.Parameter) and weight.requires_grad
        tied[0](torch.ones(2, 3, device="cuda")).sum().backward()
        assert weight.grad.is_cuda  # type: ignore[union-attr]
        torch.optim.SGD(tied.parameters(), 0.1).step()
        copied = copy.deepcopy(tied)
        assert copied[0].weight is copied[1].weight and copied[0].weight is not weight  # type: ignore[union-attr]
        alive = gpu.meter.alive()
        del copied
        assert gpu.meter.alive() < alive
        tied.to("cpu")
        assert tied[0].weight is weight is tied[1].weight and not isinstance(weight, DeviceTensor)


def test_gradients_cross_devices_and_custom_functions_run() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * torch.full((3,), 2.0, device=grad.device)

    x = torch.randn(2, 3, requires_grad=True)
    with PretendedGpu():
        y: torch.Tensor = Twice.apply(x.to("cuda").to(torch.bfloat16).float())  # type: ignore[no-untyped-call]
        y.softmax(-1).square().sum().backward()
        assert x.grad is not None and not isinstance(x.grad, DeviceTensor)
    twin = x.detach().clone().requires_grad_()
    (twin.to(torch.bfloat16).float() * 2).softmax(-1).square().sum().backward()
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]


def test_files_come_back_where_they_are_asked_for(tmp_path: Path) -> None:
    with PretendedGpu():
        x = torch.randn(3).to("cuda")
        buffer = io.BytesIO()
        torch.save({"x": x}, buffer)
        for where, device in ((None, "cuda"), ("cpu", "cpu"), ({"cuda:0": "cpu"}, "cpu")):
            buffer.seek(0)
            assert torch.load(buffer, map_location=where)["x"].device.type == device
        save_file({"x": x}, tmp_path / "x.safetensors")
        assert load_file(tmp_path / "x.safetensors", device="cuda")["x"].is_cuda


def test_launches_waits_and_bytes_are_counted() -> None:
    with PretendedGpu() as gpu:
        x = torch.randn(8, 8).to("cuda")
        gpu.meter.reset()
        y = (x * 2).T[:4].reshape(-1)  # a product, and a copy; transposing and slicing are views
        assert gpu.meter.launches.total() == 2 and not gpu.meter.waits
        for wait in (y.sum().item, y.any().__bool__, y.tolist, y.cpu, y.nonzero, lambda: y[y > 0], lambda: y.equal(y)):
            before = gpu.meter.waits.total()
            wait()
            assert gpu.meter.waits.total() == before + 1
        gpu.meter.reset()
        y[y > 0] = 0  # a fill under a mask, of which nobody has to know how large it is
        y.to("cpu", non_blocking=True)
        assert not gpu.meter.waits and gpu.meter.bytes_across == y.nbytes
        gpu.meter.reset()
        before, more = gpu.meter.alive(), torch.empty(1 << 20, device="cuda")
        assert gpu.meter.peak() == before + more.nbytes
        del more
        assert gpu.meter.alive() == before


def test_copies_wait_unless_the_host_memory_is_pinned() -> None:
    with PretendedGpu() as gpu:
        meter, x, there = gpu.meter, torch.randn(8, 8), torch.randn(8, 8, device="cuda")
        pinned = x.pin_memory()
        for queued in (
            lambda: pinned.to("cuda", non_blocking=True),
            lambda: pinned[2:].to("cuda", non_blocking=True),
            lambda: pinned.copy_(there, non_blocking=True),
        ):
            meter.reset()
            queued()
            assert not meter.waits and not meter.uploads and meter.queued.total() == 1
        back = there.to("cpu", non_blocking=True)
        assert pinned.is_pinned() and back.is_pinned() and torch.empty(2, pin_memory=True).is_pinned()
        assert not x.is_pinned() and not there.is_pinned() and not (pinned + 1).is_pinned()
        meter.reset()
        x.to("cuda", non_blocking=True)
        pinned.to("cuda")
        assert meter.uploads.total() == 2 and not meter.queued
        meter.reset()
        x.copy_(there, non_blocking=True)
        assert meter.waits.total() == 1


def test_what_goes_to_the_host_is_not_there_until_one_waits() -> None:
    with PretendedGpu(count=2) as gpu:
        x, numbers = torch.arange(4.0, device="cuda"), torch.arange(4, device="cuda")
        on_second = torch.ones(4, device="cuda:1")
        pinned = torch.zeros(8).pin_memory()
        for wait in (torch.cuda.synchronize, x.sum().item, x.cpu, x.tolist, lambda: torch.zeros(2).to("cuda")):
            back, counted = x.to("cpu", non_blocking=True), numbers.to("cpu", non_blocking=True)
            pinned[2:6].copy_(x, non_blocking=True)
            assert back.isnan().all() and counted.ne(torch.arange(4)).all()
            assert pinned.isnan().tolist() == [False] * 2 + [True] * 4 + [False] * 2
            on_second.sum().item()  # another device
            assert back.isnan().all()
            x += 1  # the device does that after the copy
            wait()
            x -= 1
            assert back.tolist() == pinned[2:6].tolist() == counted.tolist() == [0, 1, 2, 3]
            pinned.zero_()
        first = x.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        second = x.to("cpu", non_blocking=True)
        event.synchronize()
        assert not first.isnan().any() and second.isnan().all()
        third = x.to("cuda:1").to("cpu", non_blocking=True)
        x.sum().item()  # waits for the second device, too, which the first one has told something
        assert not second.isnan().any() and third.isnan().all()
    assert third.isnan().all() and gpu.meter.queued["to cpu"] == 18


def test_what_is_sent_from_pinned_memory_stays_until_one_waits() -> None:
    with PretendedGpu():
        sent = torch.ones(4).pin_memory()
        there = sent[:2].to("cuda", non_blocking=True)
        sent[2:] = 5.0  # another part of it
        torch.cuda.synchronize()
        sent[:] = 7.0
        assert there.tolist() == [1.0, 1.0]
        # A device does one thing after the other: memory goes there, comes back, and goes there again.
        there.copy_(sent[:2], non_blocking=True)
        there.mul_(2.0)
        sent[:2].copy_(there, non_blocking=True)
        assert sent[:2].isnan().all()
        assert sent.to("cuda", non_blocking=True).tolist() == [14.0, 14.0, 7.0, 7.0]
    ends: tuple[Any, ...] = (
        lambda y: torch.cuda.synchronize(),
        lambda y: sent.copy_(y, non_blocking=True),
        lambda y: None,  # the end of the device
    )
    for end in ends:
        with pytest.raises(RuntimeError, match="written to before the device had copied"), PretendedGpu():
            there = sent.to("cuda", non_blocking=True)
            sent[0] += 1.0
            end(there)


def test_a_storage_is_freed_and_filled_again() -> None:
    with PretendedGpu() as gpu:
        x = torch.arange(1024.0, device="cuda")
        part, alive = x.view(32, 32)[1:], gpu.meter.alive()
        x.untyped_storage().resize_(0)
        assert gpu.meter.alive() == alive - 4096
        with pytest.raises(RuntimeError):
            _ = part + 1
        x.untyped_storage().resize_(4096)
        x.copy_(torch.arange(1024.0))
        assert gpu.meter.alive() == alive and torch.equal(on_host(part)[0], torch.arange(32.0) + 32)


def test_a_wait_names_the_line_that_waits() -> None:
    from quark.core.checks import check
    from quark.errors import NonFiniteError

    with PretendedGpu() as gpu:
        check(torch.ones((), dtype=torch.bool, device="cuda"), NonFiniteError("no"))
        assert next(iter(gpu.meter.waited_at)).startswith("core/checks.py:")


def test_a_program_that_forgets_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: the proof of folds with its factors on the host, as it was when no GPU had run it."""
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.algorithms.scaling import float64_forward
    from quark.torch.config.named_algorithms import algo_config_by_name
    from tests.models.architectures import build, token_ids

    config = LLMTemplate.get("auto").get_config("uint4_wo_32")
    config.algo_config = [algo_config_by_name("awq")]
    monkeypatch.setattr(float64_forward, "_times", lambda factors, x: factors.cpu() * x)
    with PretendedGpu(), pytest.raises(RuntimeError, match="found at least two devices"):
        ModelQuantizer(config).quantize_model(build("llama").to("cuda"), [token_ids()])
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended"

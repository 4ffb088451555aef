"""By which flow a folder is quantized: decided by what is asked for, and by what is free of the memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quark.errors import ConfigError
from quark.jobs.folders import flows, models
from quark.jobs.folders.calibration import NO_DATA, Calibration
from quark.torch.calibration import distributed

TEXT = Calibration(Path("calib.txt"))
WRITTEN = Calibration(Path("calib.txt"), synthetic=4)
IMATRIX = Path("imatrix.dat")


@pytest.mark.parametrize(("free", "fits"), [(1501, True), (1500, False), (1000, False), (None, True)])
def test_a_model_fits_with_half_of_it_beside(free: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "available_memory", lambda: free)
    assert flows.fits_memory(1000) is fits


def flow_of(monkeypatch: pytest.MonkeyPatch, calibration: Calibration, **said: Any) -> str:
    """The flow that a job takes whose model has 1000 bytes.

    Args:
        monkeypatch: Stands flows in that say their names.
        calibration: The data of the job.
        said: Other words of the request; `free` memory, `form` of the result, whether its files are `read`.
    """
    words = {"stream": None, "save_imatrix": None, "free": 1501, "form": "quark", "read": True, **said}
    monkeypatch.setattr(flows, "available_memory", lambda: words["free"])
    monkeypatch.setattr(models, "float_bytes", lambda folder: 1000)
    monkeypatch.setattr(flows, "_from_file_to_file", lambda job, export: words["read"])
    monkeypatch.setattr(flows, "_streamed", lambda job, export: "block by block")
    monkeypatch.setattr(flows, "_in_memory", lambda job, export: ("in memory", []))
    request = SimpleNamespace(stream=words["stream"], save_imatrix=words["save_imatrix"])
    job: Any = SimpleNamespace(request=request, calibration=calibration, form=words["form"], folder=None)
    export: Any = SimpleNamespace(size=lambda: "file to file")
    return str(flows.write_folder(job, export)[0])


@pytest.mark.parametrize(
    ("calibration", "said", "flow"),
    [
        (NO_DATA, {}, "file to file"),
        (NO_DATA, {"read": False}, "in memory"),
        (NO_DATA, {"read": False, "free": 1500}, "block by block"),
        (NO_DATA, {"stream": True}, "block by block"),
        (NO_DATA, {"stream": False}, "in memory"),
        (TEXT, {}, "in memory"),
        (TEXT, {"free": None}, "in memory"),
        (TEXT, {"free": 1500}, "block by block"),
        (TEXT, {"free": 1500, "stream": False}, "in memory"),
        (TEXT, {"free": 1500, "form": "onnx"}, "in memory"),
        (TEXT, {"free": 1500, "save_imatrix": IMATRIX}, "in memory"),
        (TEXT, {"stream": True}, "block by block"),
        (WRITTEN, {"free": 1500}, "in memory"),
    ],
)
def test_the_flow_follows_from_the_words_and_the_memory(
    calibration: Calibration, said: dict[str, Any], flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flow_of(monkeypatch, calibration, **said) == flow


@pytest.mark.parametrize(
    ("calibration", "said", "message"),
    [
        (WRITTEN, {}, "--synthetic with --stream"),
        (TEXT, {"form": "onnx"}, "--stream with --export-format onnx"),
        (TEXT, {"save_imatrix": IMATRIX}, "--save-imatrix with --stream"),
    ],
)
def test_what_is_not_streamed_is_refused_where_that_is_asked_for(
    calibration: Calibration, said: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        flow_of(monkeypatch, calibration, stream=True, **said)


def test_all_processes_take_the_flow_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is too small, and that of this one is not."""
    monkeypatch.setattr(distributed, "from_first", lambda fits: False)
    assert flow_of(monkeypatch, TEXT) == "block by block"

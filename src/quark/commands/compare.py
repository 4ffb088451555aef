"""`quark compare`: what several schemes would make of a model, in size and accuracy."""

from __future__ import annotations

from quark.base.progress import log_to
from quark.commands.options.kinds import require_model
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.of_request import takes
from quark.commands.quantize import Model
from quark.jobs.compare import COMPARE, CompareFiles, CompareFolders, check_bounds, resolve_comparison, run_comparison
from quark.jobs.words import usage
from quark.report.page import check_page


@takes(COMPARE, Model)
def compare(request: CompareFolders | CompareFiles) -> None:
    """Quantize a model with several schemes, and compare size and accuracy. No model is written.

    Example: quark compare ./llama --schemes int8_wo,uint4_wo_32 --calib heldout.txt

    Example: quark compare ./llama --schemes int4,int8,Q4_K_M --calib heldout.txt

    Example: quark compare model.onnx --schemes A8W8,XINT8 --calib samples.npz
    """
    model = request.model
    require_model(model)
    with usage():
        job = resolve_comparison(request)
    check_page(request.report, model, request.calib, request.data)
    check_log_file(request.log_file, str(model), [request.calib, request.data, request.report])
    say_first("Comparing schemes of", model, *job.names)
    from quark.commands.results.compared import show  # imports numpy: after --help

    with log_to(request.log_file):
        compared = run_comparison(job)
        show(job, compared)
        check_bounds(job, compared)

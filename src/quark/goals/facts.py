"""Facts: what a program made of a file, one row for each program, format and scheme that somebody looked at.

A row is measured, or says that it is not: `known_by` is RUN where the program was run and its outputs were compared
with ours, SOURCE where only its loader was read, DOCUMENTED where its pages ask for such files. What has no row is not
known, and no goal chooses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from quark.core.schemes import SCHEMES


class Answer(Enum):
    """What the program did with the file."""

    RIGHT = "right"
    """It computes what the quantized model does."""
    LOADS = "loads"
    """It takes the file; nobody has compared what it computes."""
    REFUSED = "refused"
    """It does not load the file, or computes something else from it."""


class Evidence(Enum):
    """How it is known."""

    RUN = "run"
    SOURCE = "its source"
    DOCUMENTED = "its documentation"


@dataclass(frozen=True)
class Fact:
    """One row.

    Attributes:
        program, version: Who reads the file.
        form: How it is written: a value of --export-format, or "onnx-file" for an ONNX file that was one before.
        scheme: Name of a scheme, or of a configuration of the ONNX flow.
        answer, known_by: See there.
    """

    program: str
    version: str
    form: str
    scheme: str
    answer: Answer
    known_by: Evidence

    def __str__(self) -> str:
        return f"{self.answer.value} in {self.program} {self.version}, by {self.known_by.value}"


ONNX_FILE = "onnx-file"
MIX_NAMES = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_1", "q5_0", "q5_1", "q8_0",
)  # fmt: skip
"""The mixes of block types of GGUF files."""
RIGHT, LOADS, REFUSED = Answer.RIGHT, Answer.LOADS, Answer.REFUSED
RUN, SOURCE, DOCUMENTED = Evidence.RUN, Evidence.SOURCE, Evidence.DOCUMENTED
_INT4_GROUPS = "int4_wo_32 int4_wo_64 int4_wo_128 uint4_wo_32 uint4_wo_64 uint4_wo_128"

_TABLE: tuple[tuple[str, str, str, Answer, Evidence, str], ...] = (
    # Greedy tokens equal to those of transformers, on a CPU.
    ("vLLM", "0.32", "quark", RIGHT, RUN, "int8 int8_dynamic uint4_wo_128 int4_wo_128 ptpc_fp8"),
    ("vLLM", "0.32", "awq", RIGHT, RUN, "uint4_wo_128"),
    ("vLLM", "0.32", "compressed-tensors", RIGHT, RUN, "int4_wo_128"),
    (
        "vLLM", "0.32", "quark", REFUSED, RUN,
        "int8_wo int4_wo_per_channel int3_wo_128 int2_wo_64 int4_wa_64 int4_fp8 amdfp4 amdfp4_g32 mx4 mx6 mx9 mxint8 "
        "bfp16 mxfp8_e5m2",
    ),
    # Kernels for these are on GPUs only, so the loader was read, at no release.
    (
        "vLLM", "of 2026", "quark", LOADS, SOURCE,
        "fp8 mxfp4 mxfp4_weight_only mxfp6_e3m2 mxfp6_e2m3 mxfp4_mxfp6_e2m3 mxfp4_fp8 nvfp4 fp4_block16_scale_e4m3",
    ),
    # Of its AWQ kernels: groups that divide the inputs, 32, 64 and 128 in the one for newer GPUs.
    ("vLLM", "of 2026", "awq", LOADS, SOURCE, "uint4_wo_32 uint4_wo_64"),
    ("vLLM", "of 2026", "compressed-tensors", LOADS, SOURCE, "int4_wo_32 int4_wo_64"),
    # Of awq and compressed-tensors it was read only that there are loaders, and of its kernel the sizes of groups.
    ("SGLang", "of 2026", "quark", LOADS, SOURCE, "fp8 ptpc_fp8 mxfp4"),
    ("SGLang", "of 2026", "awq", LOADS, SOURCE, "uint4_wo_32 uint4_wo_64 uint4_wo_128 int4_wo_128"),
    ("SGLang", "of 2026", "compressed-tensors", LOADS, SOURCE, "int4_wo_32 int4_wo_64 int4_wo_128 int8_dynamic fp8"),
    # Its loader of quark folders knows two forms, and ends with an error for all others.
    (
        "SGLang", "of 2026", "quark", REFUSED, SOURCE,
        " ".join(name for name in SCHEMES if name not in ("fp8", "ptpc_fp8", "mxfp4", "float16", "bfloat16")),
    ),
    # Logits to the bit those of the frozen model: all schemes, ten architectures.
    ("transformers", "5.23", "quark", RIGHT, RUN, " ".join(SCHEMES)),
    # KL from the quantized model below 8e-5, or equal to that of llama.cpp's own files.
    ("llama.cpp", "0.3.16 (llama-cpp-python)", "gguf", RIGHT, RUN, "float16 bfloat16 int8_wo mxfp4_weight_only"),
    ("llama.cpp", "0.3.16 (llama-cpp-python)", "gguf", RIGHT, RUN, _INT4_GROUPS),
    ("llama.cpp", "0.3.16 (llama-cpp-python)", "gguf", RIGHT, RUN, "int4_wo_per_channel uint4_wo_per_channel"),
    ("llama.cpp", "0.3.16 (llama-cpp-python)", "gguf", RIGHT, RUN, " ".join(MIX_NAMES)),
    # Logits of 48 tokens, 38 to 143 dB: its kernel rounds the inputs that 4-bit weights meet to 8 bits.
    ("ONNX Runtime", "1.31", "onnx", RIGHT, RUN, _INT4_GROUPS + " int4_wo_per_channel uint4_wo_per_channel"),
    ("ONNX Runtime", "1.31", "onnx", RIGHT, RUN, "int8 fp8 ptpc_fp8 mxfp4 mxfp4_weight_only mxfp6_e3m2 mxfp6_e2m3"),
    ("ONNX Runtime", "1.31", "onnx", RIGHT, RUN, "mxfp4_mxfp6_e2m3 mxfp4_fp8 amdfp4 amdfp4_g32 int4_fp8 int8_wo"),
    ("Ryzen AI", "of the guides", "quark", LOADS, DOCUMENTED, "uint4_wo_128"),
    ("OpenVINO", "2026.4", ONNX_FILE, RIGHT, RUN, "INT8_OPENVINO"),
    ("OpenVINO", "2026.4", ONNX_FILE, REFUSED, RUN, "INT8_CPU BF16 MXINT8 MXFP4E2M1 MXFP6E2M3 MXFP6E3M2 MXFP8E4M3"),
    ("ONNX Runtime", "1.31", ONNX_FILE, RIGHT, RUN, "INT8_CPU INT8_CPU_DYNAMIC INT8_CPU_WEIGHTS MATMUL_NBITS"),
    ("ONNX Runtime", "1.31", ONNX_FILE, RIGHT, RUN, "U8S8_AAWS S8S8_AAWS U8U8_AAWA A8W8 A16W8 XINT8 BF16 FP16"),
    ("Ryzen AI", "of the guides", ONNX_FILE, LOADS, DOCUMENTED, "XINT8 A8W8 A16W8 BF16 XINT8_ADAROUND XINT8_ADAQUANT"),
    ("Ryzen AI", "of the guides", ONNX_FILE, LOADS, DOCUMENTED, "A8W8_ADAROUND A8W8_ADAQUANT"),
    ("Ryzen AI", "of the guides", ONNX_FILE, LOADS, DOCUMENTED, "A16W8_ADAROUND A16W8_ADAQUANT"),
    ("NPU compilers", "of the guides", ONNX_FILE, LOADS, DOCUMENTED, "A8W8 A16W8 A8W8_ADAROUND A16W8_ADAROUND"),
)  # fmt: skip

FACTS: tuple[Fact, ...] = tuple(
    Fact(program, version, form, scheme, answer, known_by)
    for program, version, form, answer, known_by, schemes in _TABLE
    for scheme in schemes.split()
)


def facts_of(program: str, forms: Iterable[str] | None = None) -> list[Fact]:
    """The rows of a program, of some forms only where they are given."""
    wanted = None if forms is None else set(forms)
    return [fact for fact in FACTS if fact.program == program and (wanted is None or fact.form in wanted)]

"""Rows: the goals, one each."""

from __future__ import annotations

from quark.goals.facts import ONNX_FILE
from quark.goals.goal import GOALS, GoalDefaults, RuntimeGoal

_SESSION = 'python -c "import sys, onnxruntime as o; print(o.InferenceSession(sys.argv[1]%s).get_inputs())" {out}'
_VITIS = ", providers=['VitisAIExecutionProvider']"

GOALS.register("vllm", RuntimeGoal(
    "vllm", "vLLM",
    folder=GoalDefaults(
        ("awq", "uint4_wo_128"),
        {4: ("awq", "uint4_wo_128"), 8: ("quark", "int8_dynamic")},
        "4 bits in groups of 128, in the format whose kernels every release has",
        # No --dtype: AutoAWQConfig, its loader of AWQ folders, takes bfloat16 too (0.33: get_supported_act_dtypes).
        "vllm serve {out}",
        mixed=("quark", ("uint4_wo_128", "int8_dynamic")),
        cached={4: ("compressed-tensors", "int4_wo_128"), 8: ("quark", "int8_dynamic")},
        serve_cache=" --kv-cache-dtype fp8",
        serve_tokenizer=" --tokenizer TOKENIZER",
    ),
    # Its loaders of a cache raise an error for other types ("Currently supported kv cache quantization is ...").
    cache=("fp8",),
    # Its source (0.33): what `get_cache_scale_mapper` of quark folders renames; the weights of no other name are known.
    cache_layers={"quark": ("q_proj", "k_proj", "v_proj")},
    # "requires all to use the same scheme": its quark and compressed-tensors loaders, of packed_modules_mapping.
    fuses=True,
    reader="vllm",
    float_layers=True,
    # Its source: the loader of quark folders asks for LinearBase, which a ParallelLMHead is not; those of awq and of
    # compressed-tensors ask for both.
    heads=("awq", "compressed-tensors"),
))  # fmt: skip
GOALS.register("sglang", RuntimeGoal(
    "sglang", "SGLang",
    folder=GoalDefaults(
        ("awq", "uint4_wo_128"),
        {4: ("awq", "uint4_wo_128"), 8: ("quark", "ptpc_fp8")},
        "4 bits in groups of 128, in the format whose kernels every release has",
        # No --dtype: on GPUs of NVIDIA it runs AWQ folders by AWQMarlinConfig, which takes bfloat16 too (0.5.23).
        "python -m sglang.launch_server --model-path {out}",
        mixed=("compressed-tensors", ("int4_wo_128", "int8_dynamic")),
        cached={4: ("compressed-tensors", "int4_wo_128"), 8: ("quark", "ptpc_fp8")},
        serve_cache=" --kv-cache-dtype fp8_e4m3",
        serve_tokenizer=" --tokenizer-path TOKENIZER",
    ),
    cache=("fp8",),
    fuses=True,  # by its own rows of the tables
    reader="sglang",
    float_layers=True,
    heads=(),  # none was looked at
))  # fmt: skip
GOALS.register("transformers", RuntimeGoal(
    "transformers", "transformers",
    folder=GoalDefaults(
        ("quark", "uint4_wo_128"),
        {2: ("quark", "uint2_wo_64"), 3: ("quark", "int3_wo_128"), 4: ("quark", "uint4_wo_128"),
         8: ("quark", "int8_wo"), 16: ("quark", "bfloat16")},
        "4 bits in groups of 128 lose least for their size among schemes that need no data",
        "python -c \"import sys, transformers as t; "
        "print(t.pipeline('text-generation', sys.argv[1], tokenizer=sys.argv[-1])('Once'))\" {out}",
        serve_class="python -c \"import sys, transformers as t; "
        "print(t.{model_class}.from_pretrained(sys.argv[1]))\" {out}",
        # quark is imported, as sentence-transformers reads folders of other packages without their loaders.
        serve_sentences="python -c \"import sys, quark, sentence_transformers as s; "
        "print(s.SentenceTransformer(sys.argv[1]).encode('Once').shape)\" {out}",
        serve_tokenizer=" TOKENIZER",
        mixed=("quark", ()),
    ),
    cache=("fp8", "int8", "fp8_per_head", "int8_per_head"),
    rotates=("quark",),
))  # fmt: skip
GOALS.register("diffusers", RuntimeGoal(
    "diffusers", "diffusers",
    folder=GoalDefaults(
        ("quark", "int8_wo"),
        {4: ("quark", "uint4_wo_128"), 8: ("quark", "int8_wo"), 16: ("quark", "bfloat16")},
        "8-bit weights, which need no data: a denoiser runs its layers once a step, and errors add up",
        "python -c \"import sys, quark, diffusers as d; print(d.AutoModel.from_pretrained(sys.argv[1]).dtype)\" {out}",
        serve_pipeline="python -c \"import sys, quark, diffusers as d; "
        "print(d.DiffusionPipeline.from_pretrained(sys.argv[1]))\" {out}",
    ),
    extra=("diffusers",),
    networks=True,
))  # fmt: skip
GOALS.register("llama.cpp", RuntimeGoal(
    "llama.cpp", "llama.cpp",
    folder=GoalDefaults(
        ("gguf", "q4_k_m"),
        {2: ("gguf", "q2_k"), 3: ("gguf", "q3_k_m"), 4: ("gguf", "q4_k_m"), 5: ("gguf", "q5_k_m"),
         6: ("gguf", "q6_k"), 8: ("gguf", "q8_0"), 16: ("gguf", "bfloat16")},
        "Q4_K_M: 4 bits, and more where a layer loses most",
        "llama-server -m {out}",
        mixed=("gguf", ()),
    ),
    extra=("gguf",),
))  # fmt: skip
GOALS.register("comfyui", RuntimeGoal(
    "comfyui", "ComfyUI",
    folder=GoalDefaults(
        ("comfyui", "fp8"),
        {4: ("gguf", "q4_k_s"), 5: ("gguf", "q5_k_s"), 6: ("gguf", "q6_k"), 8: ("comfyui", "fp8_wo")},
        "FP8 weights, half the size, which every graphics card takes; with data, FP8 inputs too",
        "cp {out} ComfyUI/models/diffusion_models",
        without_data=("comfyui", "fp8_wo"),
    ),
    networks=True,
))  # fmt: skip
GOALS.register("onnxruntime", RuntimeGoal(
    "onnxruntime", "ONNX Runtime",
    folder=GoalDefaults(
        ("onnx", "uint4_wo_128"),
        {4: ("onnx", "uint4_wo_128"), 8: ("onnx", "int8_wo")},
        "weights as 4-bit integers, which are a sixth of the size",
        _SESSION % "",
    ),
    onnx=GoalDefaults(
        (ONNX_FILE, "INT8_CPU"),
        {4: (ONNX_FILE, "MATMUL_NBITS"), 8: (ONNX_FILE, "INT8_CPU")},
        "in 8-bit integers what is faster so, the rest in float",
        _SESSION % "",
        without_data=(ONNX_FILE, "INT8_CPU_DYNAMIC"), targets=("ort_x64", "ort_arm64", "generic"),
    ),
))  # fmt: skip
GOALS.register("openvino", RuntimeGoal(
    "openvino", "OpenVINO",
    onnx=GoalDefaults(
        (ONNX_FILE, "INT8_OPENVINO"),
        {8: (ONNX_FILE, "INT8_OPENVINO")},
        "only what linear layers read is quantized: on a YOLOv8n 33.5 dB, with the layout for ONNX Runtime 13.4",
        "python -c \"import sys, openvino as o; print(o.Core().compile_model(sys.argv[1], 'CPU').inputs)\" {out}",
        target="openvino", targets=("openvino",),
    ),
))  # fmt: skip
GOALS.register("ryzen-ai", RuntimeGoal(
    "ryzen-ai", "Ryzen AI",
    folder=GoalDefaults(
        ("quark", "uint4_wo_128"),
        {4: ("quark", "uint4_wo_128")},
        "the scheme that its page on language models begins with",
        "python -m onnxruntime_genai.models.builder -i {out} -o oga-model -p int4 -e cpu",
    ),
    onnx=GoalDefaults(
        (ONNX_FILE, "XINT8"),
        {8: (ONNX_FILE, "XINT8"), 16: (ONNX_FILE, "BF16")},
        "8-bit integers under power-of-two scales, the type of its CNN kernels",
        _SESSION % _VITIS,
        targets=("npu",),
    ),
))  # fmt: skip
GOALS.register("npu", RuntimeGoal(
    "npu", "NPU compilers",
    onnx=GoalDefaults(
        (ONNX_FILE, "A8W8"),
        {8: (ONNX_FILE, "A8W8"), 16: (ONNX_FILE, "A16W8")},
        "8-bit integers with float scales, for compilers that take Q/DQ nodes",
        _SESSION % "",
        targets=("npu", "generic"),
    ),
))  # fmt: skip

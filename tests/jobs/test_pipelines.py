"""`quark.quantize` of a pipeline of diffusers: what is quantized, copied, and refused; diffusers runs the result."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import quark
from quark.errors import CalibrationError, ConfigError, FormatError, QuarkError
from quark.jobs import request_of
from quark.jobs.evaluate import EvaluateFolders, MeasuredPipeline, evaluate_pipeline
from quark.jobs.folders.compared.measure import compare_outputs
from quark.jobs.folders.pipeline import requests_of
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.parted import PartedModel
from quark.torch.model.calibration_data.stored_batches import write_batch
from tests.commands.program import quark as program
from tests.models.denoisers import denoiser, step

ABSENT = dict.fromkeys(("tokenizer", "tokenizer_2", "tokenizer_3", "image_encoder", "feature_extractor"))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 3 without tokenizers."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(0)
    clip = CLIPTextModelWithProjection(
        CLIPTextConfig(hidden_size=32, intermediate_size=37, num_hidden_layers=1, num_attention_heads=4, vocab_size=99)
    )
    t5 = T5EncoderModel(T5Config(d_model=32, d_ff=37, d_kv=8, num_heads=4, num_layers=1, vocab_size=99))
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), latent_channels=4, norm_num_groups=1, shift_factor=0.06, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip
    made = diffusers.StableDiffusion3Pipeline(
        transformer=denoiser("sd3"), text_encoder=clip, text_encoder_2=clip, text_encoder_3=t5, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), tokenizer=None, tokenizer_2=None, tokenizer_3=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("pipeline") / "sd3"
    made.save_pretrained(folder)
    return folder


def images(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    words, pooled = torch.randn(1, 7, 32, generator=generator), torch.randn(1, 64, generator=generator)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        prompt_embeds=words, pooled_prompt_embeds=pooled, negative_prompt_embeds=-words,
        negative_pooled_prompt_embeds=-pooled, num_inference_steps=2, height=32, width=32, output_type="latent",
        generator=generator,
    )  # fmt: skip
    return made.images  # type: ignore[no-any-return]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_diffusers_runs_a_pipeline_of_which_some_components_are_quantized(pipeline: Path, tmp_path: Path) -> None:
    import diffusers

    out = quark.quantize(pipeline, output=tmp_path / "out", component=("text_encoder_3=int8_wo",))
    loaded = diffusers.DiffusionPipeline.from_pretrained(out, **ABSENT)
    expected = diffusers.DiffusionPipeline.from_pretrained(pipeline, **ABSENT)
    plain = images(expected)
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo"))
    expected.transformer = quantizer.freeze(quantizer.quantize_model(expected.transformer))
    assert torch.equal(images(loaded), images(expected)) and not torch.equal(images(loaded), plain)
    assert loaded.text_encoder_3.quark_quantized and not hasattr(loaded.text_encoder, "quark_quantized")
    before, after = files_of(pipeline), files_of(out)
    untouched = [name for name in before if not name.startswith(("transformer/", "text_encoder_3/"))]
    assert all(after[name] == before[name] for name in untouched) and "vae/config.json" in untouched
    loaded.save_pretrained(tmp_path / "again")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "again", **ABSENT)
    assert torch.equal(images(again), images(loaded))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"component": ("unet",)}, "no such folder. Possible: 'scheduler'"),
        ({"component": ("text_encoder=int8",)}, "static activation scales need data"),
        ({"component": ("text_encoder=int9",)}, "Unknown scheme 'int9'"),
        ({"goal": "vllm"}, "vLLM does not load by itself. Possible: goal diffusers, comfyui"),
        ({"goal": None, "scheme": "int8_wo", "imatrix": "x.dat"}, "imatrix applies to a single model"),
        ({"scheme": "int8"}, "record_steps recorded"),
        ({"algorithm": "gptq"}, "record_steps recorded"),
        ({"export_format": "awq"}, "Nobody has tried int8_wo as awq in diffusers"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made(
    pipeline: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(QuarkError) as refused:
        quark.quantize(pipeline, output=tmp_path / "out", **options)
    assert said in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_component_of_one_model_is_refused(pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is one model, and no pipeline"):
        quark.quantize(pipeline / "transformer", output=tmp_path / "out", component="transformer")


def test_a_pipeline_without_a_denoiser_asks_for_a_component(pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(pipeline, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if k != "transformer"}))
    with pytest.raises(ConfigError, match=r"no component that takes a timestep. Possible: component, of .*vae"):
        quark.quantize(folder, output=tmp_path / "out")


def test_two_denoisers_are_both_quantized_each_with_its_own_steps(pipeline: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "two", tmp_path / "steps"
    shutil.copytree(pipeline, folder)
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer_2": index["transformer"]}))
    (steps / "transformer_2").mkdir(parents=True)
    asked = requests_of(request_of(folder, {"scheme": "int8", "calib": steps, "component": ("vae=int8_wo",)}))
    parts = {name: (part.scheme, part.calib) for name, part in asked.items()}
    assert parts == {
        "transformer": ("int8", steps), "transformer_2": ("int8", steps / "transformer_2"), "vae": ("int8_wo", None)
    }  # fmt: skip
    assert [part.model.name for part in asked.values()] == [*parts]


@pytest.mark.slow
def test_a_recipe_makes_a_pipeline_again(pipeline: Path, tmp_path: Path) -> None:
    made = program("quantize", pipeline, "--for", "diffusers", "--bits", 4, "-o", tmp_path / "a")
    assert made.code == 0 and "transformer: uint4_wo_32" in made.out, made
    again = program("run", tmp_path / "a" / "quark_recipe.yaml", "-o", tmp_path / "b")
    assert again.code == 0, again
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_plan_needs_no_data_and_says_which_steps_are_taken(pipeline: Path, tmp_path: Path) -> None:
    planned = program("plan", pipeline, "--scheme", "int8")
    assert planned.code == 0 and "data: needed, and not given (--calib)" in planned.out, planned
    for index in range(3):
        write_batch(tmp_path / f"{index}.npz", step("sd3", index))
    planned = program("plan", pipeline / "transformer", "--scheme", "int8", "--calib", tmp_path, "--samples", 2)
    assert f"data: {tmp_path}, 2 samples, spread evenly over all" in planned.out, planned


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"../vae": ["diffusers", "AutoencoderKL"]}, "the component '../vae', which is no folder beside it"),
        ({"..": ["diffusers", "AutoencoderKL"]}, "names the file '..', which is outside the folder"),
        ({"": ["diffusers", "AutoencoderKL"]}, "the component '', which is no folder beside it"),
        ({"transformer": ["diffusers", "FluxTransformer2DModel"]}, "names the class 'FluxTransformer2DModel'"),
        ({"transformer": ["own_code", "SD3Transformer2DModel"]}, "from 'own_code', which is no part of diffusers"),
        ({"transformer": [None, None]}, "no component that takes a timestep"),
        ({"link": ["diffusers", "AutoencoderKL"]}, "out of its folder"),
    ],
)
def test_components_are_folders_of_the_pipeline_with_classes_of_diffusers(
    pipeline: Path, tmp_path: Path, stored: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "other"
    (folder / "transformer").mkdir(parents=True)
    shutil.copyfile(pipeline / "transformer" / "config.json", folder / "transformer" / "config.json")
    (folder / "own_code.py").write_text("raise SystemExit('this was run')")
    (folder / "link").symlink_to(pipeline / "vae")
    index = {"transformer": ["diffusers", "SD3Transformer2DModel"], **stored}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(QuarkError) as refused:
        requests_of(request_of(folder, {"scheme": "int8_wo"}))
    assert said in str(refused.value)


def test_components_that_are_not_there_and_files_that_end_early_are_named(
    pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(pipeline, folder)
    shutil.rmtree(folder / "vae")
    requests_of(request_of(folder, {"scheme": "int8_wo"}))
    assert "names vae, and has no such folder" in caplog.text
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(FormatError, match=f"{file.name} is no safetensors file"):
        OpenedFolder(folder / "transformer").skeleton  # noqa: B018


def test_data_that_a_model_does_not_take_are_shown() -> None:
    pair = [PartedModel(torch.nn.Linear(3, 2)) for _ in range(2)]
    with pytest.raises(CalibrationError, match=r"does not take batch 1, float32 \(1, 4\): RuntimeError"):
        compare_outputs(*pair, [torch.zeros(1, 3), torch.zeros(1, 4)])


@pytest.mark.slow
def test_a_page_of_a_pipeline_has_timesteps_layers_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    from quark.torch import record_steps

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    made = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    made.save_pretrained("float")
    made.set_progress_bar_config(disable=True)
    record_steps(made, [{"batch_size": 1}], "steps", num_inference_steps=4)
    done = program("quantize", "float", "--scheme", "int8", "--calib", "steps", "-o", "out", "--report", "a.html")
    assert done.code == 0, done.err
    done = done_evaluate = program(
        "evaluate", "float", "out", "--data", "steps", "--report", "b.html", "--num-inference-steps", 4
    )
    assert done.code == 0 and "unet:" in done.out and "Outputs by timestep" in done.out, done.err
    for name in ("a.html", "b.html"):
        page = (tmp_path / name).read_text()
        assert all(said in page for said in ("From equal noise", "Error by timestep", "Damage by layer")), name
    assert "Pictures" in done_evaluate.out
    runs: Counter[str] = Counter()
    with monkeypatch.context() as patched:
        step = diffusers.DDIMScheduler.step
        patched.setattr(diffusers.DDIMScheduler, "step", lambda *a, **k: (runs.update(["step"]), step(*a, **k))[1])
        # The pipeline takes no prompt: a page asks for its picture on the command line, and here the request.
        asked = EvaluateFolders(
            model=Path("float"), quantized=Path("out"), data=Path("steps"), report=Path("c.html"), num_inference_steps=3
        )
        found = evaluate_pipeline(asked)
    assert runs["step"] == 6 and found.pictures["unet"].picture_sqnr > 10  # float and quantized
    measured = quark.evaluate("float", "out", data="steps", windows=2)
    assert isinstance(measured, MeasuredPipeline) and not measured.pictures
    assert measured.components["unet"].outputs.keys() == found.components["unet"].outputs.keys()
    with pytest.raises(ConfigError, match="prompt: DDIMPipeline has no such argument"):
        quark.evaluate("float", "out", data="steps", prompt="a fox")
    done = program("compare", "float", "--schemes", "int8_wo,fp8", "--calib", "steps")
    assert done.code == 0 and "int8_wo" in done.out, done.err


def test_what_evaluate_does_not_compare_is_said(pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    for words, said in (
        ((pipeline, pipeline / "transformer"), "is one model, and"),
        ((pipeline, pipeline), "holds no quantized denoiser"),
        ((pipeline, pipeline, "--num-inference-steps", 3), "Possible: --prompt TEXT, or --report FILE"),
        ((pipeline / "transformer", pipeline / "transformer", "--prompt", "x"), "is for the pictures of a pipeline"),
    ):
        done = program("evaluate", *words, "--data", tmp_path / "steps")
        assert done.code == 1 and said in done.err, done.err


def test_text_encoders_are_calibrated_with_what_they_read_of_the_prompts(pipeline: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import CLIPTextModelWithProjection

    steps = tmp_path / "steps"
    (steps / "text_encoder").mkdir(parents=True)
    write_batch(steps / "0.npz", step("sd3"))
    ids = torch.tensor([[1, 5, 7, 2]])
    write_batch(steps / "text_encoder" / "0.npz", {"input_ids": ids})
    asked = {"output": tmp_path / "out", "scheme": "int8_wo", "component": ("text_encoder=fp8", "vae=int8_wo")}
    for data, said in ((None, "no --calib is given"), (steps / "text_encoder", "has no folder text_encoder of .npz")):
        with pytest.raises(ConfigError, match=f"text_encoder=fp8: .* need data of text_encoder, and .*{said}"):
            requests_of(request_of(pipeline, {**asked, "output": str(tmp_path / "out"), "calib": data}))
    quark.quantize(pipeline, "fp8", component=("text_encoder=fp8", "vae=int8_wo"), data=steps, output=tmp_path / "out")
    model, largest = CLIPTextModelWithProjection.from_pretrained(pipeline / "text_encoder"), []
    name = "text_model.encoder.layers.0.mlp.fc2"
    model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: largest.append(inputs[0].abs().max()))
    with torch.no_grad():
        model(ids)
    stored = load_file(tmp_path / "out" / "text_encoder" / "model.safetensors")
    assert float(stored[f"{name}.input_scale"]) == pytest.approx(float(largest[0]) / 448, rel=1e-5)

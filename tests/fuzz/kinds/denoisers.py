"""Pipelines of diffusers, files of ComfyUI, and recorded steps. diffusers, torch and NumPy say what they stand for."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.bounds import rounded_rows
from tests.fuzz.case import SOUND, Case, Place, Random, WrongError, pick
from tests.fuzz.damage import damage_json
from tests.fuzz.kinds import safetensors_files
from tests.fuzz.kinds.calibration_data import archives, arrays, header, odd, some_bytes
from tests.fuzz.kinds.model_folders import change_json, files, tensors, text_bytes, weight_bytes
from tests.fuzz.oracles import sqnr
from tests.fuzz.program import quark, shown
from tests.kill.jobs import make_pipeline
from tests.models.denoisers import output, step

CLASSES = ("FluxPipeline", "StableDiffusion3Pipeline", "Nothing", "os.system", "")
ENTRIES = (["diffusers", "AutoencoderKL"], ["os", "system"], ["hostile", "Hostile"], [None, None], "x", ["diffusers"])


def _index(random: Random, folder: Path, marker: Path) -> str:
    """`model_index.json`, which names a library and a class for each component."""
    (folder / "hostile.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Hostile: pass\n")

    def change(said: Any) -> tuple[Any, str]:
        name = pick(random, ("_class_name", "transformer", "scheduler", "vae", "../up"))
        said[name] = pick(random, CLASSES if name == "_class_name" else ENTRIES)
        return said, f"{name} = {said[name]!r}"

    any_change = partial(damage_json, random)
    return change_json(folder, change if random.random() < 0.6 else any_change, "model_index.json")


def _config(random: Random, folder: Path, marker: Path) -> str:
    name = pick(random, ("transformer/config.json", "transformer/config.json", "scheduler/scheduler_config.json"))
    return change_json(folder, partial(damage_json, random), name)


def _inside(damage: Callable[[Random, Path, Path], str]) -> Callable[[Random, Path, Path], str]:
    return lambda random, folder, marker: damage(random, folder / "transformer", marker)


DAMAGES = (
    _index, _index, _config, _config, files, text_bytes,
    *map(_inside, (tensors, tensors, weight_bytes, files, text_bytes)),
)  # fmt: skip


def _load(folder: Path) -> Any:
    """The denoiser, as diffusers loads it. Raises WrongError where it would not be what the files say."""
    import diffusers

    import quark.torch  # noqa: F401 - diffusers reads quantized folders then

    try:
        model, info = diffusers.FluxTransformer2DModel.from_pretrained(
            folder / "transformer", output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # noqa: BLE001 - whatever diffusers refuses by
        raise WrongError(f"diffusers cannot load {folder.name}: {type(error).__name__}: {str(error)[:200]}") from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if info.get(kind):
            raise WrongError(f"accepted, and {folder.name} has {kind}: {list(info[kind])[:2]}")
    return model.eval()


def _image(model: Any) -> list[Any]:
    return [output(model, step("flux")).double().numpy()]


def _judge(source: Path, result: Path) -> float:
    try:
        expected = _image(_load(source))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return math.inf  # a config of sizes that do not fit each other when they meet: nothing to compare
    return sqnr(expected, _image(_load(result)))


def _bound(source: Path) -> float:
    import torch

    model = _load(source)
    expected = _image(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(rounded_rows(parameter.numpy())))
    return sqnr(expected, _image(model))


def pipelines(random: Random, place: Place) -> Case:
    base = place.bases.made("pipeline", make_pipeline)
    source, result = Path(shutil.copytree(base, place.inputs / "pipeline")), place.outputs / "result"
    damage = None if random.random() < SOUND else pick(random, DAMAGES)
    said = damage(random, source, place.marker) if damage else "undamaged"
    command = ("quantize", source, "--scheme", "int8_wo", *pick(random, ((), ("--stream",))), "-o", result)
    return Case(
        f"{said}: {shown(*command)}", partial(quark, *command), partial(_judge, source, result), (result,),
        like="pipeline", bound=partial(_bound, base), sound=damage is None,
    )  # fmt: skip


def _make_step(file: Path) -> None:
    np.savez(file, **{name: x.numpy() for name, x in step("flux").items()})


def steps(random: Random, place: Place) -> Case:
    """An archive of the arguments of a denoiser."""
    source, result = place.bases.made("pipeline", make_pipeline), place.outputs / "result"
    with np.load(place.bases.made("step.npz", _make_step)) as opened:
        data = {name: opened[name] for name in opened.files}
    file, sound = place.inputs / "steps" / "0.npz", random.random() < SOUND
    file.parent.mkdir()
    if sound:
        np.savez(file, **data)
    damage = pick(random, (arrays, arrays, archives, some_bytes, header, odd))
    said = "undamaged" if sound else damage(random, file, data, place.marker)[0]
    command = ("quantize", source, "--scheme", "fp8", "--calib", file.parent, "-o", result)
    # Ranges of other data may be anything; the weights are FP8, and what is computed a number.
    return Case(
        f"{said}: {shown(*command)}", partial(quark, *command), partial(_judge, source, result), (result,),
        margin=None, sound=sound,
    )  # fmt: skip


PREFIX, FP8 = "model.diffusion_model.", "scale_weight"


def _make_file(file: Path, fp8: bool) -> None:
    """The names of FLUX's authors, as a part of a whole checkpoint; with weights in FP8 under a scale, or in float."""
    import torch
    from safetensors.torch import save_file

    width, generator = 64, torch.Generator().manual_seed(0)
    shapes = {
        "img_in.weight": (width, 64), "double_blocks.0.img_attn.qkv.weight": (3 * width, width),
        "double_blocks.0.img_attn.qkv.bias": (3 * width,), "double_blocks.0.img_attn.proj.weight": (width, width),
        "double_blocks.0.img_mlp.2.weight": (width, 4 * width), "double_blocks.0.img_attn.norm.query_norm.scale": (16,),
    }  # fmt: skip
    held: dict[str, Any] = {"vae.x": torch.ones(2)}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        if fp8 and x.ndim > 1:
            scale = x.abs().max() / 448
            held[f"{PREFIX}{name.removesuffix('weight')}{FP8}"] = scale
            x = (x / scale).to(torch.float8_e4m3fn)
        held[f"{PREFIX}{name}"] = x
    if fp8:
        held[f"{PREFIX}scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    save_file(held, file)


def _decoded(file: Path, scale: str) -> dict[str, Any]:
    """Values by name, without those that scale others. Raises what safetensors and torch raise."""
    from safetensors.torch import load_file

    held = {name.removeprefix(PREFIX): x for name, x in load_file(file).items() if name.startswith(PREFIX)}
    held = held or load_file(file)
    values = {}
    for name, x in held.items():
        layer, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "bias", "scale"):
            continue
        factor = held.get(f"{layer}.{scale}") if leaf == "weight" else None
        assert x.is_floating_point() or (factor is not None and scale == "weight_scale")
        values[name] = x.float() * (1 if factor is None else factor.float())
    return values


def _judge_file(source: Path, result: Path) -> float:
    try:
        expected = _decoded(source, FP8)
    except Exception as error:  # noqa: BLE001 - of safetensors, of torch, or of a check
        raise WrongError(f"accepted, and stands for nothing: {type(error).__name__}: {str(error)[:200]}") from None
    found = _decoded(result, "weight_scale")
    if lacking := sorted(expected.keys() ^ found.keys()):
        raise WrongError(f"names of one side alone: {lacking[:3]}")
    return sqnr([expected[name].numpy() for name in expected], [found[name].numpy() for name in expected])


def _bound_file(source: Path) -> float:
    values = [x.numpy() for x in _decoded(source, FP8).values()]
    return sqnr(values, [rounded_rows(x) if x.ndim > 1 else x for x in values])


def comfyui(random: Random, place: Place) -> Case:
    fp8, sound = random.random() < 0.5, random.random() < SOUND
    name = f"comfyui{'-fp8' if fp8 else ''}.safetensors"
    base = place.bases.made(name, partial(_make_file, fp8=fp8))
    shutil.copyfile(base, place.inputs / "model.safetensors")
    damage = pick(random, (tensors, tensors, safetensors_files.damage, weight_bytes))
    said = "undamaged" if sound else damage(random, place.inputs, place.marker)
    source, result = place.inputs / "model.safetensors", place.outputs / "result.safetensors"
    command = ("quantize", source, "--scheme", "int8_wo", "-o", result)
    return Case(
        f"{name}: {said}: {shown(*command)}", partial(quark, *command), partial(_judge_file, source, result), (result,),
        like=name, bound=partial(_bound_file, base), sound=sound,
    )  # fmt: skip

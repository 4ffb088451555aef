"""What is written of algorithms is read by AMD Quark: its classes refuse fields that they do not have.

The wheel of AMD Quark 0.13 lies unpacked in the folder that AMD_QUARK names; without it the table of its fields stands
for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quark.core.schemes import SCHEMES
from quark.torch.config.algo_configs import AlgoConfig, GPTQConfig, ImportanceScaleConfig, RotationConfig
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.config.named_algorithms import ALGO_CONFIGS, algo_config_by_name

FIELDS = {
    "smooth": "name alpha scale_clamp_min scaling_layers model_decoder_layers",
    "awq": "name scaling_layers model_decoder_layers",
    "autosmoothquant": "name scaling_layers model_decoder_layers compute_scale_loss",
    "gptq": "name block_size damp_percent desc_act static_groups inside_layer_modules model_decoder_layers",
    "gptaq": "name block_size damp_percent alpha desc_act static_groups inside_layer_modules model_decoder_layers",
    "qronos": "name block_size desc_act static_groups alpha beta inside_layer_modules model_decoder_layers",
    "rotation": "name scaling_layers r1 r2 r3 r4 rotation_size random_r1 random_r2 backbone model_decoder_layers "
    "v_proj o_proj self_attn mlp online_r1_rotation online_config trainable train_smooth smooth_positions",
    "svdquant": "name svd_rank smooth_alpha search_alpha alpha_candidates alpha_search_max_samples exclude_patterns "
    "min_layer_size use_gptq gptq_n_bits gptq_symmetric gptq_group_size gptq_blocksize gptq_percdamp gptq_actorder",
}  # fmt: skip
"""Name of an algorithm that AMD Quark 0.13 reads from a config.json -> its fields there."""
FIELDS["quarot"] = FIELDS["rotation"]
READ = """
import json, sys
from quark.torch.quantization.config.config import QConfig
from quark.torch.quantization.config.type import Dtype, ScaleType
known = {*Dtype.__members__, *ScaleType.__members__}
for name, data in json.load(sys.stdin).items():
    try:
        QConfig.from_dict(data)
    except KeyError as error:  # a type of ours, as MX4
        if error.args[0] in known:
            raise
        print(name)
"""


def algorithms() -> list[AlgoConfig]:
    """Each algorithm that checkpoints name, as it runs when it is named, and with fields of ours."""
    named = [algo_config_by_name(name) for name in ALGO_CONFIGS]
    return [*named, GPTQConfig(refine_passes=3, fisher="auto"), RotationConfig(train_steps=7)]


def test_other_fields_stand_beside_the_documented_ones() -> None:
    for algorithm in algorithms():
        config = QConfig(config_of_layer(SCHEMES["int8_wo"]), algo_config=[algorithm])
        data = json.loads(json.dumps(config.to_dict()))
        for written in data["algo_config"] or []:
            assert written.keys() == {*FIELDS[written["name"]].split()}, algorithm
        assert QConfig.from_dict(data).algo_config == config.algo_config
    mixed = QConfig(config_of_layer(SCHEMES["int8_wo"]), algo_config=[ImportanceScaleConfig(), GPTQConfig()])
    assert [each["name"] for each in mixed.to_dict()["algo_config"]] == ["gptq"]
    assert QConfig.from_dict(mixed.to_dict()).algo_config == mixed.algo_config


@pytest.mark.skipif("AMD_QUARK" not in os.environ, reason="AMD_QUARK names no folder with its wheel unpacked")
def test_its_own_classes_read_every_scheme_and_algorithm() -> None:
    layers = {name: config_of_layer(layer) for name, layer in SCHEMES.items()}
    configs = {name: QConfig(layer, algo_config=[GPTQConfig()]).to_dict() for name, layer in layers.items()}
    for algorithm in algorithms():
        configs[str(algorithm)] = QConfig(layers["int8_wo"], algo_config=[algorithm]).to_dict()
    environment = {**os.environ, "PYTHONPATH": os.environ["AMD_QUARK"]}
    line = [sys.executable, "-c", READ]
    done = subprocess.run(
        line, input=json.dumps(configs), capture_output=True, text=True, env=environment, cwd=Path(sys.prefix)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["mx4"]  # which is ours

"""Calibration data as users have it: checked as they are read, and without padding."""

from quark.torch.model.calibration_data.batches import calibration_data
from quark.torch.model.calibration_data.joined_texts import joined_texts
from quark.torch.model.calibration_data.model_arguments import ModelArguments, placeholders_of
from quark.torch.model.calibration_data.recorded_steps import record_steps, timestep_of
from quark.torch.model.calibration_data.stored_batches import stored_batches
from quark.torch.model.calibration_data.unpadding import real_positions, unpadded

__all__ = [
    "ModelArguments", "calibration_data", "joined_texts", "placeholders_of", "real_positions", "record_steps",
    "stored_batches", "timestep_of", "unpadded",
]  # fmt: skip

"""Calibration data as users have it: checked as they are read, and without padding."""

from quark.torch.model.calibration_data.batches import calibration_data
from quark.torch.model.calibration_data.joined_texts import joined_texts
from quark.torch.model.calibration_data.model_arguments import ModelArguments, placeholders_of
from quark.torch.model.calibration_data.unpadding import real_positions, unpadded

__all__ = ["ModelArguments", "calibration_data", "joined_texts", "placeholders_of", "real_positions", "unpadded"]

"""One file for each library of which quark takes more than its documented names.

Each lists these names: since which version a name is there, and what is done before. `python -m benchmarks.facts
--libraries` prints which of them the installed versions have.
"""

from quark.base.libraries import accelerate, diffusers, huggingface_hub, peft, transformers
from quark.base.libraries.names import Name, is_there

LIBRARIES = (accelerate, diffusers, huggingface_hub, peft, transformers)
"""The files of this folder that stand for a library of their name."""

__all__ = ["LIBRARIES", "Name", "accelerate", "diffusers", "huggingface_hub", "is_there", "peft", "transformers"]

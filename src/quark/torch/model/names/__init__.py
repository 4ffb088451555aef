"""The one map of names: source <-> module <-> published checkpoint, of every class that loads one.

transformers keeps a list of conversions for each model: renamings (`.block_sparse_moe.` of Mixtral is `.mlp.` in the
module) and mergers (`experts.*.w1.weight` and `experts.*.w3.weight` make `experts.gate_up_proj`). A quantized
checkpoint is written under the published names: those are what runtimes read.

    published_names, layers_published      module -> published checkpoint
    other_forms, names_of_files            the same of what a checkpoint holds in other tensors: experts one by one
    source_names, loaded_as, loaded_into, merged_names  file -> module, as transformers renames and merges
    converted_as                           file -> the tensors of a module that transformers makes of several, or turns
    names_in, layers_in_model              file -> module of any class, experts by their numbers
    names_elsewhere, models_of_other_classes           the classes beside the model's own by which one folder is loaded
    found_by                               what the loader of a class finds of a folder, and what it would make up
    dropped_names                          what no class builds
"""

from quark.torch.model.names.expert_leaves import expert_leaves
from quark.torch.model.names.in_model import (
    Converted,
    converted_as,
    layers_in_model,
    loaded_as,
    loaded_into,
    merged_names,
    names_in,
    source_names,
)
from quark.torch.model.names.left_out import dropped_names
from quark.torch.model.names.other_classes import models_of_other_classes, names_elsewhere
from quark.torch.model.names.other_forms import OtherForm, names_of_files, other_forms
from quark.torch.model.names.published import layers_published, published_names
from quark.torch.model.names.reader import found_by

__all__ = [
    "Converted", "OtherForm", "converted_as", "dropped_names", "expert_leaves", "found_by", "layers_in_model",
    "layers_published", "loaded_as", "loaded_into", "merged_names", "models_of_other_classes", "names_elsewhere",
    "names_in", "names_of_files", "other_forms", "published_names", "source_names",
]  # fmt: skip

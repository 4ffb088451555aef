"""GGUF files: what they hold, and how it lies there. Knows configs of transformers, and no module of a model.

    reader.py            a file, and what is refused of damaged ones
    writer.py            a file of a header and tensors
    types.py             types of tensors, and the bytes of a block whose scale quark chooses
    block_bytes.py       the bytes of block types that hold their own scales
    mixes.py             which tensor gets which type under Q4_K_M and its like
    names.py             name of a tensor in a model -> name in a file
    architectures/       what each architecture of llama.cpp holds, and the metadata that say so
    hyperparameters.py   whether file and config say the same
    configs.py           the config that a file says
    tokenizer.py         the tokenizer of a folder as metadata; vocabularies/ has the kinds
    tokenizer_of_file.py the tokenizer of a file as those of a folder
    imatrix.py           importance matrices

The numerics of block types are in `quark.core`. What takes a model apart for such a file, or fills one from it, is in
one role, `quark.torch.writers.gguf`: it alone imports the files of this folder. Everything else imports the names
below, which load no torch.
"""

from quark.gguf.imatrix import Sums, check_imatrix_name, read_imatrix, save_imatrix
from quark.gguf.mixes import CHOSEN_TYPES, MIXES, Mix, WeightRole, role_of
from quark.gguf.names import expert_of, import_gguf
from quark.gguf.reader import open_gguf

__all__ = [
    "CHOSEN_TYPES", "MIXES", "Mix", "Sums", "WeightRole", "check_imatrix_name", "expert_of", "import_gguf",
    "open_gguf", "read_imatrix", "role_of", "save_imatrix",
]  # fmt: skip

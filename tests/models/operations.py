"""Counts what a device would be asked for, on the CPU: the numbers are the same on every machine."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_local_scalar_dense"}
"""Operators that are no views, and start no kernel."""
WAITS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_linalg_check_errors"}


class Operations(TorchDispatchMode):
    """Within: counts operators that are no views, each of which is a kernel that is launched, and those that wait.

    Attributes:
        launches: The former.
        waits: Reads of single numbers, and operators whose results have a size that only the device knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        name = func._schema.name.split("::")[1]
        self.launches += not is_view and name not in NO_LAUNCH
        self.waits += name in WAITS
        return func(*args, **(kwargs or {}))

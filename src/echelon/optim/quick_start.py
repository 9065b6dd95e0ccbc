"""Two seconds saved at every start.

torch's optimizers import the whole of its compiler when the first of them is made, only to mark a
few methods as not to be compiled, and again around every step. Nothing of Echelon compiles an
optimizer: the mark that torch itself looks for first, left on those methods, and a call of the
step that is inside the wrapping spare the import.
"""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

_MARK = "__dynamo_disable"
_METHODS = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")


def spare_compiler() -> None:
    """Let optimizers be made without importing torch's compiler. May be called again."""
    for name in _METHODS:
        function = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)


def plain_step(optimizer: Optimizer) -> None:
    """`optimizer.step()` without what torch wraps around its own: hooks, profiling, the compiler.

    The caller has switched gradients off and knows that there are no hooks.
    """
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if type(optimizer).__module__.startswith("torch.optim") and not differentiable:
        inspect.unwrap(type(optimizer).step)(optimizer)
    else:
        optimizer.step()

"""Run micro-batches through this member's stages, step by step as planned.

    forward    x from the stage before ─▶ layers ─▶ y to the stage after, or to `end`
    backward   gradient of y from the stage after ─▶ layers ─▶ gradient of x to the stage before

torch.distributed.pipelining fixes the shapes at the first step, needs micro-batches of one size and
one tensor as target, and pickles shapes over the wire. Batches here end unevenly, texts differ in
length, and a loss reads complete batches, so this file takes the steps itself. It leaves only the
division of backward in two to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.core.errors import TaskError
from echelon.core.types import Batch
from echelon.strategy.pipeline.line import Form, Line, one_tensor
from echelon.strategy.pipeline.schedule import Step
from echelon.strategy.pipeline.stage import Stage

AHEAD = 2
"""Tensors to receive in advance: they arrive while this member computes."""
_FORM, _OUTPUT, _GRADIENT = range(3)
Enter = Callable[[Batch], Any]
End = Callable[[Any, Batch], Tensor]


class Runner:
    """Takes this member's steps, and exchanges outputs and gradients with neighboring stages.

    `names` are the last layers of all stages. In `run`, `enter` makes the input of the first stage
    from a batch, and `end` the loss from the last stage's output.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        names: Sequence[str],
        members: int,
        line: Line,
        device: torch.device,
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._names, self._members, self._line = names, members, line
        self._last, self._device = len(names) - 1, device
        self._forms: dict[Hashable, Form] = {}
        self._coming: dict[tuple[int, int, int], tuple[Form, Tensor, Callable[[], None]]] = {}

    def run(
        self,
        steps: Sequence[Step],
        micro: Sequence[Batch],
        enter: Enter,
        end: End,
        *,
        learning: bool,
    ) -> None:
        self._micro, self._enter, self._end, self._learning = micro, enter, end, learning
        self._cut = any(step.kind == "weights" for step in steps)
        self._kinds = [_kind(batch, learning) for batch in micro]
        awaited = [message for step in steps if (message := self._awaited(step)) is not None]
        at = 0
        try:
            for step in steps:
                message = self._awaited(step)
                self._prepare(awaited[at : at + AHEAD])
                at += message is not None
                self._take(step)
            self._line.settle()
        except BaseException:
            self._coming.clear()
            for stage in self._stages.values():
                stage.clear()
            raise

    def _take(self, step: Step) -> None:
        kind, at, micro = step
        stage = self._stages[at]
        if kind == "forward":
            self._forward(stage, micro)
        elif kind == "backward":
            self._back(at, micro, stage.backward(micro, self._gradient(at, micro)))
        elif kind == "input":
            self._back(at, micro, stage.backward_input(micro, self._gradient(at, micro)))
        else:
            stage.backward_weights(micro)

    def _forward(self, stage: Stage, micro: int) -> None:
        at, batch = stage.index, self._micro[micro]
        passed = at > 0
        if self._learning and not passed:
            stage.enter(micro)
        x = self._received(_OUTPUT, at - 1, micro) if passed else self._enter(batch)
        y = stage.forward(micro, x, passed=passed, learning=self._learning)
        output = self._end(y, batch) if at == self._last else one_tensor(y, self._names[at])
        if self._learning:
            output = stage.keep(micro, output, cut=self._cut)
        if at < self._last:
            self._pass_on(at, micro, output)

    def _pass_on(self, at: int, micro: int, output: Tensor) -> None:
        """Send the output to the next stage, after its form if that stage does not know it yet."""
        key, to = (at, self._kinds[micro]), (at + 1) % self._members
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form.of(output)
            self._line.send(form.described(), to, self._tag(_FORM, at, micro))
        if sorted(zip(form.order, form.sizes, strict=True)) != list(enumerate(output.shape)):
            raise TaskError(
                f"layer {self._names[at]!r} gives a tensor of {tuple(output.shape)} this time: "
                f"in a pipeline, shapes may depend on those of a batch only, not on its values"
            )
        self._line.send(form.laid(output), to, self._tag(_OUTPUT, at, micro))

    def _back(self, at: int, micro: int, gradient: Tensor | None) -> None:
        """Send the gradient to the previous stage, if its output is differentiable."""
        if at == 0:
            return
        form = self._forms[at - 1, self._kinds[micro]]
        if not form.differentiable:
            return
        row = torch.zeros(form.sizes, dtype=form.dtype) if gradient is None else form.laid(gradient)
        to = (at - 1) % self._members
        self._line.send(row, to, self._tag(_GRADIENT, at - 1, micro))

    def _gradient(self, at: int, micro: int) -> Tensor | None:
        if at == self._last or not self._forms[at, self._kinds[micro]].differentiable:
            return None
        return self._received(_GRADIENT, at, micro)

    def _awaited(self, step: Step) -> tuple[int, int, int] | None:
        """Return the message that a step needs: what, after which stage, of which micro-batch."""
        kind, at, micro = step
        if kind == "forward":
            return (_OUTPUT, at - 1, micro) if at > 0 else None
        return (_GRADIENT, at, micro) if kind != "weights" and at < self._last else None

    def _prepare(self, messages: Sequence[tuple[int, int, int]]) -> None:
        """Begin to receive the next messages, as far as their forms are known."""
        for message in messages:
            what, at, micro = message
            form = self._forms.get((at, self._kinds[micro]))
            waste = form is not None and what == _GRADIENT and not form.differentiable
            if form is not None and not waste and message not in self._coming:
                row = form.room()
                wait = self._line.begin_receive(row, self._from(what, at), self._tag(*message))
                self._coming[message] = form, row, wait

    def _received(self, what: int, at: int, micro: int) -> Tensor:
        key = (at, self._kinds[micro])
        if key not in self._forms:
            numbers = torch.empty_like(Form(torch.float32, (), ()).described())
            self._line.receive(numbers, self._from(what, at), self._tag(_FORM, at, micro))
            self._forms[key] = Form.understood(numbers.tolist())
        self._prepare([(what, at, micro)])
        form, row, wait = self._coming.pop((what, at, micro))
        wait()
        return form.read(row, self._device)

    def _from(self, what: int, at: int) -> int:
        return (at if what == _OUTPUT else at + 1) % self._members

    def _tag(self, what: int, at: int, micro: int) -> int:
        return (micro * len(self._names) + at) * 3 + what


def _kind(batch: Batch, learning: bool) -> Hashable:
    """Return what the shapes between stages depend on; all stages see the same batch."""
    return (
        learning,
        *(
            (name, column.shape, column.dtype)
            if isinstance(column, Tensor)
            else (name, column.width)
            for name, column in batch.items()
        ),
        _rows(batch),
    )


def _rows(batch: Batch) -> int:
    column = next(iter(batch.values()))
    return len(column) if isinstance(column, Tensor) else len(column.offsets) - 1

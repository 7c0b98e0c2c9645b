"""Models that answer each step of a request (`decoupled: true`): the answers on a stream are put together and compared."""

from __future__ import annotations

import dataclasses

import numpy as np

from harness.model import TYPES, Model, Tensor
from harness.raw import Answer, Inputs, Parameters, Refused, Stream
from harness.windows import WindowOracle, WindowTalk

#: Distinguishes a request without an answer from one that is not done.
TELL_END = {"triton_enable_empty_final_response": True}


def decoupled(model: Model) -> Model:
    """The model with an answer for each step: outputs have no dimension for the steps of a request."""

    ranks = {tensor.name: len(tensor.type.tensor_type.shape.dim) for tensor in model.build().graph.output}

    def of_step(tensor: Tensor) -> Tensor:
        has_dimension = len(tensor.dims) + bool(model.max_batch_size) > ranks[tensor.name]
        return dataclasses.replace(tensor, dims=tensor.dims[1:]) if has_dimension else tensor

    outputs = tuple(of_step(tensor) for tensor in model.outputs)
    return model.variant(model.name, outputs=outputs, more="model_transaction_policy { decoupled: true }")


class Broken(Refused):
    """An error that came after some answers."""

    def __init__(self, refused: Refused, before: list[Answer]):
        super().__init__(refused.code, refused.text)
        self.before = before


class EachStep:
    """A stream to a model that answers each step. `model` has the outputs of a model that answers once."""

    by_ovms = False

    def __init__(self, deployment, model: Model):
        self.stream = Stream(deployment)
        self.model = model

    def send(self, inputs: Inputs, parameters: Parameters) -> None:
        self.stream.send(self.model.name, inputs, {**parameters, **TELL_END})

    def next(self) -> tuple[Answer, bool]:
        """The next answer, and whether it is the last one to its request."""
        _, reply = self.stream.reply()
        if isinstance(reply, Refused):
            raise reply
        return reply, bool(reply.parameters.pop("triton_final_response"))

    def answers(self) -> list[Answer]:
        """All answers to the only request that is under way; none for one that made no step."""
        came: list[Answer] = []
        is_final = False
        while not is_final:
            try:
                answer, is_final = self.next()
            except Refused as refused:
                raise Broken(refused, came) from None
            if answer.outputs or answer.parameters:
                came.append(answer)
        return came

    def ask(self, model: str, inputs: Inputs, parameters: Parameters, **_) -> Answer:
        """What a model that answers once would say."""
        assert model == self.model.name
        self.send(inputs, parameters)
        return self.together(self.answers())

    def together(self, answers: list[Answer]) -> Answer:
        steps = [answer for answer in answers if "step" in answer.parameters]
        assert [answer.parameters["step"] for answer in steps] == list(range(1, len(steps) + 1))
        for answer in steps[:-1]:
            assert not {"steps", "left", "real", "stopped"} & set(answer.parameters)
        outputs = {tensor.name: self._joined(tensor, steps) for tensor in self.model.outputs}
        last = answers[-1] if answers else Answer({}, {})
        return Answer({**last.outputs, **outputs}, last.parameters)

    def _joined(self, tensor: Tensor, steps: list[Answer]) -> np.ndarray:
        at = int(bool(self.model.max_batch_size))
        values = [answer.outputs[tensor.name] for answer in steps]
        if not values:
            return np.zeros([1] * at + [max(dim, 0) for dim in tensor.dims], TYPES[tensor.type][0])
        if values[0].ndim == len(tensor.dims) + at:
            return np.concatenate(values, tensor.dims.index(-1) + at)
        return np.stack(values, at)

    def leave(self) -> None:
        self.stream.leave()

    def close(self) -> None:
        self.stream.close()


class StepTalk(WindowTalk):
    """A sequence whose requests get an answer for each step."""

    def __init__(self, deployment, model: Model, cuts, seed: int, **how):
        self.each = EachStep(deployment, model)
        super().__init__(self.each, WindowOracle(model, cuts, **how), np.random.default_rng(seed))

    def assert_said(self, answer: Answer, said) -> None:
        # without an answer there are no parameters
        if said["steps"] > 0 or answer.parameters:
            super().assert_said(answer, said)

"""Models whose sequences the backend schedules itself, and the two ways in which a client controls a sequence there."""

from __future__ import annotations

import contextlib
import re
import time

import numpy as np
import pytest

from harness.model import Model
from harness.raw import Answer, Asks, Refused
from harness.sequence_oracle import SequenceOracle, assert_same

#: The parameter of each answer that has the id.
ANSWERED_ID = "stateful_sequence_id"

Id = int | str | None

#: Each code word of an error: gRPC's code, HTTP's, and how the text goes on (in OVMS's words where it has some).
ERRORS = {
    "SEQUENCE_MISSING": ("NOT_FOUND", "404", "Sequence with provided ID does not exist"),
    "SEQUENCE_ALREADY_EXISTS": ("ALREADY_EXISTS", "400", "Sequence with provided ID already exists"),
    "SEQUENCE_ID_NOT_PROVIDED": ("INVALID_ARGUMENT", "400", "Sequence ID has not been provided in request inputs"),
    "INVALID_SEQUENCE_CONTROL_INPUT": ("INVALID_ARGUMENT", "400", "Unexpected value of sequence control input"),
    "MAX_SEQUENCE_NUMBER_REACHED": (
        "UNAVAILABLE",
        "503",
        "Max sequence number has been reached. Could not create new sequence",
    ),
    "SEQUENCE_ID_CONFLICT": ("INVALID_ARGUMENT", "400", ""),
    "MAX_QUEUED_REQUESTS_REACHED": ("UNAVAILABLE", "503", ""),
    "SEQUENCE_QUEUE_FULL": ("UNAVAILABLE", "503", ""),
    "SEQUENCE_QUEUE_TIMEOUT": ("UNAVAILABLE", "503", ""),
}


#: HTTP's codes of OpenVINO Model Server that Triton can't give.
HTTP_OF_OVMS = {"SEQUENCE_ALREADY_EXISTS": "409"}

#: Has answers carry the id in an output, too.
ID_OUTPUT = 'output { name: "sequence_id" data_type: TYPE_UINT64 dims: [ 1 ] }'


def own(model: Model, **parameters: object) -> Model:
    """The model without `sequence_batching`, which the backend schedules itself."""
    texts = {name: str(value) for name, value in parameters.items()}
    return model.variant(model.name, scheduling="", parameters={**model.parameters, **texts})


@contextlib.contextmanager
def fails_with(word: str, sequence_id: Id = None):
    """The request in the block is refused with this code word, its code and OVMS's text, and the text has the id."""
    with pytest.raises(Refused) as caught:
        yield caught
    check_error(caught.value, word, sequence_id)


def check_error(error: Refused, word: str, sequence_id: Id = None) -> None:
    grpc_code, http_code, text = ERRORS[word]
    if error.by_ovms:
        http_code = HTTP_OF_OVMS.get(word, http_code)
        # where OpenVINO Model Server has no such error, the backend's text
        text = text or f"{word}: "
    else:
        text = f"{word}: {text}"
    assert error.code in (grpc_code, http_code, ""), error
    assert error.text.startswith(text), error
    if sequence_id is not None:
        assert re.search(rf"(?<!\w){re.escape(str(sequence_id))}(?!\w)", error.text), f"{sequence_id} not in: {error}"


class ByParameters:
    """Triton's way: the parameters sequence_id, sequence_start and sequence_end of a request."""

    name = "parameters"

    @staticmethod
    def control(model: Model, sequence_id: Id, start: bool, end: bool):
        parameters = {} if sequence_id is None else {"sequence_id": sequence_id}
        flags = {"sequence_start": start, "sequence_end": end}
        return {}, parameters | {name: True for name, given in flags.items() if given}


class ByInputs:
    """OpenVINO Model Server's way: the inputs sequence_id and sequence_control_input."""

    name = "inputs"

    @staticmethod
    def control(model: Model, sequence_id: Id, start: bool, end: bool):
        assert not (start and end), "there is no value for both"
        return special(model, sequence_id, 1 if start else 2 if end else None), {}


Way = type[ByParameters] | type[ByInputs]

both_ways = pytest.mark.parametrize("way", [ByParameters, ByInputs], ids=lambda way: way.name)


def special(model: Model, sequence_id: Id = None, control: int | None = None) -> dict[str, np.ndarray]:
    """The two special inputs; None leaves one out."""
    shape = (1, 1) if model.max_batch_size else (1,)
    inputs = {}
    if sequence_id is not None:
        inputs["sequence_id"] = np.full(shape, sequence_id, np.uint64)
    if control is not None:
        inputs["sequence_control_input"] = np.full(shape, control, np.uint32)
    return inputs


def answered_id(answer: Answer) -> int | str:
    """The id in the answer's parameter, whose numbers have a sign."""
    value = answer.parameters[ANSWERED_ID]
    return value % 2**64 if isinstance(value, int) else value


class Talk:
    """One sequence of a model: each step is served, stepped by the oracle, and compared. The answer has to carry the id.

    Without an id, the sequence takes the one that the answer to its START has.
    """

    def __init__(self, client: Asks, model: Model, sequence_id: Id = None, way: Way = ByParameters, version: str = ""):
        self.client = client
        self.model = model
        self.sequence_id = sequence_id
        self.way = way
        self.version = version
        self.rng = np.random.default_rng(1 if sequence_id is None else hash(sequence_id) % 2**32)
        self.oracle = SequenceOracle(model)

    def step(self, inputs=None, *, start: bool = False, end: bool = False, outputs=None) -> Answer:
        """Asks with these inputs, or random ones. A refused step leaves the oracle alone."""
        inputs = self.model.draw(self.rng) if inputs is None else inputs
        special_inputs, parameters = self.way.control(self.model, self.sequence_id, start, end)
        how = {"outputs": outputs, "version": self.version}
        answer = self.client.ask(self.model.name, {**inputs, **special_inputs}, parameters, **how)
        if outputs is None:
            assert ("sequence_id" in answer.outputs) == (self.client.by_ovms or ID_OUTPUT in self.model.more)
        self.check(answer, inputs, start=start, end=end)
        return answer

    def check(self, answer: Answer, inputs, *, start: bool = False, end: bool = False) -> None:
        """Compares an answer to a request with these inputs."""
        if self.sequence_id is None:
            self.sequence_id = answered_id(answer)
        assert answered_id(answer) == self.sequence_id
        outputs = dict(answer.outputs)
        if (self.client.by_ovms or ID_OUTPUT in self.model.more) and "sequence_id" in outputs:
            tensor = outputs.pop("sequence_id")
            # a name is no number
            number = self.sequence_id if isinstance(self.sequence_id, int) else 0
            assert tensor.dtype == np.uint64 and tensor.ravel().tolist() == [number]
            assert tensor.shape == ((1, 1) if self.model.max_batch_size and not self.client.by_ovms else (1,))
        expected = self.oracle.step(inputs, start=start, end=end)
        assert_same(self.model, outputs, expected, f"sequence {self.sequence_id!r}")

    def start(self, inputs=None, **how) -> Answer:
        return self.step(inputs, start=True, **how)

    def end(self, inputs=None, **how) -> Answer:
        return self.step(inputs, end=True, **how)

    def whole(self, length: int) -> None:
        """START, steps, and END."""
        for i in range(length):
            self.step(start=i == 0, end=i == length - 1)

    def one_shot(self, inputs=None, **how) -> Answer:
        return self.step(inputs, start=True, end=True, **how)


def fed(value: int, work: int = 0) -> dict[str, np.ndarray]:
    """What `models.work` takes: it adds the value, and takes that much work."""
    return {"INPUT": np.array([[value]], np.int64), "WORK": np.array([[work]], np.int64)}


#: An input of `models.work` whose run fails.
FAILS = 1000


def total(answer: Answer) -> int:
    """The sum that `models.work` answers."""
    return answer.outputs["OUTPUT"].item()


def while_they_run(begin, task) -> None:
    """Runs the task while the requests that `begin(work)` sends are at work: the task is repeated with longer requests
    if it took so long that all of them were answered first."""
    for work in (200, 1000, 5000, 25000):
        calls = begin(work)
        time.sleep(0.05)
        task()
        in_time = not all(call.future.done() for call in calls)
        for call in calls:
            call.answer()
        if in_time:
            return
        # the next attempt begins anew
    pytest.fail("the task always waited for the requests that ran")

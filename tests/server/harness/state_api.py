"""Sequences whose states are read, written, copied and saved: every answer is held against the oracle's state.

`StateSequence.ask` sends one request and checks all that comes back: the outputs of the model, the states that it asked
for, and the description. A refused request leaves the oracle alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from harness.clients import TIMEOUT_S, new_id
from harness.graphs import BATCH
from harness.model import Model
from harness.raw import Answer, Inputs, Parameters, Refused
from harness.sequence_oracle import Context, SequenceOracle, assert_same
from harness.values import words

OWN, OLDEST, DIRECT = "own", "oldest", "direct"

#: Runs a test under both kinds of scheduling: this backend's, and core's sequence batcher.
both_schedulers = pytest.mark.parametrize("by", [OWN, OLDEST])
#: The same, and with the other strategy of core's.
every_scheduler = pytest.mark.parametrize("by", [OWN, OLDEST, DIRECT])


def with_state_api(model: Model, by: str = OWN, **parameters: object) -> Model:
    """The model with the State API, scheduled by this backend or by core."""
    scheduling = {OWN: {"scheduling": ""}, OLDEST: {}, DIRECT: {"direct": ""}}[by]
    texts = {name: str(value) for name, value in {"state_api": "true", **parameters}.items() if value is not None}
    return model.variant(model.name, parameters={**model.parameters, **texts}, **scheduling)


# ---- the right answers


class StateOracle:
    """What a sequence has: the states of the model, its contexts, its held inputs, and the number of steps."""

    def __init__(self, model: Model, sequence_id: int | str):
        self.model = model
        self.steps = SequenceOracle(model, sequence_id)
        self.count = 0
        self.held: dict[str, np.ndarray] = {}
        self.names = [name for name, _ in model.states]
        shapes = {tensor.name: tensor.type.tensor_type.shape.dim for tensor in model.build().graph.input}
        self.batch_axes = {
            name: next((at for at, dim in enumerate(shapes[name]) if dim.dim_param == BATCH), None)
            for name in self.names
        }
        self.begin({})

    def copy(self) -> StateOracle:
        made = copy.copy(self)
        made.steps = copy.copy(self.steps)
        made.steps.sequence = copy.copy(self.steps.sequence)
        made.steps.sequence.state = dict(self.steps.sequence.state)
        made.steps.context = self.steps.context.copy()
        made.held = dict(self.held)
        return made

    def begin(self, fed) -> None:
        """A fresh state. `fed`: what a model for initial states reads."""
        self.steps.is_fresh = False
        self.steps.context = Context(self.model)
        self.reset(self.names, fed)
        self.count, self.held = 0, {}

    def reset(self, names, fed=None) -> None:
        for name in names:
            # one that a model makes of the inputs is brought by a request without inputs
            brought = not fed and callable(self.model.initial.get(name))
            value = (
                self.steps.oracle.zeros(name) if brought else self.steps._initial(name, self.model.as_fed(fed or {}))
            )
            self._put(name, value)

    def forget_context(self) -> None:
        self.steps.context = Context(self.model)

    def set(self, name: str, tensor: np.ndarray) -> None:
        """Sets a state to the value of a request's tensor."""
        self._put(name, self._of_graph(name, tensor))

    def state(self, name: str) -> np.ndarray:
        """A state as the tensor of an answer."""
        value = self.steps.sequence.state[name]
        axis = self.batch_axes[name]
        if not self.model.max_batch_size or axis is None:
            return value
        row = np.squeeze(value, axis)
        return row.reshape(1, *(row.shape or (1,)))

    def step(self, inputs, commit: bool = True, start: bool = False, end: bool = False) -> dict[str, np.ndarray]:
        before, context = dict(self.steps.sequence.state), self.steps.context.copy()
        inputs = {**self.held, **inputs}
        outputs = self.steps.step(inputs, end=end)
        if commit:
            self.count += 1
            self.held = {name: value for name, value in inputs.items() if name in self._held_names()}
        else:
            self.steps.sequence.state, self.steps.context = before, context
            if start:
                self.held = {name: value for name, value in inputs.items() if name in self._held_names()}
        return outputs

    def info(self, sequence_id: int | str) -> dict[str, Any]:
        """What `state_info` has."""

        def described(name: str) -> dict[str, Any]:
            value = self.state(name)
            return {
                "name": name,
                "datatype": np_to_triton_dtype(value.dtype),
                "shape": list(value.shape),
                "byte_size": byte_size(value),
            }

        return {"sequence_id": sequence_id, "steps": self.count, "states": [described(name) for name in self.names]}

    def _held_names(self) -> list[str]:
        return [name for name in self.model.parameters.get("held_inputs", "").replace(",", " ").split() if name]

    def _put(self, name: str, value: np.ndarray) -> None:
        self.steps.sequence.state = {**self.steps.sequence.state, name: self.steps._stored(value)}

    def _of_graph(self, name: str, tensor: np.ndarray) -> np.ndarray:
        axis = self.batch_axes[name]
        if not self.model.max_batch_size or axis is None:
            return tensor
        like = self.steps.sequence.state[name]
        return tensor.reshape(1) if like.ndim == 1 else np.expand_dims(tensor[0], axis)


def byte_size(value: np.ndarray) -> int:
    """The bytes of a tensor on the wire."""
    if value.dtype != np.object_:
        return value.nbytes
    return sum(4 + len(word) for word in words(value))


@dataclasses.dataclass(frozen=True)
class Saved:
    """A snapshot, and what the sequence had then."""

    tensor: np.ndarray
    oracle: StateOracle

    @property
    def bytes(self) -> bytes:
        return self.tensor.item()


def element(content: bytes, model: Model) -> np.ndarray:
    """A tensor with one string."""
    return np.array([content], np.object_).reshape((1, 1) if model.max_batch_size else (1,))


# ---- sequences


class StateSequence:
    """One sequence of a model."""

    def __init__(self, client, model: Model, rng: np.random.Generator | None = None, sequence_id=None):
        self.client = client
        self.model = model
        self.rng = np.random.default_rng(1) if rng is None else rng
        self.sequence_id = new_id() if sequence_id is None else sequence_id
        self.oracle = StateOracle(model, self.sequence_id)

    def start(self, inputs: Inputs | None = None, **how) -> Answer:
        return self.step(inputs, start=True, **how)

    def end(self, inputs: Inputs | None = None, **how) -> Answer:
        return self.step(inputs, end=True, **how)

    def step(self, inputs: Inputs | None = None, **how) -> Answer:
        """An inference with these inputs, or random ones."""
        return self.ask(self.model.draw(self.rng) if inputs is None else inputs, **how)

    def ask(
        self,
        inputs: Inputs | None = None,
        *,
        start: bool = False,
        end: bool = False,
        set: Inputs | None = None,
        restore: Saved | None = None,
        clone_of: StateSequence | None = None,
        **parameters: Any,
    ) -> Answer:
        """Sends a request, which runs the model if there are inputs, and checks its answer."""
        sent = dict(inputs or {}) | {f"state.{name}": value for name, value in (set or {}).items()}
        if restore is not None:
            sent["state_snapshot"] = restore.tensor
        if clone_of is not None:
            parameters["clone_of"] = clone_of.sequence_id
        flags = {"sequence_start": start, "sequence_end": end}
        controls = {"sequence_id": self.sequence_id} | {name: True for name, given in flags.items() if given}
        answer = self.client.ask(self.model.name, sent, {**controls, **parameters})
        origin = restore.oracle if restore is not None else clone_of.oracle if clone_of is not None else None
        self.check(answer, inputs, start=start, end=end, set=set or {}, origin=origin, parameters=parameters)
        return answer

    def check(self, answer: Answer, inputs, *, start, end, set: Inputs, origin, parameters: Parameters) -> None:
        """Applies a request that was accepted to the oracle, and compares the answer."""
        oracle, before = self.oracle, self.oracle.copy()
        if origin is not None:
            oracle = self.oracle = origin.copy()
        elif start and not parameters.get("resume"):
            oracle.begin(inputs)
        reset = parameters.get("reset_state", False)
        oracle.reset(named(reset, oracle.names), inputs)
        if not isinstance(reset, str) and reset or reset == "true":
            oracle.forget_context()
        for name, value in set.items():
            oracle.set(name, value)
        expected: dict[str, np.ndarray] = {}
        if inputs:
            commits = is_yes(parameters.get("commit", True))
            expected = oracle.step(inputs, commits, start, end)
            if not commits and not start:
                # what the inference went on from counted for it only
                oracle = self.oracle = before
        for name in named(parameters.get("get_state", False), oracle.names):
            expected[f"state.{name}"] = oracle.state(name)
        outputs = dict(answer.outputs)
        if is_yes(parameters.get("snapshot", False)):
            assert outputs.pop("state_snapshot").size == 1
        if is_yes(parameters.get("query_state", False)):
            assert json.loads(outputs.pop("state_info").item()) == oracle.info(self.sequence_id)
        assert_same(self.model, outputs, expected, f"sequence {self.sequence_id}, {sorted(parameters)}")

    def states(self) -> dict[str, np.ndarray]:
        """All states, read from the server and checked."""
        answer = self.ask(get_state=True, query_state=True)
        return {name: answer.outputs[f"state.{name}"] for name in self.oracle.names}

    def save(self, inputs=None, **how) -> Saved:
        answer = self.ask(inputs, snapshot=True, **how)
        return Saved(answer.outputs["state_snapshot"], self.oracle.copy())

    def other(self, client=None) -> StateSequence:
        """Another sequence of the model, that has not begun."""
        return StateSequence(client or self.client, self.model, self.rng)

    def clone(self, inputs: Inputs | None = None, **how) -> StateSequence:
        """A new sequence that goes on from this one."""
        made = self.other()
        made.ask(inputs, start=True, clone_of=self, **how)
        return made

    def restored(self, saved: Saved, inputs: Inputs | None = None, client=None, **how) -> StateSequence:
        """A new sequence that goes on from a snapshot."""
        made = self.other(client)
        made.ask(inputs, start=True, restore=saved, **how)
        return made

    @contextlib.contextmanager
    def refuses(self, word: str, *words: str):
        """The request in the block is refused with this code word, and the sequence has the state it had."""
        with refused(word, *words):
            yield
        self.states()


def at_once(stream, talks: list[StateSequence], inputs: list[Inputs], **parameters: Any) -> None:
    """Each sequence's request, all at once on a stream, so that they are likely to share a run."""
    for talk, fed in zip(talks, inputs, strict=True):
        stream.send(talk.model.name, fed, {"sequence_id": talk.sequence_id, **parameters})
    replies = stream.all_replies(len(talks))
    for (_, answer), talk, fed in zip(sorted(replies.items()), talks, inputs, strict=True):
        assert isinstance(answer, Answer), answer
        talk.check(answer, fed, start=False, end=False, set={}, origin=None, parameters=parameters)


def is_yes(value: bool | int | str) -> bool:
    """What a parameter that is true or false says."""
    return value in (True, "true")


def named(value: bool | int | str, names: list[str]) -> list[str]:
    """The states that a parameter names."""
    if not isinstance(value, str) or value in ("true", "false"):
        return names if is_yes(value) else []
    said = [name.strip().removeprefix("state.") for name in value.split(",")]
    return [name for name in names if name in said]


#: gRPC's and HTTP's code for each code word.
CODES: Mapping[str, tuple[str, str]] = {
    "STATE_API_OFF": ("UNIMPLEMENTED", "501"),
    "STATE_PARAMETER": ("INVALID_ARGUMENT", "400"),
    "STATE_UNKNOWN": ("INVALID_ARGUMENT", "400"),
    "STATE_CONFLICT": ("INVALID_ARGUMENT", "400"),
    "STATE_NOT_LISTED": ("INVALID_ARGUMENT", "400"),
    "SNAPSHOT_INVALID": ("INVALID_ARGUMENT", "400"),
    "SEQUENCE_STEP_CONFLICT": ("ALREADY_EXISTS", "400"),
    "SEQUENCE_NOT_PARKED": ("NOT_FOUND", "404"),
    "SEQUENCE_MISSING": ("NOT_FOUND", "404"),
    "SEQUENCE_ALREADY_EXISTS": ("ALREADY_EXISTS", "400"),
    "MAX_SEQUENCE_NUMBER_REACHED": ("UNAVAILABLE", "503"),
}


@contextlib.contextmanager
def refused(word: str, *words: str):
    """The request in the block is refused: with this code word and its code, or this text; and with these words."""
    with pytest.raises(Refused) as caught:
        yield
    error = caught.value
    if word in CODES:
        assert error.text.startswith(f"{word}: "), error
        assert error.code in (*CODES[word], ""), error
    for said in (word, *words):
        assert said in error.text, f"{said} not in: {error}"


# ---- HTTP


class BinaryHttp:
    """HTTP with binary tensors, so that strings may have any bytes. One thread only."""

    def __init__(self, deployment):
        self.client = http_client.InferenceServerClient(
            deployment.server.http_url, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )

    def ask(self, model: str, inputs: Inputs, parameters: Parameters) -> Answer:
        tensors = []
        for name, value in inputs.items():
            tensor = http_client.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            tensor.set_data_from_numpy(value)
            tensors.append(tensor)
        own = dict(parameters)
        flags = {name: own.pop(name, False) for name in ("sequence_start", "sequence_end")}
        try:
            result = self.client.infer(model, tensors, sequence_id=own.pop("sequence_id"), parameters=own, **flags)
        except InferenceServerException as error:
            raise Refused(error.status() or "", error.message()) from None
        response = result.get_response()
        found = {tensor["name"]: result.as_numpy(tensor["name"]) for tensor in response["outputs"]}
        return Answer(found, response.get("parameters", {}))

    def close(self) -> None:
        self.client.close()

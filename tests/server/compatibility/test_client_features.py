"""What clients do beside plain requests: shared memory, tensors of many MiB, cancelling, ensembles,
warm-up; and the cases that ended or confused the original."""

import contextlib
import queue
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from harness import models, raw
from harness.clients import PROTOCOLS, TIMEOUT_S, new_id
from harness.conversations import Conversation, interleave, outcome, together
from harness.deployment import eventually
from harness.graphs import BATCH, graph, node
from harness.model import Tensor
from harness.strategies import both_strategies

# ---- memory


LIBRARIES = {"grpc": grpc_client, "http": http_client}


@pytest.fixture
def region():
    """Makes regions of shared memory; they go with the test."""
    made = []

    def make(size: int):
        key = f"stateful-test-{uuid.uuid4().hex[:12]}"
        handle = shared_memory.create_shared_memory_region(key, key, size)
        made.append(handle)
        return key, handle

    yield make
    for handle in made:
        shared_memory.destroy_shared_memory_region(handle)


def unregister(client, key: str) -> None:
    """The server has a region in use until it has released the last request, a moment after its answer."""
    eventually(lambda: outcome(lambda: client.unregister_system_shared_memory(key)), lambda left: left is None)


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_inputs_and_outputs_may_lie_in_shared_memory(deployment, region, protocol):
    library = LIBRARIES[protocol]
    model = deployment.serve(models.two_inputs("two_inputs_shared"))
    url = deployment.server.grpc_url if protocol == "grpc" else deployment.server.http_url
    client = library.InferenceServerClient(url)
    key, handle = region(4096)
    client.register_system_shared_memory(key, key, 4096)
    try:
        rng = np.random.default_rng(1)
        total, sequence_id = np.zeros((1, 2), np.float32), new_id()
        for i in range(5):
            fed = model.draw(rng)
            shared_memory.set_shared_memory_region(handle, [fed["LEFT"], fed["RIGHT"]])
            inputs, outputs = [], []
            for offset, name in ((0, "LEFT"), (8, "RIGHT")):
                inputs.append(library.InferInput(name, [1, 2], "FP32"))
                inputs[-1].set_shared_memory(key, 8, offset)
            for offset, name in ((64, "DIFFERENCE"), (128, "TOTAL_OUT")):
                outputs.append(library.InferRequestedOutput(name))
                outputs[-1].set_shared_memory(key, 8, offset)
            client.infer(
                model.name,
                inputs,
                outputs=outputs,
                sequence_id=sequence_id,
                sequence_start=i == 0,
                sequence_end=i == 4,
            )
            difference = fed["LEFT"] - fed["RIGHT"]
            total = total + difference
            for offset, wanted in ((64, difference), (128, total)):
                found = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 2], offset)
                np.testing.assert_array_equal(found, wanted)
    finally:
        unregister(client, key)
        client.close()


@both_strategies
def test_requests_that_wait_in_core_may_have_their_tensors_in_shared_memory(deployment, region, direct):
    name = f"counter_shared_{'oldest' if direct is None else 'direct'}"
    places = {"max_batch_size": 4, "max_candidates": 4, "direct": direct}
    model = deployment.serve(models.counter("int64", name=name, **places))
    sequences, steps, row_bytes = 12, 5, 4 * 8
    key, handle = region(2 * sequences * steps * row_bytes)
    client, arrived = grpc_client.InferenceServerClient(deployment.server.grpc_url), queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put(error))
    client.register_system_shared_memory(key, key, 2 * sequences * steps * row_bytes)
    try:
        fed = np.random.default_rng(2).integers(-99, 99, (sequences, steps, 4))
        shared_memory.set_shared_memory_region(handle, [fed])
        ids = [new_id() for _ in range(sequences)]
        # every sequence's first request, then every second one: all but four sequences wait for a place
        for step, i in np.ndindex(steps, sequences):
            offset = (i * steps + step) * row_bytes
            tensor = grpc_client.InferInput("INPUT", [1, 4], "INT64")
            tensor.set_shared_memory(key, row_bytes, offset)
            output = grpc_client.InferRequestedOutput("OUTPUT")
            output.set_shared_memory(key, row_bytes, fed.nbytes + offset)
            how = {"sequence_id": ids[i], "sequence_start": step == 0, "sequence_end": step == steps - 1}
            client.async_stream_infer(model.name, [tensor], outputs=[output], **how)
        for _ in range(steps * sequences):
            assert (error := arrived.get(timeout=TIMEOUT_S)) is None, error.message()
        found = shared_memory.get_contents_as_numpy(handle, np.int64, fed.shape, fed.nbytes)
        np.testing.assert_array_equal(found, fed.cumsum(axis=1))
    finally:
        unregister(client, key)
        client.stop_stream()
        client.close()


def test_an_output_region_that_is_too_small_is_an_error_and_the_sequence_goes_on(deployment, region):
    model = deployment.serve(models.two_inputs("two_inputs_small_region"))
    client = grpc_client.InferenceServerClient(deployment.server.grpc_url)
    key, _ = region(4096)
    client.register_system_shared_memory(key, key, 4096)
    talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
    talk.start()
    try:
        inputs = []
        for name, value in model.draw(talk.rng).items():
            inputs.append(grpc_client.InferInput(name, [1, 2], "FP32"))
            inputs[-1].set_data_from_numpy(value)
        output = grpc_client.InferRequestedOutput("TOTAL_OUT")
        output.set_shared_memory(key, 4, 0)
        with pytest.raises(InferenceServerException):
            client.infer(model.name, inputs, outputs=[output], sequence_id=talk.sequence_id)
        talk.step()
        talk.end()
    finally:
        unregister(client, key)
        client.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_of_many_mib_come_whole(deployment, protocol):
    """Such a request reaches the backend in several pieces (over HTTP), and none may be lost."""
    width = 2_000_003  # 7.6 MiB
    model = deployment.serve(models.echo("fp32", "echo_large", dims=(width,), max_candidates=4, max_batch_size=2))
    client = deployment.connect(protocol)
    rng = np.random.default_rng(3)
    before = np.zeros((1, width), np.float32)
    for i in range(3):
        now = rng.standard_normal((1, width)).astype(np.float32)
        answer = client.step(model.name, 5, {"INPUT": now}, start=i == 0, end=i == 2)
        assert answer["OUTPUT"].tobytes() == before.tobytes()
        before = now


def test_several_large_inputs_in_one_http_request(deployment):
    """A chunk of the body may end in the middle of an element, or of another input."""
    width = 300_001

    def build():
        shape = [BATCH, width]
        return graph(
            [
                node("Add", "LEFT RIGHT", "SUM"),
                node("Add", "STATE_IN SUM", "STATE_OUT"),
                node("Identity", "STATE_OUT", "OUTPUT"),
            ],
            [("LEFT", "int32", shape), ("RIGHT", "int32", shape), ("STATE_IN", "int32", shape)],
            [("OUTPUT", "int32", shape), ("STATE_OUT", "int32", shape)],
        )

    model = models.two_inputs(
        "two_large_inputs",
        build=build,
        inputs=(Tensor("LEFT", "int32", (width,)), Tensor("RIGHT", "int32", (width,))),
        outputs=(Tensor("OUTPUT", "int32", (width,)),),
        states=(("STATE_IN", "STATE_OUT"),),
        max_candidates=8,
    )
    deployment.serve(model)
    together(
        lambda seed=seed: Conversation(deployment.connect("http"), model, np.random.default_rng(seed)).whole(4)
        for seed in range(3)
    )


# ---- cancelling


class Cancellable:
    """One gRPC request that can be cancelled, alone on its stream."""

    def __init__(self, deployment, model, sequence_id, inputs, **flags):
        self.stream = raw.Stream(deployment)
        self.stream.send(model.name, inputs, {"sequence_id": sequence_id, **flags})
        self.replies = ThreadPoolExecutor(1)
        self.reply = self.replies.submit(self.stream.reply)

    def cancel(self) -> float | None:
        """Cancels it. None, or what the output was because it was too late."""
        self.stream.leave()
        self.replies.shutdown()
        try:
            _, came = self.reply.result()
        except grpc.RpcError:
            return None
        # core may drop the sequence of a cancelled request and answer the next one without an error and outputs
        return came.outputs["OUTPUT"].item() if isinstance(came, raw.Answer) and came.outputs else None


def busy_while(client, model, task) -> None:
    """Runs the task while several runs of other sequences are due before what the task sends."""
    others = [Conversation(client, model, np.random.default_rng(seed)) for seed in range(8)]
    together(other.start for other in others)

    def soon():
        time.sleep(0.03)
        task()

    together([*(other.step for other in others), soon])
    together(other.end for other in others)


@pytest.fixture
def long_run(deployment):
    """Eight runs of this model take a third of a second."""
    return deployment.serve(models.slow("slow_to_cancel", products=4000, max_batch_size=1))


def state_of(client, model, sequence_id) -> float:
    """What a step of nothing answers: the sum so far."""
    return client.step(model.name, sequence_id, {"INPUT": np.zeros((1, 1), np.float32)})["OUTPUT"].item()


def fed(value: float):
    return {"INPUT": np.array([[value]], np.float32)}


def test_a_step_cancelled_before_its_run_leaves_the_state_or_the_sequence_gone(deployment, long_run):
    """Never computed. Where core takes the request back itself, it may drop the whole sequence."""
    client = deployment.connect()
    sequence_id = new_id()
    client.step(long_run.name, sequence_id, fed(5), start=True)
    answers = []

    def cancel():
        waiting = Cancellable(deployment, long_run, sequence_id, fed(100))
        time.sleep(0.05)
        answers.append(waiting.cancel())

    busy_while(client, long_run, cancel)
    assert answers == [None]
    came = outcome(lambda: state_of(client, long_run, sequence_id))
    if isinstance(came, InferenceServerException):
        assert "START" in came.message()
    else:
        assert came == 5.0, "the cancelled request was computed"


def test_a_cancelled_start_leaves_no_sequence(deployment, long_run):
    client = deployment.connect()
    sequence_id = new_id()

    def cancel():
        waiting = Cancellable(deployment, long_run, sequence_id, fed(100), sequence_start=True)
        time.sleep(0.05)
        assert waiting.cancel() is None

    busy_while(client, long_run, cancel)
    came = outcome(lambda: state_of(client, long_run, sequence_id))
    if isinstance(came, InferenceServerException):
        assert came.status() in ("StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT")
    else:
        assert came == 100.0, "the cancelled request was computed"
    assert client.step(long_run.name, sequence_id, fed(3), start=True, end=True)["OUTPUT"].item() == 3.0


def test_a_cancelled_end_ends_the_sequence_or_leaves_it_to_its_idle_time(deployment):
    # A sequence that waits for its turn on a slow machine must not be idle for too long.
    model = models.slow("slow_end_to_cancel", products=4000, max_batch_size=1, idle_us=15_000_000)
    model = deployment.serve(model.with_parameters(model.name, sequence_idle_margin_microseconds=100_000))
    client = deployment.connect()
    sequence_id = new_id()
    client.step(model.name, sequence_id, fed(5), start=True)

    def cancel():
        waiting = Cancellable(deployment, model, sequence_id, fed(100), sequence_end=True)
        time.sleep(0.05)
        assert waiting.cancel() is None

    busy_while(client, model, cancel)
    deployment.settles("stateful_live_sequences", model, 0)


def test_cancelling_at_random_never_gives_a_wrong_answer(deployment):
    model = deployment.serve(models.slow("slow_cancelled_at_random", products=200, max_batch_size=4))
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            sequence_id, total, due = new_id(), 1.0, 0
            client.step(model.name, sequence_id, fed(1), start=True)
            for _ in range(8):
                waiting = Cancellable(deployment, model, sequence_id, fed(100))
                time.sleep(float(rng.uniform(0, 0.02)))
                due += 1
                came = answered = waiting.cancel()
                if answered is None:
                    # the client doesn't hear whether it is computed, now or later; never twice, never half
                    came = outcome(lambda sequence_id=sequence_id: state_of(client, model, sequence_id))
                    if isinstance(came, InferenceServerException):
                        break  # core has dropped the sequence
                ran, part = divmod(came - total, 100)
                assert part == 0 and (answered is not None) <= ran <= due, f"{came} after {total}, with {due} due"
                total, due = came, due - ran

    together(lambda seed=seed: talk(seed) for seed in range(6))
    Conversation(client, model, np.random.default_rng(1)).whole(4)


# ---- around the model


def ensemble(name: str, inner, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """An ensemble of one step; the outer names are the keys."""
    types = {tensor.name: tensor for tensor in (*inner.inputs, *inner.outputs)}

    def declare(kind, outer, of):
        tensor = types[of]
        dims = ", ".join(map(str, tensor.dims))
        return f'{kind} {{ name: "{outer}" data_type: TYPE_{tensor.type.upper()} dims: [ {dims} ] }}'

    maps = [
        *(f'input_map {{ key: "{of}" value: "{outer}" }}' for outer, of in inputs.items()),
        *(f'output_map {{ key: "{of}" value: "{outer}" }}' for outer, of in outputs.items()),
    ]
    return "\n".join(
        [
            f'name: "{name}"',
            'platform: "ensemble"',
            f"max_batch_size: {inner.max_batch_size}",
            *(declare("input", outer, of) for outer, of in inputs.items()),
            *(declare("output", outer, of) for outer, of in outputs.items()),
            f'ensemble_scheduling {{ step {{ model_name: "{inner.name}" model_version: -1',
            *maps,
            "} }",
        ]
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ensemble_around_the_model_passes_sequences_through(deployment, protocol):
    inner = deployment.serve(models.two_inputs(f"inner_{protocol}"))
    name = f"ensemble_{protocol}"
    folder = deployment.repository / name
    (folder / "1").mkdir(parents=True)
    config = ensemble(name, inner, {"A": "LEFT", "B": "RIGHT"}, {"SUM": "TOTAL_OUT"})
    (folder / "config.pbtxt").write_text(config)
    deployment.admin.load_model(name)
    client = deployment.connect(protocol)

    def talk(client, seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            sequence_id, total = new_id(), np.zeros((1, 2), np.float32)
            for i in range(5):
                drawn = inner.draw(rng)
                total = total + (drawn["LEFT"] - drawn["RIGHT"])
                inputs = {"A": drawn["LEFT"], "B": drawn["RIGHT"]}
                answer = client.step(name, sequence_id, inputs, start=i == 0, end=i == 4)
                np.testing.assert_array_equal(answer["SUM"], total)

    talk(client, 0)
    together(lambda seed=seed: talk(deployment.connect(protocol), seed) for seed in range(4))
    deployment.settles("stateful_live_sequences", inner, 0)
    with pytest.raises(InferenceServerException, match="START"):
        client.step(name, new_id(), {"A": np.zeros((1, 2), np.float32), "B": np.zeros((1, 2), np.float32)})
    deployment.admin.unload_model(name)


def test_warm_up_of_the_example_model(deployment):
    """The original had no way with a request without a sequence."""
    model = models.accumulate_fp32(
        "accumulate_fp32_warm",
        more="""model_warmup {
  name: "random" batch_size: 1 count: 3
  inputs { key: "Input" value: { data_type: TYPE_FP32 dims: [ 4, 1, 5 ] random_data: true } }
}""",
    )
    deployment.serve(model)
    assert deployment.metric("stateful_sequences_started_total", model) == 0
    interleave(deployment.connect(), model, np.random.default_rng(4), sequences=4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_warm_up_of_several_rows_with_padding_and_without_inferred_ends(deployment, batch_size):
    model = models.counter(
        name=f"counter_warm_{batch_size}",
        more=f"""model_warmup {{
  name: "zeros" batch_size: {batch_size} count: 2
  inputs {{ key: "INPUT" value: {{ data_type: TYPE_FP32 dims: [ 4 ] zero_data: true }} }}
}}""",
    )
    model = deployment.serve(model.with_parameters(model.name, always_pad_to_max_batch=1, infer_end_requests=0))
    client = deployment.connect()
    talk = Conversation(client, model, np.random.default_rng(5))
    talk.start()
    talk.step()
    assert client.step(model.name, talk.sequence_id, model.draw(talk.rng), end=True)["OUTPUT"].size == 0
    deployment.settles("stateful_live_sequences", model, 0)


# ---- what was fatal


@pytest.mark.parametrize("infer_end", [0, 1])
def test_expired_sequences_and_their_late_ends_disturb_nobody(deployment, infer_end):
    """END after expiry, and requests that come while sequences expire: the original gave the slot
    of another sequence away, or its data."""
    model = models.counter(name=f"counter_expires_{infer_end}", idle_us=400_000, max_candidates=20)
    model = deployment.serve(
        model.with_parameters(model.name, sequence_idle_margin_microseconds=0, infer_end_requests=infer_end)
    )
    client = deployment.connect()
    stop = threading.Event()

    def stay():
        talk = Conversation(client, model, np.random.default_rng(1))
        talk.start()
        while not stop.is_set():
            came = outcome(talk.step)
            if isinstance(came, InferenceServerException):  # this thread paused for longer than the idle time
                assert came.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"), came
                talk.start()
            time.sleep(0.02)

    def lapse(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            talk = Conversation(client, model, rng)
            talk.start()
            time.sleep(float(rng.uniform(0.3, 0.6)))  # around the limit
            came = outcome(
                lambda talk=talk: client.step(model.name, talk.sequence_id, model.draw(rng), end=bool(rng.integers(2)))
            )
            if isinstance(came, InferenceServerException):
                assert came.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"), came

    def lapses():
        try:
            together(lambda seed=seed: lapse(seed) for seed in range(6))
        finally:
            stop.set()

    together([stay, stay, lapses])
    deployment.settles("stateful_live_sequences", model, 0)


def test_requests_that_wait_longer_than_the_idle_time_are_answered_rightly_or_refused(deployment):
    """The original's own clock could end a sequence whose next request was in the queue."""
    model = models.slow("slow_beyond_idle", products=2500, max_batch_size=1, idle_us=300_000)
    model = deployment.serve(model.with_parameters(model.name, sequence_idle_margin_microseconds=0))
    client = deployment.connect()

    def talk(seed):
        talk = Conversation(client, model, np.random.default_rng(seed))
        for i in range(5):
            came = outcome(lambda i=i: talk.step(start=i == 0))
            if isinstance(came, InferenceServerException):
                assert came.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"), came
                return

    together(lambda seed=seed: talk(seed) for seed in range(5))
    deployment.settles("stateful_live_sequences", model, 0)


def test_one_shot_sequences_leave_others_alone(deployment):
    model = deployment.serve(models.accumulate_int32("accumulate_one_shots", max_candidates=30))
    client = deployment.connect()
    rng = np.random.default_rng(6)
    staying = [Conversation(client, model, rng) for _ in range(3)]
    for talk in staying:
        talk.start()
    together(
        [
            *(
                lambda seed=seed: [Conversation(client, model, np.random.default_rng(seed)).whole(1) for _ in range(20)]
                for seed in range(4)
            ),
            *(lambda talk=talk: [talk.step() for _ in range(20)] for talk in staying),
        ]
    )
    for talk in staying:
        talk.end()
    deployment.settles("stateful_live_sequences", model, 0)


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_shared_memory_can_be_refused_to_clients(deploy, region, protocol):
    """What docs/sequences.md advises: a client that shrinks what it has registered ends any server."""
    restricted = "restricted-{}=shared-memory:administrator=yes"
    deployed = deploy(extra_args=["--grpc-" + restricted.format("protocol"), "--http-" + restricted.format("api")])
    model = deployed.serve(models.two_inputs("two_inputs_unshared"))
    library = LIBRARIES[protocol]
    url = deployed.server.grpc_url if protocol == "grpc" else deployed.server.http_url
    key, _ = region(4096)
    client = library.InferenceServerClient(url)
    with contextlib.closing(client), pytest.raises(InferenceServerException, match="restricted"):
        client.register_system_shared_memory(key, key, 4096)
    Conversation(deployed.connect(), model, np.random.default_rng(3)).whole(3)

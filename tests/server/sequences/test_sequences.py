"""What a sequence is to a client: its own state, from START to END, whoever else talks."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from harness import models
from harness.clients import PROTOCOLS, new_id
from harness.conversations import Conversation, Said, interleave, pipeline, script, together, windowed
from harness.repetitions import repeated
from harness.sequence_oracle import SequenceOracle, assert_same

EVERY_MODEL = [
    models.accumulate(),
    models.accumulate("accumulate_int32_reset", reset="int32"),
    models.accumulate("accumulate_fp32_reset", reset="fp32"),
    models.lstm(),
    models.crossed(),
    models.axes(),
    models.many_states(),
    models.controls(),
    models.speech_like(),
    models.two_inputs(),
    *(models.counter(type) for type in ("bool", "int8", "int32", "int64", "uint8", "fp16", "fp32", "fp64")),
]


@pytest.mark.parametrize("model", EVERY_MODEL, ids=lambda model: model.name)
def test_interleaved_sequences_answer_as_if_each_were_alone(deployment, model):
    rng = np.random.default_rng(1)
    interleave(deployment.connect(), deployment.serve(model), rng, sequences=12)


@pytest.mark.parametrize("seed", [0, *repeated(1, 2)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_keeps_the_sequences_apart(deployment, protocol, seed):
    rng = np.random.default_rng(seed)
    model = deployment.serve(models.accumulate())
    interleave(deployment.connect(protocol), model, rng, sequences=25)


@pytest.mark.parametrize("model", EVERY_MODEL, ids=lambda model: model.name)
def test_sequences_at_the_same_time_answer_as_if_each_were_alone(deployment, model):
    model = deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, model, rng).whole(int(rng.integers(1, 9)))

    together(lambda seed=seed: talk(seed) for seed in range(10))


def test_a_sequence_may_change_the_protocol_in_the_middle(deployment):
    model = deployment.serve(models.accumulate())
    talk = Conversation(deployment.connect("http"), model, np.random.default_rng(2))
    talk.start()
    for protocol in ("stream", "unary", "http", "stream"):
        talk.client = deployment.connect(protocol)
        talk.step()
    talk.end()


@pytest.mark.parametrize("model", [models.accumulate(), models.counter()], ids=["reset", "no_reset"])
def test_start_on_a_live_sequence_gives_a_fresh_state(deployment, model):
    talk = Conversation(deployment.connect(), deployment.serve(model), np.random.default_rng(3))
    talk.start()
    talk.step()
    talk.start()
    talk.step()
    talk.end()


@pytest.mark.parametrize("model", [models.accumulate(), models.counter()], ids=["reset", "no_reset"])
def test_a_sequence_of_one_request_is_served_and_leaves_nothing_behind(deployment, model):
    rng = np.random.default_rng(4)
    client = deployment.connect()
    model = deployment.serve(model)
    neighbour = Conversation(client, model, rng)
    neighbour.start()
    sequence_id = new_id()
    for _ in range(5):
        Conversation(client, model, rng, sequence_id).whole(1)
        neighbour.step()
    neighbour.end()


def test_an_id_used_again_after_its_end_starts_afresh(deployment):
    rng = np.random.default_rng(5)
    client = deployment.connect()
    model = deployment.serve(models.counter())
    sequence_id = new_id()
    for _ in range(5):
        Conversation(client, model, rng, sequence_id).whole(4)


def test_no_sequence_sees_the_state_of_a_slots_earlier_owner(deployment):
    # no reset input: what the slot holds at START is what the first answer shows
    model = models.counter(max_candidates=4, max_batch_size=2, name="counter_wrapping")
    model = deployment.serve(model)
    rng = np.random.default_rng(6)
    client = deployment.connect()
    for _ in range(40):
        interleave(client, model, rng, sequences=3, longest=3)


@pytest.mark.parametrize("instances", [2, *repeated(1)])
@pytest.mark.parametrize("max_batch_size", [2, *repeated(1, 16)])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "ended_or_cut_short"])
def test_an_id_reused_without_waiting_never_mixes_its_lives(deployment, ends, max_batch_size, instances):
    model = models.counter(
        name=f"counter_reused_{max_batch_size}_{instances}",
        max_batch_size=max_batch_size,
        instances=instances,
        max_candidates=400,
    )
    model = deployment.serve(model)
    rng = np.random.default_rng(max_batch_size)
    stream = deployment.connect("stream")
    for _ in range(3):
        scripts = [script(model, rng, new_id(), lives=8, ends=ends) for _ in range(12)]
        pipeline(stream, model, rng, scripts)


@pytest.mark.parametrize("max_batch_size", [2, *repeated(1, 16)])
def test_an_id_reused_before_its_end_is_answered_serves_each_life(deployment, max_batch_size):
    """Each START waits for the answer to the one before it, and not for that to the END."""
    model = models.counter(name=f"counter_reused_early_{max_batch_size}", max_batch_size=max_batch_size)
    model = deployment.serve(model)
    rng = np.random.default_rng(max_batch_size)
    for _ in range(3):
        scripts = [script(model, rng, new_id(), lives=8) for _ in range(12)]
        windowed(deployment.connect("stream"), model, rng, scripts, window=8)


def test_an_id_reused_without_waiting_while_each_run_takes_its_time(deployment):
    model = deployment.serve(models.slow("slow_reused", max_candidates=200))
    rng = np.random.default_rng(8)
    scripts = [script(model, rng, new_id(), lives=4) for _ in range(6)]
    windowed(deployment.connect("stream"), model, rng, scripts, window=8)


def test_a_life_that_core_delays_does_not_displace_the_next_of_its_id(deployment):
    # Core gives the first life a slot whose last request is still running, and the second life a free one: the second
    # START overtakes the first. Then the client takes its time. Its next request must not get the state of the first.
    model = deployment.serve(models.slow("slow_overtaking", max_batch_size=1, products=1000))
    rng = np.random.default_rng(11)
    stream = deployment.connect("stream")
    blocker, sequence_id = new_id(), new_id()
    lives = [(True, False), (False, False), (False, True)]
    said = [Said(blocker, model.draw(rng), start=True, end=True)]
    said += [Said(sequence_id, model.draw(rng), start, end) for start, end in lives * 2]

    oracles = {blocker: SequenceOracle(model), sequence_id: SequenceOracle(model)}
    expected = [oracles[now.sequence_id].step(now.inputs, start=now.start) for now in said]
    answers = {}
    for batch in (range(5), range(5, 7)):
        for i in batch:
            now = said[i]
            flags = {"start": now.start, "end": now.end}
            stream.send(model.name, now.sequence_id, now.inputs, **flags, request_id=str(i))
        for reply in stream.replies(len(batch)):
            if reply.error is not None:
                assert "cannot be told apart" in str(reply.error) or "is not live" in str(reply.error)
                continue
            answers[int(reply.request_id)] = reply.outputs
        # the second life is silent while others have the server busy
        Conversation(deployment.connect(), model, rng).whole(20)
    assert 0 in answers
    for i, answer in answers.items():
        assert_same(model, answer, expected[i], f"request {i}")


def test_many_streams_at_once_each_with_many_sequences(deployment):
    model = deployment.serve(models.counter("int64", name="counter_streams", max_candidates=300))

    def talk(seed):
        rng = np.random.default_rng(seed)
        scripts = [script(model, rng, new_id(), lives=2) for _ in range(15)]
        windowed(deployment.connect("stream"), model, rng, scripts, window=8)

    together(lambda seed=seed: talk(seed) for seed in range(4))


@pytest.fixture
def far_too_much_to_do():
    """More threads than the machine has CPUs for, so that each waits for its turn again and again."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * os.cpu_count())]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


@pytest.mark.repetition
def test_ids_used_again_on_a_machine_with_far_too_much_to_do(deployment, far_too_much_to_do):
    """Core's threads stand still for long while it has requests of a sequence whose id is used again."""
    model = deployment.serve(models.counter("fp32", name="counter_of_the_starved", max_candidates=300))

    def talk(seed):
        rng = np.random.default_rng(seed)
        scripts = [script(model, rng, new_id(), lives=120) for _ in range(5)]
        windowed(deployment.connect("stream"), model, rng, scripts, window=4)

    together(lambda seed=seed: talk(seed) for seed in range(6))


@pytest.fixture
def paused():
    """Stops a server again and again, for 2 to 30 ms and sometimes for longer than an idle instance takes to show that
    core has nothing left. Core's queue stays full meanwhile."""
    stopped = threading.Event()
    threads = []

    def pause(deployment, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def go_on():
            while not stopped.wait(float(rng.uniform(0.002, 0.03))):
                os.kill(deployment.server.pid, signal.SIGSTOP)
                time.sleep(float(rng.uniform(0.1, 0.7) if rng.random() < 0.02 else rng.uniform(0.002, 0.03)))
                os.kill(deployment.server.pid, signal.SIGCONT)

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()

    yield pause
    stopped.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("requests", [4_000, *repeated(100_000)])
def test_pauses_while_core_has_requests_mix_no_sequences(deploy, paused, requests):
    """Each payload has one request, and core has dozens queued. Ids are used again before their END is answered."""
    deployment = deploy()
    model = deployment.serve(models.counter(name="counter_paused", max_batch_size=1, max_candidates=64))
    paused(deployment, 1)
    clients, ids, mean_length = 4, 10, 3
    lives = requests // (clients * ids * mean_length)

    def talk(seed):
        rng = np.random.default_rng(seed)
        scripts = [script(model, rng, new_id(), lives=lives) for _ in range(ids)]
        windowed(deployment.connect("stream"), model, rng, scripts, window=6)

    together(lambda seed=seed: talk(seed) for seed in range(clients))


def test_one_id_on_two_models_is_two_sequences(deployment):
    rng = np.random.default_rng(9)
    client = deployment.connect()
    sequence_id = new_id()
    served = [deployment.serve(models.counter()), deployment.serve(models.crossed())]
    talks = [Conversation(client, model, rng, sequence_id) for model in served]
    for talk in talks:
        talk.start()
    for _ in range(3):
        for talk in talks:
            talk.step()
    for talk in talks:
        talk.end()


def test_one_id_on_two_versions_of_a_model_is_two_sequences(deployment):
    model = models.counter(name="counter_versions", versions=(1, 2), more="version_policy { all { } }")
    model = deployment.serve(model)
    rng = np.random.default_rng(10)
    client = deployment.connect()
    sequence_id = new_id()
    talks = [Conversation(client, model, rng, sequence_id, version) for version in ("1", "2")]
    for talk in talks:
        talk.start()
    for _ in range(3):
        for talk in talks:
            talk.step()
    for talk in talks:
        talk.end()


@pytest.mark.parametrize("instances", [2, 3])
def test_several_instances_keep_the_sequences_apart(deployment, instances):
    model = models.accumulate(f"accumulate_{instances}_instances", instances=instances, max_batch_size=4)
    model = deployment.serve(model)
    client = deployment.connect()

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            Conversation(client, model, rng).whole(int(rng.integers(1, 9)))

    together(lambda seed=seed: talk(seed) for seed in range(12))


def test_several_models_of_several_instances_at_the_same_time(deployment):
    client = deployment.connect()
    served = [
        deployment.serve(dataclasses.replace(model, name=f"{model.name}_beside", instances=instances))
        for model, instances in (
            (models.accumulate(), 2),
            (models.lstm(), 3),
            (models.crossed(), 1),
            (models.slow(), 2),
        )
    ]

    def talk(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            Conversation(client, served[seed % len(served)], rng).whole(int(rng.integers(1, 9)))

    together(lambda seed=seed: talk(seed) for seed in range(16))

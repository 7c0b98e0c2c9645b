"""START for a live sequence, without END: how long the request after it waits, and for whom."""

import threading
import time

import numpy as np

from harness import models
from harness.conversations import Conversation


def busily(client, model, seed: int, stop: threading.Event) -> tuple[Conversation, threading.Thread]:
    """A client that sends requests of one sequence, each when it has the answer to the last, until it is stopped."""
    talk = Conversation(client, model, np.random.default_rng(seed))
    talk.start()

    def go_on():
        while not stop.is_set():
            talk.step()
        talk.end()

    thread = threading.Thread(target=go_on)
    thread.start()
    return talk, thread


def test_a_restart_waits_for_a_request_or_two_of_a_busy_client(deployment):
    # No batch of this model is short, and core could have 1024 requests queued.
    model = models.slow("slow_restarts", max_batch_size=1, max_candidates=1024)
    model = deployment.serve(model)
    stop = threading.Event()
    busy, thread = busily(deployment.connect(), model, 1, stop)
    try:
        talk = Conversation(deployment.connect(), model, np.random.default_rng(2))
        for _ in range(3):
            talk.start()
            for _ in range(5):
                talk.step()
            talk.start()
            before = busy.count
            talk.step()
            assert busy.count - before <= 10
    finally:
        stop.set()
        thread.join()
    talk.end()


def test_a_restart_of_a_sequence_at_rest_waits_for_nothing(deployment):
    # Preferred batches of 1 are not delayed, but the delay counts for how long a server is to be quiet.
    oldest = "max_queue_delay_microseconds: 3000000 preferred_batch_size: [ 1 ]"
    model = deployment.serve(models.counter(name="rested_restarts", oldest=oldest, max_batch_size=4))
    talk = Conversation(deployment.connect(), model, np.random.default_rng(3))
    talk.start()
    time.sleep(3.5)
    talk.start()
    began = time.monotonic()
    talk.step()
    assert time.monotonic() - began < 2
    talk.end()


def test_silent_clients_of_direct_expire_while_others_are_busy(deployment):
    # The inputs have an open dimension: core may pass over a request of another shape.
    model = models.append(name="silent_direct", direct="", max_batch_size=4, idle_us=1_000_000)
    model = deployment.serve(model.with_parameters(model.name, sequence_idle_margin_microseconds=0))
    silent = Conversation(deployment.connect(), model, np.random.default_rng(9))
    silent.start()
    stop = threading.Event()
    # They keep their rows, so no START takes the row of the silent one.
    busy = [busily(deployment.connect(), model, seed, stop) for seed in range(3)]
    try:
        deployment.settles("stateful_sequences_expired_total", model, 1)
    finally:
        stop.set()
        for _, thread in busy:
            thread.join()
    deployment.settles("stateful_live_sequences", model, 0)

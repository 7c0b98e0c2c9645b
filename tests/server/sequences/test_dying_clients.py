"""Clients that die in the middle of everything: the others never notice."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from harness import models
from harness.conversations import Conversation, together
from harness.repetitions import repeated

# starts sequences and floods them with requests; says so once answers arrive in all threads, because tritonserver 2.51
# can crash if a stream is broken off while its first request is in flight
FLOOD = textwrap.dedent("""
    import itertools, sys, threading
    import numpy as np
    from harness import clients

    protocol, url, model, first = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

    class Server:
        grpc_url = http_url = url

    class Deployment:
        server = Server

    fed = {"INPUT": np.ones((1, 1), np.float32)}

    threads = 4
    answered = threading.Barrier(threads, lambda: print("flooding", flush=True))

    def flood(ids):
        client = clients.PROTOCOLS[protocol](Deployment)
        for count in itertools.count():
            for sequence_id in ids:
                if protocol == "stream":
                    client.send(model, sequence_id, fed, start=count == 0)
                else:
                    client.step(model, sequence_id, fed, start=count == 0)
            if protocol == "stream" and count % 4 == 3:
                client.replies(2 * len(ids))
            if count == 5:
                answered.wait()

    for i in range(threads):
        ids = [first + 3 * i + k for k in range(3)]
        threading.Thread(target=flood, args=(ids,), daemon=True).start()
    threading.Event().wait()
""")


@pytest.mark.parametrize("protocol", ["stream", *repeated("unary", "http")])
def test_killed_clients_leave_the_server_and_the_others_in_peace(deployment, protocol):
    model = models.slow(
        f"slow_survivor_{protocol}",
        products=60,
        max_candidates=200,
        idle_us=5_000_000,
        parameters={"sequence_idle_margin_microseconds": "200000"},
    )
    model = deployment.serve(model)
    client = deployment.connect()
    over = []

    def talk(seed):
        rng = np.random.default_rng(seed)
        count = 0
        while not over:
            Conversation(client, model, rng).whole(int(rng.integers(2, 9)))
            count += 1
        return count

    def kill_some():
        try:
            server = deployment.server
            url = server.http_url if protocol == "http" else server.grpc_url
            for i in range(3):
                victim = subprocess.Popen(
                    [sys.executable, "-c", FLOOD, protocol, url, model.name, str(10**6 + 100 * i)],
                    cwd=Path(__file__).parents[1],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert victim.stdout.readline() == "flooding\n"
                victim.kill()
                victim.wait()
                victim.stdout.close()
        finally:
            over.append(True)

    together([*(lambda seed=seed: talk(seed) for seed in range(3)), kill_some])
    # nobody ended the dead clients' sequences; time does
    deployment.settles("stateful_live_sequences", model, 0)

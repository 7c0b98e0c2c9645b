"""With which clients, and in which way, a test of sequences runs: directly, and through the gateway.

A client of OpenVINO Model Server knows only its two special inputs, so a test that needs strings as ids, streams,
timeouts or other parameters of a request runs with Triton's clients only.
"""

from __future__ import annotations

import pytest

from harness import raw, tensorflow_serving
from harness.own import ByInputs, ByParameters

DIRECT, GATEWAY = list(raw.PROTOCOLS), list(tensorflow_serving.CLIENTS)

tritons_protocols = pytest.mark.parametrize("protocol", DIRECT)
every_protocol = pytest.mark.parametrize("protocol", [*DIRECT, *GATEWAY])

#: `connect()` without a protocol, directly and through the gateway.
through_gateway = pytest.mark.parametrize("connect", ["unary", "predict"], indirect=True)
#: The same for both ways to control a sequence.
every_way = pytest.mark.parametrize(
    ("connect", "way"),
    [("unary", ByParameters), ("unary", ByInputs), ("predict", ByInputs)],
    indirect=["connect"],
    ids=["parameters", "inputs", "gateway"],
)
#: Each protocol with each way that it has.
every_client = pytest.mark.parametrize(
    ("protocol", "way"),
    [
        *(
            pytest.param(protocol, way, id=f"{way.name}-{protocol}")
            for way in (ByParameters, ByInputs)
            for protocol in DIRECT
        ),
        *(pytest.param(protocol, ByInputs, id=protocol) for protocol in GATEWAY),
    ],
)


def connected(deployment, protocol: str):
    """A client of a protocol's name."""
    if protocol in tensorflow_serving.CLIENTS:
        return tensorflow_serving.CLIENTS[protocol](deployment.gateway)
    return raw.PROTOCOLS[protocol](deployment)

"""Which server a proxy chooses for a sequence, and how many requests each server had."""

from __future__ import annotations

import contextlib
import http.client
import json
import re

import tritonclient.grpc as grpc_client

from harness.model import Model
from support.proxies import Proxy
from support.server import TritonServer


def is_complete(names: set[str | None]) -> bool:
    return len(names) == 3 and None not in names


def server_of(proxy: Proxy, number: int) -> str | None:
    """The name of the server that gets this sequence's requests."""
    with grpc_client.InferenceServerClient(proxy.grpc_url) as client, contextlib.suppress(Exception):
        return client.get_server_metadata(headers={"sequence-id": str(number)}).name
    return None


def server_of_http(proxy: Proxy, number: int) -> str | None:
    host, port = proxy.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port))
    with contextlib.closing(connection), contextlib.suppress(OSError, ValueError):
        connection.request("GET", "/v2", headers={"sequence-id": str(number)})
        return json.loads(connection.getresponse().read())["name"]
    return None


def requests(server: TritonServer, model: Model) -> int:
    """How many requests the server has answered."""
    count = re.compile(rf'^nv_inference_request_success{{model="{model.name}".*}} (\S+)$', re.MULTILINE)
    return int(float(count.findall(server.metrics())[0]))

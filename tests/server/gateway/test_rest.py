"""HTTP requests: formats of a body, paths, methods, and invalid requests."""

import gzip
import json
import socket

import pytest
import requests

from harness import models
from harness.own import fed, total
from harness.raw import Refused

START = {"sequence_id": [42], "sequence_control_input": [1]}
STEP = {"sequence_id": [42]}
DATA = {"INPUT": [[5]], "WORK": [[0]]}


def error_of(response: requests.Response) -> tuple[int, str]:
    """Every error is JSON."""
    body = response.json()
    assert set(body) == {"error"} and body["error"], body
    return response.status_code, body["error"]


# ---- bodies


def test_columns(serve, rest):
    model = serve().name
    expected = {"outputs": {"OUTPUT": [[5]], "sequence_id": [42]}}
    assert rest.post(f"{model}:predict", {"inputs": {**DATA, **START}}) == expected


def test_rows(serve, rest):
    """An instance leaves out the first dimension. `sequence_id` has no other, so it is a number in a prediction."""
    model = serve().name
    row = {"INPUT": [5], "WORK": [0]}
    came = rest.post(f"{model}:predict", {"instances": [{**row, **START}]})
    assert came == {"predictions": [{"OUTPUT": [5], "sequence_id": 42}]}
    came = rest.post(f"{model}:predict", {"signature_name": "serving_default", "instances": [{**row, **STEP}]})
    assert came["predictions"][0]["OUTPUT"] == [10]


def test_an_id_of_the_server_by_rows(serve, rest):
    model = serve().name
    came = rest.post(f"{model}:predict", {"instances": [{"INPUT": [5], "WORK": [0], "sequence_control_input": [1]}]})
    assert came["predictions"] == [{"OUTPUT": [5], "sequence_id": 1}]


@pytest.mark.parametrize("key", ["inputs", "instances"])
def test_a_bare_value_stands_for_the_only_input(serve, rest, key):
    """It can't carry the special inputs, so the error says that the id is missing, not that the body is wrong."""
    model = serve(models.counter, type="fp32").name
    with pytest.raises(Refused, match="^400: Sequence ID has not been provided in request inputs"):
        rest.post(f"{model}:predict", {key: [[1, 2, 3, 4]]})


def test_a_bare_value_for_a_model_of_two_inputs(serve, rest):
    with pytest.raises(Refused, match="^400: "):
        rest.post(f"{serve().name}:predict", {"inputs": [[5]]})


@pytest.mark.parametrize("signature", ["serving_default", "", "another"])
def test_the_name_of_the_signature(serve, rest, signature):
    """OpenVINO Model Server doesn't look at it."""
    came = rest.post(f"{serve().name}:predict", {"signature_name": signature, "inputs": {**DATA, **START}})
    assert came["outputs"]["OUTPUT"] == [[5]]


BODIES = {
    "nothing": b"",
    "half": b"{",
    "array": b"[]",
    "number": b"5",
    "text": b'"text"',
    "object": b"{}",
    "no_inputs": b'{"inputs": {}}',
    "inputs_number": b'{"inputs": 5}',
    "inputs_null": b'{"inputs": null}',
    "no_instances": b'{"instances": []}',
    "instances_object": b'{"instances": {}}',
    "empty_instance": b'{"instances": [{}]}',
    "number_and_object": b'{"instances": [5, {"INPUT": [5]}]}',
    "object_and_number": b'{"instances": [{"INPUT": [5]}, 5]}',
    "both": b'{"inputs": {"INPUT": [[5]]}, "instances": [{"INPUT": [5]}]}',
    "two": b'{"inputs": {"INPUT": [[5]]}} {}',
    "no_utf8": b'{"inputs": {"INPUT": "\xff"}}',
    "deep": b"[" * 100_000,
    "deep_input": b'{"inputs": {"INPUT": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request(serve, rest, gateway, body):
    model = serve().name
    response = requests.post(f"{rest.url}/{model}:predict", data=body, timeout=60)
    assert error_of(response)[0] == 400
    assert rest.post(f"{model}:predict", {"inputs": {**DATA, **START}})["outputs"]["OUTPUT"] == [[5]]


def test_instances_of_several_rows_are_refused(serve, rest):
    """A request has one sequence."""
    model = serve().name
    rows = [{"INPUT": [5], "WORK": [0], **START}, {"INPUT": [6], "WORK": [0], "sequence_id": [43]}]
    with pytest.raises(Refused, match="^400: "):
        rest.post(f"{model}:predict", {"instances": rows})
    with pytest.raises(Refused, match="^404: Sequence with provided ID does not exist"):
        rest.post(f"{model}:predict", {"inputs": {**DATA, **STEP}})


def test_instances_with_different_inputs_are_refused(serve, rest):
    model = serve().name
    rows = [{"INPUT": [5], "WORK": [0], **START}, {"INPUT": [6]}]
    with pytest.raises(Refused, match="^400: "):
        rest.post(f"{model}:predict", {"instances": rows})


def test_a_body_in_chunks(serve, rest):
    body = json.dumps({"inputs": {**DATA, **START}}).encode()
    chunks = (body[at : at + 7] for at in range(0, len(body), 7))
    response = requests.post(f"{rest.url}/{serve().name}:predict", data=chunks, timeout=60)
    assert response.json()["outputs"]["OUTPUT"] == [[5]]


def test_several_requests_on_one_connection(serve, gateway, rest):
    """Also after an error."""
    model = serve().name
    host, port = gateway.rest_url.split(":")
    body = json.dumps({"inputs": {**DATA, **START}})
    request = f"POST /v1/models/{model}:predict HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as replies:
        for status in (b"200", b"409", b"409"):
            connection.sendall(request.encode())
            assert replies.readline().split()[1] == status
            length = 0
            while (line := replies.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            replies.read(length)


# ---- paths


def predict_at(rest, path: str, flags) -> requests.Response:
    return requests.post(f"{rest.url}/{path}:predict", json={"inputs": {**DATA, **flags}}, timeout=60)


def test_a_version_in_the_path(serve, rest):
    model = serve(versions=(1, 2), more="version_policy { all { } }").name
    assert predict_at(rest, f"{model}/versions/1", START).status_code == 200
    # 0 is what ovmsclient writes for none
    for latest in ("versions/2", "versions/0", ""):
        response = predict_at(rest, f"{model}/{latest}".rstrip("/"), STEP)
        status, text = error_of(response)
        assert status == 404 and text.startswith("Sequence with provided ID does not exist")
    assert predict_at(rest, f"{model}/versions/1", STEP).json()["outputs"]["OUTPUT"] == [[10]]


def test_a_label_in_the_path_is_the_latest_version(serve, rest):
    """OpenVINO Model Server has no labels. It serves the latest version for any of them."""
    model = serve(versions=(1, 2), more="version_policy { all { } }").name
    assert predict_at(rest, f"{model}/labels/stable", START).status_code == 200
    assert predict_at(rest, f"{model}/versions/2", STEP).json()["outputs"]["OUTPUT"] == [[10]]


@pytest.mark.parametrize(
    ("version", "status"), [("abc", 400), ("-1", 400), ("1.0", 400), ("", 400), ("99999999999999999999", 404)]
)
def test_a_version_that_is_no_number(serve, rest, version, status):
    assert error_of(predict_at(rest, f"{serve().name}/versions/{version}", START))[0] == status


def test_names_are_decoded(serve, rest):
    model = serve().name
    assert predict_at(rest, "".join(f"%{ord(letter):02x}" for letter in model), START).status_code == 200


@pytest.mark.parametrize("path", ["%ff%fe", "..%2f..%2fetc", "a%00b", "%0d%0aInjected%3a%20yes", "x" * 300])
def test_names_that_no_model_has(rest, path):
    assert error_of(predict_at(rest, path, START))[0] == 404


def test_a_name_with_a_colon(rest):
    """A colon that isn't encoded is in front of a method."""
    assert error_of(predict_at(rest, "a:b", START))[0] == 400


@pytest.mark.parametrize(
    ("path", "posted", "got"),
    [
        *((path, 400, 400) for path in ("/", "/v1", "/v1/", "/v1/models/", "/v3/models", "/v1/models/m/x")),
        ("/v1/models/m:classify", 404, 404),
        # the model without a name
        ("/v1/models", 405, 404),
    ],
)
def test_unknown_paths(gateway, path, posted, got):
    assert error_of(gateway.post(path, {}))[0] == posted
    assert error_of(gateway.get(path))[0] == got


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/MODEL:predict"),
        ("PUT", "/v1/models/MODEL:predict"),
        ("POST", "/v1/models/MODEL"),
        ("POST", "/v1/models/MODEL/metadata"),
        ("DELETE", "/v1/models/MODEL"),
        ("POST", "/v1/config"),
        ("GET", "/v1/config/reload"),
    ],
)
def test_a_method_that_a_path_does_not_have(serve, gateway, method, path):
    url = f"http://{gateway.rest_url}{path.replace('MODEL', serve().name)}"
    response = requests.request(method, url, json={}, timeout=60)
    assert error_of(response)[0] == 405


def test_broken_off_requests_do_not_affect_the_next_one(serve, gateway, rest):
    model = serve().name
    host, port = gateway.rest_url.split(":")
    for part in (b"", b"POST", b"POST /v1/models/m:predict HTTP/1.1\r\nContent-Length: 100\r\n\r\n{", b"\x16\x03\x01"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(part)
    assert total(rest.ask(model, fed(5), {"sequence_id": 42, "sequence_start": True})) == 5


def test_a_compressed_body_is_refused(serve, rest):
    body = gzip.compress(json.dumps({"inputs": {**DATA, **START}}).encode())
    response = requests.post(
        f"{rest.url}/{serve().name}:predict", data=body, headers={"Content-Encoding": "gzip"}, timeout=60
    )
    assert error_of(response)[0] == 400

"""Clients that were written for OpenVINO Model Server: ovmsclient, TensorFlow Serving's stubs, and requests."""

import json
import subprocess
import sys

import grpc
import numpy as np
import ovmsclient
import pytest
import requests

from harness import models
from harness.own import fed
from harness.tensorflow_protos import predict_pb2, prediction_service_pb2_grpc
from harness.tensorflow_serving import array, tensor_proto

START, END = np.uint32(1), np.uint32(2)


@pytest.fixture(params=["grpc", "http"])
def client(gateway, request):
    """ovmsclient sends a scalar value by value, and an array by its bytes. It always names a version, and 0 for none."""
    if request.param == "grpc":
        return ovmsclient.make_grpc_client(gateway.grpc_url)
    return ovmsclient.make_http_client(gateway.rest_url)


# ---- ovmsclient


def test_ovmsclient_has_a_sequence_with_an_id_of_its_own(serve, client):
    model = serve()
    sums = []
    for value, control in ((5, {"sequence_control_input": START}), (7, {}), (-2, {"sequence_control_input": END})):
        answer = client.predict({**fed(value), "sequence_id": np.uint64(42), **control}, model.name)
        assert answer["sequence_id"].tolist() == [42]
        sums.append(answer["OUTPUT"].item())
    assert sums == [5, 12, 10]


def test_ovmsclient_has_a_sequence_with_an_id_of_the_server(serve, client):
    model = serve()
    answer = client.predict({**fed(5), "sequence_control_input": START}, model.name, timeout=60.0)
    made = np.uint64(answer["sequence_id"][0])
    assert made == 1
    assert client.predict({**fed(7), "sequence_id": made}, model.name, 1)["OUTPUT"].item() == 12
    end = {"sequence_id": made, "sequence_control_input": END}
    assert client.predict({**fed(1), **end}, model.name)["OUTPUT"].item() == 13


def test_ovmsclient_gets_the_errors_that_it_knows(serve, client):
    """It has classes for some codes: the others become one of these."""
    model = serve()
    started = {**fed(5), "sequence_id": np.uint64(42), "sequence_control_input": START}
    client.predict(started, model.name)
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Sequence with provided ID does not exist"):
        client.predict({**fed(5), "sequence_id": np.uint64(43)}, model.name)
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Model with requested name is not found"):
        client.predict(started, "no_such_model")
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Model with requested version is not found"):
        client.predict(started, model.name, 7)
    with pytest.raises(ovmsclient.InvalidInputError, match="Sequence ID has not been provided in request inputs"):
        client.predict(fed(5), model.name)
    with pytest.raises(ovmsclient.InvalidInputError, match="Unexpected value of sequence control input"):
        client.predict({**fed(5), "sequence_control_input": np.uint32(3)}, model.name)
    with pytest.raises(ovmsclient.InvalidInputError, match="shape"):
        client.predict({**started, "INPUT": np.zeros((1, 2), np.int64)}, model.name)
    with pytest.raises(
        (ConnectionError, ovmsclient.ModelServerError), match="Sequence with provided ID already exists"
    ):
        client.predict(started, model.name)


def test_ovmsclient_reads_the_metadata(serve, client):
    model = serve(models.counter, type="fp32")
    expected = {
        "model_version": 1,
        "inputs": {"INPUT": {"shape": [-1, 4], "dtype": "DT_FLOAT"}},
        "outputs": {"OUTPUT": {"shape": [-1, 4], "dtype": "DT_FLOAT"}},
    }
    assert client.get_model_metadata(model.name) == client.get_model_metadata(model.name, 1) == expected
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Model with requested name is not found"):
        client.get_model_metadata("no_such_model")
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Model with requested version is not found"):
        client.get_model_metadata(model.name, 7)


def test_ovmsclient_reads_the_status(serve, client):
    model = serve()
    [(version, status)] = client.get_model_status(model.name).items()
    assert version == 1 and status["state"] == "AVAILABLE" and status["error_code"] == 0
    assert client.get_model_status(model.name, 1) == {version: status}
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Model with requested name is not found"):
        client.get_model_status("no_such_model")
    with pytest.raises(ovmsclient.ModelNotFoundError, match="Model with requested version is not found"):
        client.get_model_status(model.name, 7)


# ---- the two clients of OpenVINO Model Server's page on stateful models
#
# They make the same requests, with the same options and in the same order, as grpc_stateful_client.py and
# rest_stateful_client.py of model_server's release 2022.3 (demos/speech_recognition_with_kaldi_model/python), which read
# their data from files of Kaldi and need TensorFlow. Each sequence has an utterance; the first frame is repeated cw_l times
# before it, and the last one cw_r times after it. If the id is 0, the one of the first response serves for all sequences.

UTTERANCES = [
    np.random.default_rng(seed).integers(-9, 9, (length, 4)).astype(np.float32) for seed, length in ((1, 5), (2, 2))
]


def frames_of(utterance, cw_l: int, cw_r: int):
    """Each frame with its control."""
    frames = [*[utterance[0]] * cw_l, *utterance, *[utterance[-1]] * cw_r]
    return [(frame[None], 1 if i == 0 else 2 if i == len(frames) - 1 else None) for i, frame in enumerate(frames)]


contexts = pytest.mark.parametrize(("cw_l", "cw_r"), [(0, 0), (3, 2)], ids=["no_context", "context"])
ids = pytest.mark.parametrize("sequence_id", [0, 10])


@ids
@contexts
def test_the_grpc_client_of_the_page(gateway, serve, sequence_id, cw_l, cw_r):
    model = serve(models.counter, type="fp32")
    with grpc.insecure_channel(gateway.grpc_url) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for utterance in UTTERANCES:
            expected = np.zeros((1, 4), np.float32)
            for frame, control in frames_of(utterance, cw_l, cw_r):
                request = predict_pb2.PredictRequest()
                request.model_spec.name = model.name
                request.inputs["INPUT"].CopyFrom(tensor_proto(frame))
                assert request.inputs["INPUT"].tensor_content
                if control is not None:
                    request.inputs["sequence_control_input"].CopyFrom(tensor_proto(np.array([control], np.uint32)))
                request.inputs["sequence_id"].CopyFrom(tensor_proto(np.array([sequence_id], np.uint64)))
                result = stub.Predict(request, 10.0)
                assert set(result.outputs) == {"OUTPUT", "sequence_id"}
                sequence_id = sequence_id or result.outputs["sequence_id"].uint64_val[0]
                assert result.outputs["sequence_id"].uint64_val == [sequence_id]
                expected = expected + frame
                answer = array(result.outputs["OUTPUT"])
                assert answer.dtype == np.float32 and answer.tolist() == expected.tolist()


@ids
@contexts
@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_the_rest_client_of_the_page(gateway, serve, sequence_id, cw_l, cw_r, version):
    model = serve(models.counter, type="fp32")
    session = requests.Session()
    for utterance in UTTERANCES:
        expected = np.zeros((1, 4), np.float32)
        for frame, control in frames_of(utterance, cw_l, cw_r):
            inputs: dict[str, list] = {"INPUT": frame.tolist(), "sequence_id": [int(sequence_id)]}
            if control is not None:
                inputs["sequence_control_input"] = [int(control)]
            body = json.dumps({"signature_name": "serving_default", "inputs": inputs})
            # without a content type
            url = f"http://{gateway.rest_url}/v1/models/{model.name}{version}:predict"
            result = json.loads(session.post(url, data=body).text)
            assert set(result) == {"outputs"} and set(result["outputs"]) == {"OUTPUT", "sequence_id"}
            sequence_id = sequence_id or np.array(result["outputs"]["sequence_id"], np.uint64).item()
            assert result["outputs"]["sequence_id"] == [sequence_id]
            expected = expected + frame
            assert result["outputs"]["OUTPUT"] == expected.tolist()


def test_one_client_may_change_the_protocol_within_a_sequence(connect, serve):
    model, (predict, rest) = serve(), (connect("predict"), connect("rest"))
    asked = ((predict, {"sequence_start": True}), (rest, {}), (predict, {}), (rest, {"sequence_end": True}))
    answers = [client.ask(model.name, fed(1), {"sequence_id": 42, **flags}) for client, flags in asked]
    assert [answer.outputs["OUTPUT"].item() for answer in answers] == [1, 2, 3, 4]


# ---- with TensorFlow itself

#: TensorFlow's own functions make the requests' tensors and read the responses', as in the examples of the page.
WITH_TENSORFLOW = """
import sys
import grpc
import numpy as np
from tensorflow import make_ndarray, make_tensor_proto
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

address, model = sys.argv[1:]
stub = prediction_service_pb2_grpc.PredictionServiceStub(grpc.insecure_channel(address))
sequence_id = 0
for control in (1, None, 2):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    frame = np.arange(4, dtype=np.float32)[None]
    request.inputs["INPUT"].CopyFrom(make_tensor_proto(frame, shape=frame.shape))
    if control:
        request.inputs["sequence_control_input"].CopyFrom(make_tensor_proto([control], dtype="uint32"))
    request.inputs["sequence_id"].CopyFrom(make_tensor_proto([np.uint64(sequence_id)], dtype="uint64"))
    response = stub.Predict(request, 10.0)
    sequence_id = response.outputs["sequence_id"].uint64_val[0]
    print(sequence_id, make_ndarray(response.outputs["OUTPUT"]).tolist())
"""


@pytest.mark.repetition
@pytest.mark.timeout(900)
def test_tensorflow_itself(gateway, serve, tmp_path):
    """Installs TensorFlow, 600 MB, into a folder of its own."""
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    wanted = ["tensorflow-cpu==2.21.0", "tensorflow-serving-api==2.21.0", "--target", str(tmp_path / "tensorflow")]
    subprocess.run([*pip, "--no-deps", "tensorflow-serving-api==2.21.0", *wanted[2:]], check=True)
    subprocess.run([*pip, wanted[0], *wanted[2:]], check=True)
    model = serve(models.counter, type="fp32")
    run = subprocess.run(
        [sys.executable, "-c", WITH_TENSORFLOW, gateway.grpc_url, model.name],
        env={"PYTHONPATH": str(tmp_path / "tensorflow"), "PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"1 {[[0.0, n, 2.0 * n, 3.0 * n]]}" for n in (1.0, 2.0, 3.0)]

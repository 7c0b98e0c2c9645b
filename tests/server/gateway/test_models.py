"""Metadata and status of models, as TensorFlow Serving's API has them."""

import shutil

import grpc
import pytest

from harness import models
from harness.deployment import eventually
from harness.model import Tensor
from harness.own import fed
from harness.raw import Refused
from harness.tensorflow_protos import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    types_pb2,
)
from harness.tensorflow_serving import of_ovms, predict_request


@pytest.fixture
def stubs(gateway, predict):
    return predict.stub, model_service_pb2_grpc.ModelServiceStub(predict.channel)


def signature_of(stubs, name: str, version: int = 0):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = name
    request.model_spec.version.value = version
    response = stubs[0].GetModelMetadata(request)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert response.model_spec.name == name
    return response.model_spec.version.value, signatures.signature_def["serving_default"]


def shapes(tensors) -> dict:
    return {name: (tensor.dtype, [dim.size for dim in tensor.tensor_shape.dim]) for name, tensor in tensors.items()}


def test_the_signature_over_grpc_has_no_special_inputs(serve, stubs):
    """The batch comes first, and is open."""
    version, signature = signature_of(stubs, serve(models.two_inputs).name)
    assert version == 1
    two = (types_pb2.DT_FLOAT, [-1, 2])
    assert shapes(signature.inputs) == {"LEFT": two, "RIGHT": two}
    assert shapes(signature.outputs) == {"DIFFERENCE": two, "TOTAL_OUT": two}
    assert {name: tensor.name for name, tensor in signature.inputs.items()} == {"LEFT": "LEFT", "RIGHT": "RIGHT"}


def test_the_signature_over_http(serve, gateway):
    model = serve().name
    response = gateway.get(f"/v1/models/{model}/metadata")
    body = response.json()
    # numbers of 64 bits are texts in JSON of protobuf
    assert body["modelSpec"]["name"] == model and body["modelSpec"]["version"] == "1"
    signature = body["metadata"]["signature_def"]["signatureDef"]["serving_default"]
    assert set(signature["inputs"]) == {"INPUT", "WORK"} and set(signature["outputs"]) == {"OUTPUT"}
    tensor = signature["inputs"]["INPUT"]
    assert tensor["dtype"] == "DT_INT64" and [dim["size"] for dim in tensor["tensorShape"]["dim"]] == ["-1", "1"]
    assert gateway.get(f"/v1/models/{model}/versions/1/metadata").json() == body


def test_a_model_without_a_batch_dimension(serve, stubs):
    rows = {"inputs": (Tensor("INPUT", "fp32", (1, 4)),), "outputs": (Tensor("OUTPUT", "fp32", (1, 4)),)}
    model = serve(lambda name, **changes: models.counter("fp32", name, **changes), max_batch_size=0, **rows)
    _, signature = signature_of(stubs, model.name)
    assert shapes(signature.inputs) == {"INPUT": (types_pb2.DT_FLOAT, [1, 4])}


def test_the_signature_is_that_of_the_version(serve, stubs, deployment, gateway):
    model = serve(versions=(1, 2), more="version_policy { all { } }")
    assert [signature_of(stubs, model.name, version)[0] for version in (0, 1, 2)] == [2, 1, 2]
    for path in ("/versions/3/metadata", "/versions/3"):
        response = gateway.get(f"/v1/models/{model.name}{path}")
        assert response.status_code == 404
        assert response.json()["error"].startswith("Model with requested version is not found")
    with pytest.raises(grpc.RpcError, match="Model with requested version is not found") as caught:
        signature_of(stubs, model.name, 3)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("field", [[], ["unknown"], ["signature_def", "unknown"]])
def test_an_unknown_field_of_metadata(serve, stubs, field):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=field)
    request.model_spec.name = serve().name
    with pytest.raises(grpc.RpcError) as caught:
        stubs[0].GetModelMetadata(request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


# ---- status


def statuses(stubs, name: str, version: int = 0) -> dict[int, tuple]:
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = name
    if version:
        request.model_spec.version.value = version
    response = stubs[1].GetModelStatus(request)
    return {of.version: (of.state, of.status.error_code) for of in response.model_version_status}


AVAILABLE = get_model_status_pb2.ModelVersionStatus.State.Value("AVAILABLE")
LOADING = get_model_status_pb2.ModelVersionStatus.State.Value("LOADING")


def test_the_status_of_all_versions_and_of_one(serve, stubs, gateway):
    model = serve(versions=(1, 2), more="version_policy { all { } }").name
    available = (AVAILABLE, 0)
    assert statuses(stubs, model) == {1: available, 2: available}
    assert statuses(stubs, model, 2) == {2: available}
    of_2 = {"version": "2", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": "OK"}}
    assert gateway.get(f"/v1/models/{model}/versions/2").json() == {"model_version_status": [of_2]}
    listed = gateway.get(f"/v1/models/{model}").json()["model_version_status"]
    assert sorted(listed, key=lambda of: of["version"]) == [of_2 | {"version": "1"}, of_2]


@pytest.mark.parametrize("version", [0, 7])
def test_the_status_of_an_unknown_model(stubs, version):
    with pytest.raises(grpc.RpcError, match="Model with requested name is not found") as caught:
        statuses(stubs, "no_such_model", version)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_the_status_of_a_model_that_could_not_be_loaded(deployment, serve, stubs, gateway):
    model = serve()
    (deployment.repository / model.name / "2").mkdir()
    (deployment.repository / model.name / "2" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(Exception, match="load"):
        deployment.admin.load_model(model.name)
    # the version that was served still is
    available, unknown = (AVAILABLE, 0), (LOADING, grpc.StatusCode.UNKNOWN.value[0])
    assert statuses(stubs, model.name) == {1: available, 2: unknown}
    [_, failed] = gateway.get("/v1/config").json()[model.name]["model_version_status"]
    assert (failed["version"], failed["state"], failed["status"]["error_code"]) == ("2", "LOADING", "UNKNOWN")
    assert "model.onnx" in failed["status"]["error_message"]
    shutil.rmtree(deployment.repository / model.name / "2")


def test_the_configuration_lists_all_models(serve, gateway):
    model = serve().name
    listed = gateway.get("/v1/config").json()
    [version] = listed[model]["model_version_status"]
    assert version["version"] == "1" and version["state"] == "AVAILABLE"
    assert listed["control_model"]


def test_a_reload_in_front_of_a_tritonserver_is_refused_with_what_to_do(gateway):
    """The models are that server's."""
    response = gateway.post("/v1/config/reload")
    assert response.status_code >= 400 and response.json()["error"], response.text


def test_a_model_that_is_unloaded_and_loaded_with_another_signature(deployment, serve, predict, rest, gateway):
    """No response is read with the old one."""
    model = serve(models.counter, type="fp32")
    for client in (predict, rest):
        with pytest.raises(Refused, match="shape|INPUT|WORK"):
            client.ask(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    deployment.unload(model)
    for client, code in ((predict, "NOT_FOUND|UNAVAILABLE"), (rest, "404|503")):
        with pytest.raises(Refused, match=f"^({code}): "):
            client.ask(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
    deployment.serve(models.work(model.name, scheduling="", more=model.more))
    for client in (predict, rest):
        client.ask(model.name, fed(1), {"sequence_id": 42, "sequence_start": True})
        assert client.ask(model.name, fed(2), {"sequence_id": 42, "sequence_end": True}).outputs["OUTPUT"].item() == 3


# ---- other methods of the services


@pytest.mark.parametrize("method", ["Classify", "Regress", "MultiInference"])
def test_methods_that_openvino_model_server_does_not_have_either(predict, method):
    call = predict.channel.unary_unary(f"/tensorflow.serving.PredictionService/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_configuration_can_not_be_sent(predict):
    call = predict.channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED and "/v1/config/reload" in caught.value.details()


def test_an_unknown_service(predict):
    call = predict.channel.unary_unary("/no.such.Service/Method")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_request(predict, gateway, body):
    for method in ("PredictionService/Predict", "PredictionService/GetModelMetadata", "ModelService/GetModelStatus"):
        call = predict.channel.unary_unary(f"/tensorflow.serving.{method}")
        with pytest.raises(grpc.RpcError) as caught:
            call(body, timeout=10)
        assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
    gateway.assert_running()


def test_compressed_requests_are_read(gateway, serve, predict):
    request = predict_request(serve().name, of_ovms(fed(5), {"sequence_id": 42, "sequence_start": True}))
    response = predict.stub.Predict(request, compression=grpc.Compression.Gzip)
    assert response.outputs["OUTPUT"].int64_val or response.outputs["OUTPUT"].tensor_content


# ---- metrics


def test_the_metrics_of_the_gateway(gateway, serve, predict, rest):
    """An unknown model has no label, because a client could make up any number of names."""
    model = serve().name
    predict.ask(model, fed(1), {"sequence_id": 42, "sequence_start": True})
    rest.ask(model, fed(1), {"sequence_id": 42})
    with pytest.raises(Refused):
        predict.ask(model, fed(1), {"sequence_id": 43})
    for at in range(5):
        with pytest.raises(Refused):
            rest.ask(f"no_such_model_{at}", fed(1), {"sequence_id": 43})
    text = gateway.get("/metrics").text
    assert "no_such_model" not in text and f'model="{model}"' in text
    of_model = {"model": model, "method": "Predict"}
    eventually(lambda: gateway.metric("stateful_ovms_requests_total", **of_model), lambda count: count >= 3)
    assert gateway.metric("stateful_ovms_requests_total", **of_model) == 3
    eventually(lambda: gateway.metric("stateful_ovms_requests_running"), lambda count: count == 0)

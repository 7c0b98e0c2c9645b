"""What one client does costs no other client an answer, and a client's own requests nothing more than it took back."""

import contextlib
import socket

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from harness import models
from harness.own import fed, own, total
from harness.tensorflow_serving import of_ovms, predict_request

PREDICT = "/tensorflow.serving.PredictionService/Predict"
# of HTTP/2, RFC 9113
DATA, HEADERS, RESET, SETTINGS, GO_AWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4

START, NEXT = {"sequence_id": 42, "sequence_start": True}, {"sequence_id": 42}


def test_clients_of_tritons_api_that_do_not_read_their_answers(deployment, gateway, serve, predict):
    """Each leaves an answer of 20 MiB waiting, which is more than a connection to Triton takes in unread."""
    model = serve()
    wide = deployment.serve(own(models.echo(name="wide_echo", dims=(5 << 20,), max_batch_size=1)))
    predict.ask(model.name, fed(1), START)
    values = np.ones((1, 5 << 20), np.float32)
    with contextlib.ExitStack() as opened:
        for sequence_id in range(1, 4):
            request = service_pb2.ModelInferRequest(model_name=wide.name)
            request.inputs.add(name="INPUT", datatype="FP32", shape=values.shape)
            request.raw_input_contents.append(values.tobytes())
            request.parameters["sequence_id"].int64_param = sequence_id
            request.parameters["sequence_start"].bool_param = True
            channel = opened.enter_context(grpc.insecure_channel(gateway.grpc_url, [("grpc.http2.bdp_probe", 0)]))
            infer = channel.unary_stream(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelInferResponse.FromString,
            )
            call = infer(request)
            opened.callback(call.cancel)
            call.initial_metadata()  # waits for the beginning of the answer
            sent = predict.call(predict_request(model.name, of_ovms(fed(1), NEXT)), timeout_s=30)
            assert total(sent.answer()) == 1 + sequence_id


def test_a_burst_of_requests_that_are_taken_back_costs_no_connection(gateway, serve, predict):
    """Frames of HTTP/2 in one segment, as a client sends them that cancels at once. Its own request that runs is answered."""
    model = serve()
    predict.ask(model.name, fed(1), START)
    message = predict_request(model.name, of_ovms(fed(1, work=2000), NEXT)).SerializeToString()
    other = b"".join(_headers(stream) + _frame(RESET, 0, stream, bytes([0, 0, 0, 8])) for stream in range(3, 2003, 2))
    host, port = gateway.grpc_url.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection, connection.makefile("rb") as answers:
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0)
        body = b"\0" + len(message).to_bytes(4, "big") + message
        connection.sendall(hello + _headers(1) + _frame(DATA, END_STREAM, 1, body) + other)
        answered = False
        while not answered:
            length, kind = int.from_bytes(answers.read(3), "big"), answers.read(1)[0]
            _flags, stream = answers.read(1), int.from_bytes(answers.read(4), "big")
            answers.read(length)
            assert kind != GO_AWAY
            answered = kind == DATA and stream == 1
    assert total(predict.ask(model.name, fed(1), NEXT)) == 3


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _headers(stream: int) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": PREDICT,
        ":authority": "x",
        "content-type": "application/grpc",
    }
    text = lambda value: bytes([len(value)]) + value.encode()  # noqa: E731
    block = b"".join(b"\0" + text(name) + text(value) for name, value in {**fields, "te": "trailers"}.items())
    return _frame(HEADERS, END_HEADERS, stream, block)

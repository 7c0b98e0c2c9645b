"""What one client does costs no other client an answer, and a client's own requests nothing more than it took back."""

import contextlib

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from harness import models
from harness.own import fed, own, total
from harness.tensorflow_serving import of_ovms, predict_request

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


def test_a_client_that_takes_many_requests_back_keeps_its_connection(serve, predict):
    model = serve()
    predict.ask(model.name, fed(1), START)
    running = predict.send(model.name, fed(1, work=3000), NEXT)
    taken_back = [predict.send(model.name, fed(1), {"sequence_id": 100 + at}) for at in range(500)]
    for call in taken_back:
        call.future.cancel()
    assert total(running.answer()) == 2

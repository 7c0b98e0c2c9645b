"""String tensors and string states: whatever bytes go in come out, with their sequence."""

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper

from support.paths import TESTED_BACKENDS
from support.server import TritonServer

CONFIG = """
name: "last_words" backend: "stateful" max_batch_size: 8
input [ { name: "SAID" data_type: TYPE_STRING dims: [ 2 ] } ]
output [ { name: "BEFORE" data_type: TYPE_STRING dims: [ 2 ] },
         { name: "ID" data_type: TYPE_STRING dims: [ 1 ] } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 20 max_queue_delay_microseconds: 2000 }
  control_input [ { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] } ]
}
instance_group [ { kind: KIND_CPU } ]
parameters [ { key: "state_pairs" value { string_value: "<<<LAST_IN, LAST_OUT>>>" } } ]
"""


def last_words() -> onnx.ModelProto:
    """BEFORE is what the sequence said in its last request; LAST has its batch axis in the middle."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["SAID"], ["LAST_OUT"], perm=[1, 0]),
            helper.make_node("Transpose", ["LAST_IN"], ["BEFORE"], perm=[1, 0]),
            helper.make_node("Identity", ["CORRID"], ["ID"]),
        ],
        "last_words",
        [
            info("SAID", TensorProto.STRING, ["N", 2]),
            info("LAST_IN", TensorProto.STRING, [2, "N"]),
            info("CORRID", TensorProto.STRING, ["N", 1]),
        ],
        [
            info("BEFORE", TensorProto.STRING, ["N", 2]),
            info("LAST_OUT", TensorProto.STRING, [2, "N"]),
            info("ID", TensorProto.STRING, ["N", 1]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("strings")
    version = repository / "last_words" / "1"
    version.mkdir(parents=True)
    onnx.save(last_words(), version / "model.onnx")
    (repository / "last_words" / "config.pbtxt").write_text(CONFIG)
    with TritonServer(repository, backends=TESTED_BACKENDS) as server:
        yield server


@pytest.mark.parametrize("library", [grpcclient, httpclient], ids=["grpc", "http"])
def test_strings_of_any_bytes_stay_with_their_sequence(server, library):
    client = library.InferenceServerClient(server.grpc_url if library is grpcclient else server.http_url)
    rng = np.random.default_rng(1)

    def say(sequence, words, **flags):
        tensor = library.InferInput("SAID", [1, 2], "BYTES")
        tensor.set_data_from_numpy(np.array([words], dtype=np.object_))
        answer = client.infer("last_words", [tensor], sequence_id=sequence, **flags)
        assert answer.as_numpy("ID").tolist() == [[sequence.encode()]]
        return answer.as_numpy("BEFORE")[0].tolist()

    def words():
        return [rng.bytes(int(rng.integers(0, 40))) for _ in range(2)]

    # tritonclient takes zero bytes at the end of an element away before it sends them
    sequences = {f"{library.__name__} {i}": [b"", b""] for i in range(10)}
    for step in range(6):
        for sequence in rng.permutation(list(sequences)).tolist():
            now = [word.rstrip(b"\0") + b"." for word in words()]
            before = say(sequence, now, sequence_start=step == 0, sequence_end=step == 5)
            assert before == sequences[sequence], f"{sequence}, step {step}"
            sequences[sequence] = now


def test_a_new_sequence_starts_with_empty_strings(server):
    client = grpcclient.InferenceServerClient(server.grpc_url)
    tensor = grpcclient.InferInput("SAID", [1, 2], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"a", b"b"]], dtype=np.object_))
    for _ in range(3):
        answer = client.infer("last_words", [tensor], sequence_id="again", sequence_start=True)
        assert answer.as_numpy("BEFORE").tolist() == [[b"", b""]]
        answer = client.infer("last_words", [tensor], sequence_id="again", sequence_end=True)
        assert answer.as_numpy("BEFORE").tolist() == [[b"a", b"b"]]


def test_a_wrong_number_of_strings_is_refused_and_the_sequence_goes_on(server):
    client = grpcclient.InferenceServerClient(server.grpc_url)

    def say(words, shape, **flags):
        tensor = grpcclient.InferInput("SAID", shape, "BYTES")
        tensor.set_data_from_numpy(np.array([words], dtype=np.object_))
        return client.infer("last_words", [tensor], sequence_id="wrong", **flags).as_numpy("BEFORE").tolist()

    say([b"a", b"b"], [1, 2], sequence_start=True)
    with pytest.raises(Exception, match="SAID"):
        say([b"a", b"b", b"c"], [1, 3])
    assert say([b"c", b"d"], [1, 2], sequence_end=True) == [[b"a", b"b"]]

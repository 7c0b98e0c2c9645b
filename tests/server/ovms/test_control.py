"""START, END and ids: cases O01 to O19 of OpenVINO Model Server, and what Triton's parameters add.

A sequence is controlled by parameters of the request (Triton's way) or by inputs (OpenVINO Model Server's way).
"""

import pytest

from harness import models
from harness.model import Tensor
from harness.own import ByInputs, ByParameters, Talk, answered_id, fails_with, fed, special, total
from harness.repetitions import repeated
from harness.ways import every_client, every_protocol, every_way, through_gateway, tritons_protocols


@every_client
def test_o01_start_with_an_id_answers_from_a_fresh_state_and_echoes_the_id(serve, connect, protocol, way):
    talk = Talk(connect(protocol), serve(), 42, way)
    assert total(talk.start(fed(5))) == 5


@every_client
def test_o02_start_without_an_id_gets_one(serve, connect, protocol, way):
    talk = Talk(connect(protocol), serve(), None, way)
    talk.start()
    assert talk.sequence_id == 1
    talk.step()
    talk.end()


@every_client
def test_o03_start_with_id_0_gets_an_id(serve, connect, protocol, way):
    model, client = serve(), connect(protocol)
    inputs, parameters = way.control(model, 0, start=True, end=False)
    answer = client.ask(model.name, {**fed(5), **inputs}, parameters)
    assert answered_id(answer) == 1
    assert answer.outputs["sequence_id"].item() == 1


@every_way
def test_o04_a_made_id_skips_those_that_are_alive(serve, connect, way):
    model, client = serve(), connect()
    for sequence_id in (1, 2, 3, 4):
        Talk(client, model, sequence_id, way).start()
    talk = Talk(client, model, None, way)
    talk.start()
    assert talk.sequence_id == 5


@pytest.mark.parametrize(("id_reuse", "second"), [(None, 2), ("ovms", 1)], ids=["advance", "ovms"])
@every_way
def test_o05_the_id_of_an_ended_sequence_is_not_made_again_unless_configured(serve, connect, way, id_reuse, second):
    model, client = serve(parameters={"id_reuse": id_reuse} if id_reuse else {}), connect()
    for made in (1, second):
        talk = Talk(client, model, None, way)
        talk.start()
        assert talk.sequence_id == made
        talk.end()


@every_way
def test_o06_a_made_id_is_never_0_even_if_the_largest_id_is_alive(serve, connect, way):
    """The counter itself wraps after 2^64 sequences: its unit test shows that."""
    model, client = serve(), connect()
    largest = Talk(client, model, 2**64 - 1, way)
    largest.start()
    talk = Talk(client, model, None, way)
    talk.start()
    assert talk.sequence_id == 1
    largest.end()


@every_way
def test_o07_an_id_that_a_client_has_taken_is_never_made(serve, connect, way):
    model, client = serve(), connect()
    Talk(client, model, 7, way).start()
    made = [Talk(client, model, None, way) for _ in range(7)]
    for talk in made:
        talk.start()
    assert [talk.sequence_id for talk in made] == [1, 2, 3, 4, 5, 6, 8]


@every_client
def test_o08_a_request_without_a_control_continues(serve, connect, protocol, way):
    talk = Talk(connect(protocol), serve(), 42, way)
    talk.start(fed(5))
    assert total(talk.step(fed(7))) == 12


@through_gateway
def test_o09_control_0_continues_like_no_control(serve, connect):
    model, client = serve(), connect()
    talk = Talk(client, model, 42, ByInputs)
    talk.start(fed(5))
    answer = client.ask(model.name, {**fed(7), **special(model, 42, 0)}, {})
    talk.check(answer, fed(7))
    assert total(answer) == 12


@every_client
def test_o10_end_is_computed_with_the_state_and_frees_the_id(deployment, serve, connect, protocol, way):
    model = serve()
    talk = Talk(connect(protocol), model, 42, way)
    talk.start(fed(5))
    assert total(talk.end(fed(7))) == 12
    deployment.settles("stateful_live_sequences", model, 0)


@every_way
def test_o11_a_request_after_the_end_is_not_found(serve, connect, way):
    talk = Talk(connect(), serve(), 42, way)
    talk.start()
    talk.end()
    with fails_with("SEQUENCE_MISSING", 42):
        talk.step()


@every_way
def test_o12_a_second_end_is_not_found(serve, connect, way):
    talk = Talk(connect(), serve(), 42, way)
    talk.start()
    talk.end()
    with fails_with("SEQUENCE_MISSING", 42):
        talk.end()


@every_way
def test_o13_an_id_may_start_again_after_its_end(serve, connect, way):
    talk = Talk(connect(), serve(), 42, way)
    talk.start(fed(5))
    talk.end(fed(7))
    assert total(talk.start(fed(3))) == 3


@every_client
def test_o14_a_request_of_no_sequence_is_not_found(serve, connect, protocol, way):
    with fails_with("SEQUENCE_MISSING", 99):
        Talk(connect(protocol), serve(), 99, way).step()


@every_way
def test_o15_an_end_of_no_sequence_is_not_found(serve, connect, way):
    with fails_with("SEQUENCE_MISSING", 99):
        Talk(connect(), serve(), 99, way).end()


@every_client
def test_o16_a_second_start_is_refused_and_the_sequence_goes_on(serve, connect, protocol, way):
    """HTTP has 400 for it: Triton cannot give 409."""
    talk = Talk(connect(protocol), serve(), 42, way)
    talk.start(fed(5))
    with fails_with("SEQUENCE_ALREADY_EXISTS", 42):
        talk.start(fed(100))
    assert total(talk.step(fed(7))) == 12


@every_way
def test_o16_a_second_start_starts_over_where_that_is_configured(deployment, serve, connect, way):
    model = serve(parameters={"on_duplicate_start": "restart"})
    talk = Talk(connect(), model, 42, way)
    talk.start(fed(5))
    assert total(talk.start(fed(100))) == 100
    assert total(talk.end(fed(7))) == 107
    deployment.settles("stateful_live_sequences", model, 0)


def test_o16_a_start_that_replaces_a_sequence_lets_the_requests_before_it_finish(serve, connect):
    model, stream = serve(parameters={"on_duplicate_start": "restart"}), connect("stream")
    asked = [(1, True), (2, False), (4, False), (10, True), (20, False)]
    for value, start in asked:
        parameters = {"sequence_id": 42, **({"sequence_start": True} if start else {})}
        stream.send(model.name, fed(value, work=20), parameters)
    replies = stream.all_replies(len(asked))
    assert [total(replies[number]) for number in range(len(asked))] == [1, 3, 7, 10, 30]


@every_protocol
@pytest.mark.parametrize("control", [None, 0], ids=["no_control", "control_0"])
def test_o17_a_request_without_an_id_is_refused(serve, connect, protocol, control):
    model = serve()
    with fails_with("SEQUENCE_ID_NOT_PROVIDED"):
        connect(protocol).ask(model.name, {**fed(5), **special(model, None, control)}, {})


@pytest.mark.parametrize("sequence_id", [None, 0])
@every_way
def test_o18_an_end_without_an_id_is_refused(serve, connect, way, sequence_id):
    with fails_with("SEQUENCE_ID_NOT_PROVIDED"):
        Talk(connect(), serve(), sequence_id, way).end()


@through_gateway
@pytest.mark.parametrize("control", [3, *repeated(4, 999, 2**32 - 1)])
def test_o19_an_unknown_control_is_refused(serve, connect, control):
    model, client = serve(), connect()
    with fails_with("INVALID_SEQUENCE_CONTROL_INPUT"):
        client.ask(model.name, {**fed(5), **special(model, 42, control)}, {})
    with fails_with("SEQUENCE_MISSING", 42):
        Talk(client, model, 42, ByInputs).step()


@tritons_protocols
@pytest.mark.parametrize("sequence_id", [42, None])
def test_o19_start_and_end_together_are_a_sequence_of_one_request(deployment, serve, connect, protocol, sequence_id):
    """OpenVINO Model Server has no value for both; Triton's parameters do."""
    model = serve()
    talk = Talk(connect(protocol), model, sequence_id)
    assert total(talk.one_shot(fed(5))) == 5
    with fails_with("SEQUENCE_MISSING", talk.sequence_id):
        talk.step()
    deployment.settles("stateful_live_sequences", model, 0)


# ---- both ways at once


def test_the_two_ways_may_say_the_same(serve, connect):
    model, client = serve(), connect()
    talk = Talk(client, model, 42)
    for start, end in ((True, False), (False, False), (False, True)):
        inputs, _ = ByInputs.control(model, 42, start, end)
        _, parameters = ByParameters.control(model, 42, start, end)
        talk.check(client.ask(model.name, {**fed(5), **inputs}, parameters), fed(5), start=start, end=end)


def test_a_sequence_may_be_controlled_one_way_and_then_the_other(serve, connect):
    talk = Talk(connect(), serve(), 42)
    talk.start()
    talk.way = ByInputs
    talk.step()
    talk.way = ByParameters
    talk.end()


@pytest.mark.parametrize(
    ("sequence_id", "control", "parameters"),
    [
        (42, None, {"sequence_id": 43}),
        (42, 1, {"sequence_id": 43, "sequence_start": True}),
        (42, None, {"sequence_id": "42"}),
        (None, 1, {"sequence_id": 42, "sequence_end": True}),
        (None, 2, {"sequence_id": 42, "sequence_start": True}),
        (None, 0, {"sequence_id": 42, "sequence_end": True}),
        (None, 1, {"sequence_id": 42, "sequence_start": True, "sequence_end": True}),
    ],
)
def test_the_two_ways_may_not_differ(serve, connect, sequence_id, control, parameters):
    model, client = serve(), connect()
    talk = Talk(client, model, 42)
    talk.start(fed(5))
    with fails_with("SEQUENCE_ID_CONFLICT"):
        client.ask(model.name, {**fed(100), **special(model, sequence_id, control)}, parameters)
    assert total(talk.end(fed(7))) == 12


# ---- ids


@tritons_protocols
def test_an_id_may_be_a_name(serve, connect, protocol):
    model, client = serve(), connect(protocol)
    talks = [Talk(client, model, sequence_id) for sequence_id in ("caller", "Ünïcödé ☎", "7", 7, "x" * 128)]
    for task in ("start", "step", "step", "end"):
        for talk in talks:
            getattr(talk, task)()
    for talk in talks:
        with fails_with("SEQUENCE_MISSING", talk.sequence_id):
            talk.step()


@tritons_protocols
def test_an_id_may_be_as_large_as_the_protocol_carries(serve, connect, protocol):
    largest = 2**64 - 1 if protocol == "http" else 2**63 - 1
    model, client = serve(), connect(protocol)
    talk = Talk(client, model, largest)
    talk.start()
    talk.step()
    with fails_with("SEQUENCE_ALREADY_EXISTS", largest):
        Talk(client, model, largest, ByInputs).start()
    talk.end()


@through_gateway
def test_the_input_carries_ids_of_64_bits_over_grpc(serve, connect):
    talk = Talk(connect(), serve(), 2**64 - 1, ByInputs)
    talk.start()
    with fails_with("SEQUENCE_MISSING", 2**63 - 1):
        Talk(talk.client, talk.model, 2**63 - 1, ByInputs).step()
    talk.end()


# ---- models without a batch dimension


@every_way
def test_special_inputs_have_one_dimension_without_a_batch(serve, connect, way):
    rows = {"inputs": (Tensor("INPUT", "fp32", (1, 4)),), "outputs": (Tensor("OUTPUT", "fp32", (1, 4)),)}
    model, client = (
        serve(lambda name, **changes: models.counter("fp32", name, **changes), max_batch_size=0, **rows),
        connect(),
    )
    assert special(model, 42)["sequence_id"].shape == (1,)
    Talk(client, model, 42, way).whole(4)

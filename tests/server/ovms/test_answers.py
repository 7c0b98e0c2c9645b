"""What answers and errors carry, and that no state leaks: cases O54 to O60 of OpenVINO Model Server."""

import numpy as np
import pytest

from harness import models
from harness.model import Tensor
from harness.own import ANSWERED_ID, ByInputs, Talk, answered_id, both_ways, fails_with, fed, special
from harness.raw import PROTOCOLS, Refused
from harness.ways import every_protocol, through_gateway, tritons_protocols


@through_gateway
def test_o54_o55_no_sequence_sees_the_state_of_another(deployment, serve, connect):
    """What `echo` answers to START is the state that it begins with."""
    model, client = serve(lambda name, **changes: models.echo("fp32", name, **changes)), connect()
    for round in range(10):
        talks = [Talk(client, model, 100 * round + i) for i in range(1, 6)]
        for talk in talks:
            talk.start()
        for talk in talks:
            talk.step()
        for talk in talks:
            talk.end()


def test_o56_the_output_for_ids_comes_only_if_the_configuration_lists_it(serve, connect):
    Talk(connect(), serve(more=""), None).whole(3)


@tritons_protocols
@both_ways
def test_o56_the_id_comes_as_a_parameter_whatever_outputs_are_wanted(serve, connect, protocol, way):
    model, client = serve(), connect(protocol)
    for wanted, came in ((None, {"OUTPUT", "sequence_id"}), (["OUTPUT"], {"OUTPUT"})):
        talk = Talk(client, model, None, way)
        assert set(talk.start(outputs=wanted).outputs) == came
        assert set(talk.step(outputs=wanted).outputs) == came
        assert set(talk.end(outputs=wanted).outputs) == came


def test_o56_the_id_may_be_the_only_output_that_is_wanted(serve, connect):
    model, client = serve(), connect()
    answer = client.ask(model.name, fed(5), {"sequence_start": True}, outputs=["sequence_id"])
    assert set(answer.outputs) == {"sequence_id"} and answered_id(answer) == 1
    answer = client.ask(model.name, fed(7), {"sequence_id": 1, "sequence_end": True})
    assert answer.outputs["OUTPUT"].item() == 12


def test_an_id_that_is_a_name_comes_as_a_text(serve, connect):
    model, client = serve(), connect()
    answer = client.ask(model.name, fed(5), {"sequence_id": "caller", "sequence_start": True}, outputs=["OUTPUT"])
    assert answer.parameters[ANSWERED_ID] == "caller"


@every_protocol
def test_o57_an_error_has_the_id_in_its_text(serve, connect, protocol):
    with fails_with("SEQUENCE_MISSING", 12345):
        Talk(connect(protocol), serve(), 12345).step()


@tritons_protocols
def test_o57_an_error_has_the_id_in_its_text_if_it_is_a_name(serve, connect, protocol):
    model, client = serve(), connect(protocol)
    with fails_with("SEQUENCE_MISSING", "caller"):
        Talk(client, model, "caller").step()


@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
def test_o58_a_models_own_tensor_of_a_special_name_is_left_to_the_model(serve, connect, name):
    """Nothing is overwritten: the model answers its own output, and the id comes as a parameter."""
    output = Tensor(name, "int64", (1,))
    model, client = serve(renamed(name), outputs=(output,), more=""), connect()
    answer = client.ask(model.name, fed(5), {"sequence_id": 42, "sequence_start": True})
    assert answer.outputs[name].dtype == np.int64 and answer.outputs[name].item() == 5
    assert answered_id(answer) == 42


def renamed(name: str):
    """`models.work` whose output has this name."""

    def make(name_of_model, **changes):
        model = models.work(name_of_model, **changes)

        def build():
            graph = model.build()
            for node in graph.graph.node:
                node.output[:] = [name if output == "OUTPUT" else output for output in node.output]
            graph.graph.output[0].name = name
            return graph

        return model.variant(name_of_model, build=build)

    return lambda name, **changes: make(name, **changes)


def test_o60_kserve_clients_are_served(serve, connect):
    """OpenVINO Model Server's stateful models answered its TensorFlow Serving protocol alone."""
    model = serve()
    for protocol in PROTOCOLS:
        Talk(connect(protocol), model, None, ByInputs).whole(3)


def test_tritonclient_gets_an_id_by_the_inputs(deployment, serve):
    """It sends no flags without an id."""
    model = serve()
    client = deployment.connect()
    answer = client.step(model.name, 0, {**fed(5), **special(model, None, 1)})
    made = answer["sequence_id"].item()
    assert client.step(model.name, made, fed(7), end=True)["OUTPUT"].item() == 12


def test_a_sequence_passes_through_an_ensemble(deployment, serve, connect):
    inner = serve()
    name = f"{inner.name}_ensemble"
    folder = deployment.repository / name
    (folder / "1").mkdir(parents=True)
    one = "data_type: TYPE_INT64 dims: [ 1 ]"
    (folder / "config.pbtxt").write_text(f"""
        platform: "ensemble"
        max_batch_size: 8
        input [ {{ name: "A" {one} }}, {{ name: "B" {one} }} ]
        output [ {{ name: "SUM" {one} }}, {{ name: "SUM_OF_SUMS" {one} }} ]
        ensemble_scheduling {{
          step {{
            model_name: "{inner.name}" model_version: -1
            input_map {{ key: "INPUT" value: "A" }} input_map {{ key: "WORK" value: "B" }}
            output_map {{ key: "OUTPUT" value: "SUM" }}
          }}
          step {{
            model_name: "{name}_second" model_version: -1
            input_map {{ key: "INPUT" value: "SUM" }} input_map {{ key: "WORK" value: "B" }}
            output_map {{ key: "OUTPUT" value: "SUM_OF_SUMS" }}
          }}
        }}
    """)
    deployment.serve(inner.variant(f"{name}_second"))
    deployment.admin.load_model(name)
    client = connect()
    for sequence_id in (42, "caller"):
        sums, sums_of_sums = 0, 0
        for i in range(4):
            flags = {"sequence_id": sequence_id, "sequence_start": i == 0, "sequence_end": i == 3}
            answer = client.ask(name, {"A": fed(3)["INPUT"], "B": fed(0)["WORK"]}, flags)
            sums += 3
            sums_of_sums += sums
            assert answer.outputs["SUM"].item() == sums
            assert answer.outputs["SUM_OF_SUMS"].item() == sums_of_sums
        with pytest.raises(Refused, match="SEQUENCE_MISSING"):
            client.ask(name, {"A": fed(3)["INPUT"], "B": fed(0)["WORK"]}, {"sequence_id": sequence_id})

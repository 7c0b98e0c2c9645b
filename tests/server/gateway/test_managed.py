"""A gateway that starts tritonserver: the command line and `config.json` of OpenVINO Model Server."""

import concurrent.futures
import json
import shutil
import socket
import threading
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from harness import models
from harness.deployment import eventually
from harness.gateway import MANAGED, Gateway, run
from harness.ovms_config import Config, place
from harness.own import ByInputs, Talk, fails_with, own
from harness.raw import Refused
from harness.tensorflow_serving import Predict, Rest
from harness.whole_sequences import EXPORTS, whole
from support.server import HOST, free_port

NEVER = "--file_system_poll_wait_seconds=0"


@pytest.fixture
def config(tmp_path):
    return Config(tmp_path / "models")


@pytest.fixture
def talk():
    """A sequence of a model that the gateway serves."""
    clients: list[Predict] = []

    def made(gateway: Gateway, name: str, sequence_id: int | None = 42, version: str = "") -> Talk:
        clients.append(Predict(gateway))
        return Talk(clients[-1], own(models.work(name)), sequence_id, ByInputs, version)

    yield made
    for client in clients:
        client.close()


def reload(gateway: Gateway, status: int):
    """Reads the configuration again, and gives the body of the response."""
    response = gateway.post("/v1/config/reload", timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def status_of(gateway: Gateway, name: str) -> dict[str, dict]:
    """The status of each version."""
    response = gateway.get(f"/v1/models/{name}")
    assert response.status_code == 200, response.text
    return {version["version"]: version for version in response.json()["model_version_status"]}


def states(gateway: Gateway, name: str) -> dict[str, str]:
    return {version: status["state"] for version, status in status_of(gateway, name).items()}


def is_there(gateway: Gateway, name: str) -> bool:
    return gateway.get(f"/v1/models/{name}").status_code == 200


# ---- the command line


@pytest.mark.parametrize("by", ["folder", "file"])
def test_one_model_of_the_command_line(config, start, talk, by):
    path = config.model(models.work("m"))
    gateway = start("--model_path", path / "1" / "model.onnx" if by == "file" else path, "--model_name=m", "--stateful")
    talk(gateway, "m", None).whole(5)
    assert states(gateway, "m") == {"1": "AVAILABLE"}
    assert set(gateway.get("/v1/config").json()) == {"m"}


def test_options_of_the_command_line_are_obeyed(config, start, talk):
    gateway = start(
        *("--model_path", config.model(models.work("m")), "--model_name=m", "--stateful"),
        *("--max_sequence_number=2", "--idle_sequence_cleanup=false", "--nireq=2", "--log_level=DEBUG"),
        *("--sequence_cleaner_poll_wait_minutes=3", f"--log_path={config.folder / 'log'}", NEVER),
        *("--", "--id=name-of-the-server"),
    )
    for sequence_id in (1, 2):
        talk(gateway, "m", sequence_id).start()
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED"):
        talk(gateway, "m", 3).start()
    # Triton's own API is handed on
    assert gateway.get("/v2").json()["name"] == "name-of-the-server"
    assert "REST on" in (config.folder / "log").read_text()
    with http_client.InferenceServerClient(gateway.rest_url) as client:
        parameters = client.get_model_config("m")["parameters"]
    written = {name: value["string_value"] for name, value in parameters.items()}
    assert written["idle_sequence_cleanup"] == "false" and written["worker_count"] == "2"
    assert written["sequence_cleaner_poll_wait_minutes"] == "3"


# ---- config.json


def entries_of_all_kinds(config) -> tuple[list[dict], dict[str, str]]:
    """All entries, two of them right; and for each of the others, words that its problem must contain."""
    right = [config.entry(models.work("first")), config.entry(models.work("second"), max_sequence_number=1)]
    place(config.folder / "ir" / "1" / "model.xml", b"<net/>")
    place(config.folder / "ir" / "1" / "model.bin", b"")
    place(config.folder / "broken" / "1" / "model.onnx", b"no model")
    (config.folder / "empty").mkdir()
    stateless = config.entry(models.work("stateless"))
    del stateless["stateful"]
    wrong = [
        ({"name": "ir", "base_path": str(config.folder / "ir"), "stateful": True}, "low_latency_transformation"),
        ({"name": "broken", "base_path": str(config.folder / "broken"), "stateful": True}, "model.onnx"),
        ({"name": "empty", "base_path": str(config.folder / "empty"), "stateful": True}, "No version found"),
        ({"name": "missing", "base_path": str(config.folder / "missing"), "stateful": True}, "missing"),
        (stateless, "stateful"),
        (stateless | {"name": "limited", "max_sequence_number": 5}, "used for non stateful model"),
        (
            config.entry(models.work("auto"), batch_size="auto"),
            "Dynamic shape and dynamic batch size are not supported",
        ),
        (config.entry(models.work("gpu"), target_device="GPU"), "target_device"),
        (config.entry(models.work("shaped"), layout="NCHW"), "layout"),
        (config.entry(models.work("none"), max_sequence_number=0), "max_sequence_number"),
        ({**right[0], "name": "a/b"}, "/"),
        ({**right[0], "name": "x" * 256}, "255"),
        ({**right[0], "name": ".."}, ".."),
    ]
    return [*[entry for entry, _ in wrong], *right], {entry["name"]: words for entry, words in wrong}


def test_a_wrong_entry_is_its_models_problem_only(config, start, talk):
    entries, problems = entries_of_all_kinds(config)
    gateway = start("--config_path", config.write(*entries))
    for name in ("first", "second"):
        talk(gateway, name).whole(3)
    second = talk(gateway, "second", 1)
    second.start()
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED"):
        talk(gateway, "second", 2).start()
    listed = gateway.get("/v1/config").json()
    assert set(listed) == {*problems, "first", "second"}
    for name, words in problems.items():
        messages = [version["status"]["error_message"] for version in listed[name]["model_version_status"]]
        assert any(words in message for message in messages), f"{name}: {messages}"
        assert all(version["state"] != "AVAILABLE" for version in listed[name]["model_version_status"])
        assert words in gateway.log_text()
        with pytest.raises(Refused) as refused:
            talk(gateway, name).start()
        assert refused.value.code in ("NOT_FOUND", "UNAVAILABLE"), refused.value


def test_a_model_of_the_command_line_that_is_wrong_ends_the_gateway(config):
    place(config.folder / "ir" / "1" / "model.xml", b"<net/>")
    arguments = ["--model_name=m", "--model_path", config.folder / "ir", "--stateful"]
    ended = run(f"--rest_port={free_port(HOST, ())}", f"--rest_bind_address={HOST}", *MANAGED, *arguments)
    assert ended.returncode == 1 and "OpenVINO IR" in ended.stderr, ended.stderr


def test_a_relative_base_path_is_relative_to_the_file(config, start, talk, tmp_path):
    config.entry(models.work("m"))
    config.write({"name": "m", "base_path": "m", "stateful": True})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    talk(start("--config_path", config.path, cwd=elsewhere), "m").whole(3)
    talk(start("--config_path", "../models/config.json", cwd=elsewhere), "m").whole(3)


def test_low_latency_transformation(config, start):
    """An export whose recurrence is inside gets states: the parts of a sequence answer as the original does at once."""
    place(config.folder / "lstm" / "1" / "model.onnx", (EXPORTS / "torch_lstm2.onnx").read_bytes())
    entry = {"name": "lstm", "base_path": str(config.folder / "lstm"), "stateful": True}
    gateway = start("--config_path", config.write({**entry, "low_latency_transformation": True}))
    x = np.random.default_rng(1).standard_normal((1, 12, 4)).astype(np.float32)
    client, came = Predict(gateway), []
    for first, last in ((0, 4), (4, 5), (5, 12)):
        flags = {"sequence_start": first == 0, "sequence_end": last == 12}
        answer = client.ask("lstm", {"x": x[:, first:last]}, {"sequence_id": 2, **flags}).outputs
        [part] = [value for name, value in answer.items() if name != "sequence_id"]
        came.append(part)
    client.close()
    np.testing.assert_allclose(np.concatenate(came, axis=1), whole("torch_lstm2", x), rtol=1e-5, atol=1e-6)


def test_names_of_models_that_need_care(config, start, talk):
    """Triton takes the name of a folder for the name of a model."""
    model = models.work("m")
    names = ["with space", "Ünïcödé", "a:b", 'quote"\\', "x" * 255, "-dash", "a%2fb"]
    base = config.model(model)
    gateway = start(
        "--config_path", config.write(*[{"name": name, "base_path": str(base), "stateful": True} for name in names])
    )
    for name in names:
        talk(gateway, name).whole(2)
        path = f"/v1/models/{quote(name, safe='')}"
        assert gateway.get(path).json()["model_version_status"][0]["state"] == "AVAILABLE"
        inputs = {"INPUT": [[5]], "WORK": [[0]], "sequence_id": [1], "sequence_control_input": [1]}
        assert gateway.post(f"{path}:predict", {"inputs": inputs}).json()["outputs"]["OUTPUT"] == [[5]]


# ---- a configuration that changes


def test_a_reload_says_whether_anything_has_changed(config, start, talk):
    """OpenVINO Model Server's codes."""
    first, second = config.entry(models.work("first")), config.entry(models.work("second"))
    gateway = start("--config_path", config.write(first), NEVER)
    assert set(reload(gateway, 200)) == {"first"}
    config.write(first, second)
    assert set(reload(gateway, 201)) == {"first", "second"}
    assert states(gateway, "second") == {"1": "AVAILABLE"}
    assert set(reload(gateway, 200)) == {"first", "second"}
    config.write(second)
    assert set(reload(gateway, 201)) == {"second"}
    assert gateway.get("/v1/models/first").status_code == 404
    talk(gateway, "second").whole(2)


def test_sequences_of_unchanged_models_live_on(config, start, talk):
    first, second = config.entry(models.work("first")), config.entry(models.work("second"))
    gateway = start("--config_path", config.write(first, second), NEVER)
    kept, ended = talk(gateway, "first"), talk(gateway, "second")
    kept.start()
    ended.start()
    config.write({**second, "max_sequence_number": 5}, first, config.entry(models.work("third")))
    reload(gateway, 201)
    kept.step()
    with fails_with("SEQUENCE_MISSING", 42):
        ended.step()
    talk(gateway, "third").whole(2)
    kept.end()


def test_a_changed_file_of_a_model_is_loaded_and_its_signature_is_new(config, start):
    entry = config.entry(models.counter("fp32", "m", width=4))
    gateway = start("--config_path", config.write(entry), NEVER)
    client, rest = Predict(gateway), Rest(gateway)
    begin = {"sequence_id": 1, "sequence_start": True}
    for round, (type, width) in enumerate([("fp32", 4), ("int64", 2), ("int64", 3)]):
        if round:
            config.model(models.counter(type, "m", width=width))
            reload(gateway, 201)
        sent = np.ones((1, width), "int64" if type == "int64" else "float32")
        for one in (client, rest):
            one.ask("m", {"INPUT": sent}, begin)
            rest.dtypes.clear()
            answer = one.ask("m", {"INPUT": sent}, {"sequence_id": 1, "sequence_end": True})
            assert answer.outputs["OUTPUT"].tolist() == [[2] * width]
            assert answer.outputs["OUTPUT"].dtype == sent.dtype
    client.close()
    rest.close()


def test_stateful_switched_off_is_refused_and_the_model_stays(config, start, talk):
    """O53. OpenVINO Model Server refuses it, too."""
    entry = config.entry(models.work("m"))
    gateway = start("--config_path", config.write(entry), NEVER)
    kept = talk(gateway, "m")
    kept.start()
    config.write({**entry, "stateful": False})
    response = gateway.post("/v1/config/reload")
    assert response.status_code >= 400 and "stateful" in response.json()["error"], response.text
    kept.step()
    config.write(entry)
    reload(gateway, 200)
    kept.end()


def test_a_file_that_is_half_written_changes_nothing(config, start, talk):
    first, second = config.entry(models.work("first")), config.entry(models.work("second"))
    gateway = start("--config_path", config.write(first), NEVER)
    kept = talk(gateway, "first")
    kept.start()
    whole = config.write(first, second).read_text()
    for text in (whole[: len(whole) // 2], "", "[]", "null", '{"model_config_list": 5}', whole + "}"):
        config.write_text(text)
        response = gateway.post("/v1/config/reload")
        assert response.status_code >= 400 and set(response.json()) == {"error"}, response.text
        kept.step()
        assert set(gateway.get("/v1/config").json()) == {"first"}
    config.write(first, second)
    reload(gateway, 201)
    kept.end()
    talk(gateway, "second").whole(2)


def test_a_file_that_is_gone_changes_nothing(config, start, talk):
    gateway = start("--config_path", config.write(config.entry(models.work("m"))), NEVER)
    kept = talk(gateway, "m")
    kept.start()
    config.path.unlink()
    assert gateway.post("/v1/config/reload").status_code >= 400
    kept.end()


def test_an_entry_that_was_wrong_is_served_when_its_files_are_right(config, start, talk):
    place(config.folder / "m" / "1" / "model.onnx", b"no model")
    entry = {"name": "m", "base_path": str(config.folder / "m"), "stateful": True}
    gateway = start("--config_path", config.write(entry, config.entry(models.work("other"))), NEVER)
    assert states(gateway, "m") != {"1": "AVAILABLE"}
    config.model(models.work("m"))
    reload(gateway, 201)
    talk(gateway, "m").whole(2)
    # and back
    place(config.folder / "m" / "1" / "model.onnx", b"no model again")
    gateway.post("/v1/config/reload")
    talk(gateway, "other").whole(2)


def test_changes_are_seen_without_being_asked_for(config, start, talk):
    """OpenVINO Model Server looks once a second; a half-written file waits for its rest."""
    first, second = config.entry(models.work("first")), config.entry(models.work("second"))
    gateway = start("--config_path", config.write(first))
    kept = talk(gateway, "first")
    kept.start()
    whole = json.dumps({"model_config_list": [{"config": first}, {"config": second}]})
    with config.path.open("w") as file:
        file.write(whole[:50])
        file.flush()
        eventually(gateway.log_text, lambda text: "The file is not valid json" in text)
        file.write(whole[50:])
    eventually(lambda: is_there(gateway, "second"), bool)
    talk(gateway, "second").whole(2)
    kept.step()
    config.write(first)
    eventually(lambda: is_there(gateway, "second"), lambda there: not there)
    kept.end()


def test_nothing_is_looked_at_without_polling(config, start):
    first, second = config.entry(models.work("first")), config.entry(models.work("second"))
    gateway = start("--config_path", config.write(first), NEVER)
    config.write(first, second)
    # longer than OpenVINO Model Server's own interval
    threading.Event().wait(1.5)
    assert not is_there(gateway, "second")
    reload(gateway, 201)
    assert is_there(gateway, "second")


def test_a_reload_goes_on_without_its_client(config, start):
    first, second = config.entry(models.work("first")), config.entry(models.work("second"))
    gateway = start("--config_path", config.write(first), NEVER)
    config.write(first, second)
    host, port = gateway.rest_url.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/config/reload HTTP/1.1\r\nHost: gateway\r\nContent-Length: 0\r\n\r\n")
        # A request whose connection ends before the gateway has read it is never begun.
        eventually(lambda: gateway.metric("stateful_ovms_requests_running") or is_there(gateway, "second"), bool)
    eventually(lambda: is_there(gateway, "second") and states(gateway, "second"), lambda of: of == {"1": "AVAILABLE"})


def test_the_configuration_changes_under_traffic(config, start):
    """Clients of one model never see an error or a wrong sum while others come, go and change."""
    steady = config.entry(models.work("steady"))
    others = [config.entry(models.work(f"other_{at}")) for at in range(3)]
    gateway = start("--config_path", config.write(steady, *others), NEVER)
    done = threading.Event()

    def client(sequence_id: int) -> int:
        predict, rounds = Predict(gateway), 0
        while not done.is_set() or rounds == 0:
            Talk(predict, own(models.work("steady")), sequence_id, ByInputs).whole(10)
            rounds += 1
        predict.close()
        return rounds

    def stranger(sequence_id: int) -> None:
        """A client of a model that may be gone. It may be refused, but must get no other error and no wrong sum."""
        predict = Predict(gateway)
        while not done.is_set():
            try:
                Talk(predict, own(models.work("other_1")), sequence_id, ByInputs).whole(3)
            except Refused as error:
                assert error.code in ("NOT_FOUND", "UNAVAILABLE"), error
        predict.close()

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        running = [threads.submit(client, of) for of in range(1, 5)]
        running += [threads.submit(stranger, of) for of in range(5, 7)]
        try:
            for round in range(4):
                changed = [{**entry, "max_sequence_number": 100 + round} for entry in others[: round % 3 + 1]]
                config.write(steady, *changed)
                reload(gateway, 201)
        finally:
            done.set()
        for one in running:
            one.result()
    gateway.assert_running()


# ---- versions


def test_the_latest_version_is_served_and_a_new_one_takes_over(config, start, talk):
    entry = config.entry(models.work("m"), versions=(1, 2))
    gateway = start("--config_path", config.write(entry), NEVER)
    assert states(gateway, "m")["2"] == "AVAILABLE" and states(gateway, "m").get("1") in (None, "END")
    old = talk(gateway, "m")
    old.start()
    config.model(models.work("m"), versions=(3,))
    reload(gateway, 201)
    assert states(gateway, "m")["3"] == "AVAILABLE"
    # O50: it goes to the latest version
    with fails_with("SEQUENCE_MISSING", 42):
        old.step()
    with pytest.raises(Refused, match="^NOT_FOUND: "):
        talk(gateway, "m", version="2").start()
    # and back
    shutil.rmtree(config.folder / "m" / "3")
    reload(gateway, 201)
    assert states(gateway, "m")["2"] == "AVAILABLE"
    talk(gateway, "m").whole(2)


def test_version_policies(config, start, talk):
    policies = {
        "all": ({"all": {}}, {"1", "2", "5"}),
        "two": ({"latest": {"num_versions": 2}}, {"2", "5"}),
        "some": ({"specific": {"versions": [1, 5, 7]}}, {"1", "5"}),
    }
    entries = [
        config.entry(models.work(name), versions=(1, 2, 5), model_version_policy=policy)
        for name, (policy, _) in policies.items()
    ]
    gateway = start("--config_path", config.write(*entries), NEVER)
    for name, (_, served) in policies.items():
        available = {version for version, state in states(gateway, name).items() if state == "AVAILABLE"}
        assert available == served, name
        for version in served:
            talk(gateway, name, version=version).start()
        for version in {"1", "2", "5", "7"} - served:
            with pytest.raises(Refused, match="^NOT_FOUND: Model with requested version is not found"):
                talk(gateway, name, version=version).start()
        assert gateway.get(f"/v1/models/{name}/versions/5").json()["model_version_status"][0]["version"] == "5"
        assert gateway.get(f"/v1/models/{name}/versions/7").status_code == 404


def test_a_version_that_comes_leaves_the_others_alone(config, start, talk):
    entry = config.entry(models.work("m"), model_version_policy={"all": {}})
    gateway = start("--config_path", config.write(entry), NEVER)
    kept = talk(gateway, "m", version="1")
    kept.start()
    config.model(models.work("m"), versions=(2,))
    reload(gateway, 201)
    assert states(gateway, "m") == {"1": "AVAILABLE", "2": "AVAILABLE"}
    kept.step()
    talk(gateway, "m", version="2").whole(2)
    shutil.rmtree(config.folder / "m" / "2")
    reload(gateway, 201)
    kept.end()


# a unit test has the other spellings
@pytest.mark.parametrize("folder", ["01", str(2**63)])
def test_a_folder_that_is_no_version_is_left_out(config, folder):
    """tritonserver ends itself with a version that it can't hold."""
    entry = config.entry(models.work("m"))
    shutil.copytree(config.folder / "m" / "1", config.folder / "m" / folder)
    entry["model_version_policy"] = {"all": {}}
    printed = run("--print-config", "--config_path", config.write(entry))
    assert printed.returncode == 0, printed.stderr
    assert "# m/config.pbtxt, versions 1\n" in printed.stdout


def test_folders_that_are_no_versions_beside_one_that_is(config, start, talk):
    entry = config.entry(models.work("m"), model_version_policy={"all": {}})
    for folder in ("0", "01", "+1", "one", str(2**63), "9" * 40):
        shutil.copytree(config.folder / "m" / "1", config.folder / "m" / folder)
    gateway = start("--config_path", config.write(entry))
    assert states(gateway, "m") == {"1": "AVAILABLE"}
    talk(gateway, "m").whole(2)


def test_links_of_hugging_face_and_of_kubernetes(config, start, talk):
    """A model's file may be a link to a blob; the files of a ConfigMap are links into a folder that is itself one."""
    content = models.work("m").build().SerializeToString()
    place(config.folder / "blobs" / "abc", content)
    (config.folder / "hub" / "1").mkdir(parents=True)
    (config.folder / "hub" / "1" / "model.onnx").symlink_to(Path("../../blobs/abc"))
    mounted = config.folder / "mounted" / "1"
    place(mounted / "..2026_11_26" / "model.onnx", content)
    (mounted / "..data").symlink_to("..2026_11_26")
    (mounted / "model.onnx").symlink_to("..data/model.onnx")
    (config.folder / "dangling" / "1").mkdir(parents=True)
    (config.folder / "dangling" / "1" / "model.onnx").symlink_to("nowhere")
    names = ("hub", "mounted", "dangling")
    entries = [{"name": name, "base_path": str(config.folder / name), "stateful": True} for name in names]
    gateway = start("--config_path", config.write(*entries), NEVER)
    for name in ("hub", "mounted"):
        talk(gateway, name).whole(2)
    [dangling] = status_of(gateway, "dangling").values()
    assert dangling["state"] != "AVAILABLE" and "nowhere" in dangling["status"]["error_message"]


# ---- Triton's own API, and --print-config


def test_models_that_are_managed_can_not_be_loaded_by_clients(config, start, talk):
    gateway = start("--config_path", config.write(config.entry(models.work("m"))), NEVER)
    kept = talk(gateway, "m")
    kept.start()
    over_grpc = grpc_client.InferenceServerClient(gateway.grpc_url)
    over_http = http_client.InferenceServerClient(gateway.rest_url)
    for client in (over_grpc, over_http):
        for task in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException):
                task("m")
        assert client.is_model_ready("m")
        client.close()
    kept.end()


def test_print_config(config):
    entry = config.entry(models.work("m"), max_sequence_number=7, nireq=2)
    place(config.folder / "ir" / "1" / "model.xml", b"<net/>")
    wrong = {"name": "ir", "base_path": str(config.folder / "ir"), "stateful": True}
    printed = run("--print-config", "--config_path", config.write(entry))
    assert printed.returncode == 0, printed.stderr
    assert 'backend: "stateful"' in printed.stdout and 'string_value: "7"' in printed.stdout
    printed = run("--print-config", "--config_path", config.write(entry, wrong))
    assert printed.returncode == 1
    assert 'string_value: "7"' in printed.stdout and "model 'ir'" in printed.stderr, printed.stderr


def test_what_print_config_prints_is_what_triton_loads(config, deployment, talk):
    name = "printed_config"
    entry = config.entry(models.work(name), max_sequence_number=1)
    printed = run("--print-config", "--config_path", config.write(entry))
    folder = deployment.repository / name
    shutil.copytree(config.folder / name, folder)
    (folder / "config.pbtxt").write_text(printed.stdout)
    deployment.admin.load_model(name)
    deployment.loaded[name] = "as printed"
    talk(deployment.gateway, name, 1).start()
    with fails_with("MAX_SEQUENCE_NUMBER_REACHED"):
        talk(deployment.gateway, name, 2).start()


def test_a_model_with_a_configuration_of_its_own(config, start):
    """Settings that OpenVINO Model Server lacks are in a config.pbtxt next to the versions."""
    entry = config.entry(models.work("m"))
    place(
        config.folder / "m" / "config.pbtxt",
        b'parameters { key: "max_queued_requests_per_sequence" value { string_value: "3" } }',
    )
    gateway = start("--config_path", config.write(entry), NEVER)
    with http_client.InferenceServerClient(gateway.rest_url) as client:
        parameters = client.get_model_config("m")["parameters"]
    assert parameters["max_queued_requests_per_sequence"]["string_value"] == "3"
    assert parameters["stateful"]["string_value"] == "true"

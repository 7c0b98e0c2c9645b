"""The command line: every option of OpenVINO Model Server is obeyed, or refused with what to do instead."""

import os
import subprocess

import pytest

from harness import models
from harness.gateway import MANAGED, PROGRAM, run
from harness.ovms_config import Config

MODEL = ["--model_name=m", "--stateful"]


@pytest.fixture
def path(tmp_path):
    return f"--model_path={Config(tmp_path).model(models.work('m'))}"


def refused(*arguments: object, code: int = 64) -> str:
    """The program ends at once, with one text that isn't a panic, and OpenVINO Model Server's code of a wrong command line."""
    ended = run(*arguments, timeout_s=30)
    assert ended.returncode == code, (ended.returncode, ended.stderr)
    assert "panicked" not in ended.stderr and ended.stderr.strip(), ended.stderr
    return ended.stderr


def test_help_and_version():
    for option in ("--help", "--version"):
        shown = run(option)
        assert shown.returncode == 0 and "stateful-ovms" in shown.stdout
    text = run("--help").stdout
    for option in ("triton", "port", "rest_port", "model_path", "config_path", "stateful", "max_sequence_number"):
        assert f"--{option}" in text


@pytest.mark.parametrize("options", [["--help"], ["--print-config"]], ids=lambda options: options[0])
def test_output_that_nobody_reads_or_that_does_not_fit(path, options):
    given = [str(PROGRAM), *options, *([path, *MODEL] if options != ["--help"] else [])]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed, open("/dev/full", "wb") as full:
        ended = subprocess.run(given, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        ended = subprocess.run(given, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
        assert ended.returncode == 1 and "No space left" in ended.stderr and "panicked" not in ended.stderr


def test_a_log_that_can_not_be_written_is_named(path):
    assert "--log_path /nope/log" in refused("--port=0", "--rest_port=1", path, *MODEL, "--log_path=/nope/log", code=1)


#: Options of OpenVINO Model Server 2026.2 that have no meaning here (docs/parameters.md there), with a value.
WITHOUT_MEANING = [
    "--cpu_extension=/lib.so",
    "--cache_dir=/cache",
    "--custom_node_resources_cleaner_interval_seconds=1",
    "--grpc_channel_arguments=grpc.max_connection_age_ms=2000",
    "--grpc_memory_quota=2147483648",
    "--metrics_list=ovms_requests_success",
    "--allow_credentials=true",
    "--allowed_headers=*",
    "--allowed_methods=*",
    "--allowed_origins=*",
    "--api_key_file=/key",
    "--allowed_local_media_path=/media",
    "--allowed_media_domains=all",
    "--mean=1",
    "--scale=1",
    "--color_format=BGR",
    "--precision=fp32",
    "--model_repository_path=/models",
    "--list_models",
    "--add_to_config",
    "--remove_from_config",
    "--pull",
    "--source_model=x",
    "--task=text_generation",
]


@pytest.mark.parametrize("option", WITHOUT_MEANING, ids=lambda option: option.partition("=")[0].lstrip("-"))
def test_an_option_without_a_meaning_here_is_refused_by_name(path, option):
    text = refused("--port=9000", *MODEL, path, option)
    name = option.partition("=")[0]
    # a reason, not only that the option is unknown
    assert name in text and len(text) > len(name) + 30 and "unexpected argument" not in text, text


#: Options of a model with values that are refused, and words of the error.
OF_A_MODEL = [
    ("--shape=auto", "Dynamic shape and dynamic batch size are not supported for stateful models"),
    ("--batch_size=auto", "Dynamic shape and dynamic batch size are not supported for stateful models"),
    ("--shape=(1,4)", "shape is the model's"),
    ("--batch_size=8", "batch_size has to be 1 or absent"),
    ("--layout=NCHW", "layout is refused"),
    ("--target_device=GPU", "target_device is 'GPU'"),
    ('--plugin_config={"ENABLE_PROFILING": "YES"}', "ENABLE_PROFILING is an option of OpenVINO"),
    ("--plugin_config=none", "Plugin config is in wrong format"),
    ("--model_version_policy=newest", "Model version policy is in wrong format"),
    ('--model_version_policy={"newest": {}}', "Model version policy is in wrong format"),
    ("--max_sequence_number=0", "max_sequence_number is 0"),
]


@pytest.mark.parametrize(("option", "words"), OF_A_MODEL, ids=lambda value: value.partition("=")[0].lstrip("-"))
def test_an_option_of_a_model_that_it_can_not_have_is_refused(path, option, words):
    """As if it were in config.json: the code is that of a model that can't be served."""
    assert words in refused("--print-config", *MODEL, path, option, code=1)


@pytest.mark.parametrize("option", ["--max_sequence_number=-1", "--nireq=many"])
def test_an_option_of_a_model_that_is_no_number_is_refused(path, option):
    name, _, value = option.partition("=")
    assert f"invalid value '{value}' for '{name} " in refused("--print-config", *MODEL, path, option)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port=9000"], ["model_path"]),
        (["--port=9000", "--model_name=m"], ["model_path"]),
        (["--port=9000", "--config_path=c.json", "--model_name=m"], ["config_path", "model_path"]),
        (["--port=9000", "--config_path=c.json", "--stateful"], ["stateful", "config.json"]),
        (["--port=9000", "--config_path=c.json", "--nireq=4"], ["nireq", "config.json"]),
        (["--triton=localhost:8001"], ["port"]),
        (["--port=9000", "--rest_port=9000", "--triton=localhost:8001"], ["same"]),
        (["--port=65536", "--triton=localhost:8001"], ["port", "65535"]),
        (["--port=-1", "--triton=localhost:8001"], ["port"]),
        (["--port=nine", "--triton=localhost:8001"], ["port", "nine"]),
        (["--port=9000", "--triton=localhost:8001", "--model_name=m"], ["model_name", "triton"]),
        (["--port=9000", "--triton=localhost:8001", "--config_path=c.json"], ["config_path", "triton"]),
        (["--port=9000", "--triton=localhost:8001", "--file_system_poll_wait_seconds=1"], ["file_system_poll"]),
        (["--port=9000", "--triton=localhost:8001", "--tritonserver=/bin/true"], ["tritonserver"]),
        (["--port=9000", "--triton=localhost:8001", "--sequence_cleaner_poll_wait_minutes=5"], ["sequence_cleaner"]),
        (["--port=9000", "--triton=localhost:8001", "--max_sequence_number=5"], ["max_sequence_number"]),
        (["--port=9000", "--triton_http=localhost:8000"], ["triton"]),
        (["--port=9000", "--triton=not an address"], ["--triton"]),
        (["--port=9000", "--triton=localhost"], ["--triton", "a host and a port"]),
        (["--port=9000", "--triton=localhost:8001", "--triton_http=localhost"], ["--triton_http", "a host and a port"]),
        (["--port=9000", "--triton=localhost:8001", "--log_level=LOUD"], ["log_level"]),
        (["--port=9000", "--triton=localhost:8001", "--grpc_bind_address=,"], ["grpc_bind_address"]),
        (["--port=9000", "--triton=localhost:8001", "--no_such_option"], ["no_such_option"]),
        (["--port=9000", "--port=9001", "--triton=localhost:8001"], ["port"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_options_that_do_not_go_together_are_refused(arguments, words):
    text = refused(*arguments)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "option", ["--low_latency_transformation", "--max_sequence_number=5", "--idle_sequence_cleanup"]
)
def test_an_option_of_stateful_models_needs_stateful(path, option):
    text = refused("--port=9000", "--model_name=m", path, option)
    assert "require setting stateful flag" in text, text


def test_a_model_without_states_is_refused_with_what_to_do(path):
    assert '"stateful" is not true' in refused("--print-config", "--model_name=m", path, code=1)


def test_a_missing_config_is_named(tmp_path):
    assert "none.json" in refused("--port=9", *MANAGED, f"--config_path={tmp_path}/none.json", code=1)


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--tritonserver=/no/such/file", "/no/such/file"), ("--backend_directory=/no/such/folder", "/no/such/folder")],
)
def test_a_missing_tritonserver_or_backend_is_named(path, argument, words):
    name = argument.partition("=")[0]
    others = [other for other in MANAGED if not other.startswith(name)]
    assert words in refused("--rest_port=0", "--port=18999", *MODEL, path, *others, argument, code=1)

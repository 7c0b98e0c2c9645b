"""The manifests of deploy/kubernetes against the schemas of Kubernetes and the Prometheus operator, and each other.

docker/Dockerfile against hadolint, deploy/alerts.yaml against promtool.
"""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support import paths
from support.paths import BUILD, ROOT
from support.server import TritonServer

CHECKS = BUILD / "deploy-checks"
sys.path.append(str(CHECKS))
fastjsonschema = pytest.importorskip("fastjsonschema", reason="scripts/test installs it")
yaml = pytest.importorskip("yaml", reason="scripts/test installs it")

SCHEMAS = json.loads((ROOT / "tests/deploy/kubernetes-1.37.json").read_text())
POD_MONITOR = json.loads((ROOT / "tests/deploy/podmonitor-0.93.json").read_text())
KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}
GROUPS = {
    "Deployment": "apps/v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}


@pytest.fixture(scope="module")
def documents():
    files = [ROOT / "deploy" / "kubernetes" / name for name in ("triton.yaml", "podmonitor.yaml")]
    read = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    return {document["kind"]: document for document in read}


@pytest.fixture(scope="module")
def validators():
    of_kubernetes = {
        kind: fastjsonschema.compile(SCHEMAS | {"$ref": f"#/$defs/{name}"}) for kind, name in KINDS.items()
    }
    return of_kubernetes | {"PodMonitor": fastjsonschema.compile(POD_MONITOR)}


@pytest.fixture
def container(documents):
    [container] = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def test_the_manifests_are_of_the_kinds_that_are_checked(documents):
    assert {kind: document["apiVersion"] for kind, document in documents.items()} == GROUPS


@pytest.mark.parametrize("kind", GROUPS)
def test_fields_and_types_are_those_of_the_schemas(documents, validators, kind):
    validators[kind](documents[kind])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ["spec", "replicaz"], 1),
        ("Deployment", ["spec", "replicas"], "1"),
        ("Deployment", ["spec", "template", "spec", "containers", 0, "readinessProbe", "httpGet", "prot"], 8000),
        ("Deployment", ["spec", "template", "spec", "containers", 0, "command"], "tritonserver"),
        ("Deployment", ["spec", "template", "spec", "terminationGracePeriodSeconds"], "120s"),
        ("Deployment", ["spec", "template", "spec", "volumes", 0, "persistentVolumeClaim", "claimName"], None),
        ("Deployment", ["spec", "template", "spec", "topologySpreadConstraints", 0, "maxSkew"], "1"),
        ("PodDisruptionBudget", ["spec", "maxUnavailible"], 1),
        ("PodMonitor", ["spec", "podMetricsEndpoint"], []),
        ("PodMonitor", ["spec", "podMetricsEndpoints", 0, "ports"], "metrics"),
        ("PodMonitor", ["spec", "podMetricsEndpoints", 0, "port"], 8002),
        ("PodMonitor", ["spec", "podMetricsEndpoints", 0, "interval"], "15 seconds"),
        ("PodMonitor", ["spec", "selector", "matchLabels"], ["triton-stateful"]),
    ],
)
def test_a_wrong_field_or_type_is_found(documents, validators, kind, path, value):
    wrong = copy.deepcopy(documents[kind])
    place = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validators[kind](wrong)


def test_everything_selects_the_pods_of_the_deployment(documents):
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert documents["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert documents["Service"]["spec"]["selector"] == labels
    assert documents["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    for constraint in documents["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]:
        assert constraint["labelSelector"]["matchLabels"] == labels


def test_a_node_with_the_only_pod_can_be_drained(documents):
    """The eviction API lets a pod go if the budget's number may be missing, of as many as the Deployment wants."""
    budget = documents["PodDisruptionBudget"]["spec"]
    replicas = documents["Deployment"]["spec"]["replicas"]
    assert budget.get("maxUnavailable", replicas - budget.get("minAvailable", 0)) >= 1


def test_the_pod_meets_the_pod_security_standard_restricted(documents, container):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, and a root file system that is read-only."""
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    context = pod["securityContext"] | container["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] != 0
    assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not [port for port in container["ports"] if "hostPort" in port]
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
    assert context["readOnlyRootFilesystem"] is True


#: Runs tritonserver as an ordinary user. Everything is read-only except new folders at WRITABLE.
CONFINED = """#!/bin/bash
set -euo pipefail
if [[ -z "${CONFINED:-}" ]]; then
    export CONFINED=1
    exec unshare --map-root-user --mount "$0" "$@"
fi
findmnt --list --noheadings --output TARGET,VFS-OPTIONS | while read -r folder options; do
    [[ "$folder" == /proc* ]] || mount -o "remount,bind,$options,ro" "$folder"
done
for folder in WRITABLE; do
    mount -t tmpfs tmpfs "$folder"
done
if { : >>"$0"; } 2>/dev/null; then
    echo "'$0' can still be written to"
    exit 1
fi
exec unshare --map-user=1000 --map-group=1000 SERVER "$@"
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0,
    reason="this user may not make a mount namespace",
)
def test_the_server_writes_only_where_the_manifest_lets_it(container, monkeypatch):
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    if any(paths.ROOT.is_relative_to(folder) for folder in writable):
        pytest.skip(f"the checkout is in one of {writable}")
    program = paths.BUILD / f"confined-{os.getpid()}"
    text = CONFINED.replace("WRITABLE", shlex.join(writable)).replace("SERVER", shlex.quote(str(paths.TRITONSERVER)))
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(paths, "TRITONSERVER", program)
    try:
        with TritonServer(paths.MODELS, backends=paths.TEST_BACKENDS) as server:
            status = f"/proc/{server.pid}/status"
            assert re.search(r"^CapEff:\t0+$", Path(status).read_text(), re.MULTILINE)
            with grpcclient.InferenceServerClient(server.grpc_url) as client:
                chunk = np.zeros((1, 512), np.float32)
                audio = grpcclient.InferInput("input", chunk.shape, "FP32").set_data_from_numpy(chunk)
                for step in range(3):
                    client.infer("silero_vad", [audio], sequence_id=1, sequence_start=step == 0, sequence_end=step == 2)
    finally:
        program.unlink()


def test_ports_are_named_as_in_the_container(documents, container):
    names = {port["name"] for port in container["ports"]}
    named = {port["targetPort"] for port in documents["Service"]["spec"]["ports"]}
    named |= {endpoint["port"] for endpoint in documents["PodMonitor"]["spec"]["podMetricsEndpoints"]}
    named |= {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness", "liveness")}
    assert named <= names


def test_mounts_are_volumes_of_the_pod(documents, container):
    volumes = {volume["name"] for volume in documents["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_pod_has_the_time_to_drain(documents, container):
    [drain] = [int(found) for found in re.findall(r"--exit-timeout-secs=(\d+)", " ".join(container["args"]))]
    script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    before = sum(map(int, re.findall(r"(?:^sleep|seq) (\d+)", script, re.MULTILINE)))
    assert documents["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain + before


def test_the_image_is_of_this_version(container):
    [version] = re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert container["image"].endswith(f":{version}")


def test_hadolint_has_nothing_to_say_about_the_dockerfile():
    ran = subprocess.run(
        [CHECKS / "bin" / "hadolint", "--no-color", ROOT / "docker" / "Dockerfile"], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian, Ubuntu: prometheus) is not installed")
def test_promtool_takes_the_alert_rules_and_the_dashboard_s_expressions(tmp_path):
    panels = json.loads((ROOT / "deploy/grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    # Grafana fills in its variables. Any duration fits where a range is expected, and any text in a label's pattern.
    filled = [re.sub(r"\$\w+", "5m", expression) for expression in asked]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(filled)]
    dashboard = tmp_path / "dashboard.yaml"
    dashboard.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran = subprocess.run(
        ["promtool", "check", "rules", ROOT / "deploy/alerts.yaml", dashboard], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(rf"\b{len(rules)} rules found", ran.stdout)


STARTED = "stateful_sequences_started_total{}"
REJECTED = "stateful_sequences_rejected_total{}"
FAILED = "stateful_requests_failed_total{reason='%s'}"
UNSAVED = "stateful_oldest_unsaved_step_seconds{}"
NOT_SAVED = "stateful_sequences_not_saved_total{}"
STORE_ERRORS = "stateful_store_errors_total{}"
MOVED = "stateful_sequences_moved_total{}"
ANSWERED = "nv_inference_request_success{}"


def severities(folder, series):
    """The alerts that fire for a model after an hour of these values, as promtool computes them."""
    labels = "{model='m',version='1',instance='i',"
    values = [{"series": name.replace("{", labels), "values": given} for name, given in series.items()]
    fired = {}
    for alert in re.findall(r"- alert: (\w+)", (ROOT / "deploy/alerts.yaml").read_text()):
        expected = [{"eval_time": "1h", "alertname": alert, "exp_alerts": []}]
        test = {"interval": "15s", "input_series": values, "alert_rule_test": expected}
        file = folder / "test.yaml"
        file.write_text(yaml.safe_dump({"rule_files": [str(ROOT / "deploy/alerts.yaml")], "tests": [test]}))
        ran = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
        if ran.returncode:
            [fired[alert]] = re.findall(r'severity="(\w+)"', ran.stdout + ran.stderr)
    return fired


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian, Ubuntu: prometheus) is not installed")
@pytest.mark.parametrize(
    ("series", "fired"),
    [
        ({STARTED: "0+100x240", REJECTED: "0x240"}, {}),
        # one START in twenty is refused
        ({STARTED: "0+95x240", REJECTED: "0+5x240"}, {}),
        # more are refused than accepted
        ({STARTED: "0+40x240", REJECTED: "0+60x240"}, {"StatefulSequencesRejected": "warning"}),
        # none is accepted
        ({STARTED: "9x240", REJECTED: "0+60x240"}, {"StatefulSequencesRejected": "warning"}),
        # a refused START counts as a failed request
        ({FAILED % "no_slot": "0+60x240"}, {}),
        ({FAILED % "run": "0+60x240"}, {"StatefulRequestsFail": "critical"}),
        ({UNSAVED: "2x240", NOT_SAVED: "7x240"}, {}),
        ({UNSAVED: "60x240"}, {"StatefulStepsNotSaved": "critical"}),
        ({NOT_SAVED: "0+1x240"}, {"StatefulSequencesNotSaved": "warning"}),
        # the store was away for a moment, half an hour ago
        ({STORE_ERRORS: "0x100 0+1x20 20x120"}, {}),
        ({STORE_ERRORS: "0+1x240"}, {"StatefulStoreFails": "critical"}),
        ({MOVED: "0+5x240", ANSWERED: "0+100x240"}, {}),
        ({MOVED: "0+50x240", ANSWERED: "0+100x240"}, {"StatefulSequencesMoveOften": "warning"}),
    ],
)
def test_alerts_fire_for_what_somebody_has_to_do(tmp_path, series, fired):
    assert severities(tmp_path, series) == fired


def test_the_dockerfile_s_rust_is_the_oldest_that_cargo_toml_allows():
    [rust] = re.findall(r"^ARG RUST_VERSION=(.*)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert f'rust-version = "{rust}"' in (ROOT / "Cargo.toml").read_text()


def test_the_dockerfile_copies_what_the_build_needs(tmp_path):
    [stage] = re.findall(
        r"^WORKDIR /src$.*?^RUN cargo build", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
    for line in re.findall(r"^COPY (.*)$", stage, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    # It fails if a package or a target of one is missing.
    subprocess.run(["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"], cwd=tmp_path, check=True)
    for file in tmp_path.rglob("*.rs"):
        for included in re.findall(r'include_(?:str|bytes)!\("(.*?)"\)', file.read_text()):
            assert (file.parent / included).exists(), f"{file.relative_to(tmp_path)}: {included}"

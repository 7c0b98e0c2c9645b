"""The manifests of deploy/kubernetes/cluster, put together as Kustomize does, against the schemas and each other."""

import copy
import functools
import json
import re
import sys
from urllib.parse import parse_qs, urlsplit

import pytest

from support.paths import BUILD, ROOT

sys.path.append(str(BUILD / "deploy-checks"))
fastjsonschema = pytest.importorskip("fastjsonschema", reason="scripts/test installs it")
yaml = pytest.importorskip("yaml", reason="scripts/test installs it")

KUBERNETES = json.loads((ROOT / "tests/deploy/kubernetes-1.37.json").read_text())
GATEWAY = json.loads((ROOT / "tests/deploy/gateway-1.9.json").read_text())
DEFINITIONS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "Service": "io.k8s.api.core.v1.Service",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
} | {kind: kind for kind in GATEWAY["$defs"]}


def read(path):
    """The documents of a file, or of the files that the kustomization of a folder lists, with its patches."""
    if path.is_file():
        return list(yaml.safe_load_all(path.read_text()))
    [kustomization] = yaml.safe_load_all((path / "kustomization.yaml").read_text())
    documents = [document for name in kustomization["resources"] for document in read((path / name).resolve())]
    for patch in kustomization.get("patches", ()):
        [target] = [found for found in documents if is_target(found, patch["target"])]
        for operation in yaml.safe_load(patch["patch"]):
            apply(target, operation)
    return documents


def is_target(document, target) -> bool:
    return (document["kind"], document["metadata"]["name"]) == (target["kind"], target["name"])


def apply(document, operation) -> None:
    """An operation of a JSON patch (RFC 6902): a replaced value, or one more in a list."""
    *folders, last = operation["path"].split("/")[1:]
    place = document
    for name in folders:
        place = place[int(name) if isinstance(place, list) else name]
    if operation["op"] == "add":
        assert last == "-" and isinstance(place, list), operation
        place.append(operation["value"])
    else:
        assert operation["op"] == "replace" and last in place, operation
        place[last] = operation["value"]


@pytest.fixture(scope="module")
def all_documents():
    return read(ROOT / "deploy" / "kubernetes" / "cluster")


@pytest.fixture
def named(all_documents):
    """By kind and name."""
    return {(document["kind"], document["metadata"]["name"]): document for document in all_documents}


@pytest.fixture(scope="module")
def validate():
    @functools.cache
    def compiled(kind: str):
        schemas = GATEWAY if kind in GATEWAY["$defs"] else KUBERNETES
        return fastjsonschema.compile(schemas | {"$ref": f"#/$defs/{DEFINITIONS[kind]}"})

    return lambda document: compiled(document["kind"])(document)


@pytest.fixture
def deployment(named):
    return named["Deployment", "triton-stateful"]


@pytest.fixture
def valkey(named):
    return named["StatefulSet", "triton-stateful-valkey"]


def test_fields_and_types_are_those_of_the_schemas(all_documents, validate):
    assert {document["kind"] for document in all_documents} == DEFINITIONS.keys()
    for document in all_documents:
        validate(document)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ["spec", "replicas"], "1"),
        ("StatefulSet", ["spec", "volumeClaimTemplates", 0, "spec", "storage"], "1Gi"),
        ("NetworkPolicy", ["spec", "ingress", 0, "from"], {}),
        ("Gateway", ["spec", "listeners", 0, "port"], "8001"),
        ("GRPCRoute", ["spec", "rules", 0, "backendRefs", 0, "port"], "grpc"),
        ("HTTPRoute", ["spec", "parentRefs", 0, "section"], "http"),
        ("BackendTrafficPolicy", ["spec", "loadBalancer", "type"], "Maglev"),
        ("BackendTrafficPolicy", ["spec", "retry", "retryOn", "triggers"], ["connect-error"]),
        ("ClientTrafficPolicy", ["spec", "timeout", "http", "streamIdleTimeout"], "never"),
    ],
)
def test_a_wrong_field_or_type_is_found(all_documents, validate, kind, path, value):
    wrong = copy.deepcopy(next(document for document in all_documents if document["kind"] == kind))
    place = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validate(wrong)


def test_several_servers_use_the_store_with_its_password(deployment, valkey, named):
    assert deployment["spec"]["replicas"] > 1
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [store] = re.findall(r"--backend-config=stateful,state-store=(\S+)", " ".join(container["args"]))
    location = urlsplit(store)
    service = named["Service", location.hostname]["spec"]
    assert location.port in [port["port"] for port in service["ports"]]
    [of_store] = valkey["spec"]["template"]["spec"]["containers"]
    assert {port["targetPort"] for port in service["ports"]} <= {port["name"] for port in of_store["ports"]}
    [file] = parse_qs(location.query)["password_file"]
    folder, key = file.rsplit("/", 1)
    [mount] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    [variable] = of_store["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": volume["secret"]["secretName"], "key": key}
    assert f"$({variable['name']})" in of_store["args"]


def test_the_store_is_reached_by_the_servers_only_and_drops_nothing(deployment, valkey, named):
    labels = valkey["spec"]["template"]["metadata"]["labels"]
    assert valkey["spec"]["selector"]["matchLabels"] == labels
    assert named["Service", valkey["spec"]["serviceName"]]["spec"]["selector"] == labels
    policy = named["NetworkPolicy", "triton-stateful-valkey"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    [[peer]] = [rule["from"] for rule in policy["ingress"]]
    assert peer["podSelector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    [container] = valkey["spec"]["template"]["spec"]["containers"]
    said = " ".join(container["args"])
    assert "--appendonly yes" in said and "--maxmemory-policy noeviction" in said
    gibibytes = int(re.findall(r"--maxmemory (\d+)gb", said)[0])
    assert gibibytes < int(container["resources"]["limits"]["memory"].removesuffix("Gi"))


def test_the_store_meets_the_pod_security_standard_restricted(valkey):
    pod = valkey["spec"]["template"]["spec"]
    context = pod["securityContext"] | pod["containers"][0]["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] != 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_routes_lead_from_the_gateway_to_the_service(named):
    listeners = {
        listener["name"]: listener["port"] for listener in named["Gateway", "triton-stateful"]["spec"]["listeners"]
    }
    ports = {port["name"]: port["port"] for port in named["Service", "triton-stateful"]["spec"]["ports"]}
    for kind, name in (("GRPCRoute", "grpc"), ("HTTPRoute", "http")):
        route = named[kind, "triton-stateful"]["spec"]
        assert [(parent["name"], parent["sectionName"]) for parent in route["parentRefs"]] == [
            ("triton-stateful", name)
        ]
        [rule] = route["rules"]
        assert rule["backendRefs"] == [{"name": "triton-stateful", "port": ports[name]}]
        assert listeners[name] == ports[name]
    for kind in ("BackendTrafficPolicy", "ClientTrafficPolicy"):
        for target in named[kind, "triton-stateful"]["spec"]["targetRefs"]:
            assert (target["kind"], target["name"]) in named
    assert named["Gateway", "triton-stateful"]["spec"]["gatewayClassName"] == "triton-stateful"


def test_the_gateway_has_the_settings_of_the_configuration_that_is_tested(named):
    """deploy/envoy/envoy.yaml, which tests run."""
    envoy = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())["static_resources"]
    managers = [listener["filter_chains"][0]["filters"][0]["typed_config"] for listener in envoy["listeners"]]
    policy = named["BackendTrafficPolicy", "triton-stateful"]["spec"]
    for_clients = named["ClientTrafficPolicy", "triton-stateful"]["spec"]
    [limits] = envoy["clusters"][0]["circuit_breakers"]["thresholds"]
    for manager in managers:
        [host] = manager["route_config"]["virtual_hosts"]
        route = host["routes"][0]["route"]
        [header] = policy["loadBalancer"]["consistentHash"]["headers"]
        assert route["hash_policy"] == [{"header": {"header_name": header["name"]}}]
        assert route["timeout"] == policy["timeout"]["http"]["requestTimeout"]
        assert route["retry_policy"]["retry_on"].split(",") == policy["retry"]["retryOn"]["triggers"]
        assert route["retry_policy"]["num_retries"] == policy["retry"]["numRetries"]
        assert manager["stream_idle_timeout"] == for_clients["timeout"]["http"]["streamIdleTimeout"]
    assert policy["timeout"]["http"]["streamIdleTimeout"] == managers[0]["stream_idle_timeout"]
    assert (
        managers[0]["http2_protocol_options"]["max_concurrent_streams"] == for_clients["http2"]["maxConcurrentStreams"]
    )
    assert policy["circuitBreaker"] == {
        "maxConnections": limits["max_connections"],
        "maxPendingRequests": limits["max_pending_requests"],
        "maxParallelRequests": limits["max_requests"],
    }


def test_a_pod_has_the_time_to_leave(deployment):
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [drain] = re.findall(r"--exit-timeout-secs=(\d+)", " ".join(container["args"]))
    script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    [waits] = re.findall(r"^sleep (\d+); stateful-drain --timeout (\d+)$", script)
    assert pod["terminationGracePeriodSeconds"] > int(drain) + sum(map(int, waits))


def test_one_pod_leaves_at_a_time(named, deployment):
    budget = named["PodDisruptionBudget", "triton-stateful"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]

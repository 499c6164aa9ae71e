"""TensorBoard's password, for real; and the pages as the API server and the load balancer's controller see them."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
import pytest
from mocks import Recorded, run
from schemas import definitions, is_object, mistakes
from werkzeug.security import check_password_hash
from werkzeug.test import Client

from workloads.base import Base
from workloads.dashboard import Dashboard
from workloads.labels import DASHBOARD_LABEL
from workloads.platform import NodeShape, Platform, VolumeSource
from workloads.settings import Web, Workloads
from workloads.tensorboard import HEALTH, TensorBoard, password_hash
from workloads.tensorboard_server import Password, protected
from workloads.toolbox import Toolbox

SERVER = Path(__file__).resolve().parents[2] / "workloads" / "tensorboard_server.py"
DEPLOYMENT, SERVICE = "kubernetes:apps/v1:Deployment", "kubernetes:core/v1:Service"
SECRET, INGRESS = "kubernetes:core/v1:Secret", "kubernetes:networking.k8s.io/v1:Ingress"
POLICY = "kubernetes:networking.k8s.io/v1:NetworkPolicy"
CERTIFICATE = "arn:aws:acm:us-west-2:123456789012:certificate/" + "0" * 36
WORD = "planted-pass:word €"


def make(stack: str = "dev", **web: str) -> Recorded:
    """What TensorBoard, the dashboard and the toolbox register."""
    core = NodeShape("core", 2, 6, 24, node_selector={"group": "core"})

    def program() -> None:
        provider = k8s.Provider("k8s", kubeconfig="{}")
        image = pulumi.Output.from_input("image@sha256:" + "0" * 64)
        platform = Platform(provider, image, VolumeSource("10Gi", host_path="/srv"), core, core)
        base = Base("base", Workloads(), platform, "dev")
        page = Web.model_validate(web)
        TensorBoard("tensorboard", page, platform, base, Path("/data/runs/dev/tensorboard"), WORD)
        Dashboard("dashboard", page, platform, base)
        Toolbox("toolbox", platform, base)

    return run(program, stack=stack)


@pytest.fixture(scope="module")
def pages() -> Recorded:
    return make(host="tb.example.com", certificateArn=CERTIFICATE)


def test_objects_are_what_an_api_server_takes(pages: Recorded) -> None:
    crds = definitions()
    for each in pages:
        if is_object(each.type):
            assert mistakes(each.inputs, crds) == [], each


def test_the_password_is_hashed_and_only_in_a_secret(pages: Recorded) -> None:
    for each in pages:
        assert "planted" not in json.dumps(each.inputs), each
    secret = pages.one(SECRET)
    assert secret.secrets == {"stringData"}
    assert check_password_hash(secret.inputs["stringData"]["hash"], WORD)


def test_the_hash_is_the_same_at_every_up_and_another_in_every_stack(pages: Recorded) -> None:
    hashes = [each.one(SECRET).inputs["stringData"]["hash"] for each in (pages, make(), make(stack="other"))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_salt_tells_nothing_of_the_password() -> None:
    salts = {password_hash(word, "project/stack").split("$")[1] for word in ("one", "two")}
    assert len(salts) == 1
    assert password_hash("one", "project/stack") != password_hash("two", "project/stack")


def test_pods_beside_the_stages_are_on_core_nodes_and_have_no_rights(pages: Recorded) -> None:
    assert len(pages.of(DEPLOYMENT)) == 2
    for each in pages.of(DEPLOYMENT):
        pod = each.inputs["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["nodeSelector"] == {"group": "core"}
        assert container["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        # A device that they hold is one that a stage waits for.
        assert set(container["resources"]["limits"]) == {"memory"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_services_find_their_pods(pages: Recorded) -> None:
    tensorboard = pages.one(DEPLOYMENT, "tensorboard-deployment").inputs["spec"]
    labels = tensorboard["template"]["metadata"]["labels"]
    selector = pages.one(SERVICE, "tensorboard-service").inputs["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert tensorboard["selector"]["matchLabels"].items() <= labels.items()
    assert pages.one(SERVICE, "dashboard-service").inputs["spec"]["selector"] == DASHBOARD_LABEL
    # There is no head until a stage runs.
    annotations = pages.one(SERVICE, "dashboard-service").inputs["metadata"]["annotations"]
    assert annotations == {"pulumi.com/skipAwait": "true"}


def test_without_a_host_nothing_is_exposed() -> None:
    made = make()
    assert made.of(INGRESS) == []
    assert [each for each in made.of(POLICY) if not each.inputs["spec"]["ingress"][0].get("from")] == []


def test_an_exposed_page_has_https_only_and_its_own_port(pages: Recorded) -> None:
    for name, port in (("tensorboard", 6006), ("dashboard", 8265)):
        ingress = pages.one(INGRESS, f"{name}-ingress").inputs
        annotations = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
        assert json.loads(annotations["listen-ports"]) == [{"HTTPS": 443}]
        assert (annotations["scheme"], annotations["certificate-arn"]) == ("internal", CERTIFICATE)
        (rule,) = ingress["spec"]["rules"]
        assert rule["host"] == "tb.example.com"
        backend = rule["http"]["paths"][0]["backend"]["service"]
        service = pages.one(SERVICE, f"{name}-service").inputs
        assert backend == {"name": service["metadata"]["name"], "port": {"number": port}}
        policy = pages.one(POLICY, f"{name}-from-load-balancers").inputs["spec"]
        assert policy["podSelector"]["matchLabels"] == service["spec"]["selector"]
        assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]


def header(word: str, user: str = "anyone") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{word}".encode()).decode()}


@pytest.fixture
def hash_file(tmp_path: Path) -> Path:
    path = tmp_path / "hash"
    path.write_text(password_hash(WORD, "project/stack") + "\n")
    return path


def guarded(hash_file: Path) -> Client:
    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"inside"]

    return Client(protected(app, Password(hash_file), HEALTH))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        header("wrong"),
        header(""),
        header(WORD + "x"),
        header(WORD.swapcase()),
        {"Authorization": "Basic"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Bearer " + WORD.replace("€", "")},
        {"Authorization": "Digest username=x"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/data/runs", "/healthz/", "//healthz", "/healthz/../data/runs"])
def test_no_way_in_without_the_password(hash_file: Path, headers: dict[str, str], path: str) -> None:
    answer = guarded(hash_file).get(path, headers=headers)
    assert (answer.status_code, b"inside" in answer.data) == (401, False)
    assert "Basic" in answer.headers["WWW-Authenticate"]


def test_the_password_opens_again_and_again_and_no_longer_when_it_has_changed(hash_file: Path) -> None:
    client = guarded(hash_file)
    assert client.get("/", headers=header("wrong")).status_code == 401
    for user in ("one", "other"):
        assert client.get("/", headers=header(WORD, user)).data == b"inside"
        assert client.get("/", headers=header("wrong")).status_code == 401
    hash_file.write_text(password_hash("new", "project/stack"))
    assert client.get("/", headers=header(WORD)).status_code == 401
    assert client.get("/", headers=header("new")).data == b"inside"


def test_a_page_of_a_hundred_requests_costs_one_check(hash_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    real = check_password_hash
    monkeypatch.setattr("workloads.tensorboard_server.check_password_hash", lambda *a: checks.append(a) or real(*a))
    client = guarded(hash_file)
    for _ in range(100):
        assert client.get("/", headers=header(WORD)).status_code == 200
    assert len(checks) == 1


@pytest.fixture
def server(hash_file: Path, tmp_path: Path) -> Iterator[str]:
    """The program as the pod runs it, from a folder of its own; its address."""
    code = tmp_path / "opt" / "server.py"
    code.parent.mkdir()
    code.write_text(SERVER.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--logdir", str(tmp_path / "not-there-yet"), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, str(code), *arguments],
        env={**os.environ, "PASSWORD_HASH_FILE": str(hash_file), "HEALTH_PATH": HEALTH, "PYTHONPATH": ""},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    said = next((line for line in iter(process.stderr.readline, "") if "TensorBoard" in line or "Error" in line), "")
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    drain.start()
    yield f"http://127.0.0.1:{port}" if "Press CTRL+C" in said else f"did not start: {said}"
    process.terminate()
    assert process.wait(30) == 0
    drain.join()


def test_tensorboard_itself_asks_for_the_password(server: str) -> None:
    def status(path: str, headers: dict[str, str]) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(server + path, headers=headers), timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status(HEALTH, {}) == 200
    for path in ("/", "/data/environment", "/data/runs"):
        assert status(path, {}) == 401
        assert status(path, header("wrong")) == 401
        assert status(path, header(WORD)) == 200

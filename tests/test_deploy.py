"""Deployment files agree with the package: versions, probes, the user of the image."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from offramp.commands.serve import ServeOptions

ROOT = Path(__file__).parents[1]


def documents(name: str) -> list[dict[str, Any]]:
    """Return the YAML documents of a deployment file."""
    return [one for one in yaml.safe_load_all((ROOT / "deploy" / name).read_text()) if one]


def test_probes_use_paths_that_the_server_has() -> None:
    deployment, service = documents("kubernetes.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    routes = (ROOT / "src" / "offramp" / "serving" / "app.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in routes
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_a_service_cannot_set_options_of_the_server() -> None:
    """Kubernetes sets OFFRAMP_PORT=tcp://… in pods beside a Service called `offramp`, which is also our --port."""
    deployment, service = documents("kubernetes.yaml")
    injected = {f"{service['metadata']['name'].upper()}_{name}" for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT")}
    assert injected & {f"OFFRAMP_{field.name.upper()}" for field in fields(ServeOptions)} == {"OFFRAMP_PORT"}
    assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_server_has_as_many_threads_as_cores_are_requested() -> None:
    (container,) = documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"]
    assert container["args"][container["args"].index("--threads") + 1] == container["resources"]["requests"]["cpu"]


def test_the_ray_version_is_the_tested_one() -> None:
    (job,), (service,) = documents("kuberay-job.yaml"), documents("kuberay-service.yaml")
    pinned = (ROOT / "constraints.txt").read_text().split()
    for cluster in (job["spec"]["rayClusterSpec"], service["spec"]["rayClusterConfig"]):
        assert f"ray=={cluster['rayVersion']}" in pinned


def test_the_ray_service_is_one_that_ray_and_offramp_accept() -> None:
    (service,) = documents("kuberay-service.yaml")
    config = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    module, function = application.import_path.split(":")
    assert callable(getattr(import_module(module), function))
    given = dict(application.args)
    assert given.pop("runs") and given.pop("gateways")
    ServeOptions(cluster="auto", api_key="key", **given)


def stages() -> list[str]:
    """Return the stages of the Dockerfile, without their comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.M)
    return re.split(r"^FROM ", text, flags=re.M)[1:]


def test_the_build_gets_the_files_that_it_copies() -> None:
    build, _ = stages()
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", build, re.M) for word in line.split()}
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "native/build" in ignored and all((ROOT / name).exists() for name in copied)


def test_the_image_has_the_native_engine_and_no_compiler() -> None:
    build, final = stages()
    tools = re.search(r"^NATIVE_TOOLS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert tools and f"--constraint constraints.txt {tools[1]} " in build
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(tools[1].split()) <= pinned
    assert "ARG NATIVE=1" in build and "./native" in build and "g++" in build
    assert build.split()[0] == final.split()[0], "the C++ library that it was linked with"
    assert "apt-get" not in final and "COPY --from=build /venv /venv" in final and "import offramp_native" in final


def test_containers_do_not_run_as_root() -> None:
    users = re.findall(r"^USER (\d+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.M)
    assert users == [str(documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]["securityContext"]["runAsUser"])]
    (service,) = documents("compose.yaml")[0]["services"].values()
    assert service["read_only"] and service["cap_drop"] == ["ALL"]

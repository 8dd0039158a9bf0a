"""What deploy/ holds: images that copy what is there and run as nobody special, and a KubeRay manifest whose parts fit each other."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from offbeat.config.load import load_config, split_overrides
from offbeat.config.root import Config

ROOT = Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile*"))
MANIFEST = ROOT / "deploy" / "rayjob.yaml"
PINNED = re.compile(r"[a-z0-9/_-]+:\d+\.\d+[A-Za-z0-9._-]*")

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
CONTAINER = {
    "type": "object", "required": ["name", "image", "resources"],
    "properties": {
        "name": {"type": "string"}, "image": {"type": "string"}, "env": {"type": "array"},
        "resources": {
            "type": "object", "required": ["requests", "limits"], "properties": {"requests": STRINGS, "limits": STRINGS},
            "additionalProperties": False},
        "volumeMounts": {"type": "array", "items": {
            "type": "object", "required": ["name", "mountPath"], "additionalProperties": False,
            "properties": {"name": {"type": "string"}, "mountPath": {"type": "string"}, "readOnly": {"type": "boolean"}}}}},
    "additionalProperties": False,
}
TEMPLATE = {
    "type": "object", "required": ["spec"], "additionalProperties": False,
    "properties": {"metadata": {"type": "object"}, "spec": {
        "type": "object", "required": ["containers"], "additionalProperties": False,
        "properties": {
            "containers": {"type": "array", "minItems": 1, "items": CONTAINER}, "volumes": {"type": "array"},
            "securityContext": {"type": "object"}, "nodeSelector": STRINGS, "tolerations": {"type": "array"}}}},
}
HEAD = {
    "type": "object", "required": ["rayStartParams", "template"], "additionalProperties": False,
    "properties": {"rayStartParams": STRINGS, "template": TEMPLATE, "serviceType": {"type": "string"}},
}
COUNT = {"type": "integer", "minimum": 0}
WORKERS = {
    "type": "object", "required": ["groupName", "rayStartParams", "template"], "additionalProperties": False,
    "properties": {
        "groupName": {"type": "string"}, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT, "numOfHosts": COUNT,
        "rayStartParams": STRINGS, "template": TEMPLATE},
}
RAY_JOB = {
    "type": "object", "required": ["apiVersion", "kind", "metadata", "spec"], "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}, "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object", "required": ["entrypoint", "rayClusterSpec"], "additionalProperties": False,
            "properties": {
                "entrypoint": {"type": "string"}, "shutdownAfterJobFinishes": {"type": "boolean"}, "ttlSecondsAfterFinished": COUNT,
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]}, "backoffLimit": COUNT,
                "activeDeadlineSeconds": COUNT, "suspend": {"type": "boolean"}, "runtimeEnvYAML": {"type": "string"},
                "rayClusterSpec": {
                    "type": "object", "required": ["headGroupSpec"], "additionalProperties": False,
                    "properties": {
                        "rayVersion": {"type": "string"}, "headGroupSpec": HEAD, "enableInTreeAutoscaling": {"type": "boolean"},
                        "workerGroupSpecs": {"type": "array", "items": WORKERS}}}}}},
}
"""The part of KubeRay's ray.io/v1 that the manifest uses; a key that is not here is a slip, or belongs here."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined and comments left out."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.lstrip().startswith("#"))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_a_pinned_base_and_a_user_without_rights(path: Path) -> None:
    lines = instructions(path)
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in lines} <= known
    assert lines[0][0] == "FROM" and PINNED.fullmatch(lines[0][1])
    users = [argument for name, argument in lines if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert f"--uid 1000 {users[-1]}" in " ".join(argument for name, argument in lines if name == "RUN")
    assert dict(lines)["ENTRYPOINT"] == '["offbeat"]'


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_is_there_and_sent_to_the_builder(path: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for name, argument in instructions(path) if name == "COPY" for source in argument.split()[:-1]}
    assert copied == sent and all((ROOT / source).exists() for source in copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = re.findall(r'"\.\[([a-z,]+)\]"', path.read_text())
    assert set(asked.split(",")) <= extras.keys()


def test_the_manifest_is_of_kuberays_form() -> None:
    jsonschema.validate(documents()["RayJob"], RAY_JOB)
    spec = documents()["RayJob"]["spec"]["rayClusterSpec"]
    (ray,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert spec["rayVersion"] == ray, "all of a cluster runs one version"


def test_volumes_that_are_mounted_are_there() -> None:
    found = documents()
    spec = found["RayJob"]["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def manifest_config(tmp_path: Path) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(documents()["ConfigMap"]["data"]["run.toml"])
    overrides, rest = split_overrides(shlex.split(documents()["RayJob"]["spec"]["entrypoint"]))
    assert rest == ["offbeat", "train", "/etc/offbeat/run.toml"]
    return load_config(str(file), overrides)


def test_the_run_of_the_manifest_is_valid_and_has_as_many_gpus_as_it_needs(tmp_path: Path) -> None:
    config = manifest_config(tmp_path)
    (workers,) = documents()["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    train, inference = config.train, config.inference
    assert train.num_ranks * train.devices_per_rank + inference.num_engines * inference.devices_per_engine == gpus == 16
    assert config.run.dir == "/runs" and config.cluster.ray_address == "auto"

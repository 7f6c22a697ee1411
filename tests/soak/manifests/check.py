"""Check manifests by published schemas, and print them as JSON. Runs in the environment with kubernetes-validate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

VERSIONS = ("1.30", "1.37")  # the oldest and the newest that count


def check(resource: dict[str, Any]) -> None:
    if resource["kind"] == "MPIJob":
        schema = json.loads(Path(__file__).with_name("mpijob.schema.json").read_text())
        jsonschema.validate(resource, schema)
        for replica in resource["spec"]["mpiReplicaSpecs"].values():
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-job"}}
            check({**template, "template": replica["template"]})
        return
    for version in VERSIONS:
        kubernetes_validate.validate(resource, version, strict=True)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        found = [resource for resource in yaml.safe_load_all(file) if resource]
    for each in found:
        check(each)
    sys.stdout.write(json.dumps(found))

"""Kubernetes objects against the schemas that an API server would hold them to, with unknown fields as errors.

Built-in kinds: the OpenAPI schemas of KUBERNETES, which the package kubernetes-validate carries. Custom resources: the
operators' definitions in the folder that CRD_DIR names, or in ../shared/crds beside the checkout.

    mistakes(object, definitions())
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.35"
CRD_DIR = Path(os.environ.get("CRD_DIR") or Path(__file__).parents[3] / "shared" / "crds")

Schema = dict[str, Any]
Definitions = dict[tuple[str, str], Schema]
"""(apiVersion, kind) -> JSON Schema."""

NOT_OBJECTS = ("kubernetes:helm.sh/", "kubernetes:yaml/", "kubernetes:kustomize/")
"""Types of pulumi-kubernetes that stand for more than one object, or for none."""
OBJECT_META = {
    "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    "finalizers": {"type": "array", "items": {"type": "string"}},
    "generateName": {"type": "string"},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "name": {"type": "string"},
    "namespace": {"type": "string"},
    "ownerReferences": {"type": "array"},
}
"""What a client may set of an object's metadata; definitions leave it to the API server."""


class NotDefined(LookupError):
    """No definition is at hand for a custom resource."""


def is_object(token: str) -> bool:
    """Whether a Pulumi type token (`kubernetes:apps/v1:Deployment`) is that of one Kubernetes object."""
    return token.startswith("kubernetes:") and not token.startswith(NOT_OBJECTS)


def identity(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """What a definition is for: (apiVersion, kind)."""
    return manifest["apiVersion"], manifest["kind"]


def is_custom(manifest: Mapping[str, Any]) -> bool:
    """Whether an object is a custom resource: its group is a domain name, and not one of Kubernetes' own."""
    group = manifest["apiVersion"].rpartition("/")[0]
    return "." in group and not group.endswith(".k8s.io")


def definitions(folder: Path = CRD_DIR) -> Definitions:
    """The schemas of a folder of CustomResourceDefinitions; empty where there is no such folder."""
    found: Definitions = {}
    for path in sorted(folder.glob("*.yaml")):
        for item in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader):
            spec = (item or {}).get("spec", {})
            for version in spec.get("versions", []):
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"] |= {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object", "properties": OBJECT_META, "additionalProperties": False},
                }
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def mistakes(manifest: Mapping[str, Any], custom: Definitions) -> list[str]:
    """What is wrong with an object, each line with the path of the field.

    Raises NotDefined for a custom resource that `custom` has no schema of.
    """
    if is_custom(manifest):
        key = identity(manifest)
        if key not in custom:
            raise NotDefined(f"{key[1]} of {key[0]}")
        errors = jsonschema.Draft7Validator(custom[key]).iter_errors(manifest)
        return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    try:
        kubernetes_validate.validate(dict(manifest), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _strict(schema: Mapping[str, Any]) -> Schema:
    """A definition's schema as JSON Schema: where the API server drops an unknown field, there is none allowed.

    Structural schemas: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
    """
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": schema.get("pattern", "")}]}
    known = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
    out: Schema = {key: schema[key] for key in (*known, "required") if key in schema}
    if schema.get("nullable"):
        out["type"] = [schema["type"], "null"]
    if "items" in schema:
        out["items"] = _strict(schema["items"])
    if schema.get("type") == "object":
        out["properties"] = {name: _strict(field) for name, field in schema.get("properties", {}).items()}
        others = schema.get("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
        out["additionalProperties"] = _strict(others) if isinstance(others, Mapping) else others
    return out

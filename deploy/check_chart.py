"""Lints and renders the chart with Helm's own SDK, and validates what comes out.

Every case of deploy/helm/cases, and the defaults: against the API of the newest Kubernetes that the
validator knows (strict: unknown fields are errors), and against the rules of this file, which are
what docs/security.md promises of a pod. Ends with 1 at the first finding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint

HELM = Path(__file__).parent / "helm"
CHART = HELM / "rollpacker"
WORKLOADS = ("Deployment", "StatefulSet")
SERVICES = {"coordinator", "rollout", "reward", "trainer"}
_WARNING = 2

Manifest = dict[str, Any]


def main() -> None:
    """Check every case."""
    cases: dict[str, Manifest] = {"defaults": {}}
    cases |= {p.stem: yaml.safe_load(p.read_text()) for p in sorted(HELM.glob("cases/*.yaml"))}
    for name, values in cases.items():
        report = lint(CHART, values)
        found = [m for m in report["messages"] if m["severity"] >= _WARNING]
        if found or report["errors"]:
            sys.exit(f"{name}: lint: {found} {report['errors']}")
        manifests = rendered(values)
        for manifest in manifests:
            where = f"{name}: {manifest['kind']} {manifest['metadata']['name']}"
            try:
                kubernetes_validate.validate(manifest, "1.37", strict=True)
            except kubernetes_validate.ValidationError as error:
                sys.exit(f"{where}: {list(error.path)}: {error.message}")
        for problem in problems(manifests):
            sys.exit(f"{name}: {problem}")
        print(f"chart, {name}: {len(manifests)} manifests are valid")


def rendered(values: Manifest) -> list[Manifest]:
    """All manifests of the chart."""
    files = Chart.load(CHART).render(values, name="rp", namespace="training")
    documents = [doc for text in files.values() for doc in yaml.safe_load_all(text)]
    return [document for document in documents if document]


def problems(manifests: list[Manifest]) -> Iterator[str]:
    """What of the promises does not hold."""
    workloads = {
        m["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: m
        for m in manifests
        if m["kind"] in WORKLOADS
    }
    if workloads.keys() != SERVICES:
        yield f"workloads are {sorted(workloads)}"
    if any(m["kind"] == "Secret" for m in manifests):
        yield "a secret is made instead of named"
    for service, workload in workloads.items():
        for problem in pod_problems(workload["spec"]["template"]["spec"]):
            yield f"{service}: {problem}"
    yield from reference_problems(manifests, workloads)
    yield from network_problems([m for m in manifests if m["kind"] == "NetworkPolicy"])


def pod_problems(pod: Manifest) -> Iterator[str]:
    """A pod that is not confined, or holds a secret in its environment."""
    context = pod["securityContext"]
    if not context["runAsNonRoot"] or context["seccompProfile"]["type"] == "Unconfined":
        yield "runs as root or without a seccomp profile"
    if pod["automountServiceAccountToken"]:
        yield "has a token of the cluster"
    (container,) = pod["containers"]
    confined = container["securityContext"]
    if (
        confined["allowPrivilegeEscalation"]
        or not confined["readOnlyRootFilesystem"]
        or confined["capabilities"] != {"drop": ["ALL"]}
    ):
        yield "is not confined"
    names = [item["name"] for item in container["env"]]
    if len(names) != len(set(names)):
        yield f"has a variable twice: {names}"
    mounts, volumes = container["volumeMounts"], pod["volumes"]
    if {mount["name"] for mount in mounts} != {volume["name"] for volume in volumes}:
        yield "mounts are not its volumes"
    for item in container["env"]:
        if item["name"].endswith("_URL") and "value" in item:
            yield f"{item['name']} is no reference to a secret"


def reference_problems(manifests: list[Manifest], workloads: dict[str, Manifest]) -> Iterator[str]:
    """Something points at nothing."""
    names = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    if len(names) != len(manifests):
        yield "two manifests have one name"
    labels = [w["spec"]["template"]["metadata"]["labels"].items() for w in workloads.values()]
    for m in manifests:
        spec = m["spec"]
        selector = spec.get("selector") or spec.get("podSelector")
        selector = selector.get("matchLabels", selector) if selector else {}
        if selector and sum(selector.items() <= own for own in labels) != 1:
            yield f"{m['kind']} {m['metadata']['name']} does not select one workload"
        target = spec.get("scaleTargetRef")
        if target and (target["kind"], target["name"]) not in names:
            yield f"{m['metadata']['name']} scales what is not there"
        if target and "replicas" in workloads["reward"]["spec"]:
            yield "replicas and an autoscaler contend"
    trainer = workloads["trainer"]
    if ("Service", trainer["spec"]["serviceName"]) not in names:
        yield "the trainer's pods have no names"


def network_problems(policies: list[Manifest]) -> Iterator[str]:
    """Reward reaches or is reached by more than the coordinator, or somebody else reaches Redis."""
    for policy in policies:
        component, rules = _component(policy["spec"]["podSelector"]), policy["spec"]
        reached = {port["port"] for rule in rules["egress"] for port in rule.get("ports", [])}
        called_by = {
            _component(peer["podSelector"])
            for rule in rules["ingress"]
            for peer in rule["from"]
            if "podSelector" in peer
        }
        if component == "reward" and (reached, called_by) != ({53, 7777}, {"coordinator"}):
            yield f"reward reaches the ports {sorted(reached)}, and is called by {called_by}"
        if (6379 in reached) != (component in ("coordinator", "trainer")):
            yield f"{component} and Redis"


def _component(selector: Manifest) -> str:
    return str(selector["matchLabels"].get("app.kubernetes.io/component", ""))


if __name__ == "__main__":
    main()

"""What AWS and Kubernetes refuse because something else is missing, or is still there.

A program can get these wrong while its data flows are right: a node group that starts before its route to the internet
exists, a policy taken from a role whose nodes still run. Each rule is a fact of the service, answered with its error
code; where AWS would only notice after twenty minutes (nodes that never join) it is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from cloud import Cloud, Resource, network, strings

Rule = Callable[[Cloud, Resource], str | None]

WORKER_POLICIES = {"AmazonEKSWorkerNodePolicy", "AmazonEKSWorkerNodeMinimalPolicy"}
REGISTRY_POLICIES = {"AmazonEC2ContainerRegistryPullOnly", "AmazonEC2ContainerRegistryReadOnly"}
# Managed add-ons that run a Deployment: they stay DEGRADED, and their creation fails, as long as there is no node.
ADDONS_ON_NODES = {"coredns", "metrics-server", "aws-ebs-csi-driver", "aws-fsx-csi-driver"}
LUSTRE_PORT = 988
# Of a custom resource's group: the chart with its definition and the chart with its controller.
CHARTS_OF_GROUPS = {
    "monitoring.coreos.com": ("kube-prometheus-stack", "kube-prometheus-stack"),
    "karpenter.sh": ("karpenter-crd", "karpenter"),
    "karpenter.k8s.aws": ("karpenter-crd", "karpenter"),
    "ray.io": ("kuberay-operator", "kuberay-operator"),
    "scheduling.volcano.sh": ("volcano", "volcano"),
}
NAMESPACES = {"default", "kube-system", "kube-public", "kube-node-lease"}


def refusals(cloud: Cloud, op: str, resource: Resource) -> str | None:
    """The first rule that an operation breaks, or None."""
    general = [already_exists, refers_to_nothing] if op == "create" else [still_in_use]
    for rule in [*general, *RULES.get((op, resource.type), []), *kubernetes_rules(op, resource.type)]:
        if why := rule(cloud, resource):
            return why
    return None


def already_exists(cloud: Cloud, new: Resource) -> str | None:
    """Names are unique by type: role, bucket, cluster, log group, ..."""
    return f"AlreadyExists: {new.type} {new.id}" if (new.type, new.id) in cloud.live else None


def refers_to_nothing(cloud: Cloud, new: Resource) -> str | None:
    """An id or an ARN that was given out once must still be of something that exists."""
    here = set(chain.from_iterable((r.id, r.outputs.get("arn")) for r in cloud.live.values()))
    gone = sorted(set(strings(new.inputs)) & cloud.issued - here)
    return f"NotFound: {new.type} refers to {gone[0]}, which does not exist" if gone else None


def still_in_use(cloud: Cloud, old: Resource) -> str | None:
    """Nothing goes while something that exists refers to it."""
    if not old.type.startswith("aws:"):
        return None
    names = {old.id, old.outputs["arn"]} & cloud.issued
    users = [r.urn for r in cloud.live.values() if r is not old and not names.isdisjoint(strings(r.inputs))]
    return f"DependencyViolation: {old.type} {old.id} is in use by {users[0]}" if users else None


def subnet_fits(cloud: Cloud, new: Resource) -> str | None:
    """A subnet lies in one of the VPC's ranges, a secondary one being associated first, and overlaps no other."""
    vpc, cidr = new.inputs["vpcId"], network(new.inputs["cidrBlock"])
    ranges = [r.inputs["cidrBlock"] for r in cloud.of("aws:ec2/vpc:Vpc") if r.id == vpc]
    ranges += [
        r.inputs["cidrBlock"]
        for r in in_vpc(cloud, "aws:ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation", vpc)
    ]
    if not any(cidr.subnet_of(network(one)) for one in ranges):
        return f"InvalidSubnet.Range: {cidr} is in none of {ranges}"
    others = [r.inputs["cidrBlock"] for r in in_vpc(cloud, "aws:ec2/subnet:Subnet", vpc)]
    return next((f"InvalidSubnet.Conflict: {cidr} and {o}" for o in others if cidr.overlaps(network(o))), None)


def range_is_empty(cloud: Cloud, old: Resource) -> str | None:
    """A secondary range of a VPC goes after its subnets."""
    cidr = network(old.inputs["cidrBlock"])
    inside = in_vpc(cloud, "aws:ec2/subnet:Subnet", old.inputs["vpcId"])
    taken = [r.id for r in inside if network(r.inputs["cidrBlock"]).subnet_of(cidr)]
    return f"DependencyViolation: {cidr} has subnets: {taken}" if taken else None


def vpc_has_gateway(cloud: Cloud, new: Resource) -> str | None:
    """A public NAT gateway needs an internet gateway on its VPC."""
    vpc = vpc_of(cloud, new.inputs["subnetId"])
    gateways = in_vpc(cloud, "aws:ec2/internetGateway:InternetGateway", vpc)
    gateways += in_vpc(cloud, "aws:ec2/internetGatewayAttachment:InternetGatewayAttachment", vpc)
    return None if gateways else f"Gateway.NotAttached: {vpc} has no internet gateway"


def no_public_address(cloud: Cloud, old: Resource) -> str | None:
    """An internet gateway goes after the NAT gateways, whose addresses are mapped to it."""
    nats = [
        r.id
        for r in cloud.of("aws:ec2/natGateway:NatGateway")
        if vpc_of(cloud, r.inputs["subnetId"]) == old.inputs.get("vpcId")
    ]
    return f"DependencyViolation: mapped public addresses of {nats}" if nats else None


def cluster_role_is_ready(cloud: Cloud, new: Resource) -> str | None:
    """EKS makes the cluster's network interfaces with the role's policy."""
    have = policies_of(cloud, new.inputs["roleArn"])
    return None if "AmazonEKSClusterPolicy" in have else f"InvalidParameterException: the role has only {sorted(have)}"


def nodes_can_join(cloud: Cloud, new: Resource) -> str | None:
    """Nodes become Ready with their role's policies, a CNI and kube-proxy, and a way to the registries."""
    if not (new.inputs.get("scalingConfig") or {}).get("desiredSize"):
        return None
    have, failure = policies_of(cloud, new.inputs["nodeRoleArn"]), "NodeCreationFailure: instances failed to join: "
    if not (have & WORKER_POLICIES and have & REGISTRY_POLICIES):
        return f"{failure}their role has only {sorted(have)}"
    cluster = new.inputs["clusterName"]
    made = [r for r in cloud.of("aws:eks/cluster:Cluster") if r.id == cluster]
    addons = {r.inputs["addonName"] for r in cloud.of("aws:eks/addon:Addon") if r.inputs["clusterName"] == cluster}
    if made and made[0].inputs.get("bootstrapSelfManagedAddons") is False and not {"vpc-cni", "kube-proxy"} <= addons:
        return f"{failure}the cluster has only the add-ons {sorted(addons)}"
    stranded = [subnet for subnet in new.inputs["subnetIds"] if not has_way_out(cloud, subnet)]
    return f"{failure}no default route in {stranded}" if stranded else None


def nodes_are_there(cloud: Cloud, new: Resource) -> str | None:
    """Pods need a node. A chart of definitions has none."""
    if str(new.inputs.get("chart")).endswith("-crd"):
        return None
    groups = cloud.of("aws:eks/nodeGroup:NodeGroup")
    if any((r.inputs.get("scalingConfig") or {}).get("desiredSize") for r in groups):
        return None
    return f"InsufficientNumberOfReplicas: {new.id}: no node to run its pods"


def addon_can_run(cloud: Cloud, new: Resource) -> str | None:
    """An add-on that is a Deployment needs a node."""
    return nodes_are_there(cloud, new) if new.inputs["addonName"] in ADDONS_ON_NODES else None


def role_is_idle(cloud: Cloud, old: Resource) -> str | None:
    """A policy stays on a role as long as a cluster or nodes work with it, or their network interfaces stay behind."""
    roles = {r.outputs["arn"] for r in cloud.of("aws:iam/role:Role") if old.inputs["role"] in (r.id, r.outputs["arn"])}
    users = [*cloud.of("aws:eks/cluster:Cluster"), *cloud.of("aws:eks/nodeGroup:NodeGroup")]
    busy = [r.id for r in users if roles & {r.inputs.get("roleArn"), r.inputs.get("nodeRoleArn")}]
    return f"the role still serves {busy}, whose network interfaces would stay behind" if busy else None


def log_group_is_first(cloud: Cloud, group: Resource) -> str | None:
    """EKS makes the log group of a cluster's control plane when there is none: ours comes before and goes after."""
    for cluster in cloud.of("aws:eks/cluster:Cluster"):
        if group.id == f"/aws/eks/{cluster.id}/cluster" and cluster.inputs.get("enabledClusterLogTypes"):
            return f"ResourceAlreadyExistsException: EKS has made {group.id} itself, or makes it again"
    return None


def lustre_is_open(cloud: Cloud, new: Resource) -> str | None:
    """FSx looks for port 988 in both directions in the security groups when it makes a file system."""
    groups = new.inputs.get("securityGroupIds") or []
    for way in ("ingress", "egress"):
        if not any(covers(rule) for group in groups for rule in rules_of(cloud, group, way)):
            return f"InvalidNetworkSettings: the security groups do not permit {way} on port {LUSTRE_PORT}"
    return None


def kind_is_defined(cloud: Cloud, new: Resource) -> str | None:
    """A custom resource is known once the chart with its definition is installed."""
    return chart_is_installed(cloud, new, 0)


def kind_is_served(cloud: Cloud, old: Resource) -> str | None:
    """A custom resource goes when its controller has cleared its finalizers."""
    return chart_is_installed(cloud, old, 1)


def namespace_is_there(cloud: Cloud, new: Resource) -> str | None:
    """A namespaced object needs its namespace; a Release may make its own."""
    release = new.type == "kubernetes:helm.sh/v3:Release"
    space = (new.inputs if release else new.inputs.get("metadata") or {}).get("namespace")
    if not space or space in NAMESPACES or (release and new.inputs.get("createNamespace")):
        return None
    made = {r.id for r in cloud.of("kubernetes:core/v1:Namespace")}
    made |= {
        r.inputs.get("namespace") for r in cloud.of("kubernetes:helm.sh/v3:Release") if r.inputs.get("createNamespace")
    }
    return None if space in made else f'namespaces "{space}" not found'


def kubernetes_rules(op: str, kind: str) -> list[Rule]:
    """The rules of everything inside the cluster."""
    if not kind.startswith("kubernetes:"):
        return []
    return [kind_is_defined, namespace_is_there] if op == "create" else [kind_is_served]


RULES: dict[tuple[str, str], list[Rule]] = {
    ("create", "aws:ec2/subnet:Subnet"): [subnet_fits],
    ("delete", "aws:ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation"): [range_is_empty],
    ("create", "aws:ec2/natGateway:NatGateway"): [vpc_has_gateway],
    ("delete", "aws:ec2/internetGateway:InternetGateway"): [no_public_address],
    ("create", "aws:eks/cluster:Cluster"): [cluster_role_is_ready],
    ("create", "aws:eks/nodeGroup:NodeGroup"): [nodes_can_join],
    ("create", "aws:eks/addon:Addon"): [addon_can_run],
    ("delete", "aws:iam/rolePolicyAttachment:RolePolicyAttachment"): [role_is_idle],
    ("create", "aws:cloudwatch/logGroup:LogGroup"): [log_group_is_first],
    ("delete", "aws:cloudwatch/logGroup:LogGroup"): [log_group_is_first],
    ("create", "aws:fsx/lustreFileSystem:LustreFileSystem"): [lustre_is_open],
    # Both ways: the hooks of a chart that is uninstalled are pods.
    ("create", "kubernetes:helm.sh/v3:Release"): [nodes_are_there],
    ("delete", "kubernetes:helm.sh/v3:Release"): [nodes_are_there],
}


def chart_is_installed(cloud: Cloud, resource: Resource, which: int) -> str | None:
    """Whether the chart with the definition (0) or the controller (1) of a custom resource is there."""
    charts = CHARTS_OF_GROUPS.get(resource.type.split(":")[1].split("/")[0])
    installed = {str(r.inputs.get("chart")).rsplit("/", 1)[-1] for r in cloud.of("kubernetes:helm.sh/v3:Release")}
    if charts is None or charts[which] in installed:
        return None
    return f"no matches for kind {resource.type}: chart {charts[which]} is not installed"


def in_vpc(cloud: Cloud, kind: str, vpc: str | None) -> list[Resource]:
    """What exists of a type in a VPC."""
    return [r for r in cloud.of(kind) if r.inputs.get("vpcId") == vpc]


def vpc_of(cloud: Cloud, subnet: str) -> str | None:
    """The VPC of a subnet."""
    return next((r.inputs["vpcId"] for r in cloud.of("aws:ec2/subnet:Subnet") if r.id == subnet), None)


def policies_of(cloud: Cloud, role: str) -> set[str]:
    """Names of the managed policies on a role, given by its ARN."""
    found = next((r for r in cloud.of("aws:iam/role:Role") if r.outputs["arn"] == role), None)
    if found is None:
        return set()
    arns = list(found.inputs.get("managedPolicyArns") or [])
    attachments = cloud.of("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    arns += [r.inputs["policyArn"] for r in attachments if r.inputs["role"] in (found.id, role)]
    return {arn.rsplit("/", 1)[-1] for arn in arns}


def has_way_out(cloud: Cloud, subnet: str) -> bool:
    """Whether a subnet's route table has a default route."""
    associations = cloud.of("aws:ec2/routeTableAssociation:RouteTableAssociation")
    tables = {r.inputs["routeTableId"] for r in associations if r.inputs.get("subnetId") == subnet}
    inline = [
        route
        for r in cloud.of("aws:ec2/routeTable:RouteTable")
        if r.id in tables
        for route in r.inputs.get("routes") or []
    ]
    routes = [r.inputs for r in cloud.of("aws:ec2/route:Route") if r.inputs["routeTableId"] in tables]
    return any("0.0.0.0/0" in (r.get("cidrBlock"), r.get("destinationCidrBlock")) for r in [*inline, *routes])


def rules_of(cloud: Cloud, group: str, way: str) -> list[dict[str, Any]]:
    """The rules of a security group in one direction, however they were written."""
    kind = f"aws:vpc/securityGroup{way.capitalize()}Rule:SecurityGroup{way.capitalize()}Rule"
    own = [r.inputs for r in cloud.of(kind) if r.inputs["securityGroupId"] == group]
    old = [r.inputs for r in cloud.of("aws:ec2/securityGroupRule:SecurityGroupRule")]
    inline = [
        rule
        for r in cloud.of("aws:ec2/securityGroup:SecurityGroup")
        if r.id == group
        for rule in r.inputs.get(way) or []
    ]
    return [*own, *(r for r in old if r["securityGroupId"] == group and r["type"] == way), *inline]


def covers(rule: dict[str, Any]) -> bool:
    """Whether a rule of a security group lets Lustre's port through."""
    protocol = str(rule.get("ipProtocol") or rule.get("protocol"))
    return protocol in ("-1", "all") or (
        protocol in ("tcp", "6") and float(rule.get("fromPort", 1e9)) <= LUSTRE_PORT <= float(rule.get("toPort", -1))
    )

"""The VPC: a small range for nodes and load balancers, a large one for pods, NAT, private ways to AWS's services.

In each zone there is a public subnet (load balancers, NAT), a private one (nodes, the API server's interfaces,
endpoints) and one for pods in the secondary range, which is not routed outside the VPC: what pods send out of it leaves
with the address of their node (VPC CNI translates it), so the range need not be free in a company's network.
"""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra import policies, settings
from infra.iam import Role, find_place
from infra.subnets import pod_subnet_cidrs, subnet_cidrs

# What the setting `endpoints` stands for: ECR is an API and the registry itself; its layers come from S3.
ENDPOINT_SERVICES = {"ecr": ["ecr.api", "ecr.dkr"], "sts": ["sts"], "ec2": ["ec2"], "logs": ["logs"]}


def cluster_name() -> str:
    """The name of the stack's EKS cluster, which subnets, roles and log groups name before there is a cluster."""
    return f"{pulumi.get_project()}-{pulumi.get_stack()}"


class Network(pulumi.ComponentResource):
    """The VPC and its subnets, by zone id."""

    region: str
    vpc: aws.ec2.Vpc
    vpc_id: pulumi.Output[str]
    public_subnets: dict[str, aws.ec2.Subnet]
    private_subnets: dict[str, aws.ec2.Subnet]
    pod_subnets: dict[str, aws.ec2.Subnet]
    ready: list[pulumi.Resource]
    """The ways out of the private subnets: nodes wait for them, and are gone before them."""

    def __init__(
        self,
        name: str,
        section: settings.Network,
        region: str,
        log_retention_days: int,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`log_retention_days` is for the flow logs."""
        super().__init__("llama-trainium:infra:Network", name, None, opts)
        self._name, self._section, self.region = name, section, region
        self._child = pulumi.ResourceOptions(parent=self)

        self.vpc = aws.ec2.Vpc(
            f"{name}-vpc",
            cidr_block=str(section.cidr),
            # Both are needed for the API server's private name, for the endpoints' and for FSx's.
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags=self._named("vpc"),
            opts=self._child,
        )
        self.vpc_id = self.vpc.id
        # AWS's default group lets its members talk to one another; without rules it is of no use to anyone.
        aws.ec2.DefaultSecurityGroup(f"{name}-default", vpc_id=self.vpc_id, opts=self._child)

        self._make_subnets()
        private_routes = self._make_routes()
        self.ready = [*private_routes, *self._make_endpoints()]
        if section.flow_logs:
            self._make_flow_logs(log_retention_days)
        self.register_outputs({"vpc_id": self.vpc_id})

    def _named(self, suffix: str) -> dict[str, str]:
        return {"Name": f"{cluster_name()}-{suffix}"}

    def _make_subnets(self) -> None:
        # Zones go by id: the letter in a name such as us-west-2a means another place in every account.
        zones = self._section.zones
        # Deleted after the pods' subnets, which depend on it: AWS refuses to drop a range that has subnets.
        pods = aws.ec2.VpcIpv4CidrBlockAssociation(
            f"{self._name}-pods", vpc_id=self.vpc_id, cidr_block=str(self._section.pod_cidr), opts=self._child
        )
        after_range = pulumi.ResourceOptions(parent=self, depends_on=[pods])
        discovery = {f"kubernetes.io/cluster/{cluster_name()}": "shared"}
        self.public_subnets, self.private_subnets, self.pod_subnets = {}, {}, {}
        for zone, cidrs in zip(zones, subnet_cidrs(self._section.cidr, len(zones)), strict=True):
            # The load balancer controller finds the subnets by these tags, an internet-facing and an internal kind.
            public, private = "kubernetes.io/role/elb", "kubernetes.io/role/internal-elb"
            self.public_subnets[zone] = self._subnet("public", zone, str(cidrs.public), discovery | {public: "1"})
            self.private_subnets[zone] = self._subnet("private", zone, str(cidrs.private), discovery | {private: "1"})
        for zone, cidr in zip(zones, pod_subnet_cidrs(self._section.pod_cidr, len(zones)), strict=True):
            self.pod_subnets[zone] = self._subnet("pods", zone, str(cidr), {}, after_range)

    def _subnet(
        self, kind: str, zone: str, cidr: str, tags: dict[str, str], opts: pulumi.ResourceOptions | None = None
    ) -> aws.ec2.Subnet:
        return aws.ec2.Subnet(
            f"{self._name}-{kind}-{zone}",
            vpc_id=self.vpc_id,
            availability_zone_id=zone,
            cidr_block=cidr,
            map_public_ip_on_launch=False,
            tags=self._named(f"{kind}-{zone}") | tags,
            opts=opts or self._child,
        )

    def _make_routes(self) -> list[pulumi.Resource]:
        """Gateways and route tables; returns what a private subnet's way out consists of."""
        gateway = aws.ec2.InternetGateway(
            f"{self._name}-gateway", vpc_id=self.vpc_id, tags=self._named("gateway"), opts=self._child
        )
        # An address is of use, and released, only while the VPC has its gateway.
        after_gateway = pulumi.ResourceOptions(parent=self, depends_on=[gateway])
        public = aws.ec2.RouteTable(
            f"{self._name}-public", vpc_id=self.vpc_id, tags=self._named("public"), opts=self._child
        )
        # The NAT gateway works once its own subnet's routes do.
        ways: list[pulumi.Resource] = [
            self._default_route("public", public, after_gateway, gateway_id=gateway.id),
            *(self._associate(f"public-{zone}", subnet, public) for zone, subnet in self.public_subnets.items()),
        ]

        nats: dict[str, aws.ec2.NatGateway] = {}
        for zone in self._section.zones if self._section.nat == "per-zone" else self._section.zones[:1]:
            address = aws.ec2.Eip(
                f"{self._name}-nat-{zone}", domain="vpc", tags=self._named(f"nat-{zone}"), opts=after_gateway
            )
            nats[zone] = aws.ec2.NatGateway(
                f"{self._name}-nat-{zone}",
                allocation_id=address.id,
                subnet_id=self.public_subnets[zone].id,
                tags=self._named(f"nat-{zone}"),
                opts=after_gateway,
            )
        first = next(iter(nats.values()))

        # A table for each zone with one NAT gateway too: going to one per zone then only changes routes.
        self._tables = [public]
        for zone in self._section.zones:
            table = aws.ec2.RouteTable(
                f"{self._name}-private-{zone}",
                vpc_id=self.vpc_id,
                tags=self._named(f"private-{zone}"),
                opts=self._child,
            )
            self._tables.append(table)
            nat = nats.get(zone, first)
            ways.append(self._default_route(f"private-{zone}", table, self._child, nat_gateway_id=nat.id))
            ways.append(self._associate(f"private-{zone}", self.private_subnets[zone], table))
            ways.append(self._associate(f"pods-{zone}", self.pod_subnets[zone], table))
        return ways

    def _default_route(
        self, name: str, table: aws.ec2.RouteTable, opts: pulumi.ResourceOptions, **target: pulumi.Input[str]
    ) -> aws.ec2.Route:
        return aws.ec2.Route(
            f"{self._name}-{name}", route_table_id=table.id, destination_cidr_block="0.0.0.0/0", opts=opts, **target
        )

    def _associate(self, name: str, subnet: aws.ec2.Subnet, table: aws.ec2.RouteTable) -> aws.ec2.RouteTableAssociation:
        return aws.ec2.RouteTableAssociation(
            f"{self._name}-{name}", subnet_id=subnet.id, route_table_id=table.id, opts=self._child
        )

    def _make_endpoints(self) -> list[pulumi.Resource]:
        """S3 for every subnet, at no cost; the others in the private subnets, at a price per zone and hour."""
        endpoints: list[pulumi.Resource] = [
            aws.ec2.VpcEndpoint(
                f"{self._name}-s3",
                vpc_id=self.vpc_id,
                service_name=f"com.amazonaws.{self.region}.s3",
                vpc_endpoint_type="Gateway",
                route_table_ids=[table.id for table in self._tables],
                tags=self._named("s3"),
                opts=self._child,
            )
        ]
        if not self._section.endpoints:
            return endpoints
        group = aws.ec2.SecurityGroup(
            f"{self._name}-endpoints",
            vpc_id=self.vpc_id,
            description="HTTPS to AWS services from the nodes and pods of this VPC",
            ingress=[
                aws.ec2.SecurityGroupIngressArgs(
                    description="HTTPS from nodes and pods",
                    protocol="tcp",
                    from_port=443,
                    to_port=443,
                    # Within the VPC a pod keeps its own address.
                    cidr_blocks=[str(self._section.cidr), str(self._section.pod_cidr)],
                )
            ],
            tags=self._named("endpoints"),
            opts=self._child,
        )
        for service in [service for key in self._section.endpoints for service in ENDPOINT_SERVICES[key]]:
            endpoint = aws.ec2.VpcEndpoint(
                f"{self._name}-{service.replace('.', '-')}",
                vpc_id=self.vpc_id,
                service_name=f"com.amazonaws.{self.region}.{service}",
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                subnet_ids=[subnet.id for subnet in self.private_subnets.values()],
                security_group_ids=[group.id],
                tags=self._named(service),
                opts=self._child,
            )
            endpoints.append(endpoint)
        return endpoints

    def _make_flow_logs(self, retention_days: int) -> None:
        group = aws.cloudwatch.LogGroup(f"{self._name}-flow-logs", retention_in_days=retention_days, opts=self._child)
        place = find_place(self.region, cluster_name(), pulumi.InvokeOutputOptions(parent=self))
        role = Role(
            f"{self._name}-flow-logs",
            place.apply(policies.flow_logs_trust),
            policy=group.arn.apply(policies.flow_logs),
            opts=self._child,
        )
        aws.ec2.FlowLog(
            f"{self._name}-flow-logs",
            vpc_id=self.vpc_id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_destination=group.arn,
            iam_role_arn=role.arn,
            tags=self._named("flow-logs"),
            opts=self._child,
        )

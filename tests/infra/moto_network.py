"""The VPC in moto, and what EKS makes in it."""

from __future__ import annotations

from typing import Any

from moto_translators import Account, Inputs, creates
from recorded import Registered


@creates("aws:ec2/vpc:Vpc")
def _vpc(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock=inputs["cidrBlock"])["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport={"Value": inputs["enableDnsSupport"]})
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": inputs["enableDnsHostnames"]})
    return {resource.id: vpc}


@creates("aws:ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation")
def _vpc_range(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ec2").associate_vpc_cidr_block(VpcId=inputs["vpcId"], CidrBlock=inputs["cidrBlock"])


@creates("aws:ec2/subnet:Subnet")
def _subnet(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    subnet = account.client("ec2").create_subnet(
        VpcId=inputs["vpcId"], CidrBlock=inputs["cidrBlock"], AvailabilityZoneId=inputs["availabilityZoneId"]
    )
    return {resource.id: subnet["Subnet"]["SubnetId"]}


@creates("aws:ec2/internetGateway:InternetGateway")
def _gateway(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    ec2 = account.client("ec2")
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=inputs["vpcId"])
    return {resource.id: gateway}


@creates("aws:ec2/eip:Eip")
def _address(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    return {resource.id: account.client("ec2").allocate_address(Domain=inputs["domain"])["AllocationId"]}


@creates("aws:ec2/natGateway:NatGateway")
def _nat(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    nat = account.client("ec2").create_nat_gateway(SubnetId=inputs["subnetId"], AllocationId=inputs["allocationId"])
    return {resource.id: nat["NatGateway"]["NatGatewayId"]}


@creates("aws:ec2/routeTable:RouteTable")
def _table(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    table = account.client("ec2").create_route_table(VpcId=inputs["vpcId"])
    return {resource.id: table["RouteTable"]["RouteTableId"]}


@creates("aws:ec2/route:Route")
def _route(account: Account, inputs: Inputs, resource: Registered) -> None:
    targets = {"gatewayId": "GatewayId", "natGatewayId": "NatGatewayId"}
    account.client("ec2").create_route(
        RouteTableId=inputs["routeTableId"],
        DestinationCidrBlock=inputs["destinationCidrBlock"],
        **{call: inputs[key] for key, call in targets.items() if key in inputs},
    )


@creates("aws:ec2/routeTableAssociation:RouteTableAssociation")
def _association(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ec2").associate_route_table(RouteTableId=inputs["routeTableId"], SubnetId=inputs["subnetId"])


@creates("aws:ec2/securityGroup:SecurityGroup")
def _group(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    ec2 = account.client("ec2")
    group = ec2.create_security_group(
        GroupName=resource.id, Description=inputs.get("description", "Managed by Pulumi"), VpcId=inputs["vpcId"]
    )["GroupId"]
    account.real[resource.id] = group
    # Pulumi's provider takes away the rule that lets everything out.
    everything = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.revoke_security_group_egress(GroupId=group, IpPermissions=[everything])
    for direction in ("ingress", "egress"):
        for rule in inputs.get(direction, []):
            ranges = [{"CidrIp": cidr} for cidr in rule.get("cidrBlocks", [])]
            permission = {
                "IpProtocol": rule["protocol"],
                "FromPort": rule["fromPort"],
                "ToPort": rule["toPort"],
                "IpRanges": ranges,
            }
            getattr(ec2, f"authorize_security_group_{direction}")(GroupId=group, IpPermissions=[permission])
    return {resource.id: group}


@creates("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
@creates("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule")
def _rule(account: Account, inputs: Inputs, resource: Registered) -> None:
    permission: dict[str, Any] = {"IpProtocol": inputs["ipProtocol"]}
    if "fromPort" in inputs:
        permission |= {"FromPort": inputs["fromPort"], "ToPort": inputs["toPort"]}
    if "cidrIpv4" in inputs:
        permission["IpRanges"] = [{"CidrIp": inputs["cidrIpv4"]}]
    if "referencedSecurityGroupId" in inputs:
        permission["UserIdGroupPairs"] = [{"GroupId": inputs["referencedSecurityGroupId"]}]
    direction = "ingress" if "Ingress" in resource.type else "egress"
    call = getattr(account.client("ec2"), f"authorize_security_group_{direction}")
    call(GroupId=inputs["securityGroupId"], IpPermissions=[permission])


@creates("aws:ec2/defaultSecurityGroup:DefaultSecurityGroup")
def _default_group(account: Account, inputs: Inputs, resource: Registered) -> None:
    """Takes the rules away, as the provider does."""
    ec2 = account.client("ec2")
    of_vpc = [{"Name": "vpc-id", "Values": [inputs["vpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    (group,) = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    ec2.revoke_security_group_egress(GroupId=group["GroupId"], IpPermissions=group["IpPermissionsEgress"])


@creates("aws:ec2/vpcEndpoint:VpcEndpoint")
def _endpoint(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    names = {
        "privateDnsEnabled": "PrivateDnsEnabled",
        "subnetIds": "SubnetIds",
        "securityGroupIds": "SecurityGroupIds",
        "routeTableIds": "RouteTableIds",
    }
    endpoint = account.client("ec2").create_vpc_endpoint(
        VpcId=inputs["vpcId"],
        ServiceName=inputs["serviceName"],
        VpcEndpointType=inputs["vpcEndpointType"],
        **{call: inputs[key] for key, call in names.items() if key in inputs},
    )
    return {resource.id: endpoint["VpcEndpoint"]["VpcEndpointId"]}


@creates("aws:cloudwatch/logGroup:LogGroup")
def _log_group(account: Account, inputs: Inputs, resource: Registered) -> None:
    logs = account.client("logs")
    logs.create_log_group(logGroupName=resource.outputs["name"])
    logs.put_retention_policy(logGroupName=resource.outputs["name"], retentionInDays=inputs["retentionInDays"])


@creates("aws:ec2/flowLog:FlowLog")
def _flow_log(account: Account, inputs: Inputs, resource: Registered) -> None:
    answer = account.client("ec2").create_flow_logs(
        ResourceIds=[inputs["vpcId"]],
        ResourceType="VPC",
        TrafficType=inputs["trafficType"],
        LogDestinationType=inputs["logDestinationType"],
        LogGroupName=inputs["logDestination"].rpartition(":")[2],
        DeliverLogsPermissionArn=inputs["iamRoleArn"],
    )
    assert not answer["Unsuccessful"], answer["Unsuccessful"]


@creates("aws:eks/cluster:Cluster")
def _cluster(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    """The security group that EKS makes with a cluster."""
    ec2 = account.client("ec2")
    (subnet,) = ec2.describe_subnets(SubnetIds=inputs["vpcConfig"]["subnetIds"][:1])["Subnets"]
    group = ec2.create_security_group(
        GroupName=f"eks-cluster-sg-{inputs['name']}", Description="EKS", VpcId=subnet["VpcId"]
    )
    return {resource.outputs["vpcConfig"]["clusterSecurityGroupId"]: group["GroupId"]}

"""Hands what a program registered to boto3, against moto: what AWS refuses is refused here.

    account = Account("us-west-2")
    account.create(recorded)          # raises botocore's ClientError or ParamValidationError

A translator per type turns Pulumi's inputs into the call that its provider makes. Ids and ARNs that the tests' engine
made up are replaced by moto's as they come, so a reference to what is not there fails too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import boto3
from mocks import Recorded, Registered

Inputs = dict[str, Any]
Translator = Callable[["Account", Inputs, Registered], dict[str, str] | None]

TRANSLATORS: dict[str, Translator] = {}

# Of the services below, what moto (5.2) has no such call for.
NOT_IN_MOTO = {
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
}
SERVICES = ("ecr", "fsx", "iam", "kms", "s3", "sqs", "vpc")
NETWORK = ("vpc", "subnet", "route", "securityGroup", "internetGateway", "natGateway", "eip", "flowLog", "defaultSec")


class Account:
    """An account of moto's in one region."""

    def __init__(self, region: str, aws_policies: bool = False) -> None:
        """Policies that AWS manages are attached only where moto was told to load them (`aws_policies`)."""
        self.region, self.aws_policies = region, aws_policies
        self.real: dict[str, str] = {}
        """Ids and ARNs of the tests' engine -> moto's."""
        self.client = cache(lambda service: boto3.client(service, region_name=self.region))

    def create(self, resources: Recorded | Iterable[Registered]) -> list[Registered]:
        """Create all resources that have a translator, in the order of the program; gives them back."""
        created = []
        for resource in resources:
            translate = TRANSLATORS.get(resource.type)
            if translate is None or (translate is _attachment and not self.aws_policies):
                continue
            try:
                made = translate(self, self._with_real_ids(resource.inputs), resource)
            except Exception as error:
                error.add_note(f"creating {resource}")
                raise
            self.real.update(made or {})
            created.append(resource)
        return created

    def _with_real_ids(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._with_real_ids(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._with_real_ids(inner) for inner in value]
        if isinstance(value, str):
            for made_up, real in self.real.items():
                value = value.replace(made_up, real)
        return value


def of_moto(resource: Registered) -> bool:
    """Whether a resource belongs to the services that are created here."""
    package, _, rest = resource.type.partition(":")
    service, _, kind = rest.partition("/")
    return package == "aws" and (service in SERVICES or (service == "ec2" and kind.startswith(NETWORK)))


def _creates(kind: str) -> Callable[[Translator], Translator]:
    def register(translate: Translator) -> Translator:
        TRANSLATORS[kind] = translate
        return translate

    return register


@_creates("aws:ec2/vpc:Vpc")
def _vpc(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock=inputs["cidrBlock"])["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport={"Value": inputs["enableDnsSupport"]})
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": inputs["enableDnsHostnames"]})
    return {resource.id: vpc}


@_creates("aws:ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation")
def _vpc_range(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ec2").associate_vpc_cidr_block(VpcId=inputs["vpcId"], CidrBlock=inputs["cidrBlock"])


@_creates("aws:ec2/subnet:Subnet")
def _subnet(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    subnet = account.client("ec2").create_subnet(
        VpcId=inputs["vpcId"], CidrBlock=inputs["cidrBlock"], AvailabilityZoneId=inputs["availabilityZoneId"]
    )
    return {resource.id: subnet["Subnet"]["SubnetId"]}


@_creates("aws:ec2/internetGateway:InternetGateway")
def _gateway(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    ec2 = account.client("ec2")
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=inputs["vpcId"])
    return {resource.id: gateway}


@_creates("aws:ec2/eip:Eip")
def _address(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    return {resource.id: account.client("ec2").allocate_address(Domain=inputs["domain"])["AllocationId"]}


@_creates("aws:ec2/natGateway:NatGateway")
def _nat(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    nat = account.client("ec2").create_nat_gateway(SubnetId=inputs["subnetId"], AllocationId=inputs["allocationId"])
    return {resource.id: nat["NatGateway"]["NatGatewayId"]}


@_creates("aws:ec2/routeTable:RouteTable")
def _table(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    table = account.client("ec2").create_route_table(VpcId=inputs["vpcId"])
    return {resource.id: table["RouteTable"]["RouteTableId"]}


@_creates("aws:ec2/route:Route")
def _route(account: Account, inputs: Inputs, resource: Registered) -> None:
    targets = {"gatewayId": "GatewayId", "natGatewayId": "NatGatewayId"}
    account.client("ec2").create_route(
        RouteTableId=inputs["routeTableId"],
        DestinationCidrBlock=inputs["destinationCidrBlock"],
        **{call: inputs[key] for key, call in targets.items() if key in inputs},
    )


@_creates("aws:ec2/routeTableAssociation:RouteTableAssociation")
def _association(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ec2").associate_route_table(RouteTableId=inputs["routeTableId"], SubnetId=inputs["subnetId"])


@_creates("aws:ec2/securityGroup:SecurityGroup")
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


@_creates("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
@_creates("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule")
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


@_creates("aws:ec2/defaultSecurityGroup:DefaultSecurityGroup")
def _default_group(account: Account, inputs: Inputs, resource: Registered) -> None:
    """Takes the rules away, as the provider does."""
    ec2 = account.client("ec2")
    of_vpc = [{"Name": "vpc-id", "Values": [inputs["vpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    (group,) = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    ec2.revoke_security_group_egress(GroupId=group["GroupId"], IpPermissions=group["IpPermissionsEgress"])


@_creates("aws:ec2/vpcEndpoint:VpcEndpoint")
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


@_creates("aws:cloudwatch/logGroup:LogGroup")
def _log_group(account: Account, inputs: Inputs, resource: Registered) -> None:
    logs = account.client("logs")
    logs.create_log_group(logGroupName=resource.outputs["name"])
    logs.put_retention_policy(logGroupName=resource.outputs["name"], retentionInDays=inputs["retentionInDays"])


@_creates("aws:ec2/flowLog:FlowLog")
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


@_creates("aws:eks/cluster:Cluster")
def _cluster(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    """The security group that EKS makes with a cluster."""
    ec2 = account.client("ec2")
    (subnet,) = ec2.describe_subnets(SubnetIds=inputs["vpcConfig"]["subnetIds"][:1])["Subnets"]
    group = ec2.create_security_group(
        GroupName=f"eks-cluster-sg-{inputs['name']}", Description="EKS", VpcId=subnet["VpcId"]
    )
    return {resource.outputs["vpcConfig"]["clusterSecurityGroupId"]: group["GroupId"]}


@_creates("aws:iam/role:Role")
def _role(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("iam").create_role(
        RoleName=resource.outputs["name"], AssumeRolePolicyDocument=inputs["assumeRolePolicy"]
    )


@_creates("aws:iam/rolePolicy:RolePolicy")
def _role_policy(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("iam").put_role_policy(
        RoleName=inputs["role"], PolicyName=resource.outputs["name"], PolicyDocument=inputs["policy"]
    )


@_creates("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
def _attachment(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("iam").attach_role_policy(RoleName=inputs["role"], PolicyArn=inputs["policyArn"])


@_creates("aws:iam/instanceProfile:InstanceProfile")
def _profile(account: Account, inputs: Inputs, resource: Registered) -> None:
    iam = account.client("iam")
    iam.create_instance_profile(InstanceProfileName=resource.outputs["name"])
    iam.add_role_to_instance_profile(InstanceProfileName=resource.outputs["name"], RoleName=inputs["role"])


@_creates("aws:kms/key:Key")
def _key(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    kms = account.client("kms")
    policy = {"Policy": inputs["policy"]} if "policy" in inputs else {}
    key = kms.create_key(Description=inputs["description"], **policy)["KeyMetadata"]
    if inputs.get("enableKeyRotation"):
        kms.enable_key_rotation(KeyId=key["KeyId"])
    return {resource.id: key["KeyId"], resource.outputs["arn"]: key["Arn"]}


@_creates("aws:kms/alias:Alias")
def _alias(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("kms").create_alias(AliasName=inputs["name"], TargetKeyId=inputs["targetKeyId"])


@_creates("aws:s3/bucket:Bucket")
def _bucket(account: Account, inputs: Inputs, resource: Registered) -> None:
    place = {} if account.region == "us-east-1" else {"LocationConstraint": account.region}
    configuration = {"CreateBucketConfiguration": place} if place else {}
    account.client("s3").create_bucket(Bucket=resource.id, **configuration)


@_creates("aws:s3/bucketPolicy:BucketPolicy")
def _bucket_policy(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("s3").put_bucket_policy(Bucket=inputs["bucket"], Policy=inputs["policy"])


@_creates("aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock")
def _public_access(account: Account, inputs: Inputs, resource: Registered) -> None:
    names = ("blockPublicAcls", "ignorePublicAcls", "blockPublicPolicy", "restrictPublicBuckets")
    account.client("s3").put_public_access_block(
        Bucket=inputs["bucket"],
        PublicAccessBlockConfiguration={name[0].upper() + name[1:]: inputs[name] for name in names},
    )


@_creates("aws:s3/bucketVersioning:BucketVersioning")
def _versioning(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("s3").put_bucket_versioning(
        Bucket=inputs["bucket"],
        VersioningConfiguration={"Status": inputs["versioningConfiguration"]["status"]},
    )


@_creates("aws:s3/bucketOwnershipControls:BucketOwnershipControls")
def _ownership(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("s3").put_bucket_ownership_controls(
        Bucket=inputs["bucket"],
        OwnershipControls={"Rules": [{"ObjectOwnership": inputs["rule"]["objectOwnership"]}]},
    )


@_creates("aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration")
def _encryption(account: Account, inputs: Inputs, resource: Registered) -> None:
    rules = [
        {
            "ApplyServerSideEncryptionByDefault": {
                "SSEAlgorithm": rule["applyServerSideEncryptionByDefault"]["sseAlgorithm"]
            }
        }
        for rule in inputs["rules"]
    ]
    account.client("s3").put_bucket_encryption(
        Bucket=inputs["bucket"], ServerSideEncryptionConfiguration={"Rules": rules}
    )


@_creates("aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration")
def _bucket_lifecycle(account: Account, inputs: Inputs, resource: Registered) -> None:
    rules = [
        {
            "ID": rule["id"],
            "Status": rule["status"],
            "Filter": {"Prefix": rule["filter"]["prefix"]},
            "NoncurrentVersionExpiration": {"NoncurrentDays": rule["noncurrentVersionExpiration"]["noncurrentDays"]},
            "Expiration": {"ExpiredObjectDeleteMarker": rule["expiration"]["expiredObjectDeleteMarker"]},
            "AbortIncompleteMultipartUpload": {
                "DaysAfterInitiation": rule["abortIncompleteMultipartUpload"]["daysAfterInitiation"]
            },
        }
        for rule in inputs["rules"]
    ]
    account.client("s3").put_bucket_lifecycle_configuration(
        Bucket=inputs["bucket"], LifecycleConfiguration={"Rules": rules}
    )


@_creates("aws:ecr/repository:Repository")
def _repository(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ecr").create_repository(
        repositoryName=resource.outputs["name"],
        imageTagMutability=inputs["imageTagMutability"],
        imageScanningConfiguration={"scanOnPush": inputs["imageScanningConfiguration"]["scanOnPush"]},
        encryptionConfiguration={"encryptionType": inputs["encryptionConfigurations"][0]["encryptionType"]},
    )


@_creates("aws:ecr/lifecyclePolicy:LifecyclePolicy")
def _repository_lifecycle(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ecr").put_lifecycle_policy(
        repositoryName=inputs["repository"], lifecyclePolicyText=inputs["policy"]
    )


@_creates("aws:fsx/lustreFileSystem:LustreFileSystem")
def _file_system(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    answer = account.client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        StorageCapacity=inputs["storageCapacity"],
        StorageType=inputs["storageType"],
        SubnetIds=[inputs["subnetIds"]],
        SecurityGroupIds=inputs["securityGroupIds"],
        FileSystemTypeVersion=inputs["fileSystemTypeVersion"],
        LustreConfiguration={
            "DeploymentType": inputs["deploymentType"],
            "PerUnitStorageThroughput": inputs["perUnitStorageThroughput"],
            "DataCompressionType": inputs["dataCompressionType"],
        },
    )
    return {resource.id: answer["FileSystem"]["FileSystemId"]}


@_creates("aws:sqs/queue:Queue")
def _queue(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    url = account.client("sqs").create_queue(QueueName=resource.outputs["name"])["QueueUrl"]
    return {resource.outputs["url"]: url}


@_creates("aws:sqs/queuePolicy:QueuePolicy")
def _queue_policy(account: Account, inputs: Inputs, resource: Registered) -> None:
    json.loads(inputs["policy"])
    account.client("sqs").set_queue_attributes(QueueUrl=inputs["queueUrl"], Attributes={"Policy": inputs["policy"]})

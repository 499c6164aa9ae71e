"""IAM, KMS, S3, ECR, FSx and SQS in moto."""

from __future__ import annotations

import json

from moto_translators import Account, Inputs, creates
from recorded import Registered


@creates("aws:iam/role:Role")
def _role(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("iam").create_role(
        RoleName=resource.outputs["name"], AssumeRolePolicyDocument=inputs["assumeRolePolicy"]
    )


@creates("aws:iam/rolePolicy:RolePolicy")
def _role_policy(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("iam").put_role_policy(
        RoleName=inputs["role"], PolicyName=resource.outputs["name"], PolicyDocument=inputs["policy"]
    )


@creates("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
def _attachment(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("iam").attach_role_policy(RoleName=inputs["role"], PolicyArn=inputs["policyArn"])


@creates("aws:iam/instanceProfile:InstanceProfile")
def _profile(account: Account, inputs: Inputs, resource: Registered) -> None:
    iam = account.client("iam")
    iam.create_instance_profile(InstanceProfileName=resource.outputs["name"])
    iam.add_role_to_instance_profile(InstanceProfileName=resource.outputs["name"], RoleName=inputs["role"])


@creates("aws:kms/key:Key")
def _key(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    kms = account.client("kms")
    policy = {"Policy": inputs["policy"]} if "policy" in inputs else {}
    key = kms.create_key(Description=inputs["description"], **policy)["KeyMetadata"]
    if inputs.get("enableKeyRotation"):
        kms.enable_key_rotation(KeyId=key["KeyId"])
    return {resource.id: key["KeyId"], resource.outputs["arn"]: key["Arn"]}


@creates("aws:kms/alias:Alias")
def _alias(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("kms").create_alias(AliasName=inputs["name"], TargetKeyId=inputs["targetKeyId"])


@creates("aws:s3/bucket:Bucket")
def _bucket(account: Account, inputs: Inputs, resource: Registered) -> None:
    place = {} if account.region == "us-east-1" else {"LocationConstraint": account.region}
    configuration = {"CreateBucketConfiguration": place} if place else {}
    account.client("s3").create_bucket(Bucket=resource.id, **configuration)


@creates("aws:s3/bucketPolicy:BucketPolicy")
def _bucket_policy(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("s3").put_bucket_policy(Bucket=inputs["bucket"], Policy=inputs["policy"])


@creates("aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock")
def _public_access(account: Account, inputs: Inputs, resource: Registered) -> None:
    names = ("blockPublicAcls", "ignorePublicAcls", "blockPublicPolicy", "restrictPublicBuckets")
    account.client("s3").put_public_access_block(
        Bucket=inputs["bucket"],
        PublicAccessBlockConfiguration={name[0].upper() + name[1:]: inputs[name] for name in names},
    )


@creates("aws:s3/bucketVersioning:BucketVersioning")
def _versioning(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("s3").put_bucket_versioning(
        Bucket=inputs["bucket"],
        VersioningConfiguration={"Status": inputs["versioningConfiguration"]["status"]},
    )


@creates("aws:s3/bucketOwnershipControls:BucketOwnershipControls")
def _ownership(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("s3").put_bucket_ownership_controls(
        Bucket=inputs["bucket"],
        OwnershipControls={"Rules": [{"ObjectOwnership": inputs["rule"]["objectOwnership"]}]},
    )


@creates("aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration")
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


@creates("aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration")
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


@creates("aws:ecr/repository:Repository")
def _repository(account: Account, inputs: Inputs, resource: Registered) -> None:
    moving = inputs.get("imageTagMutabilityExclusionFilters")
    account.client("ecr").create_repository(
        **({"imageTagMutabilityExclusionFilters": moving} if moving else {}),
        repositoryName=resource.outputs["name"],
        imageTagMutability=inputs["imageTagMutability"],
        imageScanningConfiguration={"scanOnPush": inputs["imageScanningConfiguration"]["scanOnPush"]},
        encryptionConfiguration={"encryptionType": inputs["encryptionConfigurations"][0]["encryptionType"]},
    )


@creates("aws:ecr/lifecyclePolicy:LifecyclePolicy")
def _repository_lifecycle(account: Account, inputs: Inputs, resource: Registered) -> None:
    account.client("ecr").put_lifecycle_policy(
        repositoryName=inputs["repository"], lifecyclePolicyText=inputs["policy"]
    )


@creates("aws:fsx/lustreFileSystem:LustreFileSystem")
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


@creates("aws:sqs/queue:Queue")
def _queue(account: Account, inputs: Inputs, resource: Registered) -> dict[str, str]:
    url = account.client("sqs").create_queue(QueueName=resource.outputs["name"])["QueueUrl"]
    return {resource.outputs["url"]: url}


@creates("aws:sqs/queuePolicy:QueuePolicy")
def _queue_policy(account: Account, inputs: Inputs, resource: Registered) -> None:
    json.loads(inputs["policy"])
    account.client("sqs").set_queue_attributes(QueueUrl=inputs["queueUrl"], Attributes={"Policy": inputs["policy"]})

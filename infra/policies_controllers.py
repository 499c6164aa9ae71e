"""IAM policies of the controllers that act on AWS from the cluster: autoscalers and the load balancer controller.

What a statement may change is narrowed to this cluster by the tags that EKS and the controllers put on all they make.
`"*"` as a resource stands where infra/policies.py says, and for `ec2:GetSecurityGroupsForVpc`, where AWS's own policies
disagree on whether it knows one.
"""

from __future__ import annotations

from infra.policies import Place, Policy, allow, document


def cluster_autoscaler(place: Place) -> Policy:
    """Looks at every Auto Scaling group and scales those of this cluster's node groups, which EKS tags for it.

    The calls are those of its AWS provider (release 1.35) for groups of one instance type from a launch template.
    """
    return document(
        [
            allow(
                [
                    "autoscaling:DescribeAutoScalingGroups",
                    "autoscaling:DescribeAutoScalingInstances",
                    "autoscaling:DescribeScalingActivities",
                    "ec2:DescribeInstanceTypes",
                    "ec2:DescribeLaunchTemplateVersions",
                ],
                "*",
            ),
            allow(["eks:DescribeNodegroup"], [place.arn("eks", f"nodegroup/{place.cluster}/*/*")]),
            allow(
                ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"],
                [place.arn("autoscaling", "autoScalingGroup:*:autoScalingGroupName/*")],
                {"StringEquals": {f"aws:ResourceTag/k8s.io/cluster-autoscaler/{place.cluster}": "owned"}},
            ),
        ]
    )


def karpenter(place: Place, node_role_arn: str, queue_arn: str) -> Policy:
    """Launches, tags and terminates instances that carry the tags of this cluster and of a NodePool.

    The tags are those that Karpenter (1.14) requests for all it makes. The instance profile is the program's own, so
    Karpenter may make none.
    """

    def ec2(*kinds: str) -> list[str]:
        return [place.arn("ec2", f"{kind}/*") for kind in kinds]

    owned, pool = f"kubernetes.io/cluster/{place.cluster}", "karpenter.sh/nodepool"
    made = ec2("fleet", "instance", "launch-template", "network-interface", "spot-instances-request", "volume")
    names = {f"aws:RequestTag/{owned}": "owned", "aws:RequestTag/eks:eks-cluster-name": place.cluster}
    requested = {"StringEquals": names, "StringLike": {f"aws:RequestTag/{pool}": "*"}}
    tagged = {
        "StringEquals": {f"aws:ResourceTag/{owned}": "owned"},
        "StringLike": {f"aws:ResourceTag/{pool}": "*"},
    }
    launch = ["ec2:CreateFleet", "ec2:RunInstances"]
    actions = ["CreateFleet", "CreateLaunchTemplate", "RunInstances"]
    return document(
        [
            # What an instance is launched with: images and their snapshots are Amazon's, a reservation may be shared.
            allow(
                launch,
                [
                    f"arn:aws:ec2:{place.region}::image/*",
                    f"arn:aws:ec2:{place.region}::snapshot/*",
                    f"arn:aws:ec2:{place.region}:*:capacity-reservation/*",
                    *ec2("placement-group", "security-group", "subnet"),
                ],
            ),
            allow(launch, ec2("launch-template"), tagged),
            allow([*launch, "ec2:CreateLaunchTemplate"], made, requested),
            allow(["ec2:CreateTags"], made, {**requested, "StringEquals": {**names, "ec2:CreateAction": actions}}),
            allow(
                ["ec2:CreateTags"],
                ec2("instance"),
                {
                    **tagged,
                    "ForAllValues:StringEquals": {
                        "aws:TagKeys": ["Name", "eks:eks-cluster-name", "karpenter.sh/nodeclaim"]
                    },
                },
            ),
            allow(["ec2:DeleteLaunchTemplate", "ec2:TerminateInstances"], ec2("instance", "launch-template"), tagged),
            allow(
                [
                    "ec2:DescribeCapacityReservations",
                    "ec2:DescribeImages",
                    "ec2:DescribeInstanceStatus",
                    "ec2:DescribeInstanceTypeOfferings",
                    "ec2:DescribeInstanceTypes",
                    "ec2:DescribeInstances",
                    "ec2:DescribeLaunchTemplates",
                    "ec2:DescribePlacementGroups",
                    "ec2:DescribeSecurityGroups",
                    "ec2:DescribeSpotPriceHistory",
                    "ec2:DescribeSubnets",
                ],
                "*",
                {"StringEquals": {"aws:RequestedRegion": place.region}},
            ),
            allow(["pricing:GetProducts"], "*"),
            allow(["ssm:GetParameter"], [f"arn:aws:ssm:{place.region}::parameter/aws/service/*"]),
            allow(["eks:DescribeCluster"], [place.cluster_arn]),
            allow(["iam:PassRole"], [node_role_arn], {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
            # It looks for profiles of its own to clean up every 30 minutes, whether or not it makes any.
            allow(["iam:ListInstanceProfiles"], [f"arn:aws:iam::{place.account}:instance-profile/*"]),
            allow(["sqs:DeleteMessage", "sqs:GetQueueUrl", "sqs:ReceiveMessage"], [queue_arn]),
        ]
    )


def interruption_queue(queue_arn: str, rule_arn: str) -> Policy:
    """Of the queue that Karpenter reads: only this EventBridge rule writes to it, and nothing comes without TLS."""
    return document(
        [
            {
                **allow(["sqs:SendMessage"], queue_arn, {"ArnEquals": {"aws:SourceArn": rule_arn}}),
                "Principal": {"Service": "events.amazonaws.com"},
            },
            {
                "Effect": "Deny",
                "Principal": "*",
                "Action": ["sqs:DeleteMessage", "sqs:ReceiveMessage", "sqs:SendMessage"],
                "Resource": queue_arn,
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            },
        ]
    )


def load_balancer_controller(place: Place, vpc_id: str, node_security_group_id: str) -> Policy:
    """What an ingress with a certificate needs: application load balancers, and their way to the pods.

    No Shield, WAF, Cognito, network load balancer or address pool: the chart's values switch `enableShield`,
    `enableWaf` and `enableWafv2` off. The controller opens `node_security_group_id` to the security groups that it
    makes. It puts its tag on all it makes, and names load balancers and target groups k8s-..., which bounds their
    listeners and rules.
    """
    tag = "elbv2.k8s.aws/cluster"
    requested = {"StringEquals": {f"aws:RequestTag/{tag}": place.cluster}}
    tagged = {"StringEquals": {f"aws:ResourceTag/{tag}": place.cluster}}
    vpc, groups = place.arn("ec2", f"vpc/{vpc_id}"), place.arn("ec2", "security-group/*")
    service = "elasticloadbalancing"
    balancers = [place.arn(service, "loadbalancer/app/k8s-*"), place.arn(service, "targetgroup/k8s-*")]
    listeners = [place.arn(service, "listener/app/k8s-*"), place.arn(service, "listener-rule/app/k8s-*")]
    ingress = ["ec2:AuthorizeSecurityGroupIngress", "ec2:RevokeSecurityGroupIngress"]
    return document(
        [
            allow(
                ["iam:CreateServiceLinkedRole"],
                [f"arn:aws:iam::{place.account}:role/aws-service-role/{service}.amazonaws.com/*"],
                {"StringEquals": {"iam:AWSServiceName": f"{service}.amazonaws.com"}},
            ),
            allow(
                [
                    "acm:ListCertificates",
                    "ec2:DescribeAccountAttributes",
                    "ec2:DescribeAddresses",
                    "ec2:DescribeAvailabilityZones",
                    "ec2:DescribeInstances",
                    "ec2:DescribeInternetGateways",
                    "ec2:DescribeNetworkInterfaces",
                    "ec2:DescribeRouteTables",
                    "ec2:DescribeSecurityGroups",
                    "ec2:DescribeSubnets",
                    "ec2:DescribeTags",
                    "ec2:DescribeVpcPeeringConnections",
                    "ec2:DescribeVpcs",
                    "ec2:GetSecurityGroupsForVpc",
                    "elasticloadbalancing:DescribeCapacityReservation",
                    "elasticloadbalancing:DescribeListenerAttributes",
                    "elasticloadbalancing:DescribeListenerCertificates",
                    "elasticloadbalancing:DescribeListeners",
                    "elasticloadbalancing:DescribeLoadBalancerAttributes",
                    "elasticloadbalancing:DescribeLoadBalancers",
                    "elasticloadbalancing:DescribeRules",
                    "elasticloadbalancing:DescribeSSLPolicies",
                    "elasticloadbalancing:DescribeTags",
                    "elasticloadbalancing:DescribeTargetGroupAttributes",
                    "elasticloadbalancing:DescribeTargetGroups",
                    "elasticloadbalancing:DescribeTargetHealth",
                ],
                "*",
            ),
            allow(["acm:DescribeCertificate"], [place.arn("acm", "certificate/*")]),
            allow(ingress, [place.arn("ec2", f"security-group/{node_security_group_id}")]),
            allow(["ec2:CreateSecurityGroup"], [vpc]),
            allow(["ec2:CreateSecurityGroup"], [groups], requested),
            allow(
                ["ec2:CreateTags"],
                [groups],
                {"StringEquals": {**requested["StringEquals"], "ec2:CreateAction": "CreateSecurityGroup"}},
            ),
            allow(
                [*ingress, "ec2:CreateTags", "ec2:DeleteSecurityGroup", "ec2:DeleteTags"],
                [groups],
                tagged,
            ),
            allow(
                [
                    "elasticloadbalancing:AddTags",
                    "elasticloadbalancing:CreateLoadBalancer",
                    "elasticloadbalancing:CreateTargetGroup",
                ],
                balancers,
                requested,
            ),
            allow(
                [
                    "elasticloadbalancing:AddTags",
                    "elasticloadbalancing:CreateListener",
                    "elasticloadbalancing:DeleteLoadBalancer",
                    "elasticloadbalancing:DeleteTargetGroup",
                    "elasticloadbalancing:DeregisterTargets",
                    "elasticloadbalancing:ModifyLoadBalancerAttributes",
                    "elasticloadbalancing:ModifyTargetGroup",
                    "elasticloadbalancing:ModifyTargetGroupAttributes",
                    "elasticloadbalancing:RegisterTargets",
                    "elasticloadbalancing:RemoveTags",
                    "elasticloadbalancing:SetIpAddressType",
                    "elasticloadbalancing:SetSecurityGroups",
                    "elasticloadbalancing:SetSubnets",
                ],
                balancers,
                tagged,
            ),
            allow(
                [
                    "elasticloadbalancing:AddListenerCertificates",
                    "elasticloadbalancing:AddTags",
                    "elasticloadbalancing:CreateRule",
                    "elasticloadbalancing:DeleteListener",
                    "elasticloadbalancing:DeleteRule",
                    "elasticloadbalancing:ModifyListener",
                    "elasticloadbalancing:ModifyListenerAttributes",
                    "elasticloadbalancing:ModifyRule",
                    "elasticloadbalancing:RemoveListenerCertificates",
                    "elasticloadbalancing:RemoveTags",
                    "elasticloadbalancing:SetRulePriorities",
                ],
                listeners,
            ),
        ]
    )

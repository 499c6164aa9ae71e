"""The bill of materials: from an AWS account to a cluster that Llama is pre-trained on. `pulumi up -s STACK`"""

import pulumi
import pulumi_aws as aws

from infra.accelerators import AcceleratorGroup
from infra.addons import AddOns
from infra.autoscaler import Autoscaler
from infra.cluster import Cluster
from infra.devices import DevicePlugins
from infra.image import TrainingImage
from infra.ingress import LoadBalancerController
from infra.network import Network
from infra.nodes import CoreNodes
from infra.operators import Operators
from infra.storage import SharedStorage
from stack_settings import AwsStack, read_stack
from training.errors import UserError

stack = pulumi.get_stack()
try:
    settings = read_stack(pulumi.Config(), stack)
except UserError as error:
    raise pulumi.RunError(str(error)) from None
assert isinstance(settings, AwsStack)

tags = settings.all_tags(stack)
provider = aws.Provider("aws", region=settings.region, default_tags=aws.ProviderDefaultTagsArgs(tags=tags))
in_aws = pulumi.ResourceOptions(providers=[provider])

# What AWS runs. Each line waits only for what it is handed: the image and the file system are made beside the cluster.
image = TrainingImage("training", settings.image, in_aws)
network = Network("network", settings.network, settings.region, settings.cluster.log_retention_days, in_aws)
cluster = Cluster("cluster", settings.cluster, network, tags, in_aws)
storage = SharedStorage("storage", settings.storage, network, cluster, in_aws)
core = CoreNodes("core", settings.core_nodes, cluster, network, tags, in_aws)
accelerators = [
    AcceleratorGroup(group.name, group, cluster, network, core.role, tags, settings.autoscaler, in_aws)
    for group in settings.accelerators
]

# What runs in the cluster, on the core nodes.
addons = AddOns("addons", cluster, core, tags, in_aws)
pods_run = [core.node_group, addons.dns]
devices = DevicePlugins("devices", settings, cluster, pods_run, in_aws)
operators = Operators("operators", settings, cluster, pods_run, settings.workloads.gang, in_aws)
autoscaler = Autoscaler("autoscaler", settings, cluster, network, core.role, accelerators, tags, pods_run, in_aws)
if settings.cluster.load_balancer_controller:
    LoadBalancerController("ingress", settings, network, cluster, pods_run, in_aws)

pulumi.export("cluster", cluster.name)
pulumi.export(
    "connect", pulumi.Output.format("aws eks update-kubeconfig --region {} --name {}", settings.region, cluster.name)
)
pulumi.export("image", image.ref)
pulumi.export("bucket", storage.bucket.bucket)
pulumi.export("fileSystem", storage.file_system.id)

"""From a stack's settings to a platform, and the stages on it, each when the one before has succeeded.

pulumi up -s dev        # makes it all on AWS; -s local: on a cluster of the kubeconfig
"""

import pulumi

from platforms import aws_platform, existing_platform
from stack_settings import AwsStack, read_stack
from training.errors import UserError
from workloads.base import Base, Secrets
from workloads.dashboard import Dashboard
from workloads.monitoring import Monitoring
from workloads.pipeline import Pipeline
from workloads.platform import on_volume
from workloads.tensorboard import TensorBoard
from workloads.toolbox import Toolbox

stack = pulumi.get_stack()
try:
    settings = read_stack(pulumi.Config(), stack)
except UserError as error:
    raise pulumi.RunError(str(error)) from None

made = aws_platform(settings, stack) if isinstance(settings, AwsStack) else existing_platform(settings)
platform, workloads, training = made.platform, settings.workloads, settings.training_settings()

secrets = Secrets(
    settings.secret("hugging_face_token"), settings.secret("dashboard_password"), settings.secret("redis_password")
)
base = Base("base", workloads, platform, workloads.name or stack, secrets)
stages = Pipeline("stages", workloads, platform, training, settings.training.nodes, base)
Dashboard("dashboard", workloads.dashboard, platform, base)
Monitoring("monitoring", platform, base)
password = settings.secret("tensorboard_password")
if workloads.tensorboard.enabled and password is not None:
    logs = on_volume(training).run.dir / "tensorboard"
    TensorBoard("tensorboard", workloads.tensorboard, platform, base, logs, password)
if workloads.toolbox:
    Toolbox("toolbox", platform, base)

for name, value in made.exports.items():
    pulumi.export(name, value)
pulumi.export("namespace", base.namespace)
pulumi.export("volume", base.claim)
pulumi.export("stages", stages.results)
pulumi.export("next", ["make status", "make logs STAGE=train", "make dashboard", "make tensorboard"])

"""A stack file as the program reads it, without Pulumi's engine: for commands that ask about a stack before it exists.

    file = read_stack_file("us-west-2")
    file.settings()         # AwsStack, by the same classes and with the same refusals as `pulumi preview`

The engine would decrypt secrets, and needs a login for that. What is asked here is only whether a secret is there, so
each has a placeholder, and `given` says which keys the file has.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import yaml
from pulumi.runtime import set_all_config

from infra.settings import PROJECT
from stack_settings import SECRETS, AwsStack, read_stack
from training.errors import UserError
from training.messages import expected_one_of, shown

ROOT = Path(__file__).parent
PLACEHOLDER = "encrypted"
TOKEN = "huggingFaceToken"
assert TOKEN in SECRETS


@dataclass(frozen=True)
class StackFile:
    """What `Pulumi.<stack>.yaml` says."""

    stack: str
    values: Mapping[str, str]
    """Pulumi's full keys and values as the engine hands them over: text, or JSON of what is structured."""
    given: frozenset[str]
    """Keys of the project whose values are secrets."""

    @property
    def on_aws(self) -> bool:
        """Whether the stack has resources on AWS."""
        return self.values.get(f"{PROJECT}:platform", "aws") != "existing"

    def settings(self) -> AwsStack:
        """The settings of a stack on AWS. Raises `UserError` as `pulumi preview` would, one line per mistake.

        A Hugging Face token that is missing is no mistake here: it is `infra.preflight` that looks for it.
        """
        if not self.on_aws:
            raise UserError(f"STACK: {self.stack}, expected a stack on AWS: this one has platform: existing")
        token = f"{PROJECT}:{TOKEN}"
        values = {token: PLACEHOLDER, **self.values}
        hidden = {f"{PROJECT}:{key}" for key in self.given} | ({token} - self.values.keys())

        def read() -> AwsStack:
            set_all_config(values, list(hidden))
            found = read_stack(pulumi.Config(PROJECT), self.stack)
            assert isinstance(found, AwsStack)
            return found

        # Pulumi keeps config in context variables: in a context of its own reading leaves nothing behind.
        return contextvars.copy_context().run(read)


def read_stack_file(stack: str, root: Path = ROOT) -> StackFile:
    """The file of the stack in the folder `root`. Raises `UserError`."""
    path = root / f"Pulumi.{stack}.yaml"
    known = sorted(each.name.removeprefix("Pulumi.").removesuffix(".yaml") for each in root.glob("Pulumi.*.yaml"))
    if stack not in known:
        raise UserError(f"STACK: {shown(stack)}{expected_one_of(stack, known)}")
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path.name}: {str(error).partition(chr(10))[0]}, expected a stack file in YAML") from None
    config = (loaded or {}).get("config") if isinstance(loaded or {}, dict) else None
    if not isinstance(config, dict):
        raise UserError(f"{path.name}: no config, expected the group `config` of a stack file")
    values = {str(key): value for key, value in config.items()}
    given = {key.partition(":")[2] for key, value in values.items() if _has_secret(value)}
    return StackFile(stack, {key: _text(value) for key, value in values.items()}, frozenset(given))


def _has_secret(value: Any) -> bool:
    """Whether there is a secret anywhere in it, `{secure: ciphertext}` in a stack file."""
    if isinstance(value, dict):
        return set(value) == {"secure"} or any(map(_has_secret, value.values()))
    return isinstance(value, list) and any(map(_has_secret, value))


def _text(value: Any) -> str:
    """A value as the engine hands it over."""
    if isinstance(value, dict) and set(value) == {"secure"}:
        return PLACEHOLDER
    return value if isinstance(value, str) else json.dumps(value, default=str)

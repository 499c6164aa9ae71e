"""How a type's inputs become a call of boto3: moto_network.py and moto_services.py, collected here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from recorded import Registered

Inputs = dict[str, Any]


class Account(Protocol):
    """What a translator sees of moto_account.Account."""

    region: str
    real: dict[str, str]
    client: Callable[[str], Any]


Translator = Callable[[Account, Inputs, Registered], dict[str, str] | None]
"""Makes a resource in an account; gives back ids and ARNs of the tests' engine with those of moto."""

TRANSLATORS: dict[str, Translator] = {}


def creates(kind: str) -> Callable[[Translator], Translator]:
    """Marks the translator of a type."""

    def register(translate: Translator) -> Translator:
        TRANSLATORS[kind] = translate
        return translate

    return register

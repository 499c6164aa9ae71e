"""`python -m infra.preflight`: what it prints and how it ends."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from intercepted import intercepted, refused
from preflight_account import CONFIG, QUOTAS, REGION, SECRET, account_with_amis, quotas
from stack_configs import raw_config, read_raw

from infra import preflight
from infra.account import clients_of
from infra.preflight_checks import Subject, no_answer
from stack_settings import AwsStack


@pytest.fixture(autouse=True)
def account() -> Iterator[None]:
    with account_with_amis():
        yield


def test_without_credentials_aws_is_asked_nothing_more() -> None:
    settings = read_raw(raw_config(CONFIG) | SECRET, list(SECRET))
    assert isinstance(settings, AwsStack)
    with intercepted({"GetCallerIdentity": refused("ExpiredToken")}) as called:
        subject = Subject("dev", settings, clients_of(REGION), False, lambda url: None)
        said = preflight.findings(subject)
    assert called == ["GetCallerIdentity"]
    assert [(each.check, each.status) for each in said] == [("credentials", "fail"), ("Hugging Face", "pass")]


def test_a_server_that_answers_is_reached_whatever_it_says() -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert no_answer(f"http://127.0.0.1:{server.server_port}/v2/") is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and not listening
        assert "refused" in str(no_answer(f"http://127.0.0.1:{closed.getsockname()[1]}/v2/"))


def command(monkeypatch: pytest.MonkeyPatch, stack: str, values: Mapping[str, float]) -> int:
    monkeypatch.setattr(preflight, "no_answer", lambda url: None)
    with intercepted({"GetServiceQuota": quotas(values)}):
        return preflight.main([stack])


def test_the_command_ends_with_0_when_nothing_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert command(monkeypatch, "dev", QUOTAS) == 0
    out = capsys.readouterr().out
    assert "preflight of dev in us-west-2" in out
    assert out.splitlines()[-1].endswith(" 0 fail")


def test_the_command_ends_with_1_when_something_fails_and_says_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(monkeypatch, "us-west-2", {**QUOTAS, "L-2C3B7624": 128}) == 1
    out = capsys.readouterr().out
    assert "--quota-code L-2C3B7624 --desired-value 2048" in out
    assert "pulumi config set --secret huggingFaceToken --stack us-west-2" in out
    assert out.splitlines()[-1].endswith(" 2 fail")


@pytest.mark.parametrize(
    ("stack", "says"),
    [("uswest2", "STACK: uswest2, did you mean us-west-2?"), ("local", "STACK: local, expected a stack on AWS")],
)
def test_a_bad_stack_is_one_line_and_exit_code_2(stack: str, says: str, capsys: Any) -> None:
    assert preflight.main([stack]) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")

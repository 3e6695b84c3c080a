"""A refusal of AWS becomes a sentence that says what to do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from unittest.mock import Mock

import botocore.exceptions
import botocore.parsers
import pytest

from gpufleet.infra.account import refusals
from gpufleet.infra.account.fleet import NO_FLEET
from gpufleet.infra.errors import AwsRefused


def client_error(code: str, message: str = "the message.") -> botocore.exceptions.ClientError:
    return botocore.exceptions.ClientError({"Error": {"Code": code, "Message": message}}, "DescribeFleets")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (botocore.exceptions.NoCredentialsError(), "aws configure"),
        (botocore.exceptions.ProfileNotFound(profile="x"), "list-profiles"),
        (botocore.exceptions.SSOTokenLoadError(error_msg="gone"), "aws sso login"),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), "cannot be reached"),
        (botocore.parsers.ResponseParserError("invalid XML: <!doctype html>"), "is not from AWS"),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://x"), "cannot be reached"),
        (client_error("UnauthorizedOperation"), "does not let you call DescribeFleets: the message."),
        (client_error("AccessDenied"), "does not let you call"),
        (client_error("ExpiredToken"), "aws sso login"),
        (client_error("AuthFailure"), "AWS_PROFILE"),
        (client_error("Throttling"), "AWS answered Throttling to DescribeFleets"),
    ],
)
def test_every_refusal_by_aws_says_what_to_do(error: Exception, words: str) -> None:
    refused = refusals.refusal(error)
    assert isinstance(refused, AwsRefused)
    assert words in str(refused)


@pytest.mark.parametrize(
    ("code", "message", "seconds_off", "words"),
    [
        (
            "SignatureDoesNotMatch",
            "Signature expired: 20261125T180000Z is now earlier than 20261125T205500Z (20261125T211000Z - 15 min.)",
            None,
            "clock is 3:10:00 behind: it says 2026-11-25T18:00:00Z, AWS says 2026-11-25T21:10:00Z. Set it: `sudo",
        ),
        (
            "InvalidSignatureException",
            "Signature not yet current: 20261125T233000Z is still later than 20261125T212500Z (20261125T211000Z + 15)",
            None,
            "clock is 2:20:00 ahead",
        ),
        ("RequestTimeTooSkewed", "The difference is too large.", -3600, "clock is 1:00:00 behind"),
        ("AuthFailure", "AWS was not able to validate the provided access credentials", 3600, "clock is 1:00:00 ahead"),
        ("AuthFailure", "AWS was not able to validate the provided access credentials", 10, "AWS_PROFILE"),
        ("SignatureDoesNotMatch", "The signature we calculated does not match.", None, "AWS_PROFILE"),
    ],
)
def test_a_clock_that_is_wrong_is_told_from_keys_that_are(
    monkeypatch: pytest.MonkeyPatch, code: str, message: str, seconds_off: int | None, words: str
) -> None:
    error = client_error(code, message)
    now = datetime(2026, 11, 25, 12, tzinfo=UTC)
    if seconds_off is not None:
        answered = format_datetime(now - timedelta(seconds=seconds_off), usegmt=True)
        error.response["ResponseMetadata"] = {"HTTPHeaders": {"date": answered}}
    monkeypatch.setattr(
        refusals, "datetime", type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: now)})
    )
    assert words in str(refusals.refusal(error))


def test_a_mistake_of_our_own_is_not_blamed_on_aws() -> None:
    assert refusals.refusal(botocore.exceptions.ParamValidationError(report="x")) is None
    assert refusals.refusal(KeyError("x")) is None


@pytest.mark.parametrize(
    ("code", "codes", "is_absent"),
    [
        ("NoSuchBucket", ("NoSuchBucket",), True),
        ("NoSuchBucketPolicy", ("NoSuchBucket",), False),
        ("InvalidFleetId.Malformed", NO_FLEET, False),
        ("InvalidAMIID.Malformed", ("InvalidAMIID.",), True),
    ],
)
def test_a_code_that_only_begins_like_one_for_what_is_absent_is_raised(
    code: str, codes: tuple[str, ...], is_absent: bool
) -> None:
    ask = Mock(side_effect=client_error(code))
    if is_absent:
        assert refusals.absent(ask, *codes) is None
    else:
        with pytest.raises(botocore.exceptions.ClientError):
            refusals.absent(ask, *codes)

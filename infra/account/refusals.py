"""Turns an error of AWS, or of the connection to AWS, into a sentence: the request, why it failed, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TypeVar

from botocore import exceptions
from botocore.parsers import ResponseParserError

from gpufleet.infra.errors import AwsRefused
from gpufleet.job.text import stamp

_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403")
_BAD_KEYS = (
    "AuthFailure", "InvalidClientTokenId", "InvalidAccessKeyId", "UnrecognizedClientException",
    "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "RequestExpired",
    "InvalidSignatureException", "RequestTimeTooSkewed", "RequestInTheFuture",
)  # fmt: skip
_T = TypeVar("_T")
_SKEW = timedelta(minutes=5)  # AWS refuses signatures that differ by more from its own time (S3 and IAM: 15 min)


def refusal(error: Exception) -> AwsRefused | None:
    """The sentence for an error of botocore: the refused request, and what to do. None for any other error."""
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return AwsRefused(
            "there are no AWS credentials. Run `aws configure sso` or `aws configure`, or set AWS_PROFILE; "
            "without an account, `gpufleet rehearse` and `gpufleet cost` still work."
        )
    if isinstance(error, exceptions.ProfileNotFound | exceptions.ConfigNotFound):
        return AwsRefused(f"{error}. `aws configure list-profiles` lists the profiles; set AWS_PROFILE to one of them.")
    if isinstance(
        error, exceptions.TokenRetrievalError | exceptions.SSOTokenLoadError | exceptions.UnauthorizedSSOTokenError
    ):
        return AwsRefused(f"the sign-in has expired ({error}). Run `aws sso login`.")
    if isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError):
        return AwsRefused(
            f"AWS cannot be reached ({error}). Check the network, a proxy (HTTPS_PROXY), and AWS_ENDPOINT_URL: "
            "it must be unset for real AWS, and `gpufleet cloud` must be running where it is set."
        )
    if isinstance(error, ResponseParserError):
        return AwsRefused(
            "the answer is neither XML nor JSON, so it is not from AWS. Check HTTPS_PROXY and AWS_ENDPOINT_URL."
        )
    if isinstance(error, exceptions.ClientError):
        return client_refusal(error)
    # an error in this program, not an answer of AWS
    ours = exceptions.ParamValidationError | exceptions.OperationNotPageableError
    if isinstance(error, exceptions.BotoCoreError) and not isinstance(error, ours):
        return AwsRefused(f"AWS could not be asked: {error}")
    return None


def code(error: exceptions.ClientError) -> str:
    """The error's code, such as NoSuchKey or UnauthorizedOperation."""
    return str(error.response.get("Error", {}).get("Code", ""))


def absent(ask: Callable[[], _T], *codes: str) -> _T | None:
    """The result of a call; None if AWS answers with one of `codes`, which mean that the resource does not exist. A
    code that ends with a dot stands for all codes that begin with it.
    """
    try:
        return ask()
    except exceptions.ClientError as error:
        families = tuple(family for family in codes if family.endswith("."))
        if code(error) in codes or code(error).startswith(families):
            return None
        raise


def denied(error: exceptions.ClientError) -> bool:
    """Whether AWS refused because the caller lacks rights."""
    return code(error) in _DENIED


def client_refusal(error: exceptions.ClientError) -> AwsRefused:
    """The sentence for an error that AWS returned."""
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    action = error.operation_name
    if denied(error):
        return AwsRefused(
            f"AWS does not let you call {action}: {message} Ask for that action for your user or role; "
            "`aws sts get-caller-identity` says who you are."
        )
    if code(error) in _BAD_KEYS and (times := _clocks(error, message)):
        ours, theirs = times
        side = "behind" if ours < theirs else "ahead"
        return AwsRefused(
            f"this computer's clock is {abs(ours - theirs)} {side}: it says {stamp(ours)}, AWS says {stamp(theirs)}. "
            "Set it: `sudo hwclock -s` in WSL, which loses time while Windows sleeps; elsewhere in the system's "
            "settings (`sudo timedatectl set-ntp true`)."
        )
    if code(error) in _BAD_KEYS:
        return AwsRefused(
            f"AWS does not accept the credentials ({code(error)}: {message}) Sign in again (`aws sso login`) or set "
            "AWS_PROFILE; with AWS_ENDPOINT_URL set, use the keys that `gpufleet cloud` printed."
        )
    return AwsRefused(f"AWS answered {code(error)} to {action}: {message}")


def _clocks(error: exceptions.ClientError, message: str) -> tuple[datetime, datetime] | None:
    """This computer's time and AWS's time if they differ too much; otherwise None. Both times are in the message
    ("expired: OURS is now earlier than LIMIT (THEIRS - 15 min.)"). If the message does not have AWS's time, it is the
    date of the answer.
    """
    named = [datetime.strptime(moment, "%Y%m%dT%H%M%S%z") for moment in re.findall(r"\d{8}T\d{6}Z", message)]
    answered = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if len(named) == 3:
        ours, _, theirs = named
    elif answered:
        ours, theirs = datetime.now(UTC).replace(microsecond=0), parsedate_to_datetime(answered)
    else:
        return None
    return (ours, theirs) if abs(ours - theirs) > _SKEW else None

"""Checks requests before they reach moto: only the dummy account has access, and a node may do only what its role
allows. The user may do everything. The session token of a node is the id of its instance, by which its role is found.
Each request of a node is checked against the statements of the role's inline policies as IAM does it; a condition that
cannot be decided is an error and never ignored. Tests can refuse an action to the user or to the node.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

from gpufleet.infra.account import iam_policy
from gpufleet.infra.account.iam_policy import AccessRequest, Statement
from gpufleet.rehearsal import registry, schedules
from gpufleet.rehearsal.clock import Clock

FREE = ("sts:GetCallerIdentity",)  # actions that need no right
UNNARROWED = ("DescribeFleets", "DescribeInstances")  # actions without a resource (IAM service authorization reference)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The parts of a request that rights depend on. `action` is the API's own name, empty for S3."""

    service: str
    region: str
    account: str
    action: str
    method: str
    path: str
    query: str
    body: bytes = b""


def asked(
    request: Request, tags: Callable[[str], Mapping[str, str]], key_of: Callable[[str], str | None]
) -> list[AccessRequest]:
    """The rights that the request needs. `tags` returns the tags of a fleet or instance by its id; `key_of` returns the
    customer key that encrypts a bucket, by the bucket's name.
    """
    if request.service == "s3":
        wishes = list(_of_s3(request))
        return [*wishes, *_of_key(request, wishes, key_of)]
    action, place = f"{request.service}:{request.action}", f"{request.region}:{request.account}"
    if request.service == "logs":
        names = json.loads(request.body or b"{}")
        stream = f"log-group:{names.get('logGroupName')}:log-stream:{names.get('logStreamName')}"
        return [AccessRequest(action, f"arn:aws:logs:{place}:{stream}")]
    if request.service in ("ssm", "secretsmanager") and request.action in ("GetParameter", "GetSecretValue"):
        names = json.loads(request.body or b"{}")
        of_parameter, of_secret = f"parameter{names.get('Name')}", f"secret:{names.get('SecretId')}-AbCdEf"
        # six characters that AWS adds to the ARN of a secret
        resource = of_parameter if request.service == "ssm" else of_secret
        return [AccessRequest(action, f"arn:aws:{request.service}:{place}:{resource}")]
    if request.service == "sns":
        return [AccessRequest(action, parse_qs(request.body.decode()).get("TopicArn", [""])[0])]
    if request.service == "states":
        named = json.loads(request.body or b"{}").get("stateMachineArn", "*")
        return [AccessRequest(action, str(named))]
    if request.service == "scheduler":
        return list(_of_scheduler(request, place))
    if request.service != "ec2" or request.action in UNNARROWED:
        return [AccessRequest(action)]
    fields = parse_qs(request.body.decode("utf-8", "replace"))
    named = {
        f"arn:aws:ec2:{place}:{kind.lower()}/{values[0]}": values[0]
        for name, values in fields.items()
        for kind in re.findall(r"^(Fleet|Instance)Id(?:\.\d+)?$", name)
    }
    wishes = [
        AccessRequest(action, arn, context={f"aws:ResourceTag/{key}": value for key, value in tags(name).items()})
        for arn, name in named.items()
    ]
    # true is the default of TerminateInstances
    if request.action == "DeleteFleets" and fields.get("TerminateInstances") != ["false"]:
        # AWS's page names no resource for this action, so the request is treated as having no tags, which is stricter.
        wishes.append(AccessRequest("ec2:TerminateInstances"))
    return wishes or [AccessRequest(action)]


def _of_scheduler(request: Request, place: str) -> Iterator[AccessRequest]:
    """The rights for a request to EventBridge Scheduler: on the schedule, and on the role in the request."""
    fields, name = json.loads(request.body or b"{}"), request.path.rpartition("/")[2]
    group = fields.get("GroupName") or parse_qs(request.query).get("groupName", ["default"])[0]
    yield AccessRequest(f"scheduler:{request.action}", f"arn:aws:scheduler:{place}:schedule/{group}/{name}")
    if role := (fields.get("Target") or {}).get("RoleArn"):
        context = {"iam:PassedToService": schedules.SERVICE}
        yield AccessRequest("iam:PassRole", role, context=context)


def listing(request: Request) -> AccessRequest:
    """The right to list the bucket; without it S3 answers 403 for a missing object.

    The check is made without a prefix.
    """
    bucket = request.path.lstrip("/").partition("/")[0]
    return AccessRequest("s3:ListBucket", f"arn:aws:s3:::{bucket}")


def allowed(statements: Iterable[Statement], wish: AccessRequest) -> bool:
    answer = iam_policy.allowed(statements, wish)
    if answer is None:
        raise ValueError(f"the embedded AWS cannot tell from the role's policy whether it allows {wish.action}")
    return wish.action in FREE or answer


def _of_key(
    request: Request, wishes: Iterable[AccessRequest], key_of: Callable[[str], str | None]
) -> Iterator[AccessRequest]:
    """The requests that S3 makes to the bucket's key for a reader or writer of objects. Each part of an upload needs
    Decrypt and GenerateDataKey.
    """
    needs = {
        "s3:GetObject": ["Decrypt"],
        "s3:PutObject": ["GenerateDataKey", *(["Decrypt"] * ("uploadId=" in request.query))],
    }
    context = {"kms:ViaService": f"s3.{request.region}.amazonaws.com"}
    for wish in wishes:
        if (actions := needs.get(wish.action)) and (key := key_of(wish.resource.split(":::")[1].partition("/")[0])):
            yield from (AccessRequest(f"kms:{action}", key, context=context) for action in actions)


def _of_s3(request: Request) -> Iterator[AccessRequest]:
    bucket, _, key = request.path.lstrip("/").partition("/")
    query = parse_qs(request.query, keep_blank_values=True)
    arn = f"arn:aws:s3:::{bucket}"
    reading = request.method in ("GET", "HEAD")
    if not key and "delete" in query:
        for entry in ElementTree.fromstring(request.body).iter():
            if entry.tag.rpartition("}")[2] == "Key":
                yield AccessRequest("s3:DeleteObject", f"{arn}/{entry.text}")
    elif not key:
        settings = set(query) - {"list-type", "prefix", "delimiter", "encoding-type", "max-keys", "start-after"}
        settings -= {"continuation-token", "marker", "fetch-owner"}
        action = "ListBucket" if reading and not settings else f"{request.method}:{','.join(sorted(settings))}"
        context = {"s3:prefix": query["prefix"][0]} if "prefix" in query else {}
        yield AccessRequest(f"s3:{action}", arn, context=context)
    else:
        of = "Tagging" if "tagging" in query else "Acl" if "acl" in query else ""
        if reading:
            action = "ListMultipartUploadParts" if "uploadId" in query else f"GetObject{of}"
        elif request.method == "DELETE":
            action = "AbortMultipartUpload" if "uploadId" in query else f"DeleteObject{of}"
        else:
            action = f"PutObject{of}"
        yield AccessRequest(f"s3:{action}", f"{arn}/{key}")


USER_KEY = "AKIAREHEARSALUSER000"
NODE_KEY = "ASIAREHEARSALNODE000"
SECRET = "rehearsal-only-no-account-has-this"  # this is no secret, because signatures are not checked

_JSON = ("logs", "scheduler", "ssm", "secretsmanager", "states")  # services that write errors as JSON
_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/[^/]*/([^/]*)/([^/]*)/")


class Gate:
    """WSGI middleware around moto's application."""

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        account: str,
        seed_region: Callable[[str], None],
        statements: Callable[[str], Sequence[Statement] | None],
        statements_of: Callable[[str], Sequence[Statement] | None],
        tags: Callable[[str], Mapping[str, str]],
        key_of: Callable[[str], str | None],
        clock: Clock,
    ) -> None:
        """`statements` returns the statements of a node's role by the node's session token; None for an unknown token.
        `statements_of` returns those of a role by its ARN. `tags` and `key_of`: see `asked`.
        """
        self.app = app
        self.account = account
        self.seed_region = seed_region
        self.statements, self.statements_of = statements, statements_of
        self.tags, self.key_of, self.clock = tags, key_of, clock
        self._one_of_ec2 = threading.Lock()
        self.endpoint = ""  # set as soon as the port is known
        self.images: dict[tuple[str, str], str] = {}  # digests of real images, by name and tag or digest
        self.denied: set[tuple[str, str]] = set()  # (access key, action)
        self.calls: list[tuple[str, str]] = []  # (access key, action), except S3's

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = str(environ.get("PATH_INFO", ""))
        authorization = str(environ.get("HTTP_AUTHORIZATION", ""))
        if path.startswith(("/v2/", "/token")) and not authorization.startswith("AWS4"):
            return _send(start, environ, *registry.answer(path, authorization, self.endpoint, self.images))
        key, region, service = _credential(environ, authorization)
        if key not in (USER_KEY, NODE_KEY):
            return _send(start, environ, *_refusal(service, key))
        action = ""
        if service != "s3":
            self.seed_region(region)
            action = _scheduler_action(environ) if service == "scheduler" else _action(environ)
            self.calls.append((key, action))
            if action == "SimulatePrincipalPolicy":
                return _send(start, environ, *self._simulated(key, environ))
            if (key, action) in self.denied:
                return _send(start, environ, *_unauthorized(service, f"{action} (refused by the rehearsal)"))
        if service == "scheduler" and (past := self._passed_moment(environ, action)):
            return _send(start, environ, *_error(service, "400 Bad Request", "ValidationException", past))
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = self.account
        if key == NODE_KEY:
            return self._of_node(environ, start, service, region, action)
        return self._answer(environ, start, service)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any], service: str) -> Iterable[bytes]:
        """moto's answer. Requests to EC2 are answered one at a time, because moto reads its tables without a lock, and
        fails if another request changes them meanwhile. When an object is overwritten, moto closes its old file, even
        if another request is reading it. That request then reads the new object.
        """
        with self._one_of_ec2 if service == "ec2" else contextlib.nullcontext():
            try:
                return self.app(environ, start)
            except ValueError:
                if service != "s3" or environ["REQUEST_METHOD"] != "GET":
                    raise
                return self.app(environ, start)

    def _simulated(self, key: str, environ: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
        """Answers requests to IAM's simulator, which moto does not have. A role may do what its policies allow, and the
        user everything that is not refused here.
        """
        asked = {name: value for name, (value,) in parse_qs(_body(environ).decode()).items()}
        statements = self.statements_of(asked["PolicySourceArn"])
        resource, members = asked.get("ResourceArns.member.1", "*"), ""
        context = {
            value: asked[name.replace("ContextKeyName", "ContextKeyValues.member.1")]
            for name, value in asked.items()
            if name.endswith(".ContextKeyName")
        }
        for action in (value for name, value in asked.items() if name.startswith("ActionNames.member.")):
            if statements is None:
                may = (key, action.partition(":")[2]) not in self.denied
            else:
                may = allowed(statements, AccessRequest(action, resource, context=context))
            decision = "allowed" if may else "implicitDeny"
            members += (
                f"<member><EvalActionName>{action}</EvalActionName><EvalDecision>{decision}</EvalDecision></member>"
            )
        result = f"<EvaluationResults>{members}</EvaluationResults><IsTruncated>false</IsTruncated>"
        result = f"<SimulatePrincipalPolicyResult>{result}</SimulatePrincipalPolicyResult>"
        space = 'xmlns="https://iam.amazonaws.com/doc/2010-05-08/"'
        whole = f"<SimulatePrincipalPolicyResponse {space}>{result}</SimulatePrincipalPolicyResponse>"
        return "200 OK", {"Content-Type": "text/xml"}, whole.encode()

    def _passed_moment(self, environ: dict[str, Any], action: str) -> str:
        """AWS's error for a schedule whose hour has passed; empty if it has not."""
        if action not in ("CreateSchedule", "UpdateSchedule"):
            return ""
        expression = str(json.loads(_body(environ))["ScheduleExpression"])
        at = schedules.moment(expression)
        return f"Invalid Schedule Expression {expression}" if at is None or at <= self.clock.now() else ""

    def _of_node(
        self, environ: dict[str, Any], start: Callable[..., Any], service: str, region: str, action: str
    ) -> Iterable[bytes]:
        """The refusal of a request for which the node has no right; empty if it has the right. If the node may not list
        the bucket, a request for a missing object is refused too.
        """
        statements = self.statements(str(environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")))
        if statements is None:
            return _send(start, environ, *_refusal(service, NODE_KEY))
        method, query = str(environ["REQUEST_METHOD"]), str(environ.get("QUERY_STRING", ""))
        request = Request(
            service=service,
            region=region,
            account=self.account,
            action=action,
            method=method,
            path=str(environ.get("PATH_INFO", "")),
            query=query,
            # Parts of an upload are not checked, because each has 64 MiB.
            body=_body(environ) if service != "s3" or method == "POST" else b"",
        )
        for wish in asked(request, self.tags, self.key_of):
            if not allowed(statements, wish):
                return _send(start, environ, *_unauthorized(service, f"{wish.action} on {wish.resource}"))
        if service != "s3" or method not in ("GET", "HEAD") or allowed(statements, listing(request)):
            return self._answer(environ, start, service)
        answer: list[Any] = []
        body = list(self._answer(environ, lambda *words: answer.extend(words), service))
        if str(answer[0]).startswith("404"):
            wish = listing(request)
            return _send(start, environ, *_unauthorized(service, f"{wish.action} on {wish.resource}"))
        start(*answer)
        return body


def _credential(environ: dict[str, Any], authorization: str) -> tuple[str, str, str]:
    match = _CREDENTIAL.search(authorization)
    if match is not None:
        return match[1], match[2], match[3]
    query = parse_qs(str(environ.get("QUERY_STRING", "")))
    scope = query.get("X-Amz-Credential", [""])[0].split("/")
    return (scope[0], scope[2], scope[3]) if len(scope) == 5 else ("", "", "s3")


def _action(environ: dict[str, Any]) -> str:
    target = str(environ.get("HTTP_X_AMZ_TARGET", ""))
    if target:
        return target.rpartition(".")[2]
    if not str(environ.get("CONTENT_TYPE", "")).startswith("application/x-www-form-urlencoded"):
        return ""
    body = _body(environ)
    return parse_qs(body.decode("utf-8", "replace")).get("Action", [""])[0]


def _scheduler_action(environ: dict[str, Any]) -> str:
    """The action of an API that expresses it by method and path."""
    verbs = {"GET": "Get", "PUT": "Update", "POST": "Create", "DELETE": "Delete"}
    kind, _, name = str(environ["PATH_INFO"]).strip("/").partition("/")
    named = {"schedules": "Schedule", "schedule-groups": "ScheduleGroup"}.get(kind, "")
    return f"{verbs[str(environ['REQUEST_METHOD'])]}{named}" if named and name else f"List{named}s" if named else ""


def _body(environ: dict[str, Any]) -> bytes:
    """The request's body, which stays readable for the next reader."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _refusal(service: str, key: str) -> tuple[str, dict[str, str], bytes]:
    code = {
        "s3": "InvalidAccessKeyId",
        "ec2": "AuthFailure",
        "iam": "InvalidClientTokenId",
        "sts": "InvalidClientTokenId",
    }.get(service, "UnrecognizedClientException")
    who = f"The access key {key[:4]}... is" if key else "No access key was sent; a missing key is"
    text = (
        f"{who} not of this embedded AWS. It takes only the dummy keys that `gpufleet cloud` prints; nothing was done."
    )
    return _error(service, "403 Forbidden", code, text)


def _unauthorized(service: str, operation: str) -> tuple[str, dict[str, str], bytes]:
    code = "AccessDeniedException" if service in _JSON else "AccessDenied"
    code = "UnauthorizedOperation" if service == "ec2" else code
    return _error(service, "403 Forbidden", code, f"You are not authorized to perform this operation: {operation}")


def _error(service: str, status: str, code: str, text: str) -> tuple[str, dict[str, str], bytes]:
    """An error in the form that the service's SDKs can read."""
    error = f"<Code>{code}</Code><Message>{text}</Message>"
    if service == "ec2":
        body = f"<Response><Errors><Error>{error}</Error></Errors><RequestID>0</RequestID></Response>"
    elif service in ("iam", "sts", "sns"):
        body = f"<ErrorResponse><Error><Type>Sender</Type>{error}</Error></ErrorResponse>"
    elif service == "s3":
        body = f"<Error>{error}</Error>"
    else:
        body = json.dumps({"__type": code, "message": text})
        return status, {"Content-Type": "application/x-amz-json-1.1", "x-amzn-ErrorType": code}, body.encode()
    return status, {"Content-Type": "text/xml"}, f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()


def _send(
    start: Callable[..., Any], environ: dict[str, Any], status: str, headers: dict[str, str], body: bytes
) -> Iterable[bytes]:
    start(status, [*headers.items(), ("Content-Length", str(len(body)))])
    return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else body]

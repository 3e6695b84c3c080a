"""Makes the clients that read prices. These clients repeat failed requests for a long time. The clients ask only the
real AWS, because the prices of the embedded AWS are invented.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import NoCredentialsError

from gpufleet.infra.errors import GpufleetError

_AWS = (".amazonaws.com", ".api.aws")


def client(service: str, region: str) -> Any:
    """A client with adaptive retries, because hundreds of requests in a row exceed the API's rate limit."""
    retries: Any = {"mode": "adaptive", "total_max_attempts": 8}
    config = Config(connect_timeout=5, read_timeout=60, retries=retries, user_agent_extra="gpufleet")
    session = boto3.session.Session()
    made = session.client(service, region_name=region, config=config)
    host = urlsplit(made.meta.endpoint_url).hostname or ""
    if not host.endswith(_AWS):
        raise GpufleetError(
            f"prices come only from AWS, but {service} would be asked at {host}, whose prices may be made up:"
            " unset AWS_ENDPOINT_URL"
        )
    # This is checked before hundreds of requests are made, and has the same message as in other commands.
    if session.get_credentials() is None:
        raise NoCredentialsError
    return made

"""What of the user's environment would come between this machine and the embedded AWS.

Imports nothing, so that it can go before moto, which asks for AWS's configuration as it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def forget_account() -> None:
    """Takes the user's AWS out of this process's own environment: boto3 does not start with a profile that is not
    there, whatever keys and address it is given.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull))


def scratch(settings: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a command in a scratch project: the user's, without a word about AWS or Pulumi, and
    these.
    """
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_", "GPUFLEET_"))}
    return {**mine, **settings}


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps a user's HTTP_PROXY, which cannot reach a loopback address here, out of the way; else nothing."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in environment):
        return {}
    said = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*filter(None, said.split(",")), "127.0.0.1", "localhost"]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}  # each tool reads the one or the other

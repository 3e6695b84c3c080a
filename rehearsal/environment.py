"""Prevents the user's environment from disturbing the connection to the embedded AWS.

This module imports nothing, so that it can be used before moto, which reads AWS's configuration when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def forget_account() -> None:
    """Removes the user's AWS variables from this process's environment. If one of them names a profile that does not
    exist, boto3 does not start, even if keys and address are passed to it.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull))


def scratch(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command in a scratch project: the user's environment without variables of AWS and Pulumi,
    plus `settings`.
    """
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_", "GPUFLEET_"))}
    return {**mine, **settings}


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a user's HTTP_PROXY is not used for loopback addresses, which it cannot reach; empty if no
    proxy is set.
    """
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in environment):
        return {}
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*filter(None, exempt.split(",")), "127.0.0.1", "localhost"]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}  # each tool reads one of the two names

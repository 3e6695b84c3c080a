"""Importing this module makes all sessions of the process share what botocore reads of each service: EC2's description
alone takes a quarter of a second, and each session would read its own.
"""

from __future__ import annotations

import functools

import botocore.session

botocore.session.create_loader = functools.cache(botocore.session.create_loader)

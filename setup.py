"""The README as a package index shows it: links that lead to files here lead to Source in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
base = f"{project['urls']['Source']}/{{}}/v{project['version']}/"
text = re.sub(r"(!\[[^]]*]\()(?!https?:|#)", rf"\g<1>{base.format('raw')}", Path("README.md").read_text())
text = re.sub(r"((?<!!)\[[^]]*]\()(?!https?:|#)", rf"\g<1>{base.format('blob')}", text)
setup(long_description=text, long_description_content_type="text/markdown")

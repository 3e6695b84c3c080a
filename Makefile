# The commands a newcomer needs. Each sets up its own virtual environment the first time.
STACK ?= tinystories-growth
MINUTES ?= 10
PYTHON ?= python3
BIN := .venv/bin
# Some environments set it. Each of a rehearsal's and the tests' many processes would compile all its modules again: a
# fifth of their time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup rehearse rehearse-all test test-experiments test-dates test-slow chaos test-all wheel check-dist test-wheel docs release lint freeze schema fix
help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: .venv/ready ## make .venv, as every other target does the first time

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gpufleet needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up .venv (once; about 5 GB with PyTorch, two to five minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[job,rehearsal,dev,docs]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/(pulumi_aws/(?!(cloudwatch|ebs|ec2|iam|s3|scheduler|sfn|sns|vpc)/)[^/]+|scipy|sklearn|networkx|debugpy|mypy|fontTools|setuptools|tests?|testing)/' .venv/lib || true # on all cores, pip does it on one; some packages hold files that do not compile, and of these few are ever imported
	@touch $@
	@echo "Set up: $$($(BIN)/python --version), $$($(BIN)/python -c 'import importlib.metadata as m; print(", ".join(p + " " + m.version(p) for p in ("pulumi", "pulumi-aws", "torch")))')"

rehearse: .venv/ready ## run one experiment against an embedded AWS: STACK=tinystories-growth
	@$(BIN)/gpufleet rehearse $(STACK)

rehearse-all: .venv/ready ## rehearse every stack in turn, and print one table
	@$(BIN)/gpufleet rehearse --all

# Four workers more than cores: half of the tests' time is waiting, for processes of theirs and for lines of a log.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 4)) --dist loadgroup --no-loadscope-reorder
EXPERIMENTS := tests/job/experiments

test: .venv/ready ## run the tests of all but the ready-made jobs
	$(PYTEST) --ignore $(EXPERIMENTS)

test-experiments: .venv/ready ## run the tests of the ready-made jobs: their data, models and training
	$(PYTEST) $(EXPERIMENTS)

# What moves the clock is compiled when it is installed; tests/dates.py says what that needs where it could not be.
test-dates: .venv/ready ## run them as of other days: DAY='29 February' TESTS=tests/released
	@$(BIN)/python -c 'import libfaketime' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt libfaketime || true
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.dates $(if $(DAY),--day '$(DAY)') $(if $(CI),--or-skip) $(TESTS)

test-slow: .venv/ready ## run the tests that take minutes each
	$(BIN)/python -m pytest -m slow

chaos: .venv/ready ## inject seeded faults, and print one table: MINUTES=10 SEED=1 KIND='S3 faults'
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --kind '$(KIND)'

test-all: .venv/ready policy/.venv/ready ## install the optional parts, and run what `make test` leaves out
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	$(BIN)/python -m pytest -m "slow or optional"

# build/ would bring what an earlier wheel had and this one has not.
wheel: .venv/ready ## make the package, as dist/*.whl
	@rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# twine is installed where it is used: with what it brings it is 9 MB.
check-dist: wheel ## make the sdist too, and ask of both what a package index asks
	@$(BIN)/python -c 'import sys; from setuptools import build_meta; sys.argv[1:] = ["--quiet"]; build_meta.build_sdist("dist", {"--global-option": ["--quiet"]})'
	@$(BIN)/python -c 'import twine' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt twine
	$(BIN)/python -m twine check --strict dist/*

test-wheel: check-dist ## install the package in an environment of its own, and use it there
	$(BIN)/python -m pytest -m wheel tests/test_wheel.py

# The site is made of a copy without the words after a block's language, by which tests tell what to do with it.
docs: .venv/ready ## make the pages as a site with search: site/html/index.html
	@rm -rf site && mkdir -p site/pages
	@cp -r --parents *.md docs examples bench/results site/pages
	@find site/pages -name '*.md' -exec sed -i -E 's/^(```(sh|console)) .*/\1/' {} +
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: .venv/ready ## tag this commit and make its package, which is uploaded by nobody: VERSION=0.2.0
	@.ci/release '$(VERSION)'

# pulumi-policy wants an older protobuf than the rest.
policy/.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv policy/.venv
	grep -vE '^(protobuf|googleapis-common-protos)==' constraints.txt > policy/.venv/constraints.txt
	policy/.venv/bin/python -m pip install --quiet --disable-pip-version-check -c policy/.venv/constraints.txt -e '.[policy]'
	@touch $@

lint: .venv/ready ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

freeze: .venv/ready ## write down a deliberate change of frozen bills, tables, resources and of outputs in pages; its diff is the review
	GPUFLEET_FREEZE=1 $(BIN)/python -m pytest -q tests/test_frozen.py tests/infra/bill/test_bill_golden.py tests/infra/bill/test_table.py tests/test_tutorial.py tests/test_readme.py::test_an_output_shown_is_what_the_command_prints tests/test_readme.py::test_the_table_has_every_experiment_with_its_node_bound_and_todays_p50

schema: .venv/ready ## write the definition's JSON Schema of code and pages
	@$(BIN)/python -m gpufleet.infra.definition.json_schema

fix: .venv/ready ## mend what ruff can mend, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

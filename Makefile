# `make demo` and `make test` are all that a fresh clone needs. README.md says more.
# PYTHON=/path/to/python3.12 chooses the interpreter of a new .venv (`make clean` first to change it).

MOETUNE := .venv/bin/moetune
# Off by default: no usage statistics leave this machine.
export RAY_USAGE_STATS_ENABLED ?= 0
export MLFLOW_DISABLE_TELEMETRY ?= true

.PHONY: help env env-dev demo ui test bridge check format constraints clean

help:
	@echo "make demo         install, run the example sweep on this machine, print the leaderboard"
	@echo "make ui           the dashboard, on loopback"
	@echo "make test         the whole test suite (CPU)"
	@echo "make bridge       Megatron Bridge as a second judge of the rules, where it can be installed"
	@echo "make check        style, types, import directions, documents"
	@echo "make format       rewrite the sources in the project's style"
	@echo "make constraints  pin again after pyproject.toml changed (UPGRADE=1: newest versions)"
	@echo "make clean        remove .venv, .bootstrap and caches; results stay"

env:
	@scripts/bootstrap.sh run

env-dev:
	@scripts/bootstrap.sh dev

demo: env
	$(MOETUNE) run examples/laptop.yaml
	@echo "make ui opens the dashboard, on loopback"

ui: env
	$(MOETUNE) ui examples/laptop.yaml

test: env-dev
	.venv/bin/python -m pytest $(ARGS)

bridge: env-dev
	scripts/bridge_oracle.sh -q

check: env-dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy search_spaces train_worker tracking tuner
	.venv/bin/lint-imports
	.venv/bin/python -m pytest -q tests/architecture

format: env-dev
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

constraints:
	@scripts/constraints.sh $(if $(UPGRADE),--upgrade)

# Journals and results are the user's and stay.
clean:
	rm -rf .venv .venv-bridge .bootstrap .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis moetune.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make help` lists what there is. Needs git, make and Python 3.11 or newer, nothing else.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
# DJANGO=6.0 takes another Django series than the one that belongs to the Python version.
VENV ?= $(if $(DJANGO),.venv-django$(DJANGO),.venv)
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help test lint format types contracts migrations bench demo coverage clean

help: ## List the commands.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | \
		while IFS='|' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done
	@echo
	@echo '  make test ARGS="-k replay"            some tests'
	@echo '  make test ON=sqlite,postgresql        some databases'
	@echo '  make test DATABASE_URL=postgres://…   a running server (also MARIADB_URL=mysql://…)'

test: $(VENV)/.test ## Run the test-suite on SQLite, PostgreSQL and, where installed, MariaDB.
	@ON="$(ON)" $(BIN)/python -m tests.run $(ARGS)

demo: $(VENV)/.demo ## Start the demo shop: web server, worker, beat. Ctrl-C stops all of it.
	@$(BIN)/python -m demo_shop $(ARGS)

bench: $(VENV)/.bench ## Measure what protection costs, on a real server and a real PostgreSQL.
	@$(BIN)/python -m tests.benchmarks $(ARGS)

lint: $(VENV)/.dev ## Check style, types, import contracts and migrations.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python manage.py makemigrations --check --dry-run

format: $(VENV)/.dev ## Rewrite the code in the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(VENV)/.test ## Run the tests on all databases and show what they do not reach.
	@rm -f .coverage .coverage.*
	@COVERAGE=1 ON="$(ON)" $(BIN)/python -m tests.run $(ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

clean: ## Remove the virtual environment, caches, test data and the demo's data.
	rm -rf $(VENV) .var dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .coverage .coverage.*
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# One stamp for each set of requirements: nothing is installed when the stamp is newer.

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed, and none is on the PATH.'; \
		echo 'Install it, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'Python 3.11 or newer is needed, $(PYTHON) is older.'; \
		echo 'Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)'; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo 'This Python has no working "venv" module.'; \
		echo 'On Debian or Ubuntu: apt install python3-venv; then run make again.'; \
		echo 'Or name another Python: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)'; exit 1; }
	@echo 'Creating $(VENV) with $(PYTHON) …'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.%: requirements/%.txt requirements/base.txt requirements/demo.txt requirements/test.txt \
		requirements/constraints.txt | $(VENV)/pyvenv.cfg
	@echo 'Installing $< …'
	@$(BIN)/python -m pip install --quiet --requirement $<
	@test -z "$(DJANGO)" || $(BIN)/python -m pip install --quiet "Django==$(DJANGO).*"
	@touch $@
